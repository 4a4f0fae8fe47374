"""Modules: names, parameters and hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing.conformance.ranks import assert_values, read, tensor

Tensor = Any


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = self.parameter((width,))
        self.up = nn.Linear(width, 2 * width, bias=True)
        self.norm = nn.RMSNorm(2 * width)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self.ops.mul(self.up(self.ops.mul(x, self.scale)), factor)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2)
        self.blocks = nn.ModuleList([Block(2), Block(2)])
        # One module under two names: traversals must yield it once unless asked otherwise.
        self.tied = self.table

    def forward(self, ids: Tensor) -> Tensor:
        return self.blocks[0](self.table(ids))


@pytest.fixture
def building(hp_platform: Platform) -> Iterator[Platform]:
    with nn.building(hp_platform):
        yield hp_platform


def _fill(platform: Platform, module: Any) -> None:
    for i, (_, parameter) in enumerate(platform.named_parameters(module)):
        count = int(np.prod(parameter.shape))
        # Small integers, so that float32 results are exact and may be compared without a tolerance.
        platform.copy_(parameter, tensor(platform, (np.arange(count) % 5 + i).reshape(tuple(parameter.shape))))


def test_instances_belong_to_the_platform(building: Platform) -> None:
    block = Block(2)
    assert isinstance(block, building.Module)
    assert isinstance(block, Block)
    assert isinstance(block.scale, building.Tensor)
    assert building.requires_grad(block.scale)


def test_modules_and_parameters_have_dotted_names_once_each(building: Platform) -> None:
    model = Model()
    modules = [name for name, _ in building.named_modules(model)]
    assert modules[0] == ""
    assert sorted(modules[1:]) == [
        "blocks", "blocks.0", "blocks.0.norm", "blocks.0.up", "blocks.1", "blocks.1.norm", "blocks.1.up", "table",
    ]  # fmt: skip
    names = [name for name, _ in building.named_parameters(model)]
    of_block = ["norm.weight", "scale", "up.bias", "up.weight"]
    assert sorted(names) == sorted(["table.weight", *(f"blocks.{i}.{name}" for i in (0, 1) for name in of_block)])
    assert [name for name, _ in building.named_parameters(model.blocks[0], recurse=False)] == ["scale"]


def test_shared_parameters_have_all_their_names_on_demand(building: Platform) -> None:
    model = Model()
    names = [name for name, _ in building.named_parameters(model, remove_duplicate=False)]
    assert {"table.weight", "tied.weight"} <= set(names)


def test_parameters_are_replaced_by_parameters_and_by_tensors(building: Platform) -> None:
    block = Block(2)
    new = building.Parameter(tensor(building, [3.0, 4.0]), requires_grad=True)
    building.set_parameter(block, "scale", new)
    assert block.scale is new
    assert dict(building.named_parameters(block))["scale"] is new
    # During a forward a parameter is replaced by the result of an operation, which is no leaf. Frameworks whose modules
    # accept parameters only would refuse it.
    computed = building.ops.mul(new, 2.0)
    building.set_parameter(block, "scale", computed)
    assert block.scale is computed
    building.set_parameter(block, "scale", new)
    assert block.scale is new


def test_a_parameter_may_need_no_gradient(building: Platform) -> None:
    frozen = building.Parameter(tensor(building, [1.0]), requires_grad=False)
    assert not building.requires_grad(frozen)


def test_layers_compute_and_train(building: Platform) -> None:
    model = Model()
    _fill(building, model)
    weights = {name: read(building, p) for name, p in building.named_parameters(model)}
    output = model(tensor(building, [[0, 3], [4, 0]], "int64"))
    looked_up = weights["table.weight"][[[0, 3], [4, 0]]] * weights["blocks.0.scale"]
    expected = looked_up @ weights["blocks.0.up.weight"].T + weights["blocks.0.up.bias"]
    assert_values(building, output, expected)
    building.backward(building.ops.sum(output))
    gradients = {name: building.get_grad(p) for name, p in building.named_parameters(model)}
    assert_values(building, gradients["blocks.0.up.bias"], np.full(4, 4.0))
    through = weights["blocks.0.up.weight"].sum(0)
    by_row = np.zeros((5, 2))
    # Not `+=`, which would count row 0 once: its id occurs twice, and gradients add up.
    np.add.at(by_row, [0, 3, 4, 0], through * weights["blocks.0.scale"])
    assert_values(building, gradients["table.weight"], by_row)
    # The forward does not use this block. A gradient of zeros would let an optimizer update it.
    assert gradients["blocks.1.scale"] is None


def test_norms(building: Platform) -> None:
    # Without eps and with elements of equal magnitude, the root mean square is an exact integer.
    norm = nn.RMSNorm(2, eps=0.0)
    building.copy_(norm.weight, tensor(building, [2.0, 10.0]))
    assert_values(building, norm(tensor(building, [[1.0, 1.0], [-3.0, 3.0]])), [[2, 10], [-2, 10]])


def test_lists_are_indexed_and_iterated(building: Platform) -> None:
    blocks = nn.ModuleList([Block(2), Block(3)])
    assert len(blocks) == 2
    assert blocks[-1].up.in_features == 3
    assert [block.up.in_features for block in blocks] == [2, 3]
    with pytest.raises(IndexError, match="index 2 of a ModuleList of 2"):
        blocks[2]


def test_hooks_see_and_replace_arguments_and_outputs(building: Platform) -> None:
    ops, block = building.ops, Block(2)
    _fill(building, block)
    plain = read(building, block(tensor(building, [[1.0, 2.0]]), factor=2.0))
    events: list[str] = []

    def before(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        assert module is block
        events.append(f"before {kwargs}")
        return args, {"factor": kwargs["factor"] + 1.0}

    def after(module: Any, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        events.append(f"after {kwargs}")
        return ops.mul(output, 10.0)

    handles = [building.add_forward_pre_hook(block, before), building.add_forward_hook(block, after)]
    assert_values(building, block(tensor(building, [[1.0, 2.0]]), factor=1.0), plain * 10)
    assert events == ["before {'factor': 1.0}", "after {'factor': 2.0}"]
    for handle in handles:
        handle.remove()
    assert_values(building, block(tensor(building, [[1.0, 2.0]]), factor=2.0), plain)


def test_hooks_run_in_order_and_may_come_first_or_change_nothing(building: Platform) -> None:
    block, order = Block(2), []
    building.add_forward_pre_hook(block, lambda *_: order.append("second"))
    building.add_forward_pre_hook(block, lambda *_: order.append("first"), prepend=True)
    building.add_forward_hook(block, lambda *_: order.append("fourth"))
    building.add_forward_hook(block, lambda *_: order.append("third"), prepend=True)
    output = block(tensor(building, [[1.0, 2.0]]))
    assert tuple(output.shape) == (1, 4)
    assert order == ["first", "second", "third", "fourth"]


@pytest.mark.parametrize("place", ["before", "inside", "after"])
def test_a_hook_may_be_called_after_a_forward_that_raises(building: Platform, place: str) -> None:
    block, called = Block(2), []

    def fail(*_: Any) -> None:
        raise ArithmeticError("no output today")

    building.add_forward_hook(block, lambda *_: called.append("usual"))
    # Before, inside and after the forward itself: a framework may guard only a part of a module's call.
    if place == "after":
        building.add_forward_hook(block, fail)
    else:
        building.add_forward_pre_hook({"before": block, "inside": block.up}[place], fail)
    building.add_forward_hook(block, lambda *_: called.append("always"), always_call=True)
    with pytest.raises(ArithmeticError, match="no output today"):
        block(tensor(building, [[1.0, 2.0]]))
    assert called == (["usual"] if place == "after" else []) + ["always"]


def test_hooks_are_found(building: Platform) -> None:
    block = Block(2)
    for add in (building.add_forward_pre_hook, building.add_forward_hook):
        assert not building.has_hooks(block)
        hook = add(block, lambda *_: None)
        assert building.has_hooks(block)
        hook.remove()
    assert not building.has_hooks(block)


def test_hooks_see_positional_arguments(building: Platform) -> None:
    block = Block(2)
    _fill(building, block)
    x = tensor(building, [[1.0, 2.0]])
    expected = read(building, block(building.ops.mul(x, 2.0), 3.0))
    building.add_forward_pre_hook(
        block, lambda module, args, kwargs: ((building.ops.mul(args[0], 2.0), *args[1:]), kwargs)
    )
    assert_values(building, block(x, 3.0), expected)


def test_buffers_are_registered(hp_platform: Platform) -> None:
    """Experts keep their biases and counts in buffers."""
    with nn.building(hp_platform):
        inner, outer = nn.RMSNorm(2), nn.ModuleList()
    outer.append(inner)
    inner.register_buffer("seen", tensor(hp_platform, [1.0, 2.0]))
    inner.register_buffer("nothing", None)
    assert inner.nothing is None
    assert inner.training
    hp_platform.copy_(inner.seen, tensor(hp_platform, [3.0, 4.0]))
    (found,) = hp_platform.named_buffers(outer)
    assert found[0] == "0.seen"
    assert found[1] is inner.seen
    assert_values(hp_platform, found[1], [3, 4])
    assert [name for name, _ in hp_platform.named_parameters(outer)] == ["0.weight"]


def test_only_owned_parameters_are_replaced(hp_platform: Platform) -> None:
    with nn.building(hp_platform):
        norm = nn.RMSNorm(2)
    parameter = hp_platform.Parameter(tensor(hp_platform, [1.0, 2.0]))
    with pytest.raises(KeyError):
        hp_platform.set_parameter(norm, "wieght", parameter)
    assert [name for name, _ in hp_platform.named_parameters(norm)] == ["weight"]
