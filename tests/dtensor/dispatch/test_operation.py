"""Mistakes are errors that say what is wrong, on the rank that makes them, before anything is communicated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from placed_arrays import MATRIX, on_ranks, place

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    ShardingPlan,
    batch_redistribute,
    custom_shard,
    distribute_tensor,
    exceptions,
    from_local,
    init_device_mesh,
    local_map,
    record_collectives,
    shard_module,
    zeros,
)
from hp_dtensor.exceptions import MixedOperandsError, ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks

R, S0 = Replicate(), Shard(0)
Case = tuple[Callable[[], Any], str, str]
"""(what is done, the error, what it says)."""


def _operands(platform: Platform) -> Iterator[Case]:
    ops, plain, mesh = platform.ops, _plain(platform), _mesh(platform)
    x = distribute_tensor(plain, mesh, (S0, R), src_data_rank=None)
    y = distribute_tensor(plain, mesh["dp"], (S0,), src_data_rank=None)
    yield lambda: x + y, "MixedOperandsError", "add: operands on different meshes: .*dp=2, tp=2.* and .*dp=2"
    yield lambda: ops.cat([x, y], 0), "MixedOperandsError", "cat: operands on different meshes"
    yield lambda: x + plain, "MixedOperandsError", "plain tensor of shape .4, 4. among DTensors. Say how it is placed"
    yield lambda: plain + x, "MixedOperandsError", "plain tensor of shape .4, 4. among DTensors"
    yield lambda: ops.matmul(plain, x), "MixedOperandsError", "matmul: a plain tensor"
    yield lambda: ops.cat([x, plain], 0), "MixedOperandsError", "cat: a plain tensor"
    two_kinds = DTensor.from_local(plain, mesh, (Partial(), Partial("max")))
    yield lambda: ops.exp(two_kinds), "PlacementError", "^exp: cannot redistribute .*partial max and sum in one tensor"
    yield (
        lambda: ops.stack([x, x[:3]], 0),
        "ShardingRuleError",
        "stack.*to stack have one shape, got .3, 4. and",
    )
    scale = platform.Parameter(platform.from_numpy(np.array(2, np.float32)))
    yield lambda: ops.mul(x, scale), "MixedOperandsError", "mul: a plain scalar that requires a gradient"
    yield lambda: x.redistribute(placements=(Shard(5), R)), "PlacementError", "dimension 5 of a 2-dimensional"
    yield lambda: x.redistribute(placements=S0), "PlacementError", "redistribute: placements must be a tuple"
    yield lambda: batch_redistribute([x, plain, None]), "MixedOperandsError", "others at positions .*1: .*2: 'NoneType'"
    yield lambda: batch_redistribute([x, x], S0), "PlacementError", "batch_redistribute: placements must be a tuple"
    yield lambda: batch_redistribute([x], [(R, R), None]), "PlacementError", "of 1 tensors: .* got 2 lists"
    yield (
        lambda: batch_redistribute([x, y, x], [(S0,), (S0,), (R, Shard(7))]),
        "PlacementError",
        "^tensor 0 .*expected 2 placements.*; tensor 2 .*dimension 7 of a 2-dimensional",
    )
    yield lambda: batch_redistribute([x, two_kinds]), "PlacementError", "partial max and sum in one tensor"
    yield lambda: x.to_local(grad_placements=(S0,)), "PlacementError", "expected 2 placements"
    yield lambda: x.to_local(grad_placements=S0), "PlacementError", "to_local: placements must be a tuple"
    for grads in ((R, R), (Partial(), R), (Shard(1), R), (S0, S0)):
        yield (
            lambda grads=grads: x.to_local(grad_placements=grads),
            "PlacementError",
            "to_local: grad_placements .*sharded",
        )
        yield (
            lambda grads=grads: DTensor.from_local(platform.unwrap(x), mesh, (S0, R), grad_placements=grads),
            "PlacementError",
            "from_local: grad_placements .* a gradient is sharded like its value",
        )
    yield lambda: x.redistribute("dp"), "MeshError", "redistribute: device_mesh must be a DeviceMesh, got 'dp'"
    yield lambda: local_map(abs, [S0, R], device_mesh="dp"), "MeshError", "local_map: device_mesh must be"
    yield lambda: local_map(abs, [S0, R])(x=x), "PlacementError", "DTensors are passed by position, got x by keyword"
    yield lambda: local_map(abs, [S0, R], [None])(x), "PlacementError", "argument 0 is a DTensor .* is None"
    yield lambda: local_map(abs, [Shard(3), R])(x), "PlacementError", "Shard.3. shards dimension 3 of a 2-dimensional"
    yield lambda: shard_module(abs, "dp", ShardingPlan()), "MeshError", "shard_module: device_mesh must be a DeviceMesh"
    yield lambda: local_map(abs, [[S0, R]], [[S0, R], [S0, R]])(x), "PlacementError", "2 in_placements for 1 positional"
    yield (
        lambda: custom_shard(lambda a, b: a, mesh, [S0, R], [[S0, R], [S0, R]])(x, plain),
        "PlacementError",
        "argument 1 has placements .* but is not a DTensor",
    )


def _creation(platform: Platform) -> Iterator[Case]:
    plain, mesh = _plain(platform), _mesh(platform)
    x = distribute_tensor(plain, mesh, (S0, R), src_data_rank=None)
    for make in (distribute_tensor, DTensor.from_local):
        yield lambda make=make: make(plain, mesh, (Shard(2), R)), "PlacementError", "dimension 2 of a 2-dimensional"
        yield lambda make=make: make(plain, mesh, (S0,)), "PlacementError", "expected 2 placements for mesh .*, got 1"
        yield lambda make=make: make(plain, mesh, S0), "PlacementError", "a tuple with one placement for each"
        yield lambda make=make: make(plain, mesh, ("S0", R)), "PlacementError", "placement 0 is a str"
        yield lambda make=make: make(plain, "dp", (S0,)), "MeshError", "device_mesh must be a DeviceMesh, got 'dp'"
        yield lambda make=make: make(plain), "MeshError", "no mesh was given and there is no current one"
        yield lambda make=make: make([1.0], mesh, (S0, R)), "MixedOperandsError", f"'{platform.name}', got list"
    yield lambda: DTensor.from_local(x, mesh, (S0, R)), "MixedOperandsError", "takes a plain"
    yield lambda: distribute_tensor(x, mesh, (R, R)), "PlacementError", "is a DTensor placed"
    yield lambda: distribute_tensor(plain, mesh, (RaggedShard(0, (1, 2)), R)), "PlacementError", "units that sum to 3"
    yield lambda: zeros(4, device_mesh=mesh, placements=(Partial(), R)), "PlacementError", "cannot make partial"
    yield lambda: zeros(4, device_mesh="dp"), "MeshError", "a factory: device_mesh must be a DeviceMesh, got 'dp'"
    for size in (2.0, (4, 2.0)):
        message = re.escape(f"a factory: shape must be a sequence of integers, got {size}")
        yield lambda size=size: zeros(size, device_mesh=mesh), "ShardShapeError", message
    yield lambda: zeros(-4, device_mesh=mesh), "ShardShapeError", "sizes of at least 0, got .-4."
    yield (
        lambda: DTensor.from_local(plain, mesh, (S0, R), shape=(4, 4)),
        "ShardShapeError",
        "must be .2, 4., got .4, 4.",
    )
    yield (
        lambda: DTensor.from_local(plain, mesh, (Partial(), Partial("max"))).redistribute(placements=(R, R)),
        "PlacementError",
        r"cannot redistribute TensorSpec.* to \(dp:R, tp:R\): partial max and sum in .*; redistribute one axis before",
    )


def _meshes(platform: Platform) -> Iterator[Case]:
    """On ranks 2 and 3 of four."""
    half = DeviceMesh("cpu", (2,), ranks=(0, 1), platform=platform)
    outside = distribute_tensor(_plain(platform), half, (S0,), src_data_rank=None)
    yield lambda: outside.full_tensor(), "MeshError", "full_tensor: rank . is outside mesh"
    yield lambda: half.get_group(), "MeshError", "rank . is outside mesh"
    yield lambda: platform.ops.argmax(outside, 1), "MeshError", "argmax: rank . is outside mesh .* Call it where"
    ids = distribute_tensor(platform.from_numpy(np.ones(4, np.int64)), half, (S0,), src_data_rank=None)
    yield lambda: platform.ops.bincount(ids, 2), "MeshError", "bincount: it runs on full operands, .* Call it where"
    yield lambda: DeviceMesh("cpu", (3, 2), platform=platform), "MeshError", "6 ranks, the world only 4"
    yield lambda: init_device_mesh("cpu", (8,), platform=platform), "MeshError", "8 ranks, the world only 4"
    yield lambda: init_device_mesh("cpu", (2,), platform=platform), "MeshError", "has 2 ranks, the world has 4"
    yield lambda: DeviceMesh("cpu", (2,), ranks=(0, 9), platform=platform), "MeshError", "ranks .9. are outside"
    yield lambda: DeviceMesh("cpu", (2,), ranks=(1, 1), platform=platform), "MeshError", "ranks repeat"
    yield lambda: DeviceMesh("cpu", "22", platform=platform), "MeshError", "must be a shape .a tuple of ints. or ranks"
    yield lambda: DeviceMesh("toaster", (4,), platform=platform), "MeshError", "has no device 'toaster' here, only"
    yield lambda: _mesh(platform)["pp"], "MeshError", "has no axis 'pp'; axes: dp, tp"


def _plain(platform: Platform) -> Any:
    return platform.from_numpy(np.ones((4, 4), np.float32))


def _mesh(platform: Platform) -> DeviceMesh:
    return DeviceMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=platform)


def _mistakes(platform: Platform) -> list[str]:
    wrong = []
    # What every rank does wrong; the last on half of the ranks, while the others go on.
    on_half = () if _mesh(platform).get_local_rank("dp") == 0 else (_meshes,)
    for cases in (_operands, _creation, *on_half):
        for number, (mistake, error, message) in enumerate(cases(platform)):
            where = f"{cases.__name__} {number} ({message})"
            with record_collectives() as log:
                try:
                    wrong.append(f"{where}: no error but {mistake()}")
                except exceptions.HPError as raised:
                    if type(raised).__name__ != error or not re.search(message, str(raised)):
                        wrong.append(f"{where}: {raised!r}, expected {error}")
            if log.count():
                wrong.append(f"{where}: communicated {log.records}")
    return wrong


def test_mistakes_are_errors_before_anything_is_communicated(hp_platform: Platform) -> None:
    for wrong in run_ranks(_mistakes, 4, hp_platform, hp_platform):
        assert not wrong, "\n".join(wrong)


def test_plain_and_distributed_operands_do_not_mix(hp_platform: Platform) -> None:
    """pytorch/pytorch#153354, #156535, #134212: a plain operand is refused with the way out, never guessed."""

    def program(platform: Platform, mesh: DeviceMesh) -> str:
        _, x = place(platform, mesh, MATRIX, (Shard(0),))
        with pytest.raises(MixedOperandsError) as refusal:
            platform.ops.add(x, platform.from_numpy(MATRIX.copy()))
        return str(refusal.value)

    message = on_ranks(hp_platform, program)
    assert "add: a plain tensor of shape [5, 4]" in message
    assert "distribute_tensor" in message


def test_a_refused_operation_is_refused_again(hp_platform: Platform) -> None:
    """A plain scalar in a list, and a result that is not as the rule says: not only the first time."""

    def program(platform: Platform, mesh: DeviceMesh) -> None:
        from hp_dtensor.dispatch import operation

        _, x = place(platform, mesh, MATRIX, (Shard(0),))
        scalar = platform.ops.sum(x)
        plain = platform.ops.sum(platform.from_numpy(MATRIX.copy()))
        for _ in range(2):
            with pytest.raises(MixedOperandsError, match=r"stack: a plain tensor of shape \[\] among DTensors"):
                platform.ops.stack([plain, scalar], 0)
            with pytest.raises(ShardingRuleError, match="exp: the sharding rule expects"):
                operation.dispatch(platform, "exp", lambda _: platform.from_numpy(np.ones(7, np.float32)), (x,), {})

    on_ranks(hp_platform, program)


def test_ids_outside_a_sharded_table_fail_on_every_rank(hp_platform: Platform) -> None:
    """Megatron-style tables give zeros for an id that no rank has."""

    def program(platform: Platform, mesh: DeviceMesh) -> str:
        ids = from_local(platform.from_numpy(np.array([0, 9])), mesh, (Replicate(),))
        _, table = place(platform, mesh, MATRIX, (Shard(0),))
        with pytest.raises((IndexError, RuntimeError)) as failure:
            platform.ops.embedding(ids, table)
        return type(failure.value).__name__

    assert on_ranks(hp_platform, program) in ("IndexError", "RuntimeError")


def test_an_operation_without_a_rule_names_itself_and_the_way_out(hp_platform: Platform) -> None:
    """pytorch/pytorch#164543: errors that can be read."""
    from hp_dtensor.dispatch import operation

    def program(platform: Platform, mesh: DeviceMesh) -> list[str]:
        _, x = place(platform, mesh, MATRIX, (Shard(0),))
        messages = []
        for name, keywords in (("mystery", {}), ("sum", {"where": True}), ("nonzero", {})):
            with pytest.raises(ShardingRuleError) as refusal:
                operation.dispatch(platform, name, lambda *_: None, (x,), keywords)
            messages.append(str(refusal.value))
        return messages

    messages = on_ranks(hp_platform, program)
    for name, message in zip(("mystery", "sum", "nonzero"), messages, strict=True):
        assert name in message
        assert "S(0)" in message
        assert "edistribute" in message
    assert "'where'" in messages[1]
