"""`ContextParallel` of a module: its attention is that of the full sequence, and nothing else of it changes."""

from __future__ import annotations

import functools

import attention_reference as reference
import numpy as np
import pytest

from hp_dtensor import (
    AttentionMask,
    ContextParallel,
    DeviceMesh,
    SequenceSharding,
    Shard,
    attention,
    context_parallel_attention,
    current_world,
    distribute_tensor,
    init_device_mesh,
    nn,
    parallelize_module,
    record_collectives,
    use_sequence_sharding,
)
from hp_dtensor.exceptions import AttentionError, LaunchError
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.testing import run_ranks

LENGTH, WIDTH, HEADS = 11, 12, 3
X = np.random.default_rng(0).standard_normal((2, LENGTH, WIDTH)).astype(np.float32)
WEIGHT = np.random.default_rng(1).standard_normal((3 * WIDTH, WIDTH)).astype(np.float32) * 0.3
PACKED = reference.positions_of((4, 7), (11,))


class SelfAttention(nn.Module):
    """Projections of one weight, then attention; `window` is the mask's."""

    def __init__(self, window=None):
        super().__init__()
        self.window = window
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, positions=None):
        ops = self.ops
        mask = AttentionMask(window=self.window, positions=positions)
        parts = ops.chunk(self.projection(x), 3, -1)
        q, k, v = (ops.transpose(ops.reshape(each, (*x.shape[:2], HEADS, WIDTH // HEADS)), 1, 2) for each in parts)
        out = ops.transpose(attention(q, k, v, mask=mask), 1, 2)
        return ops.reshape(out, tuple(x.shape))


def build(platform, window=None):
    with nn.building(platform):
        model = SelfAttention(window)
    platform.copy_(model.projection.weight, platform.from_numpy(WEIGHT.copy()))
    return model


def run(platform, model, x, positions, recomputed=False, sharding=None):
    """Return result and gradients of input and weight for the loss sum of squares."""
    given = platform.from_numpy(np.ascontiguousarray(x))
    platform.set_requires_grad(given, True)
    known = None if positions is None else platform.from_numpy(np.ascontiguousarray(positions))
    with use_sequence_sharding(sharding):
        y = checkpoint(model, given, known, platform=platform) if recomputed else model(given, known)
    platform.backward(platform.ops.sum(platform.ops.square(y)))
    weight = platform.get_grad(model.projection.weight)
    return [platform.to_numpy(each).copy() for each in (y, platform.get_grad(given), weight)]


def on_ranks(platform, style, positions, window=None, recomputed=False, packed=False):
    world = current_world(platform)
    model = build(platform, window)
    parallelize_module(model, init_device_mesh("cpu", (world.size,), platform=platform), style)
    sharding = style.sharding(LENGTH, world.size, positions=positions if packed else None)
    own = None if positions is None else sharding.shard(positions, world.rank)
    return run(platform, model, sharding.shard(X, world.rank), own, recomputed, sharding if packed else None)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("ranks", "options", "positions", "window"),
    [
        (2, {}, None, None),
        (3, {"ulysses_degree": 3}, PACKED, 3),
        (3, {"method": "ulysses"}, PACKED, None),
        (4, {"ulysses_degree": 2, "length": LENGTH}, PACKED, None),
        (4, {"method": "all_gather", "balanced": False}, None, 4),
    ],
)
def test_equals_one_device(hp_platform, ranks, options, positions, window, recomputed):
    wanted = run(hp_platform, build(hp_platform, window), X, positions)
    style = ContextParallel(**options)
    found = run_ranks(on_ranks, ranks, hp_platform, hp_platform, style, positions, window, recomputed)
    sharding = style.sharding(LENGTH, ranks)
    close = {"rtol": 2e-5, "atol": 2e-5}
    for index in (0, 1):
        np.testing.assert_allclose(sharding.unshard([each[index] for each in found]), wanted[index], **close)
    np.testing.assert_allclose(sum(each[2] for each in found), wanted[2], rtol=2e-5, atol=2e-4)


class FrameworksOwn(SelfAttention):
    """Attends by torch's function, which has a causal mask and no positions."""

    def forward(self, x, positions=None):
        import torch

        parts = self.projection(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_frameworks_own_attention_equals_one_device(hp_platform, recomputed, monkeypatch):
    if hp_platform.name != "torch":
        pytest.skip("attention of hp_dtensor alone is routed here")
    wanted = run(hp_platform, build(hp_platform), X, None)
    monkeypatch.setitem(globals(), "SelfAttention", FrameworksOwn)
    style = ContextParallel()

    def program():
        return on_ranks(hp_platform, style, None, recomputed=recomputed), run(hp_platform, build(hp_platform), X, None)

    results = run_ranks(program, 2, hp_platform)
    found, after = zip(*results, strict=True)
    for index in (0, 1):
        full = style.sharding(LENGTH, 2).unshard([each[index] for each in found])
        np.testing.assert_allclose(full, wanted[index], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(sum(each[2] for each in found), wanted[2], rtol=2e-5, atol=2e-4)
    # A module that was not parallelized is not routed, also after a recomputation that ended within the other one.
    for each in after:
        np.testing.assert_allclose(each[0], wanted[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("options", [{}, {"method": "all_gather", "ulysses_degree": 2}], ids=["ring", "both"])
def test_a_sharding_of_packed_documents_is_set(hp_platform, options, recomputed):
    wanted = run(hp_platform, build(hp_platform), X, PACKED)
    style = ContextParallel(**options)
    found = run_ranks(on_ranks, 4, hp_platform, hp_platform, style, PACKED, None, recomputed, True)
    sharding = style.sharding(LENGTH, 4, positions=PACKED)
    assert sharding.documents == ((4, 7), (11,))
    for index in (0, 1):
        full = sharding.unshard([each[index] for each in found])
        np.testing.assert_allclose(full, wanted[index], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(sum(each[2] for each in found), wanted[2], rtol=2e-5, atol=2e-4)


class Checkpointed(nn.Module):
    """A model whose part is under the framework's checkpoint, which recomputes the square after attention too."""

    def __init__(self, part, recompute):
        super().__init__()
        self.part, self.recompute_by = part, recompute

    def forward(self, x, positions=None):
        return self.recompute_by(self._squared, x, positions)

    def _squared(self, x, positions):
        return self.ops.square(self.part(x, positions))

    @property
    def projection(self):
        return self.part.projection


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cls", [SelfAttention, FrameworksOwn])
def test_checkpoints_of_the_framework_recompute_as_in_forward(hp_platform, cls, reentrant, packed, monkeypatch):
    """Backward runs after the module and the block of the sharding have ended."""
    if hp_platform.name != "torch" and (reentrant or cls is FrameworksOwn):
        pytest.skip("refused, or not routed")
    if not hp_platform.recomputes_on_unpack:
        pytest.skip("MindSpore 2.10 has hooks on saved tensors")
    if packed and cls is FrameworksOwn:
        pytest.skip("its attention has no documents")
    if hp_platform.name == "torch":
        from torch.utils.checkpoint import checkpoint as recompute
    else:
        from mindspore import recompute
    own = build

    def checkpointed(platform, window=None):
        with nn.building(platform):
            return Checkpointed(own(platform, window), functools.partial(recompute, use_reentrant=reentrant))

    positions = PACKED if packed else None
    monkeypatch.setitem(globals(), "SelfAttention", cls)
    monkeypatch.setitem(globals(), "build", checkpointed)
    wanted = run(hp_platform, build(hp_platform), X, positions)
    style = ContextParallel()
    found = run_ranks(on_ranks, 2, hp_platform, hp_platform, style, positions, None, False, packed)
    sharding = style.sharding(LENGTH, 2, positions=positions)
    for index in (0, 1):
        full = sharding.unshard([each[index] for each in found])
        np.testing.assert_allclose(full, wanted[index], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(sum(each[2] for each in found), wanted[2], rtol=2e-4, atol=2e-3)


def test_attention_elsewhere_is_as_before_when_a_part_has_been_computed_again(hp_platform):
    """Backward ends the recomputation within the module, whose attention is that of the full sequence."""
    wanted = run(hp_platform, build(hp_platform), X, None)

    def program():
        on_ranks(hp_platform, ContextParallel(), None, recomputed=True)
        with record_collectives() as log:
            found = run(hp_platform, build(hp_platform), X, None)
        return found, log.count()

    for found, count in run_ranks(program, 2, hp_platform):
        assert count == 0
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(x, y)


def test_without_positions_the_whole_sequence_may_be_on_every_rank(hp_platform):
    wanted = run(hp_platform, build(hp_platform), X, None)

    def program():
        model = build(hp_platform)
        style = ContextParallel(replicated_without_positions=True)
        parallelize_module(model, init_device_mesh("cpu", (2,)), style)
        with record_collectives() as log:
            found = run(hp_platform, model, X, None)
        return found, log.count()

    for found, count in run_ranks(program, 2, hp_platform):
        assert count == 0
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(x, y)


def test_with_tensor_parallel_heads(hp_platform):
    """Queries, keys and values are DTensors sharded over heads on one axis, their sequence over another."""
    q, k, v, grad, _ = reference.inputs(heads=4, kv_heads=2, keys=LENGTH)
    out, grads = reference.attend(q, k, v)
    wanted = [out, *grads(grad)]

    def program():
        mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        sharding, rank = SequenceSharding(length=LENGTH, ranks=2), mesh["cp"].get_local_rank()
        own = [hp_platform.from_numpy(sharding.shard(x, rank, 2)) for x in (q, k, v)]
        placed = [distribute_tensor(x, mesh["tp"], [Shard(1)]) for x in own]
        for x in placed:
            hp_platform.set_requires_grad(x, True)
        y = context_parallel_attention(*placed, mesh["cp"], mask=AttentionMask(), sharding=sharding)
        assert y.placements == (Shard(1),)
        given = hp_platform.from_numpy(sharding.shard(grad, rank, 2))
        hp_platform.backward(y, distribute_tensor(given, mesh["tp"], [Shard(1)]))
        every = (y, *(hp_platform.get_grad(x) for x in placed))
        return [hp_platform.to_numpy(x.full_tensor()) for x in every]

    results = run_ranks(program, 4, hp_platform)
    sharding = SequenceSharding(length=LENGTH, ranks=2)
    for index, expected in enumerate(wanted):
        found = sharding.unshard([results[0][index], results[2][index]], 2)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)


def refused(hp_platform, program, message, ranks=2):
    with pytest.raises((LaunchError, AttentionError)) as caught:
        run_ranks(program, ranks, hp_platform)
    assert message in str(caught.value) + str(caught.value.__cause__)


def test_refuses_the_whole_sequence_on_every_rank(hp_platform):
    def program():
        model = build(hp_platform)
        parallelize_module(model, init_device_mesh("cpu", (2,)), ContextParallel())
        run(hp_platform, model, X, reference.positions_of((LENGTH,), (LENGTH,)))

    refused(hp_platform, program, "expected one more, or 0 where a document begins")


def test_refuses_another_length_than_the_sharding(hp_platform):
    def program():
        model = build(hp_platform)
        parallelize_module(model, init_device_mesh("cpu", (2,)), ContextParallel(length=12))
        run(hp_platform, model, X[:, :5], None)

    refused(hp_platform, program, "rank 0 of 2 has 5 queries and 5 keys; SequenceSharding(length=12")


def test_refuses_a_mask_of_another_sharding(hp_platform):
    """A mask without positions does not identify its batch."""

    class OneMask(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = AttentionMask()

        def forward(self, q):
            return attention(q, q, q, mask=self.mask)

    def program():
        with nn.building(hp_platform):
            model = OneMask()
        parallelize_module(model, init_device_mesh("cpu", (2,)), ContextParallel())
        q = hp_platform.from_numpy(np.zeros((1, 2, 4, 8), np.float32))
        for documents in (((8,),), ((6, 2),)):
            with use_sequence_sharding(SequenceSharding(length=8, ranks=2, documents=documents)):
                model(q)

    refused(hp_platform, program, "expected a new mask for each forward pass")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "rings"}, "method must be one of ('ring', 'all_gather', 'ulysses'), got 'rings'"),
        ({"method": "auto"}, "choose_context_parallel(...).best has the cheapest one"),
        ({"method": "ulysses", "ulysses_degree": 1}, "exchanges heads among all 2 ranks, got ulysses_degree=1"),
        ({"ulysses_degree": 3}, "a ulysses_degree that divides the ranks"),
    ],
)
def test_refuses_a_style_that_cannot_be(hp_platform, options, message):
    def program():
        parallelize_module(build(hp_platform), init_device_mesh("cpu", (2,)), ContextParallel(**options))

    refused(hp_platform, program, message)


def test_refuses_tensors_of_two_dtypes(hp_platform):
    def program():
        q, k = (hp_platform.from_numpy(np.zeros((1, 2, 3, 4), dtype)) for dtype in (np.float32, np.float16))
        context_parallel_attention(q, k, q, init_device_mesh("cpu", (2,)), mask=AttentionMask())

    refused(hp_platform, program, "expected one dtype, since tensors share messages")


def test_refuses_a_mesh_of_two_dimensions(hp_platform):
    def program():
        q = hp_platform.from_numpy(np.zeros((1, 2, 3, 4), np.float32))
        mesh = DeviceMesh("cpu", (2, 2))
        context_parallel_attention(q, q, q, mesh, mask=AttentionMask())

    refused(hp_platform, program, "takes a mesh of one dimension", ranks=4)
