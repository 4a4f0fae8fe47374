"""Attention on one rank and on DTensors equals brute force, forward and gradients, whatever it is asked for."""

from __future__ import annotations

import gc
import weakref

import attention_reference as reference
import numpy as np
import pytest

from hp_dtensor import DeviceMesh, Replicate, Shard, distribute_tensor, record_collectives
from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention import AttentionMask, attention, functional
from hp_dtensor.parallel.attention.blockwise import PartialAttention
from hp_dtensor.parallel.attention.masks import plan_blocks
from hp_dtensor.testing import run_ranks

PACKED = reference.positions_of((5, 1, 7), (13,))
CASES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 4},
    "window of one": {"window": 1},
    "wide window": {"window": 13},
    "full window": {"causal": False, "window": 3},
    "packed": {"positions": PACKED},
    "packed full": {"positions": PACKED, "causal": False},
    "packed window": {"positions": PACKED, "window": 3},
    "scaled": {"scale": 0.3},
    "capped": {"soft_cap": 0.7},
    "capped window": {"soft_cap": 0.7, "window": 4},
    "sinks": {"sinks": True},
    "everything": {"sinks": True, "soft_cap": 0.7, "window": 4, "positions": PACKED, "scale": 0.4},
    "fewer queries": {"queries": 5},
    "one query": {"queries": 1, "window": 3},
    "fewer packed queries": {"queries": 6, "positions": PACKED},
    "fewer queries of equal documents": {"queries": 4, "positions": reference.positions_of((5, 8), (3, 10))},
    "one head per key": {"kv_heads": 4},
    "one key head": {"kv_heads": 1, "sinks": True},
    "wider values": {"out_width": 12},
}


def case_of(queries=None, kv_heads=2, out_width=None, sinks=False, **options):
    """Return (arrays, options of the mask, other options)."""
    arrays = reference.inputs(queries=queries, kv_heads=kv_heads, out_width=out_width)
    mask = {name: options.pop(name) for name in ("causal", "window", "positions") if name in options}
    return arrays[: 5 if sinks else 4], mask, options


def leaves(platform, arrays):
    made = [platform.from_numpy(x.copy()) for x in arrays]
    for x in made:
        platform.set_requires_grad(x, True)
    return made


def computed(platform, arrays, mask, options):
    q, k, v, grad, *sinks = arrays
    inputs = leaves(platform, (q, k, v, *sinks))
    out = attention(*inputs[:3], mask=AttentionMask(**mask), sinks=inputs[3] if sinks else None, **options)
    platform.backward(out, platform.from_numpy(grad.copy()))
    return [platform.to_numpy(x) for x in (out, *(platform.get_grad(x) for x in inputs))]


@pytest.mark.parametrize("name", CASES)
def test_equals_brute_force(hp_platform, name):
    case = case_of(**CASES[name])
    reference.compare(computed(hp_platform, *case), reference.expected(*case))


@pytest.mark.parametrize("name", ["causal", "full", "window", "packed", "everything", "fewer queries"])
def test_equals_brute_force_in_blocks_of_five(hp_platform, monkeypatch, name):
    monkeypatch.setattr(functional, "TILE", 5)
    case = case_of(**CASES[name])
    reference.compare(computed(hp_platform, *case), reference.expected(*case))


@pytest.mark.parametrize("keys", [300, 1100, 2100])
def test_long_causal_squares_equal_brute_force(hp_platform, keys):
    """Torch's backward computes a causal square in strips of 128 keys, or of 256 above 1,024 keys."""
    arrays = reference.inputs(batch=1, heads=2, kv_heads=1, keys=keys, width=4)
    reference.compare(computed(hp_platform, arrays, {}, {}), reference.expected(arrays, {}, {}))


@pytest.mark.parametrize("name", ["causal", "packed window", "everything", "one key head"])
@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Shard(2), Shard(0))])
def test_of_dtensors_equals_brute_force(hp_platform, name, placements):
    case = case_of(**CASES[name])
    wanted = reference.expected(*case)

    def program():
        mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        (q, k, v, grad, *sinks), mask, options = case
        placed = [distribute_tensor(hp_platform.from_numpy(x.copy()), mesh, placements) for x in (q, k, v)]
        of_sinks = [Shard(0) if p == Shard(1) else Replicate() for p in placements]
        placed += [distribute_tensor(hp_platform.from_numpy(x.copy()), mesh, of_sinks) for x in sinks]
        for x in placed:
            hp_platform.set_requires_grad(x, True)
        out = attention(*placed[:3], mask=AttentionMask(**mask), sinks=placed[3] if sinks else None, **options)
        given = distribute_tensor(hp_platform.from_numpy(grad.copy()), mesh, out.placements)
        hp_platform.backward(out, given)
        grads = [hp_platform.get_grad(x) for x in placed]
        return out.placements, [hp_platform.to_numpy(x.full_tensor()) for x in (out, *grads)]

    for found_placements, found in run_ranks(program, 4, hp_platform):
        reference.compare(found, wanted)
        assert Shard(2) not in found_placements


def test_of_dtensors_sharded_over_heads_sends_nothing(hp_platform):
    def program():
        mesh = DeviceMesh("cpu", (2,))
        arrays = reference.inputs(kv_heads=2)
        placed = [distribute_tensor(hp_platform.from_numpy(x), mesh, [Shard(1)]) for x in arrays[:3]]
        with record_collectives() as log:
            attention(*placed, mask=AttentionMask(window=3))
        return log.count()

    assert run_ranks(program, 2, hp_platform) == [0, 0]


def test_layers_share_what_a_mask_takes(hp_platform, monkeypatch):
    calls = []
    monkeypatch.setattr(functional, "plan_blocks", lambda *args: calls.append(args) or plan_blocks(*args))
    q, k, v = (hp_platform.from_numpy(x) for x in reference.inputs()[:3])
    mask = AttentionMask(window=3)
    for _ in range(3):
        attention(q, k, v, mask=mask)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([(2, 4, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)], {}, "4 query heads cannot share 3 key-value heads equally"),
        ([(2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 5, 8)], {}, "do not fit each other"),
        ([(4, 5, 8), (4, 5, 8), (4, 5, 8)], {}, r"attention takes \[batch, heads, length, head_dim\], got query"),
        ([(2, 4, 7, 8), (2, 4, 5, 8), (2, 4, 5, 8)], {}, "7 queries are more than 5 keys"),
        ([(2, 4, 5, 8)] * 3, {"soft_cap": 0.0}, "soft_cap must be None or above 0, got 0.0"),
        ([(2, 4, 5, 8)] * 3, {"sinks": np.zeros(3, np.float32)}, r"sinks \[3\] must be \[heads\] \[4\]"),
        ([(2, 4, 5, 8)] * 3, {"positions": np.zeros((1, 5), int)}, r"must be \[batch, keys\] \[2, 5\]"),
    ],
)
def test_refuses_what_does_not_fit(hp_platform, shapes, options, message):
    tensors = [hp_platform.from_numpy(np.zeros(shape, np.float32)) for shape in shapes]
    mask = AttentionMask(positions=options.pop("positions", None))
    if "sinks" in options:
        options["sinks"] = hp_platform.from_numpy(options["sinks"])
    with pytest.raises(AttentionError, match=message):
        attention(*tensors, mask=mask, **options)


def test_refuses_a_window_below_one():
    with pytest.raises(AttentionError, match="window must be None or an integer of at least 1, got 0"):
        AttentionMask(window=0)


def test_attention_over_blocks_is_freed_without_the_garbage_collector(hp_platform):
    """Queries and results of each layer would else stay until it comes, beside those of the next layers."""
    x = hp_platform.from_numpy(np.ones((1, 1, 4, 2), np.float32))
    gc.disable()
    try:
        attended = PartialAttention(hp_platform, x, x)
        freed = weakref.ref(attended)
        del attended
        assert freed() is None
    finally:
        gc.enable()
