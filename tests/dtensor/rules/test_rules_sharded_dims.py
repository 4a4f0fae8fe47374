"""Operations along a dimension that is sharded: what they send, and how their results are placed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    DeviceMesh,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    explicit_redistribution,
    from_local,
    parallelize_value_and_grad,
)
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.exceptions import LaunchError, ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks
from hp_dtensor.testing.rule_proof import Operations

ROWS = np.arange(40.0, dtype=np.float32).reshape(10, 4) % 17
FLAT = ROWS.reshape(40)
ITEMSIZE = 4


def _called(
    platform: Platform,
    array: np.ndarray,
    placements: Sequence[Any],
    shape: tuple[int, ...],
    call: Callable[[Any, Any], Any],
) -> tuple[Any, float, list[str], np.ndarray]:
    """Placements of a call's result, bytes and collectives of the call on this rank, and the full result."""
    mesh = DeviceMesh("cpu", shape, platform=platform)
    x = distribute_tensor(platform.from_numpy(array), mesh, placements)
    with record_collectives() as log, explicit_redistribution():
        result = call(Operations(platform), x)
    return result.placements, log.wire_bytes(), [r.name for r in log.records], platform.to_numpy(result.full_tensor())


def on_ranks(
    platform: Platform,
    array: np.ndarray,
    placements: Sequence[Any],
    call: Callable[[Any, Any], Any],
    shape: tuple[int, ...] = (4,),
) -> list[Any]:
    return run_ranks(_called, int(np.prod(shape)), platform, platform, array, placements, shape, call)


SLICES: dict[str, tuple[Callable[[Any, Any], Any], Any, np.ndarray]] = {
    "a slice": (lambda ops, x: x[2:9], RaggedShard(0, (1, 3, 3, 0)), ROWS[2:9]),
    "a slice of even parts": (lambda ops, x: x[1:9:2], RaggedShard(0, (1, 2, 1, 0)), ROWS[1:9:2]),
    "nothing": (lambda ops, x: x[4:4], Shard(0), ROWS[4:4]),
    "narrow": (lambda ops, x: ops.narrow(x, 0, 0, 8), RaggedShard(0, (3, 3, 2, 0)), ROWS[:8]),
    "a position": (lambda ops, x: x[-2], Partial(), ROWS[-2]),
    "select": (lambda ops, x: ops.select(x, 0, 5), Partial(), ROWS[5]),
    "a slice that is sharded evenly": (lambda ops, x: x[:9], Shard(0), ROWS[:9]),
}


@pytest.mark.parametrize("name", SLICES)
def test_what_an_index_picks_stays_where_it_is(hp_platform: Platform, name: str) -> None:
    call, placed, expected = SLICES[name]
    for placements, sent, _, full_value in on_ranks(hp_platform, ROWS, (Shard(0),), call):
        assert (placements, sent) == ((placed,), 0)
        np.testing.assert_array_equal(full_value, expected)


def test_a_slice_of_a_dimension_sharded_twice_is_not_redistributed(hp_platform: Platform) -> None:
    results = on_ranks(hp_platform, ROWS, (Shard(0), Shard(0)), lambda ops, x: x[1:8][1:], shape=(2, 2))
    assert [placements[1] for placements, *_ in results[::2]] == [RaggedShard(0, (1, 2)), RaggedShard(0, (3, 0))]
    for placements, sent, _, full_value in results:
        assert placements[0] == Shard(0)
        assert sent == 0
        np.testing.assert_array_equal(full_value, ROWS[2:8])


# Positions that are not there -----------------------------------------------------------------------------------

MISSING: dict[str, Callable[[Any, Any], Any]] = {
    "x[7]": lambda ops, x: x[10],
    "x[-8]": lambda ops, x: x[-11],
    "x[1:, 4]": lambda ops, x: x[1:, 4],
    "select": lambda ops, x: ops.select(x, 0, 10),
    "narrow": lambda ops, x: ops.narrow(x, 0, 8, 3),
    "narrow before the first": lambda ops, x: ops.narrow(x, 0, -11, 1),
}


def _refused(platform: Platform, placements: Sequence[Any], call: Callable[[Any, Any], Any]) -> tuple[str, int]:
    x = distribute_tensor(platform.from_numpy(ROWS), DeviceMesh("cpu", (4,), platform=platform), placements)
    with record_collectives() as log, pytest.raises(IndexError) as refusal:
        call(Operations(platform), x)
    return str(refusal.value), log.count()


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
@pytest.mark.parametrize("name", MISSING)
def test_a_position_that_is_not_there_is_an_index_error_on_every_rank(
    hp_platform: Platform, name: str, placement: Any
) -> None:
    for message, sent in run_ranks(_refused, 4, hp_platform, hp_platform, (placement,), MISSING[name]):
        assert sent == 0
        assert "out of bounds for dimension" in message
        assert "[10, 4]" in message, "the global shape"


def test_the_message_of_a_missing_position(hp_platform: Platform) -> None:
    (message, _), *_ = run_ranks(_refused, 4, hp_platform, hp_platform, (Shard(0),), lambda ops, x: x[2:, 4])
    assert message.startswith("getitem: index 4 is out of bounds for dimension 1 with size 4 of TensorSpec([10, 4]")


IDS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "index_select": lambda ops, x, ids: ops.index_select(x, 0, ids),
    "gather": lambda ops, x, ids: ops.gather(x, 0, ops.expand(ops.unsqueeze(ids, 1), (2, 4))),
    "getitem": lambda ops, x, ids: x[ids],
    "embedding": lambda ops, x, ids: ops.embedding(ids, x),
}


def _with_bad_id(platform: Platform, placement: Any, call: Callable[[Any, Any, Any], Any]) -> str:
    mesh = DeviceMesh("cpu", (4,), platform=platform)
    x = distribute_tensor(platform.from_numpy(ROWS), mesh, (placement,))
    ids = distribute_tensor(platform.from_numpy(np.array([1, 10])), mesh, (Replicate(),))
    with pytest.raises((IndexError, RuntimeError, ValueError)) as failure:
        platform.to_numpy(call(Operations(platform), x, ids).full_tensor())
    return type(failure.value).__name__


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", IDS)
def test_an_id_that_all_ranks_see_fails_on_all_of_them(hp_platform: Platform, name: str, placement: Any) -> None:
    kinds = run_ranks(_with_bad_id, 4, hp_platform, hp_platform, placement, IDS[name])
    assert len(set(kinds)) == 1


def _with_own_bad_id(platform: Platform, call: Callable[[Any, Any, Any], Any]) -> None:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    x = distribute_tensor(platform.from_numpy(ROWS), mesh, (Replicate(),))
    ids = distribute_tensor(platform.from_numpy(np.array([1, 10])), mesh, (Shard(0),))
    platform.to_numpy(call(Operations(platform), x, ids).full_tensor())


@pytest.mark.parametrize("name", ["index_select", "getitem", "embedding"])
def test_an_id_that_one_rank_sees_ends_the_job_with_its_name(hp_platform: Platform, name: str) -> None:
    with pytest.raises(LaunchError, match="rank 1 of 2 failed"):
        run_ranks(_with_own_bad_id, 2, hp_platform, hp_platform, IDS[name])


# What needs a full dimension -----------------------------------------------------------------------------------

FULL: dict[str, Callable[[Any, Any], Any]] = {
    "sort": lambda ops, x: ops.sort(x, 0)[0],
    "argsort": lambda ops, x: ops.argsort(x, 0),
    "median": lambda ops, x: ops.median(x, 0)[0],
    "nanmedian": lambda ops, x: ops.nanmedian(x, 0)[0],
    "mode": lambda ops, x: ops.mode(x, 0)[0],
    "kthvalue": lambda ops, x: ops.kthvalue(x, 3, 0)[0],
    "quantile": lambda ops, x: ops.quantile(x, 0.3, 0),
}


def _replicated(platform: Platform, array: np.ndarray, shape: tuple[int, ...], name: str) -> tuple[Any, float, Any]:
    mesh = DeviceMesh("cpu", shape, platform=platform)
    x = distribute_tensor(platform.from_numpy(array), mesh, (Shard(0),) * len(shape))
    with record_collectives() as log:
        result = FULL[name](Operations(platform), x)
    plain = FULL[name](Operations(platform), platform.from_numpy(array))
    same = np.array_equal(platform.to_numpy(result.full_tensor()), platform.to_numpy(plain))
    return result.placements, log.wire_bytes(), same


def _has(platform: Platform, name: str) -> bool:
    return platform.operation(name) is not None


@pytest.mark.parametrize("name", ["sort", "argsort", "median", "nanmedian", "mode", "kthvalue", "quantile"])
def test_a_dimension_is_made_whole_by_cutting_another_one(hp_platform: Platform, name: str) -> None:
    """Each rank sends three quarters of its part; gathered, it would be three times all of it."""
    if not _has(hp_platform, name):
        pytest.skip(f"{hp_platform.name} has no {name}")
    array = np.random.default_rng(0).permutation(32).astype(np.float32).reshape(8, 4)
    for placements, sent, same in run_ranks(_replicated, 4, hp_platform, hp_platform, array, (4,), name):
        assert placements == (Shard(1 if name in ("sort", "argsort") else 0),)
        assert sent == array.nbytes // 4 * 3 // 4
        assert same


def test_a_dimension_sharded_twice_is_gathered_by_sharding_another_one(hp_platform: Platform) -> None:
    if not _has(hp_platform, "sort"):
        pytest.skip(f"{hp_platform.name} has no sort")
    array = np.random.default_rng(0).permutation(32).astype(np.float32).reshape(8, 4)
    for placements, sent, same in run_ranks(_replicated, 4, hp_platform, hp_platform, array, (2, 2), "sort"):
        assert placements == (Shard(1), Shard(1))
        assert sent == array.nbytes // 4 * 3 // 4
        assert same


# Scans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_scans_send_totals(hp_platform: Platform, name: str) -> None:
    """One row of 4 values to each of three ranks."""
    if not _has(hp_platform, name):
        pytest.skip(f"{hp_platform.name} has no {name}")
    array = np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(16, 4)
    for placements, sent, _, _ in on_ranks(hp_platform, array, (Shard(0),), lambda ops, x: getattr(ops, name)(x, 0)):
        assert placements == (Shard(0),)
        assert sent == 3 * 4 * ITEMSIZE


# Partial results of several kinds ---------------------------------------------------------------------------------

KINDS = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min, "product": np.prod}
PARTS = np.random.default_rng(3).permutation(24).reshape(4, 6).astype(np.float32) / 8 + 0.5


def _mixed(platform: Platform, left: str, right: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    rank, ops = mesh.world.rank, platform.ops
    leaves = [platform.from_numpy(PARTS[rank].copy()), platform.from_numpy(PARTS[2 + rank].copy())]
    for leaf in leaves:
        platform.set_requires_grad(leaf, True)
    x, y = (from_local(leaf, mesh, (Partial(op),)) for leaf, op in zip(leaves, (left, right), strict=True))
    results = [f(x, y).full_tensor() for f in (ops.add, ops.mul, ops.maximum)]
    grads = platform.grad([ops.sum(results[1])], leaves)
    return [platform.to_numpy(platform.detach(r)) for r in results], [platform.to_numpy(g) for g in grads]


@pytest.mark.parametrize(("left", "right"), list(itertools.product(KINDS, repeat=2)))
def test_partial_results_of_two_kinds_meet(hp_platform: Platform, left: str, right: str) -> None:
    """Each is reduced by its own kind; the gradient of a largest or smallest value is its holder's."""
    x, y = KINDS[left](PARTS[:2], axis=0), KINDS[right](PARTS[2:], axis=0)
    for rank, (results, grads) in enumerate(run_ranks(_mixed, 2, hp_platform, hp_platform, left, right)):
        for result, expected in zip(results, (x + y, x * y, np.maximum(x, y)), strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-5)
        for grad, kind, full_value, own, other in (
            (grads[0], left, x, PARTS[rank], y),
            (grads[1], right, y, PARTS[2 + rank], x),
        ):
            np.testing.assert_allclose(grad, other * _share(kind, full_value, own), rtol=1e-5)


def _share(kind: str, full_value: np.ndarray, own: np.ndarray) -> Any:
    """The derivative of a result by a rank's contribution."""
    shares = {"sum": 1.0, "avg": 0.5, "product": full_value / own}
    return shares[kind] if kind in shares else (full_value == own).astype(np.float32)


# Assignment -------------------------------------------------------------------------------------------------------


def _assigned(platform: Platform, index: Any, size: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    mesh, ops = DeviceMesh("cpu", (4,), platform=platform), platform.ops
    value = platform.from_numpy(np.full(size, 3.0, np.float32))
    platform.set_requires_grad(value, True)
    x = ops.mul(distribute_tensor(platform.from_numpy(ROWS), mesh, (Shard(0),)), 1.0)
    x[index] = from_local(value, mesh, (Replicate(),))
    full_value = x.full_tensor()
    weights = platform.from_numpy(ROWS)
    (grad,) = platform.grad([ops.sum(ops.mul(full_value, weights))], [value])
    return platform.to_numpy(platform.detach(full_value)), platform.to_numpy(grad)


@pytest.mark.parametrize(
    ("index", "size"), [(4, (4,)), (slice(4, 5), (1, 4)), ((slice(1, 3), 2), (2,)), (-1, ())], ids=str
)
def test_an_assigned_value_has_its_gradient_whoever_writes(
    hp_platform: Platform, index: Any, size: tuple[int, ...]
) -> None:
    expected = ROWS.copy()
    expected[index] = 3.0
    for full_value, grad in run_ranks(_assigned, 4, hp_platform, hp_platform, index, size):
        np.testing.assert_array_equal(full_value, expected)
        np.testing.assert_allclose(grad, ROWS[index] if size else ROWS[index].sum())


# Pieces -----------------------------------------------------------------------------------------------------------


def _shapes_of_nothing(platform: Platform) -> list[tuple[int, ...]]:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    x = distribute_tensor(platform.from_numpy(ROWS[:0]), mesh, (Shard(0),))
    return [tuple(piece.shape) for piece in platform.ops.chunk(x, 3, 0)]


def test_nothing_has_as_many_chunks_as_asked_for(hp_platform: Platform) -> None:
    for shapes in run_ranks(_shapes_of_nothing, 2, hp_platform, hp_platform):
        assert shapes == [(0, 4)] * 3


# Padding ----------------------------------------------------------------------------------------------------------


def _cropped(platform: Platform, dtype: str) -> np.ndarray:
    x = distribute_tensor(
        platform.from_numpy(ROWS.astype(dtype)), DeviceMesh("cpu", (2,), platform=platform), (Shard(0),)
    )
    return platform.to_numpy(Operations(platform).pad(x, (-1, 2, 1, -3)).full_tensor())


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_negative_padding_cuts_off(hp_platform: Platform, dtype: str) -> None:
    if not _has(hp_platform, "pad"):
        pytest.skip(f"{hp_platform.name} has no pad")
    expected = np.zeros((8, 5), dtype)
    expected[1:, :3] = ROWS[:7, 1:]
    for got in run_ranks(_cropped, 2, hp_platform, hp_platform, dtype):
        np.testing.assert_array_equal(got, expected)


# Dtypes -----------------------------------------------------------------------------------------------------------

DTYPES: dict[str, tuple[Callable[[Any, Any, Any], Any], str, str]] = {
    "maximum": (lambda ops, x, y: ops.maximum(x, y), "float16", "float32"),
    "hypot": (lambda ops, x, y: ops.hypot(x, y), "float16", "float32"),
    "fmod": (lambda ops, x, y: ops.fmod(x, y), "int64", "float32"),
    "half": (lambda ops, x, y: ops.half(x), "float32", "float32"),
    "sum of truth values": (lambda ops, x, y: ops.sum(x, 0), "bool", "float32"),
}


def _dtypes_of_parts(platform: Platform, name: str) -> tuple[set[str], np.ndarray, np.ndarray]:
    call, *dtypes = DTYPES[name]
    mesh, ops = DeviceMesh("cpu", (3,), platform=platform), Operations(platform)
    plain = [
        platform.from_numpy(np.array([[1], [0]]).astype(dtype) + np.array(i, dtype)) for i, dtype in enumerate(dtypes)
    ]
    result = call(ops, *(distribute_tensor(x, mesh, (Shard(0),)) for x in plain))
    expected = call(ops, *plain)
    dtypes_found = {platform.dtype_name(x.dtype) for x in (result, platform.unwrap(result), expected)}
    return dtypes_found, platform.to_numpy(result.full_tensor()), platform.to_numpy(expected)


@pytest.mark.parametrize("name", DTYPES)
def test_a_rank_that_has_nothing_has_the_dtype_of_the_others(hp_platform: Platform, name: str) -> None:
    if name != "sum of truth values" and not _has(hp_platform, name):
        pytest.skip(f"{hp_platform.name} has no {name}")
    for dtypes, full_value, expected in run_ranks(_dtypes_of_parts, 3, hp_platform, hp_platform, name):
        assert len(dtypes) == 1
        np.testing.assert_allclose(full_value, expected)


INTEGERS: dict[str, Callable[[Any, Any], Any]] = {
    "softmax": lambda ops, x: ops.softmax(x, 0),
    "log_softmax": lambda ops, x: ops.log_softmax(x, 0),
    "std": lambda ops, x: ops.std(x, 0),
}


def _of_integers(platform: Platform, name: str) -> None:
    x = distribute_tensor(platform.from_numpy(np.arange(6)), DeviceMesh("cpu", (2,), platform=platform), (Shard(0),))
    with pytest.raises(ShardingRuleError, match="needs floating-point values, got int64"):
        INTEGERS[name](Operations(platform), x)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_not_rounded_part_by_part(hp_platform: Platform, name: str) -> None:
    if not _has(hp_platform, name):
        pytest.skip(f"{hp_platform.name} has no {name}")
    run_ranks(_of_integers, 2, hp_platform, hp_platform, name)


def test_logsumexp_of_infinite_values(hp_platform: Platform) -> None:
    rows = np.array([[200, 0, 0, np.inf], [-np.inf, -np.inf, 0, 0], [-np.inf] * 4, [1, 2, np.nan, 3]], np.float32)

    def program() -> tuple[np.ndarray, np.ndarray]:
        mesh, ops = DeviceMesh("cpu", (2,), platform=hp_platform), hp_platform.ops
        x = distribute_tensor(hp_platform.from_numpy(rows), mesh, [Shard(1)])
        value = hp_platform.to_numpy(ops.logsumexp(x, 1).full_tensor())
        hp_platform.set_requires_grad(x, True)
        _, grad = parallelize_value_and_grad(lambda: ops.sum(ops.logsumexp(x, 1)), x)()
        return value, hp_platform.to_numpy(grad.full_tensor())

    for value, grad in run_ranks(program, 2, hp_platform):
        np.testing.assert_allclose(value, [np.inf, np.log(2), -np.inf, np.nan], rtol=1e-6)
        # exp(200) is infinite in float32: the gradient of a finite value next to an infinite one is 0 all the same.
        np.testing.assert_allclose(grad[:2], [[0, 0, 0, np.nan], [0, 0, 0.5, 0.5]], rtol=1e-6)
