"""`sharding_rule`: a user's function is one operation on DTensors, with a line of factors."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    record_collectives,
    register_sharding,
    sharding_rule,
)
from hp_dtensor.dispatch import operation
from hp_dtensor.dispatch.operation import count_plans, forget_plans
from hp_dtensor.exceptions import MixedOperandsError, ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.testing import run_ranks
from hp_dtensor.testing.rule_proof import prove
from hp_dtensor.testing.rule_samples import Sample


def _ops(x: Any) -> Any:
    assert not isinstance(x, DTensor), "the function runs on plain tensors"
    return get_platform().ops


@sharding_rule("... k, n k -> ... n", reduced={"k": "sum"}, linear=True)
def linear(x: Any, weight: Any) -> Any:
    """Its documentation."""
    return _ops(x).matmul(x, _ops(weight).permute(weight, (1, 0)))


@sharding_rule("rows columns -> rows columns, rows", replicated=["columns"])
def normed(x: Any, power: float = 2.0, *, scale: float = 1.0) -> tuple[Any, Any]:
    ops = _ops(x)
    total = ops.sum(ops.pow(ops.square(x), power / 2), dim=1, keepdim=True)
    return ops.mul(ops.div(x, ops.add(total, 1.0)), scale), ops.sum(total, dim=1)


@sharding_rule("..., ... -> ...")
def mixed(x: Any, y: Any) -> Any:
    return _ops(x).mul(_ops(x).sin(x), y)


@sharding_rule("b m, b n -> m n", reduced={"b": "sum"})
def products(x: Any, y: Any) -> Any:
    return _ops(x).matmul(_ops(x).permute(_ops(x).sin(x), (1, 0)), y)


@sharding_rule("rows columns -> rows")
def totals(x: Any) -> Any:
    return _ops(x).sum(_ops(x).sin(x), dim=1)


@sharding_rule("rows columns -> columns", reduced={"rows": "avg"})
def means(x: Any) -> Any:
    return _ops(x).mean(_ops(x).sin(x), dim=0)


@sharding_rule("rows columns -> columns", reduced={"rows": "max"})
def largest(x: Any) -> Any:
    return _ops(x).amax(x, dim=0)


SAMPLES = (
    Sample("linear", ((3, 5, 4), (6, 4)), lambda ops, x, w: linear(x, w)),
    Sample("linear of rows", ((5, 4), (6, 4)), lambda ops, x, w: linear(x, weight=w)),
    Sample("normed", ((5, 4),), lambda ops, x: normed(x, 4.0, scale=3.0)),
    Sample("mixed", ((5, 1, 4), (3, 1)), lambda ops, x, y: mixed(x, y)),
    Sample("products", ((5, 3), (5, 4)), lambda ops, x, y: products(x, y)),
    Sample("totals", ((5, 4),), lambda ops, x: totals(x)),
    Sample("means of uneven parts", ((5, 4),), lambda ops, x: means(x)),
    Sample("means of even parts", ((4, 3),), lambda ops, x: means(x)),
)


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_values_and_gradients_are_those_of_one_device(torch_or, hp_platform: Platform, mesh: tuple[int, ...]) -> None:
    torch_or(mesh == (2, 2))
    for report in run_ranks(prove, int(np.prod(mesh)), hp_platform, hp_platform, mesh, SAMPLES, 24):
        assert report.wrong == report.refused == []
        assert report.right >= 4 * len(SAMPLES)


def test_nothing_is_sent_where_the_factors_say_so(hp_platform: Platform) -> None:
    def rank() -> None:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        x, w = (
            distribute_tensor(hp_platform.from_numpy(np.ones(shape, np.float32)), mesh, [Shard(1)])
            for shape in ((5, 4), (6, 4))
        )
        assert linear(x, w).placements == (Partial(),)
        assert [y.placements for y in normed(x)] == [(Shard(0),), (Shard(0),)]
        assert totals(x.redistribute(placements=[Shard(0)])).placements == (Shard(0),)
        assert totals(x).placements in ((Shard(0),), (Replicate(),))
        assert linear.__doc__ == "Its documentation."

    run_ranks(rank, 2, hp_platform)


def test_parts_without_elements_are_not_asked_for_the_largest(hp_platform: Platform) -> None:
    def rank() -> None:
        mesh = DeviceMesh("cpu", (4,), platform=hp_platform)
        for rows, placements in ((9, Replicate()), (8, Partial("max"))):
            values = np.arange(rows, dtype=np.float32).reshape(rows, 1)
            y = largest(distribute_tensor(hp_platform.from_numpy(values), mesh, [Shard(0)]))
            assert y.placements == (placements,)
            np.testing.assert_array_equal(hp_platform.to_numpy(y.full_tensor()), values.max(0))

    run_ranks(rank, 4, hp_platform)


def test_a_function_named_as_a_frameworks_operation_is_another_one(hp_platform: Platform) -> None:
    def as_strided(x: Any) -> Any:
        return _ops(x).mul(x, 2.0)

    as_strided.__qualname__ = "as_strided"  # as at the top of a file
    doubled = sharding_rule("n -> n")(as_strided)

    def rank() -> None:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        x = distribute_tensor(hp_platform.from_numpy(np.ones(4, np.float32)), mesh, [Shard(0)])
        np.testing.assert_array_equal(hp_platform.to_numpy(doubled(x).full_tensor()), 2.0)
        assert rule_registry().get("as_strided") is None

    run_ranks(rank, 2, hp_platform)


def test_results_of_every_function_of_one_name_are_checked(hp_platform: Platform) -> None:
    def made(stop: int) -> Any:
        @sharding_rule("n -> n")
        def part(x: Any) -> Any:
            return x[:stop]

        return part

    def rank() -> None:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        x = distribute_tensor(hp_platform.from_numpy(np.ones(4, np.float32)), mesh, [Shard(0)])
        assert made(2)(x).placements == (Shard(0),)
        with pytest.raises(ShardingRuleError, match="expects a result"):
            made(1)(x)

    run_ranks(rank, 2, hp_platform)


def test_a_function_that_is_defined_again_is_the_same_operation(hp_platform: Platform) -> None:
    def made(factor: float, replicated: Sequence[str]) -> Any:
        @sharding_rule("n m -> n m", replicated=replicated)
        def times(x: Any) -> Any:
            return _ops(x).mul(x, factor)

        return times

    def rank(factor: float, replicated: Sequence[str]) -> Any:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        x = distribute_tensor(hp_platform.from_numpy(np.ones((4, 3), np.float32)), mesh, [Shard(0)])
        y = made(factor, replicated)(x)
        np.testing.assert_array_equal(hp_platform.to_numpy(y.full_tensor()), factor)
        return y.placements

    def number_of_rules(factor: float, *replicated: str) -> int:
        for placements in run_ranks(rank, 2, hp_platform, factor, replicated):
            assert (placements == (Shard(0),)) == (not replicated)
        return len(rule_registry().names())

    first = number_of_rules(2.0)
    assert number_of_rules(3.0) == first
    assert number_of_rules(3.0, "n") == first + 1


@dataclass
class _Options:
    """It has no hash."""

    factor: float


class _Pair(NamedTuple):
    left: Any
    right: Any


def _what_is_left(platform: Platform) -> tuple[list[str], set[int]]:
    """Return the names of arguments of three calls that stay alive, and the numbers of plans after each."""

    @sharding_rule("a b, a b -> a b")
    def combined(tensors: Any, options: Any, *, then: Any, more: Any = _Options(0.0)) -> Any:
        return then(platform.ops.add(platform.ops.mul(tensors[0], options.factor), tensors[1]))

    left, plans = [], set()
    for factor in (1.0, 2.0, 3.0):
        x, options = _sharded_rows(platform, 1), _Options(factor)
        given = _Pair(x, x)
        y = combined(given, options, then=lambda t, options=options: t, more={"step": [factor, {factor}, bytearray()]})
        np.testing.assert_array_equal(platform.to_numpy(y.full_tensor()), factor + 1)
        watched = {"options": weakref.ref(options), "tensor": weakref.ref(x)}
        plans.add(count_plans())
        del x, options, given, y
        gc.collect()
        left += [name for name, reference in watched.items() if reference() is not None]
    return left, plans


def test_arguments_are_let_go(hp_platform: Platform) -> None:
    forget_plans()
    left, plans = run_ranks(_what_is_left, 1, hp_platform, hp_platform)[0]
    assert left == []
    assert len(plans) == 1


def test_keywords_are_the_functions_own(hp_platform: Platform) -> None:
    """No other names of a framework's parameters."""

    @sharding_rule("a b, b -> a b")
    def less(input: Any, **more: Any) -> Any:
        return hp_platform.ops.sub(input, more["x"])

    def rank() -> Any:
        x = _sharded_rows(hp_platform)
        row = distribute_tensor(hp_platform.from_numpy(np.ones(3, np.float32)), x.device_mesh, [Replicate()])
        return hp_platform.to_numpy(less(x=row, input=x).full_tensor())

    for found in run_ranks(rank, 2, hp_platform):
        np.testing.assert_array_equal(found, np.zeros((4, 3)))


def test_calls_that_do_not_fit_are_refused(hp_platform: Platform) -> None:
    def rank() -> None:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        plain = hp_platform.from_numpy(np.ones((4, 4), np.float32))
        x, y = (distribute_tensor(hp_platform.from_numpy(np.ones(s, np.float32)), mesh) for s in ((4, 4), (4, 5)))
        with pytest.raises(ShardingRuleError, match=r"linear.*'k' in its rule '.*' has sizes 4 and 5"):
            linear(x, y)
        with pytest.raises(ShardingRuleError, match=r"needs the dimensions 'rows columns', got the shape \[4\]"):
            totals(distribute_tensor(hp_platform.from_numpy(np.ones(4, np.float32)), mesh))
        with pytest.raises(ShardingRuleError, match="needs 2 tensors, got 1"):
            mixed(x, 3.0)
        with pytest.raises(ShardingRuleError, match="does not know the arguments 'size'"):
            totals(x, size=3)
        with pytest.raises(MixedOperandsError, match=r"mixed: a plain tensor of shape \[4, 4\] among DTensors"):
            mixed(x, plain)
        wrong = sharding_rule("a b -> a b")(lambda t: hp_platform.ops.sum(t, dim=1))
        with pytest.raises(
            ShardingRuleError, match=r"expects a result \[2, 4\] on this rank, the operation gave \[2\]"
        ):
            wrong(x.redistribute(placements=[Shard(0)]))

    run_ranks(rank, 2, hp_platform)


def test_tensors_that_the_rule_does_not_see_are_refused(hp_platform: Platform) -> None:
    @sharding_rule("a b -> a b")
    def scaled(x: Any, options: Any = None, *, more: Any = ()) -> Any:
        return _ops(x).mul(x, 2.0)

    def rank() -> None:
        x = _sharded_rows(hp_platform)
        for held in ({"scale": x}, [[x]], [{"scale": x}]):
            with pytest.raises(
                ShardingRuleError, match=r"scaled: argument 'options' holds DTensors inside a (dict|list)"
            ):
                scaled(x, held)
            with pytest.raises(ShardingRuleError, match="argument 'more'"):
                scaled(x, more=held)

    run_ranks(rank, 2, hp_platform)


def test_a_write_that_would_be_lost_is_refused(hp_platform: Platform) -> None:
    if hp_platform.name == "numpy":
        pytest.skip("it does not count writes")

    def rank() -> None:
        @sharding_rule("a b -> a b", replicated=["b"])
        def doubled(x: Any) -> Any:
            return hp_platform.own_function("mul_")(x, 2.0)

        x = _sharded_rows(hp_platform)
        np.testing.assert_array_equal(hp_platform.to_numpy(doubled(x).full_tensor()), 2.0)
        np.testing.assert_array_equal(hp_platform.to_numpy(x.full_tensor()), 2.0)
        with pytest.raises(ShardingRuleError, match=r"doubled writes its argument 'x', which its rule .* redistribute"):
            doubled(x.redistribute(placements=[Shard(1)]))

        @sharding_rule("b, a b -> a b")
        def scaled(x: Any, y: Any) -> Any:
            return hp_platform.ops.mul(y, hp_platform.own_function("mul_")(x, 2.0))

        # A sum and its terms have the same shape on a rank. Ranks use the sum with different rows.
        terms = DTensor.from_local(hp_platform.from_numpy(np.ones(3, np.float32)), x.device_mesh, [Partial()])
        with pytest.raises(ShardingRuleError, match=r"scaled writes its argument 'x', which its rule .* redistribute"):
            scaled(terms, x)
        np.testing.assert_array_equal(hp_platform.to_numpy(scaled(terms.redistribute(), x).full_tensor()), 8.0)

    run_ranks(rank, 2, hp_platform)


def test_a_result_that_is_held_elsewhere_stays_plain(hp_platform: Platform) -> None:
    def rank() -> None:
        held = hp_platform.from_numpy(np.ones((2, 3), np.float32))
        hp_platform.set_requires_grad(held, True)

        @sharding_rule("a b -> a b")
        def constant(x: Any) -> Any:
            return held

        y = constant(_sharded_rows(hp_platform))
        assert isinstance(y, DTensor)
        assert not isinstance(held, DTensor)
        np.testing.assert_array_equal(hp_platform.to_numpy(y.full_tensor()), 1.0)

    run_ranks(rank, 2, hp_platform)


def test_results_that_are_no_tensors_are_refused(hp_platform: Platform) -> None:
    results: dict[str, Any] = {"int": 3, "NoneType": None, "2": lambda x: (x, x), "str": lambda x: (x, "b")}

    def rank() -> None:
        x = _sharded_rows(hp_platform)
        for shown, result in results.items():
            function = result if callable(result) else lambda x, result=result: result
            with pytest.raises(
                ShardingRuleError, match=f"has 1 plain tensors as results, the function returned {shown}"
            ):
                sharding_rule("a b -> a b")(function)(x)

    run_ranks(rank, 2, hp_platform)


def _sharded_rows(platform: Platform, ranks: int = 2) -> Any:
    mesh = DeviceMesh("cpu", (ranks,), platform=platform)
    return distribute_tensor(platform.from_numpy(np.ones((4, 3), np.float32)), mesh, [Shard(0)])


@pytest.mark.parametrize(
    ("factors", "options", "message"),
    [
        ("a b", {}, "expected one '->'"),
        ("a -> a -> a", {}, "expected one '->'"),
        ("a b -> a c", {}, "'c' is in an output but in no input"),
        ("a 1 -> a", {}, "'1' is not a name"),
        ("a a -> a", {}, "'a a' has a name twice"),
        ("a b -> a", {"reduced": {"c": "sum"}}, "no input has 'c'"),
        ("a b -> a", {"replicated": ["d"]}, "no input has 'd'"),
        ("a b -> a", {"reduced": {"a": "sum"}}, "'a' is reduced, but an output has it"),
        ("a b -> a", {"reduced": {"b": "mean"}}, "expected one of sum, avg, max, min, product, got 'mean'"),
    ],
)
def test_factors_that_cannot_be_read(factors: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sharding_rule(factors, **options)


class Halves(NamedTuple):
    low: Any
    high: Any


@sharding_rule("..., ... -> ..., ...")
def halves(pair: Halves) -> Halves:
    return Halves(_ops(pair.low).mul(pair.low, 0.5), _ops(pair.low).mul(pair.high, 2.0))


def test_named_tuples_are_taken_and_returned(hp_platform: Platform) -> None:
    def program() -> tuple[Any, ...]:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        x = distribute_tensor(hp_platform.from_numpy(ROWS.copy()), mesh, [S0])
        y = distribute_tensor(hp_platform.from_numpy(ROWS.copy()), mesh, [S1])  # one of them is redistributed
        found = halves(Halves(x, y))
        return type(found), hp_platform.to_numpy(found.high.full_tensor())

    for kind, high in run_ranks(program, 2, hp_platform):
        assert kind is Halves
        np.testing.assert_array_equal(high, 2 * ROWS)


R, S0, S1 = Replicate(), Shard(0), Shard(1)
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(autouse=True)
def _forget_registered() -> Iterator[None]:
    before = dict(operation._sharding_functions)
    yield
    operation._sharding_functions.clear()
    operation._sharding_functions.update(before)


def by_columns(x: Any, *rest: Any) -> list[Any]:
    assert (x.ndim, tuple(x.shape)) == (2, ROWS.shape)
    return [([R], [R, R]), ([S1], [S1, S0])]


def test_the_listed_placements_come_before_the_rule(hp_platform: Platform) -> None:
    """By its rule a product keeps sharded rows; by the list it takes sharded columns or full tensors."""
    register_sharding("mul")(by_columns)

    def program() -> tuple[Any, ...]:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        x = distribute_tensor(hp_platform.from_numpy(ROWS.copy()), mesh, [S0])
        w = distribute_tensor(hp_platform.from_numpy(np.array([1, 2, 3], np.float32)), mesh, [R])
        for each in (x, w):
            hp_platform.set_requires_grad(each, True)
        with record_collectives() as log:
            y = hp_platform.ops.mul(x, w)
        hp_platform.backward(hp_platform.ops.sum(y))
        grads = [hp_platform.to_numpy(hp_platform.get_grad(each).full_tensor()) for each in (x, w)]
        return y.placements, log.count("all_gather"), hp_platform.to_numpy(y.full_tensor()), *grads

    for placements, gathers, y, grad, grad_w in run_ranks(program, 2, hp_platform):
        assert placements == (S1,)  # an all-to-all of half the rows is cheaper than gathering them
        assert gathers == 0
        np.testing.assert_array_equal(y, ROWS * [1, 2, 3])
        np.testing.assert_array_equal(grad, np.tile(np.array([1, 2, 3], np.float32), (4, 1)))
        np.testing.assert_array_equal(grad_w, ROWS.sum(0))


def test_a_later_registration_replaces_cached_plans(hp_platform: Platform) -> None:
    def program() -> tuple[Any, ...]:
        mesh = DeviceMesh("cpu", (1,), platform=hp_platform)
        x = distribute_tensor(hp_platform.from_numpy(ROWS.copy()), mesh, [S0])
        found = [hp_platform.ops.mul(x, x).placements]
        for placement in (S1, R):
            register_sharding("mul")(lambda *args, p=placement: [([p], [p, p])])
            found.append(hp_platform.ops.mul(x, x).placements)
        return tuple(found)

    assert run_ranks(program, 1, hp_platform) == [((S0,), (S1,), (R,))]


WRONG: dict[str, tuple[Any, str]] = {
    "nothing fits": ([([S0], [Shard(2), R])], "none of the 1 registered shardings fits"),
    "no argument": ([([S0], [S0])], "has no placement for argument 1"),
    "no output": ([([], [S0, R])], "has no placement for the output"),
}


@pytest.mark.parametrize(("listed", "message"), WRONG.values(), ids=WRONG)
def test_lists_that_do_not_fit_are_refused(hp_platform: Platform, listed: Any, message: str) -> None:
    register_sharding(["mul"])(lambda *args: listed)

    def program() -> None:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        x = distribute_tensor(hp_platform.from_numpy(ROWS.copy()), mesh, [S0])
        with pytest.raises(ShardingRuleError, match=message):
            hp_platform.ops.mul(x, x)

    run_ranks(program, 2, hp_platform)
