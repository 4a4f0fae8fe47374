"""A parameter that two modules own stays one parameter when it is placed, and a style may serve several modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    PrepareModuleInputOutput,
    Replicate,
    RowwiseParallel,
    Shard,
    ShardingPlan,
    distribute_module,
    distribute_tensor,
    nn,
    parallelize_module,
    shard_module,
)
from hp_dtensor.exceptions import MixedOperandsError, PlanError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks

VOCABULARY, WIDTH = 7, 4


class Tied(nn.Module):
    """An embedding whose table is also the weight of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Any) -> Any:
        return self.head(self.table(ids))


def make(platform: Platform) -> Any:
    with nn.building(platform):
        model = Tied()
    values = np.random.default_rng(0).uniform(-1, 1, (VOCABULARY, WIDTH)).astype(np.float32)
    with platform.no_grad():
        platform.copy_(model.table.weight, platform.from_numpy(values))
    platform.set_parameter(model.head, "weight", model.table.weight)
    return model


def run(platform: Platform, model: Any) -> np.ndarray:
    """The gradient of the table after one step on a fixed batch."""
    logits = model(platform.from_numpy(np.array([0, 3, 6, 3])))
    loss = platform.ops.sum(platform.ops.square(logits))
    platform.backward(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)
    grad = platform.get_grad(model.table.weight)
    return platform.to_numpy(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)


def _parallelized(platform: Platform) -> np.ndarray:
    mesh, model = DeviceMesh("cpu", (2,), platform=platform), make(platform)
    parallelize_module(
        model, mesh, {"table": RowwiseParallel(use_local_output=False), "head": ColwiseParallel(use_local_output=False)}
    )
    assert model.head.weight is model.table.weight
    return run(platform, model)


def test_styles_keep_a_tied_parameter_one(hp_platform: Platform) -> None:
    expected = run(hp_platform, make(hp_platform))
    for grad in run_ranks(_parallelized, 2, hp_platform, hp_platform):
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-5)


def _sharded(platform: Platform) -> list[str]:
    mesh, model = DeviceMesh("cpu", (2,), platform=platform), make(platform)
    plans = ({"table.weight": (Shard(0),), "head.weight": (Shard(1),)}, {"head.weight": (Shard(0),)})
    with pytest.raises(PlanError) as contradiction:
        shard_module(model, mesh, ShardingPlan(plan=plans[0]))
    shard_module(model, mesh, ShardingPlan(plan=plans[1]))
    assert model.head.weight is model.table.weight
    assert model.table.weight.placements == (Shard(0),)
    return [str(contradiction.value)]


def test_a_plan_names_a_tied_parameter_under_any_name(hp_platform: Platform) -> None:
    for messages in run_ranks(_sharded, 2, hp_platform, hp_platform):
        assert "plan['head.weight']: the same parameter as plan['table.weight']: placed [" in messages[0]


class Twice(nn.Module):
    """Whose own parameter has two names, both of which it multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.alias = self.weight = self.parameter((WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        return self.ops.matmul(self.ops.matmul(x, self.weight), self.alias)


def _placed_by_hand(name: str, module: Any, mesh: DeviceMesh) -> None:
    platform = mesh.platform
    for key, old in list(platform.named_parameters(module, recurse=False)):
        placed = distribute_tensor(platform.detach(old), mesh, [Shard(0)])
        platform.set_parameter(module, key, platform.Parameter(placed))


WAYS: dict[str, Callable[[Any, DeviceMesh], Any]] = {
    "shard_module": lambda m, mesh: shard_module(m, mesh, ShardingPlan({"weight": (Shard(0),)})),
    "shard_module, the other name": lambda m, mesh: shard_module(m, mesh, ShardingPlan({"alias": (Shard(0),)})),
    "distribute_module": distribute_module,
    "distribute_module, placed by hand": lambda m, mesh: distribute_module(m, mesh, _placed_by_hand),
    "parallelize_module": lambda m, mesh: parallelize_module(
        m, mesh, ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_parameter_with_two_names_in_one_module_stays_one(
    hp_platform: Platform, way: Callable[[Any, DeviceMesh], Any]
) -> None:
    rows = np.arange(2 * WIDTH, dtype=np.float32).reshape(2, WIDTH)

    def gradient(model: Any, x: Any) -> np.ndarray:
        loss = hp_platform.ops.sum(model(x))
        hp_platform.backward(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)
        grad = hp_platform.get_grad(model.weight)
        return hp_platform.to_numpy(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)

    def make() -> Any:
        with nn.building(hp_platform):
            model = Twice()
        values = np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)
        with hp_platform.no_grad():
            hp_platform.copy_(model.weight, hp_platform.from_numpy(values))
        return model

    def rank() -> np.ndarray:
        mesh, model = DeviceMesh("cpu", (2,), platform=hp_platform), make()
        way(model, mesh)
        assert model.alias is model.weight
        assert model.weight.placements == ((Replicate(),) if way is distribute_module else (Shard(0),))
        return gradient(model, distribute_tensor(hp_platform.from_numpy(rows), mesh))

    expected = gradient(make(), hp_platform.from_numpy(rows))
    for grad in run_ranks(rank, 2, hp_platform):
        np.testing.assert_array_equal(grad, expected)


@pytest.mark.parametrize("by_hand", [False, True])
def test_distribute_module_keeps_a_tie_of_two_modules(hp_platform: Platform, by_hand: bool) -> None:
    def first_only(name: str, module: Any, mesh: DeviceMesh) -> None:
        if name == "head":
            _placed_by_hand(name, module, mesh)

    def rank() -> Any:
        mesh, model = DeviceMesh("cpu", (2,), platform=hp_platform), make(hp_platform)
        distribute_module(model, mesh, first_only if by_hand else None)
        assert model.head.weight is model.table.weight
        return model.table.weight.placements

    assert run_ranks(rank, 2, hp_platform) == [(Shard(0) if by_hand else Replicate(),)] * 2


def test_distribute_module_refuses_a_tie_that_its_function_placed_in_two_ways(hp_platform: Platform) -> None:
    def place(name: str, module: Any, mesh: DeviceMesh) -> None:
        for key, old in list(hp_platform.named_parameters(module, recurse=False)):
            placed = distribute_tensor(hp_platform.detach(old), mesh, [Shard(0) if name == "table" else Shard(1)])
            hp_platform.set_parameter(module, key, hp_platform.Parameter(placed))

    def rank() -> None:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        with pytest.raises(PlanError, match=r"head\.weight is the same parameter as table\.weight: placed .*S\(1\)"):
            distribute_module(make(hp_platform), mesh, place)

    run_ranks(rank, 2, hp_platform)


def _parallelized_in_two_calls(platform: Platform, submodules: bool) -> np.ndarray:
    mesh, model = DeviceMesh("cpu", (2,), platform=platform), make(platform)
    head = ColwiseParallel(use_local_output=False)
    table = RowwiseParallel(use_local_output=False)
    if submodules:
        parallelize_module(model.table, mesh, table)
        parallelize_module(model.head, mesh, head)
    else:
        parallelize_module(model, mesh, {"table": table})
        parallelize_module(model, mesh, {"head": head})
    assert model.head.weight is model.table.weight
    with pytest.raises(PlanError, match="ColwiseParallel has been applied to it already"):
        parallelize_module(model.head, mesh, head)
    return run(platform, model)


@pytest.mark.parametrize("submodules", [True, False])
def test_a_tied_parameter_is_placed_by_two_calls(hp_platform: Platform, submodules: bool) -> None:
    expected = run(hp_platform, make(hp_platform))
    for grad in run_ranks(_parallelized_in_two_calls, 2, hp_platform, hp_platform, submodules):
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-5)


def _placed_differently_by_two_calls(platform: Platform) -> list[str]:
    messages = []
    for root in (True, False):
        mesh, model = DeviceMesh("cpu", (2,), platform=platform), make(platform)
        parallelize_module(
            model if root else model.table, mesh, {"table": RowwiseParallel()} if root else RowwiseParallel()
        )
        with pytest.raises(PlanError) as refusal:
            parallelize_module(model.head, mesh, RowwiseParallel())
        messages.append(str(refusal.value))
        if root:  # the tie holds, so a head without a style does not compute with a table of its own
            with pytest.raises(MixedOperandsError):
                run(platform, model)
    return messages


def test_two_calls_that_place_a_tied_parameter_differently_are_refused(hp_platform: Platform) -> None:
    for message in run_ranks(_placed_differently_by_two_calls, 2, hp_platform, hp_platform)[0]:
        assert message.startswith("parallelize_module:\n  RowwiseParallel of weight: ")
        assert "placed (axis0:S(0))" in message


def test_values_written_between_two_calls_are_not_lost(hp_platform: Platform) -> None:
    if hp_platform.name != "torch":
        pytest.skip("counts of writes are torch's")

    def rank() -> None:
        mesh, model = DeviceMesh("cpu", (2,), platform=hp_platform), make(hp_platform)
        parallelize_module(model.table, mesh, RowwiseParallel())
        with hp_platform.no_grad():
            model.head.weight.mul_(2.0)
        with pytest.raises(PlanError, match="was written after another module"):
            parallelize_module(model.head, mesh, ColwiseParallel())

    run_ranks(rank, 2, hp_platform)


def _wrong_plans(platform: Platform) -> list[str]:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    plans: list[Any] = [
        {"up": ColwiseParallel(), "*": ColwiseParallel(), "down": 3},
        {"up": ColwiseParallel(), "*": RowwiseParallel()},
        {"up": ColwiseParallel(), "norm": _Odd()},
        {"up": ColwiseParallel(), "": RowwiseParallel()},
        {"up": ColwiseParallel(), "norm": _Elsewhere()},
    ]
    messages = []
    for plan in plans:
        with nn.building(platform):
            model = nn.Module()
            model.up, model.down, model.norm = nn.Linear(4, 6), nn.Linear(6, 4), nn.RMSNorm(4)
        with pytest.raises(PlanError) as refusal:
            parallelize_module(model, mesh, plan)
        assert not any(hasattr(p, "placements") for _, p in platform.named_parameters(model)), "nothing has changed"
        messages.append(str(refusal.value))
    return messages


class _Odd(ColwiseParallel):
    def _layout(self, table: str | None) -> Any:
        return {"weight": Shard(3)}, Replicate(), Replicate()


class _Elsewhere(ColwiseParallel):
    def placements(self, module: Any, platform: Platform) -> Any:
        return {"table": Shard(0)}


def test_a_plan_of_styles_is_checked_before_anything_changes(hp_platform: Platform) -> None:
    no_style, twice, odd, root, elsewhere = run_ranks(_wrong_plans, 2, hp_platform, hp_platform)[0]
    assert "'down' has a int, expected a ParallelStyle" in no_style
    assert "two styles place up.weight" in twice
    assert "RowwiseParallel of norm.weight: placement 0" in twice
    assert "_Odd of norm.weight: placement 0" in odd
    assert "dimension 3 of a 1-dimensional tensor" in odd
    assert "RowwiseParallel of the root module: it is for a linear layer or an embedding, with a weight" in root
    assert "_Elsewhere places norm.table, which is no parameter" in elsewhere


def test_inputs_and_outputs_may_be_prepared_without_layouts(hp_platform: Platform) -> None:
    def run() -> tuple[int, ...]:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        with nn.building(hp_platform):
            module = nn.Linear(4, 4)
        parallelize_module(module, mesh, PrepareModuleInputOutput())
        return tuple(module(hp_platform.from_numpy(np.ones((2, 4), np.float32))).shape)

    assert run_ranks(run, 2, hp_platform) == [(2, 4)] * 2


def _shared_style(platform: Platform) -> Any:
    mesh, style = DeviceMesh("cpu", (2,), platform=platform), RowwiseParallel(use_local_output=False)
    with nn.building(platform):
        table, down = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3, bias=False)
    style.apply(table, mesh)
    style.apply(down, mesh)
    rows = platform.from_numpy(np.ones((5, WIDTH // 2), np.float32))
    return down(rows).shape, down(rows).placements


def test_one_style_serves_an_embedding_and_a_linear_layer(hp_platform: Platform) -> None:
    for shape, placements in run_ranks(_shared_style, 2, hp_platform, hp_platform):
        assert (tuple(shape), placements) == ((5, 3), (Replicate(),))


def _older_forms(platform: Platform) -> None:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    with nn.building(platform):
        layer = nn.Linear(WIDTH, WIDTH)
    distribute_module(
        layer,
        mesh,
        input_fn=lambda inputs, mesh: DTensor.from_local(inputs[0], mesh, [Shard(0)]),
        output_fn=lambda output, mesh: output.redistribute(placements=[Replicate()]).to_local(),
    )
    assert tuple(layer(platform.ops.ones((2, WIDTH), platform.dtype("float32"))).shape) == (4, WIDTH)
    assert layer.weight.placements == (Replicate(),)


def test_functions_of_two_arguments_are_called_without_the_module(hp_platform: Platform) -> None:
    with pytest.warns(FutureWarning, match=r"(input|output)_fn with two arguments \(values, mesh\) is deprecated"):
        run_ranks(_older_forms, 2, hp_platform, hp_platform)


def _other_forms(platform: Platform) -> None:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    with nn.building(platform):
        layer = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(PlanError, match=r"input_fn takes \(module, values, mesh\), got a function of 1 arguments"):
        distribute_module(layer, mesh, input_fn=lambda inputs: inputs)
    assert not isinstance(layer.weight, DTensor)  # nothing was changed


def test_functions_of_other_arguments_are_refused_first(hp_platform: Platform) -> None:
    run_ranks(_other_forms, 2, hp_platform, hp_platform)
