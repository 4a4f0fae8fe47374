"""`local_map` and `custom_shard`: placements stated at the border, global shapes that follow, counts that must fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from hp_dtensor import (
    DeviceMesh,
    Layout,
    Partial,
    Replicate,
    Shard,
    ShardingPlan,
    custom_shard,
    distribute_tensor,
    local_map,
    shard_module,
)
from hp_dtensor.exceptions import PlacementError, RankMismatchError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks

S0, S1, R = Shard(0), Shard(1), Replicate()
FULL = np.arange(20, dtype=np.float32).reshape(5, 4)


def on_ranks(platform: Platform, fn: Callable[[DeviceMesh, Any], Any], size: int = 2) -> list[Any]:
    """`fn(mesh, x)` on simulated ranks of one axis, `x` sharded over its 5 rows; the results by rank."""

    def rank() -> Any:
        mesh = DeviceMesh("cpu", (size,), mesh_dim_names=("dp",), platform=platform)
        return fn(mesh, distribute_tensor(platform.from_numpy(FULL.copy()), mesh, [S0]))

    return run_ranks(rank, size, platform)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_uneven_and_empty_shards_keep_their_global_shape(hp_platform: Platform, size: int) -> None:
    ops = hp_platform.ops

    def rank(mesh: DeviceMesh, x: Any) -> list[np.ndarray]:
        doubled = local_map(lambda t: ops.mul(t, 2), [S0])(x)
        turned = local_map(lambda t: ops.permute(t, (1, 0)), [S1])(x)
        summed = local_map(lambda t: ops.sum(t, dim=1), [S0])(x)
        total = local_map(lambda t: ops.sum(t, dim=0), [Partial()])(x)
        several = local_map(lambda t, n: (ops.mul(t, n), ops.mul(t, 0)), [[S0], [S0]], [[S0], None])(x, 3)
        return [hp_platform.to_numpy(y.full_tensor()) for y in (doubled, turned, summed, total, *several)]

    expected = [2 * FULL, FULL.T, FULL.sum(1), FULL.sum(0), 3 * FULL, 0 * FULL]
    for found in on_ranks(hp_platform, rank, size):
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_a_size_that_cannot_be_known_is_refused(hp_platform: Platform) -> None:
    """Twice as many rows: 6 of 10 on one rank, but the region sees only its own."""

    def rank(mesh: DeviceMesh, x: Any) -> None:
        with pytest.raises(PlacementError, match=r"output 0 \[[64], 4\] is sharded along dimension 0 .*from_local"):
            local_map(lambda t: hp_platform.ops.cat([t, t], 0), [S0])(x)

    on_ranks(hp_platform, rank)


def test_a_size_that_follows_from_even_parts(hp_platform: Platform) -> None:
    def rank(mesh: DeviceMesh, x: Any) -> tuple[int, ...]:
        even = x.redistribute(placements=[S1])
        return tuple(local_map(lambda t: hp_platform.ops.cat([t, t], 1), [S1])(even).shape)

    assert on_ranks(hp_platform, rank) == [(5, 8)] * 2


def test_specifications_by_aliases_and_layouts(hp_platform: Platform) -> None:
    def rank(mesh: DeviceMesh, x: Any) -> None:
        layout = Layout.from_device_mesh(mesh)
        for out, into in (
            (("None", "dp"), (("None", "dp"),)),
            (layout("None", "dp"), (layout("None", "dp"),)),
            (((S1,),), ((S1,),)),
        ):
            y = custom_shard(lambda t: t, mesh, out, into)(x)
            assert y.placements == (S1,)
            np.testing.assert_array_equal(hp_platform.to_numpy(y.full_tensor()), FULL)

    on_ranks(hp_platform, rank)


@pytest.mark.parametrize("container", [list, tuple])
def test_aliases_for_one_output_and_none_for_the_other(hp_platform: Platform, container: type) -> None:
    def rank(mesh: DeviceMesh, x: Any) -> None:
        several = container([("None", "dp"), None])
        y, n = custom_shard(lambda t, n: (t, n), mesh, several, several)(x, 3)
        assert (y.placements, n) == ((S1,), 3)
        plan = ShardingPlan(input_plan={"input": several}, output_plan={"output": several})
        y, n = shard_module(lambda t, n: (t, n), mesh, plan)(x, x)
        assert (y.placements, n.placements) == ((S1,), (S0,))

    on_ranks(hp_platform, rank)


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "one output more": (lambda f, x: local_map(f, [[S0], [S0]])(x), "returned 1 outputs, out_placements has 2"),
    "bare placements": (lambda f, x: local_map(f, [S0], [S0])(x), r"in_placements\[0\] must be placements"),
    "no tensor": (lambda f, x: local_map(lambda t: 3, [S0])(x), "output 0 has placements but is not a tensor: int"),
    "a number": (lambda f, x: local_map(f, [S0], [[S0], [R]])(x, 3), "argument 1 has placements .* is not a DTensor"),
    "placed otherwise": (
        lambda f, x: local_map(f, [S1], [[S1]])(x),
        r"argument 0 must be placed \[Shard\(1\)\], got \(dp:S\(0\)\)",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(hp_platform: Platform, call: Callable[..., Any], message: str) -> None:
    def rank(mesh: DeviceMesh, x: Any) -> None:
        with pytest.raises(PlacementError, match=message):
            call(lambda t, *rest: t, x)

    on_ranks(hp_platform, rank)


def test_as_a_decorator_with_plain_and_nested_arguments(hp_platform: Platform) -> None:
    ops = hp_platform.ops

    @local_map(out_placements=([S1], [S0], None), in_placements=([S1], [S0], [R], None), redistribute_inputs=True)
    def shifted(pair: Any, plain: Any, label: str) -> Any:
        """Named."""
        return {"columns": ops.add(pair[0], plain), "rows": [pair[1], label]}

    assert shifted.__name__ == "shifted"
    assert shifted.__doc__ == "Named."

    def rank(mesh: DeviceMesh, x: Any) -> None:
        plain = hp_platform.zeros((1,), hp_platform.dtype("float32"))
        x = distribute_tensor(hp_platform.from_numpy(FULL[:4].copy()), mesh, [S0])
        found = shifted([x, x], plain, "a")
        columns, (rows, label) = found["columns"], found["rows"]
        assert (columns.placements, rows.placements, label) == ((S1,), (S0,), "a")
        for each in (columns, rows):
            np.testing.assert_array_equal(hp_platform.to_numpy(each.full_tensor()), FULL[:4])

    on_ranks(hp_platform, rank)


def test_arguments_on_several_meshes(hp_platform: Platform) -> None:
    """A batch sharded over dp and a weight sharded over tp; the outputs are sharded over both axes."""
    ops = hp_platform.ops
    batch, columns = (np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(6, dtype=np.float32).reshape(3, 2))

    def program() -> tuple[np.ndarray, np.ndarray, str]:
        mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=hp_platform)
        x = distribute_tensor(hp_platform.from_numpy(batch), mesh, [S0, R])
        w = distribute_tensor(hp_platform.from_numpy(columns), mesh["tp"], [S1])
        hp_platform.set_requires_grad(x, True)
        y = local_map(ops.matmul, [S0, S1], [[S0, R], [S1]])(x, w)
        assert y.device_mesh == mesh
        hp_platform.backward(ops.sum(y))  # x is used for other columns on each rank of tp: its gradient is summed
        grad = hp_platform.to_numpy(hp_platform.get_grad(x).full_tensor())
        bare = distribute_tensor(hp_platform.from_numpy(columns), mesh["tp"], [R])
        hp_platform.set_requires_grad(bare, True)
        with pytest.raises(PlacementError, match=r"argument 1, replicated over axis 'tp'.*no such axis") as refusal:
            local_map(ops.matmul, [S0], device_mesh=mesh["dp"])(
                distribute_tensor(hp_platform.detach(x.to_local()), mesh["dp"], [R]), bare
            )
        return hp_platform.to_numpy(y.full_tensor()), grad, str(refusal.value)

    for y, grad, message in run_ranks(program, 4, hp_platform):
        np.testing.assert_array_equal(y, batch @ columns)
        np.testing.assert_array_equal(grad, np.tile(columns.sum(1), (4, 1)))
        assert "in_grad_placements" in message


class Pair(NamedTuple):
    first: Any
    second: Any


def test_outputs_keep_their_container(hp_platform: Platform) -> None:
    def rank(mesh: DeviceMesh, x: Any) -> None:
        for container in (Pair, lambda *items: (*items,), lambda *items: [*items]):
            found = local_map(container, [[S0], [S0]])(x, x)
            assert type(found) is type(container(1, 2))
            assert [item.placements for item in found] == [(S0,), (S0,)]

    on_ranks(hp_platform, rank)


WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)
GRADIENTS: dict[str, tuple[Any, Any, Callable[..., Any]]] = {
    "sharded rows": (S0, [S0], lambda ops, a, w: ops.matmul(a, w)),
    "a total": (S0, [Partial()], lambda ops, a, w: ops.sum(ops.matmul(a, w), dim=0)),
    "replicated": (R, [R], lambda ops, a, w: ops.matmul(a, w)),
    "no tensor besides": (S0, [[S0], None], lambda ops, a, w: (ops.matmul(a, w), 3)),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("rows", "out", "func"), GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_follow_from_the_placements(
    hp_platform: Platform, rows: Any, out: Any, func: Callable[..., Any], size: int
) -> None:
    """A replicated weight gets the sum of what ranks compute differently, and one of what they compute alike."""

    def rank(mesh: DeviceMesh, x: Any) -> list[np.ndarray]:
        a = hp_platform.Parameter(x.redistribute(placements=[rows]))
        w = hp_platform.Parameter(distribute_tensor(hp_platform.from_numpy(WEIGHT.copy()), mesh))
        entries = ([rows], [R])
        region = custom_shard(lambda a, w: func(hp_platform.ops, a, w), mesh, out, entries)
        y = region(a, w)
        y = y[0] if isinstance(y, tuple) else y
        hp_platform.backward(hp_platform.ops.sum(y).full_tensor())
        return [hp_platform.to_numpy(hp_platform.get_grad(p).full_tensor()) for p in (a, w)]

    for grad_a, grad_w in on_ranks(hp_platform, rank, size):
        np.testing.assert_array_equal(grad_a, np.repeat(WEIGHT.sum(1)[None], 5, 0))
        np.testing.assert_array_equal(grad_w, np.repeat(FULL.sum(0)[:, None], 3, 1))


def test_gradients_that_do_not_follow_are_stated(hp_platform: Platform) -> None:
    ops = hp_platform.ops

    def rank(mesh: DeviceMesh, x: Any) -> None:
        w = hp_platform.Parameter(distribute_tensor(hp_platform.from_numpy(np.ones((5, 4), np.float32)), mesh))

        def several(x: Any, w: Any) -> tuple[Any, Any]:
            return ops.mul(x, 2), ops.mul(w, 2)

        with pytest.raises(PlacementError, match=r"argument 1, replicated over axis 'dp', .*: not all outputs are"):
            local_map(several, [[S0], [R]])(x, w)
        with pytest.raises(PlacementError, match="outputs are replicated but computed from arguments that are not"):
            local_map(lambda x, w: ops.mul(w, 2), [R])(x, w)
        stated = local_map(lambda x, w: ops.mul(w, 2), [R], in_grad_placements=[None, [R]])(x, w)
        hp_platform.backward(ops.sum(stated).full_tensor())
        np.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.get_grad(w).full_tensor()), 2)
        with hp_platform.no_grad():
            assert local_map(several, [[S0], [R]])(x, w)[1].placements == (R,)

    on_ranks(hp_platform, rank)


@pytest.mark.parametrize("records", [False, True])
def test_each_specification_has_a_placement_per_mesh_axis(hp_platform: Platform, records: bool) -> None:
    def rank() -> None:
        mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=hp_platform)
        x = distribute_tensor(hp_platform.from_numpy(FULL.copy()), mesh, [S0, R])
        x = hp_platform.Parameter(x, requires_grad=records)
        expected = r"expected 2 placements for mesh \(dp=2, tp=2\), got 1"
        with pytest.raises(PlacementError, match=rf"local_map: out_placements\[0\]: {expected}"):
            local_map(lambda t: t, [S0])(x)
        with pytest.raises(PlacementError, match=rf"local_map: in_placements\[0\]: {expected}"):
            local_map(lambda t: t, [S0, R], [[S0]])(x)
        if records:
            with pytest.raises(PlacementError, match=rf"local_map: in_grad_placements\[0\]: {expected}"):
                local_map(lambda t: t, [S0, R], in_grad_placements=[[S0]])(x)

    run_ranks(rank, 4, hp_platform)


def test_ranks_whose_outputs_make_no_tensor_are_told(hp_platform: Platform) -> None:
    """Rank 0 gives 4 rows, rank 1 gives 1: not what rows sharded in chunk order are."""

    def program(mesh: DeviceMesh, x: Any) -> str:
        rows = 4 if mesh.get_coordinate() == (0,) else 1
        mapped = local_map(lambda part: hp_platform.ops.narrow(hp_platform.ops.cat([part, part]), 0, 0, rows), [S0])
        with pytest.raises((RankMismatchError, PlacementError)) as refusal:
            mapped(x)
        return str(refusal.value)

    for message in on_ranks(hp_platform, program):
        assert "output 0" in message


def test_ranks_compare_the_shapes_of_outputs_in_the_first_call(hp_platform: Platform) -> None:
    def program(mesh: DeviceMesh, x: Any) -> list[int]:
        group, calls = mesh.group_along(0), []
        mapped = local_map(lambda part: hp_platform.ops.mul(part, 2.0), [S0])
        for _ in range(3):
            calls.append(-group.num_calls)
            assert tuple(mapped(x).shape) == FULL.shape
            calls[-1] += group.num_calls
        return calls

    assert on_ranks(hp_platform, program) == [[1, 0, 0], [1, 0, 0]]
