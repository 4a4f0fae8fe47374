"""Integers beside positions in an index: torch takes the integers first, unlike NumPy, so the result has other dims."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from hp_dtensor import DeviceMesh, RaggedShard, Replicate, Shard, distribute_tensor, get_platform, implicit_replication
from hp_dtensor.exceptions import MixedOperandsError
from hp_dtensor.testing import run_ranks

FULL = torch.arange(240.0).reshape(4, 5, 3, 4)
ALL = slice(None)
INDICES: dict[str, tuple[Any, ...]] = {
    "an integer apart": (0, ALL, [1, 2, 0]),
    "an integer apart behind": (ALL, [3, 1], ALL, 2),
    "an integer apart from a list of rows": (ALL, 0, ALL, [1, 3, 1]),
    "an integer and a new dimension": (-1, None, [1, 2, 4]),
    "an integer between": (ALL, [1, 4], 1, [0, 3]),
    "integers around": (2, ALL, [[0], [2]], -1),
    "an integer and a slice": (1, slice(1, 4), slice(1, 3), [2, 0]),
    "two lists apart": (1, [0, 4], ALL, [2, 0]),
    "a 0-d tensor apart": (torch.tensor(2), ALL, [1, 2, 0]),
    "a 0-d tensor apart behind": (ALL, [3, 1], ALL, torch.tensor(-1)),
    "a 0-d tensor behind a slice": (slice(1, 4), torch.tensor(2)),
    "a 0-d tensor behind a dimension": (ALL, torch.tensor(2), slice(0, 2), None),
    "0-d tensors alone": (torch.tensor(1), ALL, torch.tensor(2)),
}
LAYOUTS = [
    (Shard(0), Replicate()),
    (Shard(1), Shard(0)),
    (Shard(2), Shard(3)),
    (Shard(0), Shard(0)),
    (RaggedShard(3, (1, 3)), Shard(1)),
]


def _run(index: Any, x: Any, weights: Any, value: Any) -> tuple[list[Any], list[Any]]:
    """Return the elements picked and the tensor written to, and the gradients of the tensor and the value."""
    (x[index] * value).sum().backward()
    written = x * 1
    written[index] = value
    (written * weights).sum().backward()
    return [x[index], written], [x.grad, value.grad]


def _all(index: Any, value: torch.Tensor) -> list[tuple[list[Any], list[Any]]]:
    mesh = DeviceMesh("cpu", (2, 2), platform=get_platform("torch"))
    full = [Replicate()] * 2
    index = tuple(distribute_tensor(item, mesh, full) if isinstance(item, torch.Tensor) else item for item in index)
    found = []
    for layout in LAYOUTS:
        placed = [
            distribute_tensor(x.clone(), mesh, p).requires_grad_(grad)
            for x, p, grad in ((FULL, layout, True), (FULL, layout, False), (value, full, True))
        ]
        found.append(tuple([x.full_tensor().detach() for x in each] for each in _run(index, *placed)))
    return found


@pytest.mark.parametrize("behind", [False, True], ids=["a full value", "a broadcast one"])
@pytest.mark.parametrize("name", INDICES)
def test_what_is_picked_and_written(name: str, behind: bool) -> None:
    index = INDICES[name]
    shape = FULL[index].shape[-1:] if behind else FULL[index].shape
    value = torch.arange(1.0, 1.0 + shape.numel()).reshape(shape)
    if any(isinstance(item, list) and len({*map(str, item)}) < len(item) for item in index):
        value = torch.ones(shape)  # which of several values for one place is written is open
    expected = _run(index, FULL.clone().requires_grad_(), FULL, value.clone().requires_grad_())
    for found in run_ranks(_all, 4, "torch", index, value)[0]:
        torch.testing.assert_close(found, tuple([x.detach() for x in each] for each in expected), rtol=0, atol=0)


def _written(y: Any, index: Any) -> Any:
    y[index] = 5.0
    return y


UNDER_HOOKS: dict[str, Callable[[Any], Any]] = {
    "two integers": lambda x: x[2, 1] * x,
    "a tuple of one": lambda x: x[(1,)] * x,
    "a slice and an integer": lambda x: x[1:, 1] * 2,
    "a list": lambda x: x[[1, 2]] * x[0],
    "lists in a tuple": lambda x: x[[1, 2], [0, 3]] * 2,
    "written at two integers": lambda x: _written(x * 1, (1, 2)) * x,
    "written at a list": lambda x: _written(x * 1, [1, 2]) * x,
}


def _under_hooks(run: Callable[[Any], Any], saved: bool) -> list[list[Any]]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    found = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        for _ in range(2):  # the second call finds the plan of the first
            x = distribute_tensor(FULL[0, :, 0] + 1, mesh, [placement]).requires_grad_()
            with torch.autograd.graph.save_on_cpu() if saved else contextlib.nullcontext():
                y = run(x) if saved else torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
            (y * y).sum().backward()
            found.append([y.full_tensor().detach(), x.grad.full_tensor()])
    return found


@pytest.mark.parametrize("saved", [False, True], ids=["recomputed", "saved on the host"])
@pytest.mark.parametrize("name", UNDER_HOOKS)
def test_an_index_stays_a_tuple_where_hooks_take_saved_tensors(name: str, saved: bool) -> None:
    leaf = (FULL[0, :, 0] + 1).requires_grad_()
    expected = UNDER_HOOKS[name](leaf)
    (expected * expected).sum().backward()
    for value, gradient in run_ranks(_under_hooks, 2, "torch", UNDER_HOOKS[name], saved)[0]:
        torch.testing.assert_close((value, gradient), (expected.detach(), leaf.grad), rtol=0, atol=0)


def _plain_and_dtensors() -> None:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    value = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)])
    rows = distribute_tensor(torch.tensor([0, 1]), mesh, [Replicate()])
    plain = torch.zeros(4, 3)
    with pytest.raises(MixedOperandsError, match=r"setitem: a plain tensor of shape \[4, 3\] among DTensors"):
        plain[[0, 1]] = value
    with pytest.raises(MixedOperandsError, match=r"getitem: a plain tensor of shape \[4, 3\] among DTensors"):
        plain[[0, 1], rows]
    with implicit_replication():
        assert plain[[0, 1], rows].full_tensor().tolist() == [0, 0]


def test_a_plain_tensor_indexed_by_a_list_beside_dtensors() -> None:
    run_ranks(_plain_and_dtensors, 2, "torch")
