"""A model sharded by a plan computes what the unsharded one does."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
from small_model import loss_of, make_data, make_model, reference

from hp_dtensor import DeviceMesh, Replicate, Shard, distribute_tensor, replicate_like
from hp_dtensor.compat.shard_module import ShardingPlan, shard_module
from hp_dtensor.compat.value_and_grad import parallelize_value_and_grad
from hp_dtensor.exceptions import GradientPathError, PlanError
from hp_dtensor.optim import clip_grad_norm_
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing import run_ranks
from hp_dtensor.trees import fields_of, tensors_in

# float32 sums of at most 7 products of order one, in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

PLANS = {
    "tensor parallel": {
        "plan": {"up.weight": ("tp", "None"), "up.bias": ("tp",), "down.weight": ("None", "tp")},
        "input_plan": {"input": ("dp", "None")},
    },
    "both axes on one dimension": {
        "plan": {"up.weight": (("dp", "tp"), "None"), "up.bias": (("dp", "tp"),), "down.weight": ("None", "tp")},
    },
    "placements": {
        "plan": {"up.weight": (Shard(1), Shard(0)), "down.bias": (Replicate(), Shard(0))},
        "input_plan": {"input": {"x": (Shard(0), Replicate())}},
        "output_plan": {"output": (Shard(0), Shard(1))},
    },
}


def _mesh(platform: Platform, shape: tuple[int, int]) -> DeviceMesh:
    return DeviceMesh("cpu", shape, mesh_dim_names=("dp", "tp"), platform=platform)


def _sharded(platform: Platform, mesh: DeviceMesh, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A sharded model, its output, and the loss's weight."""
    model = shard_module(make_model(platform), mesh, ShardingPlan(**options))
    x, weight = make_data(platform)
    output = model(distribute_tensor(x, mesh))
    return model, output, replicate_like(weight, output)


def _gradients(platform: Platform, shape: tuple[int, int], options: dict[str, Any]) -> dict[str, np.ndarray]:
    model, output, weight = _sharded(platform, _mesh(platform, shape), options)
    platform.backward(loss_of(platform, output, weight).full_tensor())
    return {name: platform.to_numpy(platform.get_grad(p).full_tensor()) for name, p in platform.named_parameters(model)}


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS.keys())
def test_gradients_equal_the_unsharded_ones(
    hp_platform: Platform, shape: tuple[int, int], options: dict[str, Any]
) -> None:
    expected = reference(hp_platform)
    for grads in run_ranks(_gradients, shape[0] * shape[1], hp_platform, hp_platform, shape, options):
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, expected[name], **CLOSE, err_msg=name)


def _styled(platform: Platform) -> dict[str, np.ndarray]:
    mesh = DeviceMesh("cpu", (3,), mesh_dim_names=("tp",), platform=platform)
    model = parallelize_module(
        make_model(platform),
        mesh,
        {"up": ColwiseParallel(use_local_output=False), "dow?": RowwiseParallel(use_local_output=False)},
    )
    x, weight = make_data(platform)
    output = model(x)
    platform.backward(loss_of(platform, output, replicate_like(weight, output)).full_tensor())
    return {name: platform.to_numpy(platform.get_grad(p).full_tensor()) for name, p in platform.named_parameters(model)}


def test_styles_give_the_same_gradients(hp_platform: Platform) -> None:
    expected = reference(hp_platform)
    for grads in run_ranks(_styled, 3, hp_platform, hp_platform):
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, expected[name], **CLOSE, err_msg=name)


def _clipped(platform: Platform, max_norm: float, norm_type: float) -> tuple[float, dict[str, np.ndarray]]:
    model, output, weight = _sharded(platform, _mesh(platform, (2, 2)), PLANS["tensor parallel"])
    platform.backward(loss_of(platform, output, weight).full_tensor())
    norm = clip_grad_norm_([p for _, p in platform.named_parameters(model)], max_norm, norm_type)
    grads = {n: platform.to_numpy(platform.get_grad(p).full_tensor()) for n, p in platform.named_parameters(model)}
    return float(platform.to_numpy(norm)), grads


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_sees_every_shard_once(hp_platform: Platform, norm_type: float) -> None:
    expected = reference(hp_platform)
    everything = np.concatenate([grad.ravel() for grad in expected.values()])
    full = float(np.linalg.norm(everything, ord=norm_type))
    for norm, grads in run_ranks(_clipped, 4, hp_platform, hp_platform, full / 2, norm_type):
        assert norm == pytest.approx(full, rel=1e-5)
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, expected[name] / 2, rtol=1e-4, atol=1e-5, err_msg=name)


def _valued(platform: Platform) -> list[np.ndarray]:
    mesh = _mesh(platform, (1, 2))
    model = shard_module(make_model(platform), mesh, ShardingPlan(**PLANS["tensor parallel"]))
    names = [name for name, _ in platform.named_parameters(model)]
    x, weight = make_data(platform)

    def loss(inputs: Any) -> Any:
        output = model(inputs)
        return loss_of(platform, output, replicate_like(weight, output))

    weights = [p for _, p in platform.named_parameters(model)]
    _, grads = parallelize_value_and_grad(loss, weights)(distribute_tensor(x, mesh))
    assert len(names) == len(grads)
    return [platform.to_numpy(grad.full_tensor()) for grad in grads]


def test_value_and_grad_gives_single_device_gradients(hp_platform: Platform) -> None:
    expected = list(reference(hp_platform).values())
    for grads in run_ranks(_valued, 2, hp_platform, hp_platform):
        for grad, want in zip(grads, expected, strict=True):
            np.testing.assert_allclose(grad, want, **CLOSE)


def test_parameters_without_an_entry_are_replicated(hp_platform: Platform) -> None:
    def program() -> dict[str, tuple[Any, ...]]:
        model = shard_module(make_model(hp_platform), _mesh(hp_platform, (1, 2)), ShardingPlan({"up.bias": ("tp",)}))
        return {name: p.placements for name, p in hp_platform.named_parameters(model)}

    replicated = (Replicate(), Replicate())
    sharded_value = {"up.bias": (Replicate(), Shard(0))}
    for placed in run_ranks(program, 2, hp_platform):
        assert placed == {name: sharded_value.get(name, replicated) for name in placed}


@pytest.mark.parametrize(
    "plans",
    [
        {"input_plan": {"input": None, "output": (Replicate(), Shard(1))}},
        {"input_plan": {"input": None}, "output_plan": {"output": (Replicate(), Shard(1)), "up.input": None}},
        {"input_plan": {"up.input": [None], "output": ("None", "tp")}},
    ],
)
def test_either_plan_takes_inputs_outputs_and_none(hp_platform: Platform, plans: dict[str, Any]) -> None:
    def program() -> tuple[np.ndarray, Any]:
        model = shard_module(make_model(hp_platform), _mesh(hp_platform, (1, 2)), ShardingPlan(**plans))
        x, _ = make_data(hp_platform)
        output = model(distribute_tensor(x, model.up.weight.device_mesh))
        return hp_platform.to_numpy(output.full_tensor()), output.placements

    x, _ = make_data(hp_platform)
    expected = hp_platform.to_numpy(make_model(hp_platform)(x))
    for output, placements in run_ranks(program, 2, hp_platform):
        np.testing.assert_allclose(output, expected, **CLOSE)
        assert placements == (Replicate(), Shard(1))


def test_one_key_in_both_plans_is_refused(hp_platform: Platform) -> None:
    plan = ShardingPlan(input_plan={"output": None}, output_plan={"output": None})
    with pytest.raises(PlanError, match="input_plan and output_plan both have the key 'output'"):
        shard_module(lambda x: x, _mesh(hp_platform, (1, 1)), plan)


def test_value_and_grad_of_one_parameter_and_of_an_unused_one(hp_platform: Platform) -> None:
    def program() -> tuple[Any, Any, Any]:
        platform, mesh = hp_platform, _mesh(hp_platform, (1, 2))
        model = shard_module(make_model(platform), mesh, ShardingPlan({"down.weight": ("None", "tp")}))
        x, weight = make_data(platform)
        own = dict(platform.named_parameters(model))

        def loss(inputs: Any) -> Any:
            output = model(inputs)
            return loss_of(platform, output, replicate_like(weight, output))

        def half(inputs: Any) -> Any:
            return platform.ops.sum(model.up(inputs))

        _, one = parallelize_value_and_grad(loss, own["up.weight"])(distribute_tensor(x, mesh))
        _, (used, unused) = parallelize_value_and_grad(half, [own["up.bias"], own["down.weight"]])(
            distribute_tensor(x, mesh)
        )
        assert unused.placements == own["down.weight"].placements
        return tuple(platform.to_numpy(grad.full_tensor()) for grad in (one, used, unused))

    expected = reference(hp_platform)["up.weight"]
    rows = next(iter(make_data(hp_platform)[0].shape))
    for one, used, unused in run_ranks(program, 2, hp_platform):
        np.testing.assert_allclose(one, expected, **CLOSE)
        np.testing.assert_array_equal(used, np.full_like(used, rows))
        assert not unused.any()


def _refused(platform: Platform) -> str:
    model = make_model(platform)
    before = {name: tuple(p.shape) for name, p in platform.named_parameters(model)}
    plan = ShardingPlan(
        plan={
            "up.weigth": ("tp", "None"),
            "up.bias": ("dp", "tp"),
            "down.bias": (Shard(0),),
            "down.weight": (Shard(2),) * 2,
        },
        input_plan={
            "up.inputs": ("dp",),
            "middle.input": ("dp",),
            "input": {"y": ("dp",)},
            "up.input": [("dp",), None, None],
        },
        output_plan={"output": ("ep", "None")},
        return_local_tensor=["dwn"],
    )
    with pytest.raises(PlanError) as refusal:
        shard_module(model, _mesh(platform, (2, 1)), plan)
    assert before == {name: tuple(p.shape) for name, p in platform.named_parameters(model)}
    return str(refusal.value)


def test_all_problems_of_a_plan_come_at_once(hp_platform: Platform) -> None:
    message = run_ranks(_refused, 2, hp_platform, hp_platform)[0]
    assert message == (
        "sharding plan:\n"
        "  there is no parameter 'up.weigth'; closest: up.weight, down.weight\n"
        "  plan['up.bias']: 2 alias names for 1 dimensions [7]\n"
        "  plan['down.bias']: expected 2 placements for mesh (dp=2, tp=1), got 1\n"
        "  plan['down.weight']: placement 0: Shard(2) shards dimension 2 of a 2-dimensional tensor; "
        "placement 1: Shard(2) shards dimension 2 of a 2-dimensional tensor\n"
        "  input_plan key 'up.inputs' must be 'input' or 'output', or end in '.input' or '.output'\n"
        "  input_plan['middle.input']: there is no module 'middle'; there are: down, up\n"
        "  input_plan['input']: there is no input 'y'; there are: x\n"
        "  input_plan['up.input']: 3 specifications for the 1 inputs x\n"
        "  output_plan['output']: unknown alias 'ep'; known: dp, tp and 'None'\n"
        "  return_local_tensor 'dwn': there is no module 'dwn'; closest: down"
    )


def _sharded_twice(platform: Platform) -> str:
    mesh, plan = _mesh(platform, (1, 2)), ShardingPlan({"up.weight": ("tp", "None")})
    model = shard_module(make_model(platform), mesh, plan)
    with pytest.raises(PlanError) as refusal:
        shard_module(model, mesh, plan)
    return str(refusal.value)


def test_what_is_sharded_already_is_refused_by_name(hp_platform: Platform) -> None:
    message = run_ranks(_sharded_twice, 2, hp_platform, hp_platform)[0]
    assert message.startswith("sharding plan:\n  plan['up.weight']: is a DTensor already, placed (dp:")


def test_modules_whose_outputs_become_local_are_a_list() -> None:
    with pytest.raises(TypeError, match="must be a list of module paths, got 'block'"):
        ShardingPlan(return_local_tensor="block")


def _local_outputs(platform: Platform) -> None:
    mesh = _mesh(platform, (1, 2))
    x = distribute_tensor(platform.from_numpy(np.ones((5, 2), np.float32)), mesh, (Replicate(), Shard(0)))
    function = shard_module(lambda x: {"a": x, "b": [x, (x, 3)]}, mesh, ShardingPlan(return_local_tensor=[""]))
    found = function(x)
    tensors = [found["a"], found["b"][0], found["b"][1][0]]
    assert not any(isinstance(tensor, DTensor) for tensor in tensors)
    assert {tuple(tensor.shape) for tensor in tensors} == {tuple(x.local_shape)}
    assert found["b"][1][1] == 3


def test_nested_outputs_become_local(hp_platform: Platform) -> None:
    run_ranks(_local_outputs, 2, hp_platform, hp_platform)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Output:
    first: Any
    second: Any = None


ROWS, COLUMNS = (Shard(0), Replicate()), (Replicate(), Shard(1))
CONTAINERS = [Pair, lambda a, b: (a, b), lambda a, b: [a, b], lambda a, b: {"first": a, "second": b}, Output]


@pytest.mark.parametrize("container", CONTAINERS, ids=["named tuple", "tuple", "list", "dict", "dataclass"])
def test_outputs_keep_their_container(hp_platform: Platform, container: Any) -> None:
    def rank() -> None:
        mesh = _mesh(hp_platform, (1, 2))
        x = distribute_tensor(hp_platform.from_numpy(np.ones((4, 2), np.float32)), mesh)
        expected = container(1, 2)
        if isinstance(expected, (tuple, list)):
            found = shard_module(container, mesh, ShardingPlan(output_plan={"output": [ROWS, COLUMNS]}))(x, x)
            assert type(found) is type(expected)
            assert [y.placements for y in found] == [ROWS, COLUMNS]
        else:
            with pytest.raises(PlanError, match=r"returned a \w+ of first, second, but its output plan is by position"):
                shard_module(container, mesh, ShardingPlan(output_plan={"output": [ROWS, COLUMNS]}))(x, x)
        if fields_of(expected) is not None:
            function = shard_module(container, mesh, ShardingPlan(output_plan={"output": {"second": COLUMNS}}))
            placed = fields_of(function(x, x))
            assert [y.placements for y in placed.values()] == [x.placements, COLUMNS]
            with pytest.raises(PlanError, match="of first, second, but its output plan has the names third"):
                shard_module(container, mesh, ShardingPlan(output_plan={"output": {"third": ROWS}}))(x, x)
        found = shard_module(container, mesh, ShardingPlan(return_local_tensor=[""]))(x, x)
        assert type(found) is type(expected)
        assert not any(isinstance(y, DTensor) for y in tensors_in(found, hp_platform.Tensor))

    run_ranks(rank, 2, hp_platform)


INPUTS = {"by position": [ROWS, None, COLUMNS], "by name": {"a": ROWS, "rest": COLUMNS}}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_inputs_are_placed_however_they_are_given(hp_platform: Platform, inputs: Any) -> None:
    def placed(a: Any, b: Any = None, *rest: Any, scale: Any = None, **more: Any) -> list[Any]:
        given = (a, b, *rest, scale, *more.values())
        return [x.placements for x in given if isinstance(x, DTensor)]

    def rank() -> None:
        mesh = _mesh(hp_platform, (1, 2))
        x = distribute_tensor(hp_platform.from_numpy(np.ones((4, 2), np.float32)), mesh)
        function = shard_module(placed, mesh, ShardingPlan(input_plan={"input": inputs}))
        plain = x.placements
        assert function(x) == function(a=x) == [ROWS]
        assert function(x, x, x) == [ROWS, plain, COLUMNS]
        assert function(b=x, a=x, scale=x) == [ROWS, plain, plain]
        by_name = isinstance(inputs, dict)
        assert function(x, x, x, x) == [ROWS, plain, COLUMNS, COLUMNS if by_name else plain]

    run_ranks(rank, 2, hp_platform)


def test_functions_without_a_signature_go_by_position(hp_platform: Platform) -> None:
    def rank() -> None:
        mesh = _mesh(hp_platform, (1, 2))
        x = distribute_tensor(hp_platform.from_numpy(np.ones((4, 2), np.float32)), mesh)
        plan = ShardingPlan(input_plan={"input": [None, ROWS]})
        assert shard_module(max, mesh, plan)(x, x, key=lambda y: y.placements == ROWS).placements == ROWS
        with pytest.raises(PlanError, match="there is no input 'x'; there are: args"):
            shard_module(max, mesh, ShardingPlan(input_plan={"input": {"x": ROWS}}))

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize("name", ["plan", "input_plan", "output_plan"])
def test_names_in_a_plan_are_strings(name: str) -> None:
    with pytest.raises(TypeError, match=rf"ShardingPlan: {name} must have strings as keys, got \[1\]"):
        ShardingPlan(**{name: {1: ROWS}})


def test_value_and_grad_of_a_weight_without_gradient_is_refused(hp_platform: Platform) -> None:
    weight, frozen = (hp_platform.Parameter(hp_platform.from_numpy(np.ones(3, np.float32)), g) for g in (True, False))
    with pytest.raises(GradientPathError, match=r"weights \[1\] of 2 require no gradient"):
        parallelize_value_and_grad(lambda: hp_platform.ops.sum(weight), [weight, frozen])()


LOSSES = {
    "replicated": lambda ops, y: ops.sum(y).redistribute(),
    "partial": lambda ops, y: ops.sum(y),
    "sharded": lambda ops, y: ops.sum(y, dim=1),
    "full": lambda ops, y: y,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_value_and_grad_of_a_loss_of_any_layout(hp_platform: Platform, loss: Any) -> None:
    """A loss with more elements counts by their sum."""
    rows, columns = np.arange(10, dtype=np.float32).reshape(5, 2), np.arange(6, dtype=np.float32).reshape(2, 3)

    def rank() -> tuple[Any, Any]:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        x, w = (
            distribute_tensor(hp_platform.from_numpy(value.copy()), mesh, [placement])
            for value, placement in ((rows, Shard(0)), (columns, Replicate()))
        )
        weight, ops = hp_platform.Parameter(w), hp_platform.ops
        value, (grad,) = parallelize_value_and_grad(lambda x: loss(ops, ops.matmul(x, weight)), [weight])(x)
        return hp_platform.to_numpy(value.full_tensor()).sum(), hp_platform.to_numpy(grad.full_tensor())

    for value, grad in run_ranks(rank, 2, hp_platform):
        assert value == (rows @ columns).sum()
        np.testing.assert_array_equal(grad, np.repeat(rows.sum(0)[:, None], 3, 1))


@pytest.mark.parametrize("outputs", [3.0, (), (3.0, 4.0)])
def test_value_and_grad_of_no_tensor_is_refused(hp_platform: Platform, outputs: Any) -> None:
    weight = hp_platform.from_numpy(np.ones(3, np.float32))
    with pytest.raises(TypeError, match="fn must return tensors, got"):
        parallelize_value_and_grad(lambda: outputs, [weight])()
    with pytest.raises(TypeError, match="weights must be one tensor or several, got "):
        parallelize_value_and_grad(lambda: outputs, "weight")


@pytest.mark.parametrize(
    ("sens", "message"),
    [([1.0, 2], "sens must hold floats"), ("1.0", "list or tuple of floats"), ([1.0], "None for a single output")],
)
def test_wrong_sens_is_refused(hp_platform: Platform, sens: Any, message: str) -> None:
    weight = hp_platform.from_numpy(np.ones(3, np.float32))
    with pytest.raises(TypeError, match=message):
        parallelize_value_and_grad(lambda: hp_platform.ops.sum(weight), [weight], sens)()
