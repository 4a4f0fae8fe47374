"""Bytes and operations of a forward and backward that are counted on tensors without memory."""

from __future__ import annotations

import pytest
import torch

from hp_dtensor.platform.selection import get_platform
from hp_platform_torch.trainer.plugin import hp_step_counter

ROWS, WIDTH = 6, 8


class Chain(torch.nn.Module):
    """Two parts, of which each keeps its input and what its activation takes, and a head."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        parts = (torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.SiLU()) for _ in range(2))
        self.parts = torch.nn.ModuleList(parts)
        self.head = torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return self.head(x)


def count(build=Chain, dtype: str | None = None):
    def run(model):
        x = torch.ones(ROWS, WIDTH, dtype=model.head.weight.dtype)
        return model(x).sum()

    return hp_step_counter(get_platform("torch"))(build, run, lambda model: dict(model.parts.named_children()), dtype)


def test_parameters_are_those_of_the_module_and_of_their_part():
    step = count()
    assert [(each.name, each.part) for each in step.parameters] == [
        ("parts.0.0.weight", 0),
        ("parts.0.0.bias", 0),
        ("parts.1.0.weight", 1),
        ("parts.1.0.bias", 1),
        ("head.weight", None),
    ]
    assert all((each.itemsize, each.trainable) == (4, True) for each in step.parameters)
    assert step.parameters[-1].shape == (2 * WIDTH, WIDTH)


@pytest.mark.parametrize(("dtype", "itemsize"), [(None, 4), ("bfloat16", 2)])
def test_bytes_are_those_that_autograd_keeps(dtype: str | None, itemsize: int):
    """Of each part what its activation takes, and its result, which the next product takes."""
    step = count(dtype=dtype)
    rows = ROWS * WIDTH * itemsize
    first, second = step.parts
    assert (first.before, first.after, second.after) == (rows, 3 * rows, 5 * rows)
    # The result of the head is freed but for the sum.
    assert step.after_forward == 5 * rows + itemsize
    assert [each.itemsize for each in step.parameters] == [4] * 5


def test_backward_frees_what_its_layer_has_saved():
    first, second = count().parts
    assert first.is_reached
    assert second.is_reached
    assert second.peak > second.after
    assert second.after > second.end > first.end > 0


def test_products_are_counted_in_both_passes():
    # Of the first part no gradient of its input is asked for.
    assert count().flops == 2 * ROWS * WIDTH * (3 * 2 * WIDTH + 3 * WIDTH + 2 * WIDTH)


def test_parts_that_nothing_is_trained_in_are_not_reached():
    def build():
        model = Chain()
        model.parts[0].requires_grad_(False)
        return model

    step = count(build)
    assert [each.is_reached for each in step.parts] == [False, True]
    assert [each.trainable for each in step.parameters] == [False, False, True, True, True]


class Crossed(Chain):
    """Parts of several sizes, called in another order than they stand in, one of them not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.parts.append(torch.nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (2, 0):
            x = self.parts[index](x)
        return self.head(x)


def test_parameters_belong_to_the_parts_in_the_order_of_forward():
    step = count(Crossed)
    assert [(part.name, part.is_reached) for part in step.parts] == [("1", False), ("2", True), ("0", True)]
    found = {each.name: each.part for each in step.parameters}
    assert {name.split(".")[1]: part for name, part in found.items() if part is not None} == {"1": 0, "2": 1, "0": 2}


class Placed(Chain):
    """Adds a table in float32 before its parts and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x + self.table)
        return self.head(x.to(self.head.weight.dtype))


def test_inputs_of_parts_are_cast_as_sharded_modules_cast_them():
    step = count(Placed, "bfloat16")
    assert step.flops == count(Placed).flops
    # Sums with the table are in float32; of each its copy stays, in which the product computes.
    assert step.parts[0].after < count(Placed).parts[0].after


@pytest.mark.parametrize("named", [False, True])
def test_backward_is_seen_through_named_arguments_and_results_in_a_dict(named: bool):
    class Wrapped(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x=x)["x"] if named else part(x)
            return self.head(x)

    class Part(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor] | torch.Tensor:
            return {"x": super().forward(x)} if named else super().forward(x)

    def build():
        model = Wrapped()
        model.parts = torch.nn.ModuleList(Part(*part) for part in model.parts)
        return model

    first, second = count(build).parts
    assert (first.is_reached, second.is_reached) == (True, True)
    assert (first, second) == count().parts


def test_buffers_are_counted():
    assert count().buffers == 0
    assert count(Placed).buffers == 4 * WIDTH


def test_fused_attention_is_counted_without_its_scores():
    heads, length, width = 2, 64, 8

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(torch.ones(1, heads, length, width))

        def forward(self):
            return torch.nn.functional.scaled_dot_product_attention(self.x, self.x, self.x, is_causal=True)

    step = hp_step_counter(get_platform("torch"))(Attention, lambda model: model().sum(), lambda model: {}, None)
    products = 2 * heads * length * length * width
    assert step.flops == 2 * products + 5 * products
    assert step.outside < 4 * heads * length * length
    assert step.parts == ()


def test_a_module_of_any_size_takes_no_memory():
    def build():
        model = Chain()
        model.huge = torch.nn.Linear(2**20, 2**20)
        return model

    assert max(each.shape[0] for each in count(build).parameters) == 2**20
