"""`inplace=True` writes the DTensor that is given, as it does a plain one, or is refused as operations in place are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DeviceMesh, Partial, RaggedShard, Replicate, Shard, distribute_tensor, from_local, get_platform
from hp_dtensor.exceptions import LaunchError, ShardingRuleError
from hp_dtensor.testing import run_ranks

FULL = torch.linspace(-3, 9, 36).reshape(6, 3, 2)
NONLINEAR: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: F.relu(x, inplace=True),
    "relu6": lambda x: F.relu6(x, inplace=True),
    "hardtanh": lambda x: F.hardtanh(x, -2.0, 2.0, inplace=True),
    "silu": lambda x: F.silu(x, inplace=True),
    "mish": lambda x: F.mish(x, inplace=True),
    "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2, inplace=True),
    "elu": lambda x: F.elu(x, inplace=True),
    "celu": lambda x: F.celu(x, inplace=True),
    "selu": lambda x: F.selu(x, inplace=True),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0, inplace=True),
    "nn.ReLU": torch.nn.ReLU(inplace=True),
    "threshold by name": lambda x: torch.threshold_(threshold=0.1, value=20.0, input=x),
    "rrelu by name": lambda x: torch.rrelu_(training=True, input=x),
    "rrelu in evaluation": lambda x: F.rrelu(x, inplace=True),
    "rrelu": lambda x: F.rrelu(x, training=True, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, True, True),
}
LINEAR: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.5, True, True),
    "dropout1d": lambda x: F.dropout1d(x, 0.5, True, True),
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, False, True),
    "dropout of nothing": lambda x: F.dropout(x, 0.0, True, True),
    "alpha_dropout in evaluation": lambda x: F.alpha_dropout(x, 0.5, False, True),
    "alpha_dropout of nothing": lambda x: F.alpha_dropout(x, 0.0, True, True),
}
SHARDS = [Shard(0), Shard(1), Replicate(), RaggedShard(0, (1, 5))]


def _written(run: Callable[[Any], Any], x: Any) -> tuple[bool, Any, Any]:
    """Return True if the result is the tensor itself, then the tensor's value, and the gradient."""
    leaf = x.requires_grad_()
    x = leaf * 1
    torch.manual_seed(0)
    same = run(x) is x
    (x * x).sum().backward()
    return same, x.detach(), leaf.grad


def _on_shards(run: Callable[[Any], Any]) -> list[tuple[bool, Any, Any]]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    found = [_written(run, distribute_tensor(FULL, mesh, [placement])) for placement in SHARDS]
    return [(same, x.full_tensor(), grad.full_tensor()) for same, x, grad in found]


def _parts(mesh: DeviceMesh) -> Any:
    rank = mesh.world.rank
    return from_local(FULL * 3 if rank else FULL * -2, mesh, [Partial()])


def _on_parts(run: Callable[[Any], Any]) -> tuple[bool, Any]:
    x = _parts(DeviceMesh("cpu", (2,), platform=get_platform("torch")))
    torch.manual_seed(0)
    return run(x) is x, x.full_tensor()


def _refusals(run: Callable[[Any], Any], makers: str) -> list[str]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    copy = distribute_tensor(torch.stack([FULL, FULL]), mesh, [Shard(0)])[1]
    found = []
    for x in (copy, _parts(mesh)) if makers == "both" else (copy,):
        with pytest.raises(ShardingRuleError) as caught:
            run(x)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("name", [*NONLINEAR, *LINEAR])
def test_what_is_given_is_written(name: str) -> None:
    run = (NONLINEAR | LINEAR)[name]
    expected = _written(run, FULL.clone())
    for found in run_ranks(_on_shards, 2, "torch", run)[0]:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", LINEAR)
def test_partial_tensors_are_written_where_the_operation_is_linear(name: str) -> None:
    x = FULL.clone()
    torch.manual_seed(0)
    LINEAR[name](x)
    same, written = run_ranks(_on_parts, 2, "torch", LINEAR[name])[0]
    torch.testing.assert_close((same, written), (True, x))


@pytest.mark.parametrize("name", NONLINEAR)
def test_partial_tensors_and_copies_of_views_are_refused(name: str) -> None:
    copy, partial = run_ranks(_refusals, 2, "torch", NONLINEAR[name], "both")[0]
    assert "_ on the result of getitem, which is a copy" in copy
    assert "in place it would have to change the placement" in partial


@pytest.mark.parametrize("name", LINEAR)
def test_copies_of_views_are_refused_by_linear_operations_too(name: str) -> None:
    assert "which is a copy" in run_ranks(_refusals, 2, "torch", LINEAR[name], "copy")[0][0]


def _copied_to_parts(dtype: torch.dtype, value: Any) -> Any:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    x = from_local(torch.ones(3, dtype=dtype), mesh, [Partial()])
    return x.copy_(value(mesh)).full_tensor()


def _halves(mesh: DeviceMesh) -> Any:
    return from_local(torch.full((3,), 1.5), mesh, [Partial()])


def _whole(mesh: DeviceMesh) -> Any:
    return distribute_tensor(torch.arange(3.0), mesh, [Replicate()])


def test_copy_to_a_partial_tensor() -> None:
    assert run_ranks(_copied_to_parts, 2, "torch", torch.float32, _halves)[0].tolist() == [3, 3, 3]
    assert run_ranks(_copied_to_parts, 2, "torch", torch.float32, _whole)[0].tolist() == [0, 1, 2]
    for dtype, value in ((torch.int64, _halves), (torch.float32, lambda mesh: torch.tensor(3.0))):
        with pytest.raises(LaunchError, match="would have to change the placement"):
            run_ranks(_copied_to_parts, 2, "torch", dtype, value)


@pytest.mark.parametrize(("probability", "training"), [(0.5, False), (0.0, True)])
@pytest.mark.parametrize("dropout", [F.dropout, F.dropout1d, F.alpha_dropout, F.feature_alpha_dropout])
def test_dropout_that_drops_nothing_writes_nothing(dropout: Any, probability: float, training: bool) -> None:
    """Backward may need its input as it was."""

    def rank() -> Any:
        mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
        x = distribute_tensor(FULL, mesh, [Shard(0)]).requires_grad_()
        y = x.sigmoid()
        assert dropout(y, probability, training, inplace=True) is y
        y.sum().backward()
        return x.grad.full_tensor()

    expected = FULL.sigmoid() * (1 - FULL.sigmoid())
    assert all(torch.allclose(grad, expected) for grad in run_ranks(rank, 2, "torch"))


def test_integers_become_truth_values_of_the_full_tensor() -> None:
    def rank() -> Any:
        mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
        sign = 1 if mesh.get_rank() else -1
        x = from_local(torch.tensor([1, 2]) * torch.tensor([sign, 1]), mesh, [Partial()])  # the whole is [0, 4]
        truth = distribute_tensor(torch.ones(2, dtype=torch.bool), mesh, [Replicate()])
        made = [x.to(torch.bool), x.to(bool), x.type("torch.BoolTensor"), x.to(truth), truth.copy_(x)]
        return [y.full_tensor().tolist() for y in made]

    assert run_ranks(rank, 2, "torch") == [[[False, True]] * 5] * 2


def test_parts_are_summed_before_they_are_rounded() -> None:
    def rank() -> Any:
        mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
        x = from_local(torch.tensor([0.5, 1.5]), mesh, [Partial()])
        made = [x.to(int), x.to(dtype=int), x.sum(0, dtype=int), x.sum(0, dtype=torch.int64)]
        return [y.full_tensor().tolist() for y in made]

    assert run_ranks(rank, 2, "torch") == [[[1, 3], [1, 3], 4, 4]] * 2


def test_a_mean_and_a_softmax_take_python_types_as_dtypes() -> None:
    def rank() -> Any:
        mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
        x = distribute_tensor(torch.tensor([1, 2]), mesh, [Shard(0)])
        made = [x.mean(dtype=float), x.softmax(0, dtype=float), torch.nn.functional.log_softmax(x, 0, dtype=float)]
        return [y.full_tensor() for y in made]

    x = torch.tensor([1, 2])
    for results in run_ranks(rank, 2, "torch"):
        torch.testing.assert_close(results, [x.mean(dtype=float), x.softmax(0, dtype=float), x.log_softmax(0, float)])


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_transposing_in_place_counts_as_a_write(placement) -> None:
    """A graph that has saved the tensor must not go on with its other layout."""

    def program() -> None:
        mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
        a = distribute_tensor(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), mesh, [placement])
        w = distribute_tensor(torch.ones(2, 2), mesh, [placement]).requires_grad_()
        y = (w * a).sum()
        a.t_()
        assert a.full_tensor().tolist() == [[1.0, 3.0], [2.0, 4.0]]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    run_ranks(program, 2, "torch")
