"""Torch calls in forms that are easily mistaken: keywords, lists, dtypes, options, ragged shards."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import (
    DeviceMesh,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    from_local,
    get_platform,
)
from hp_dtensor.dispatch.operation import count_plans
from hp_dtensor.exceptions import MixedOperandsError, ShardingRuleError
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.testing import run_ranks

Tensor = torch.Tensor
Call = Callable[..., Any]
HALF_TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}
"""Half-precision results in another order of summation."""


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    return (2.0 * torch.randn(shape, generator=generator)).to(dtype)


def gradient(call: Call, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(call(x).square().sum(), x)[0]


def integers(highest: int, *shape: int) -> Tensor:
    return torch.randint(0, highest, shape, generator=torch.Generator().manual_seed(3))


CALLS: dict[str, tuple[Call, tuple[Tensor, ...]]] = {
    "operands by keyword": (lambda x, y: torch.matmul(other=y, input=x), (floats(4, 4), floats(4, 4))),
    "weight first": (lambda x, w: F.linear(weight=w, input=x), (floats(4, 4), floats(4, 4))),
    "target first": (lambda x, t: F.cross_entropy(target=t, input=x), (floats(5, 7), integers(7, 5))),
    "mean axis": (lambda x: x.mean(axis=0), (floats(5, 4),)),
    "sum axis keepdims": (lambda x: x.sum(axis=1, keepdims=True), (floats(5, 4),)),
    "cat axis": (lambda x, y: torch.cat((x, y), axis=1), (floats(5, 4), floats(5, 4))),
    "split by keyword": (lambda x: torch.split(x, split_size_or_sections=[1, 4])[1], (floats(5, 4),)),
    "view by keyword": (lambda x: x.view(size=(2, 6)), (floats(4, 3),)),
    "swapaxes by keyword": (lambda x: torch.swapaxes(x, axis0=0, axis1=1), (floats(4, 3),)),
    "to integers": (lambda x: x.to(torch.int64), (floats(5, 4),)),
    "sum as integers": (lambda x: x.sum(0, dtype=torch.int64), (floats(5, 4),)),
    "flatten": (lambda x: x.flatten(), (floats(4, 3),)),
    "unflatten": (lambda x: x.view(4, 3), (floats(12),)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, dim=0), (floats(4, 3),)),
    "embedding": (F.embedding, (integers(7, 4), floats(7, 3))),
    "to another's dtype": (lambda x, y: x.to(y), (floats(5, 4), integers(4, 3))),
    "type_as": (lambda x, y: x.type_as(y), (floats(5, 4), floats(3))),
    "rounded quotient": (lambda x: torch.div(x, 0.7, rounding_mode="floor"), (floats(5, 4),)),
    "mean in double": (lambda x: x.mean(0, dtype=torch.float64), (floats(3, 4),)),
    "mean of integers": (lambda x: x.mean(0, dtype=torch.float32), (integers(9, 3, 4),)),
    "amax of integers": (lambda x: x.amax(0), (integers(9, 3, 4),)),
    "amin of truth values": (lambda x: x.amin(0), (integers(2, 3, 4).bool(),)),
    "norm of an order": (lambda x: x.norm(1, 0), (floats(4, 2),)),
    "std of a sample or not": (lambda x: x.std(False) + x.std(0, False) + x.var(1, True, True), (floats(2, 2),)),
    "var_mean": (lambda x: torch.var_mean(x, 0, False)[0], (floats(4, 2),)),
    "median of everything": (lambda x: x.median(), (floats(5, 3),)),
    **{
        f"{name} of torch.masked, which is not masked": (
            lambda x, name=name: (
                gradient(lambda x: getattr(torch.masked, name)(x, -1, keepdim=True, dtype=torch.float64) + x, x)
                + getattr(torch.masked, name)(x, 0)
                + getattr(torch.masked, name)(x, keepdim=True)
            ),
            (floats(5, 4),),
        )
        for name in ("mean", "var", "std")
    },
    "mode": (lambda x: x.mode()[0], (integers(3, 5, 3),)),
    "softmax of a number": (lambda x: x.reshape(()).softmax(0) + x.sum().cumsum(0), (floats(1),)),
    "weighted mean": (
        lambda x, y: F.mse_loss(x, y, weight=y.abs()) + F.huber_loss(x, y, weight=x.abs()),
        (floats(5, 4), floats(4, 5).T.contiguous()),
    ),
    "cosine similarity to one column": (lambda x, y: F.cosine_similarity(x, y), (floats(5, 4), floats(5, 1))),
    "gradient of the cosine similarity of short rows": (
        lambda x, y: gradient(lambda x: F.cosine_similarity(x, y, eps=4.0), x),
        (floats(5, 4), floats(5, 4)),
    ),
    **{
        f"gradient of the norm of order {order} where elements tie": (
            lambda x, order=order: (
                gradient(lambda x: x.norm(order, dim=(0, 1), dtype=torch.float64), x)
                + gradient(lambda x: torch.linalg.vector_norm(x, order, 1, keepdim=True), x)
            ),
            (floats(5, 4).round().clamp(-2, 2),),
        )
        for order in (math.inf, -math.inf)
    },
    "cosine similarity to a matrix": (lambda x, y: F.cosine_similarity(x, y, dim=1), (floats(3, 2, 4), floats(2, 4))),
    "type by a string": (lambda x: x.type("torch.LongTensor"), (floats(5, 4) * 3,)),
    "type by a class": (lambda x: x.type(torch.IntTensor), (floats(5, 4) * 3,)),
    "inverse by keyword": (lambda x: torch.linalg.inv(A=x @ x.mT + 3), (floats(3, 2, 2),)),
    "determinant by keyword": (lambda x: torch.linalg.det(A=x), (floats(3, 2, 2),)),
    "slogdet by keyword": (lambda x: torch.linalg.slogdet(A=x)[1], (floats(3, 2, 2),)),
    "singular values by keyword": (lambda x: torch.linalg.svdvals(A=x) + torch.linalg.svd(A=x)[1], (floats(3, 2, 2),)),
    "qr by keyword": (lambda x: torch.linalg.qr(A=x)[1].abs(), (floats(3, 2, 2),)),
    "triangular by keyword": (
        lambda x: torch.linalg.solve_triangular(input=x, B=x, upper=True, unitriangular=True),
        (floats(3, 2, 2),),
    ),
    "numbers of NumPy": (
        lambda x: x.view(np.int64(2), np.prod([4, 2])).sum(np.int64(0), keepdim=True) * np.float64(2),
        (floats(4, 4),),
    ),
    "operands by NumPy's keywords": (lambda x, y: torch.add(x1=x, x2=y), (floats(4, 4), floats(4, 4))),
    "an operand by linalg's keyword": (lambda x: torch.linalg.vector_norm(x=x, ord=1, dim=0), (floats(4, 4),)),
    "cross entropy": (lambda x, t: F.cross_entropy(x, t, ignore_index=2), (floats(5, 7), integers(7, 5))),
}


def _placements(x: Tensor) -> list[Any]:
    found: list[Any] = [Replicate(), *(Shard(i) for i in range(x.dim()))]
    if x.is_floating_point():
        found.append(Partial())
    found += [RaggedShard(i, (1, size - 1)) for i, size in enumerate(x.shape)]
    return [*found, RaggedShard(0, (x.shape[0], 0))]


def _place(x: Tensor, mesh: DeviceMesh, placement: Any) -> Any:
    if not placement.is_partial():
        return distribute_tensor(x, mesh, (placement,), src_data_rank=None)
    first = 0.3 * x + 1.0
    return from_local(first if mesh.get_local_rank() == 0 else x - first, mesh, (placement,), shape=x.shape)


def _differences(call: Call, tensors: Sequence[Tensor], tolerance: dict[str, float]) -> list[str]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    expected, wrong = call(*tensors), []
    for placements in itertools.product(*map(_placements, tensors)):
        got = call(*(_place(x, mesh, placement) for x, placement in zip(tensors, placements, strict=True)))
        try:
            assert got.shape == expected.shape
            torch.testing.assert_close(got.full_tensor(), expected, **tolerance)
        except AssertionError as error:
            wrong.append(f"{placements}: {error}")
    return wrong


def check(call: Call, *tensors: Tensor, **tolerance: float) -> None:
    found = run_ranks(_differences, 2, "torch", call, tensors, tolerance or {"rtol": 1e-4, "atol": 1e-4})
    assert found == [[], []]


@pytest.mark.parametrize("name", CALLS)
def test_result_is_that_of_one_device_whatever_the_placements(name: str) -> None:
    call, tensors = CALLS[name]
    check(call, *tensors)


LOW_PRECISION: dict[str, tuple[Call, tuple[Tensor, ...]]] = {
    "float16 mean of a large sum": (lambda x: x.mean(), (floats(400, 500, dtype=torch.float16) + 100,)),
    "bfloat16 count of rows": (F.cross_entropy, (floats(4100, 3, dtype=torch.bfloat16), integers(3, 4100))),
    "float16 sum over classes": (F.cross_entropy, (floats(2, 70000, dtype=torch.float16) / 100, integers(9, 2))),
}


@pytest.mark.parametrize("name", LOW_PRECISION)
def test_half_precision_holds_sums_and_counts(name: str) -> None:
    call, tensors = LOW_PRECISION[name]
    check(call, *tensors, **HALF_TOLERANCE)


REFUSED: dict[str, tuple[Call, Tensor, str]] = {
    "where alone": (lambda x: torch.where(x > 0), floats(4), "depends on data of all ranks"),
    "one_hot of unknown size": (F.one_hot, integers(3, 4), "num_classes must be given"),
    "softmax of no dimension": (lambda x: F.softmax(x, dim=None), floats(5, 4), "it needs one dimension"),
    "attention without heads": (lambda x: F.scaled_dot_product_attention(x, x, x), floats(2, 3, 2), "[batch, heads"),
    "renormalized table": (
        lambda w: F.embedding(distribute_tensor(integers(4, 3), w.device_mesh, None), w, max_norm=1.0),
        floats(4, 2),
        "max_norm is not supported",
    ),
    "filling a partial tensor": (
        lambda x: from_local(x.to_local(), x.device_mesh, (Partial(),)).uniform_(),
        floats(4, 2),
        "would have to change the placement",
    ),
}


def _refusal(call: Call, x: Tensor) -> str:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    with pytest.raises(ShardingRuleError) as refusal:
        call(distribute_tensor(x, mesh, (Shard(0),)))
    return str(refusal.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused_on_every_rank(name: str) -> None:
    call, x, message = REFUSED[name]
    for refusal in run_ranks(_refusal, 2, "torch", call, x):
        assert message in refusal


def _padded_gradient() -> Tensor:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    table = distribute_tensor(floats(7, 3), mesh, (Shard(0),)).requires_grad_()
    ids = distribute_tensor(torch.tensor([0, 2, 2, 6]), mesh, (Replicate(),))
    F.embedding(ids, table, padding_idx=-5).sum().full_tensor().backward()
    return table.grad.full_tensor()


def test_the_padding_row_of_a_sharded_table_gets_no_gradient() -> None:
    table = floats(7, 3).requires_grad_()
    F.embedding(torch.tensor([0, 2, 2, 6]), table, padding_idx=-5).sum().backward()
    for grad in run_ranks(_padded_gradient, 2, "torch"):
        assert torch.equal(grad, table.grad)


def _alpha_dropout() -> Tensor:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    torch.manual_seed(3)
    return F.alpha_dropout(distribute_tensor(floats(5, 4), mesh, (Shard(0),)), 0.5, True).full_tensor()


def test_alpha_dropout_draws_the_numbers_of_one_device() -> None:
    torch.manual_seed(3)
    expected = F.alpha_dropout(floats(5, 4), 0.5, True)
    for got in run_ranks(_alpha_dropout, 2, "torch"):
        torch.testing.assert_close(got, expected)


def _nested() -> list[Tensor]:
    """Rows sharded over one axis, then raggedly over the other: units differ between ranks of the first."""
    mesh = DeviceMesh("cpu", (2, 2), platform=get_platform("torch"))
    units = ((2, 1), (0, 2))[mesh.get_coordinate()[0]]
    x = distribute_tensor(floats(5, 4), mesh, (Shard(0), RaggedShard(0, units)), src_data_rank=None)
    y = distribute_tensor(floats(5, 4), mesh, (Shard(1), Replicate()), src_data_rank=None)
    z = distribute_tensor(floats(4, 3), mesh, (Replicate(), Shard(0)), src_data_rank=None)
    return [result.full_tensor() for result in (x + y, x * x, x @ z, x.sum(0), x.sum(1), x.view(20), x.t())]


def test_nested_ragged_shards() -> None:
    x, z = floats(5, 4), floats(4, 3)
    expected = [x + x, x * x, x @ z, x.sum(0), x.sum(1), x.view(20), x.t()]
    for results in run_ranks(_nested, 4, "torch"):
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)


# `zero` places everything at 0: the positions, the targets.
NUMBERS: dict[str, tuple[str, Call]] = {
    "pad": ("value", lambda x, zero, s: F.pad(x, (1, 1), value=s)),
    "cross_entropy": ("label_smoothing", lambda x, zero, s: F.cross_entropy(x, zero, label_smoothing=s)),
    "norm": ("p", lambda x, zero, s: x.norm(s, 0)),
    "std": ("correction", lambda x, zero, s: x.std(0, correction=s)),
    "roll": ("shifts", lambda x, zero, s: x.roll(s.long(), 0)),
}


@pytest.mark.parametrize(("name", "call"), NUMBERS.values(), ids=NUMBERS)
def test_a_dtensor_as_a_number_is_refused_by_name(name: str, call: Call) -> None:
    def rank() -> None:
        mesh = DeviceMesh("cpu", (2,))
        x, zero = (distribute_tensor(t, mesh, [Shard(0)]) for t in (floats(4, 3), torch.zeros(4, dtype=torch.long)))
        with pytest.raises(
            ShardingRuleError, match=rf"takes a number, not a DTensor, as {name}\..*float\({name}\) or int\({name}\)"
        ):
            call(x, zero, x.sum())

    run_ranks(rank, 2, "torch")


FACTORS: dict[str, Call] = {
    "index_add": lambda x, zero, s: x.index_add(0, zero, x, alpha=s),
    "addmm": lambda x, zero, s: torch.addmm(x, x, x[:3], beta=s),
    "baddbmm": lambda x, zero, s: torch.baddbmm(x[None], x[None], x[None, :3], alpha=s),
}


@pytest.mark.parametrize("call", FACTORS.values(), ids=FACTORS)
def test_a_dtensor_as_a_factor_is_its_full_value(call: Call) -> None:
    x, zero = floats(4, 3), torch.zeros(4, dtype=torch.long)

    def rank() -> Tensor:
        mesh = DeviceMesh("cpu", (2,))
        parts = [distribute_tensor(t, mesh, [Shard(0)]) for t in (x, zero)]
        return call(*parts, parts[0].sum()).full_tensor()

    for found in run_ranks(rank, 2, "torch"):
        torch.testing.assert_close(found, call(x, zero, x.sum().item()))


def test_a_row_is_filled_with_the_full_value() -> None:
    def rank() -> Tensor:
        mesh = DeviceMesh("cpu", (2,))
        x = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
        rows = distribute_tensor(torch.tensor([0, 4]), mesh, [Shard(0)])
        return x.index_fill(0, rows, x.sum()).full_tensor()

    for filled in run_ranks(rank, 2, "torch"):
        assert torch.equal(filled, torch.ones(5, 3).index_fill(0, torch.tensor([0, 4]), 15.0))


def test_a_new_tensor_is_filled_with_the_full_value() -> None:
    def rank() -> Tensor:
        x = distribute_tensor(torch.ones(5, 3), DeviceMesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(ShardingRuleError, match=r"Pass the value: float\(fill_value\)"):
            x.new_full((4, 3), fill_value=x.sum())
        return x.new_full((4, 3), fill_value=float(x.sum())).full_tensor()

    for filled in run_ranks(rank, 2, "torch"):
        assert torch.equal(filled, torch.full((4, 3), 15.0))


def test_an_object_among_the_arguments_is_let_go() -> None:
    class Flag:
        pass

    def rank() -> bool:
        x, flag = distribute_tensor(floats(4, 3), DeviceMesh("cpu", (2,)), [Shard(0)]), Flag()
        assert F.relu(x, inplace=flag) is x
        freed = weakref.ref(flag)
        del flag
        gc.collect()
        return freed() is None

    assert run_ranks(rank, 2, "torch") == [True, True]


def test_arrays_among_dtensors_are_refused() -> None:
    def rank() -> None:
        x = distribute_tensor(floats(4, 3), DeviceMesh("cpu", (2,)), [Shard(0)])
        for call in (lambda: x == np.ones(3), lambda: x ** np.ones(3), lambda: x.split(np.array([1, 3]))):
            with pytest.raises(MixedOperandsError, match=r"a plain array of shape \[\d\] among DTensors"):
                call()

    run_ranks(rank, 2, "torch")


def test_a_number_of_numpys_is_known_by_its_type() -> None:
    def rank() -> None:
        x = distribute_tensor(floats(4, 3), DeviceMesh("cpu", (1,)), [Shard(0)])
        assert x.view(-1, np.int64(1)).shape == (12, 1)
        with pytest.raises(ShardingRuleError, match=r"expected a shape of integers, got \[-1, 1\.0\]"):
            x.view(-1, np.float64(1))
        plans = set()
        for factor in (0.5, 1.5, 2.5):
            assert torch.equal((x * np.float64(factor)).full_tensor(), x.full_tensor() * factor)
            plans.add(count_plans())
        assert len(plans) == 1

    run_ranks(rank, 1, "torch")


@pytest.mark.parametrize("call", [torch.add, torch.sub, torch.mul, torch.maximum, torch.Tensor.add_, torch.matmul])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), RaggedShard(0, (3, 0, 1))], ids=str)
def test_a_replicated_operand_is_selected_in_later_calls_as_in_the_first(call: Call, placement: Any) -> None:
    x, v = floats(4, 4), floats(4, 4).flip(0)  # over three ranks: uneven and empty shards

    def rank() -> list[Tensor]:
        mesh = DeviceMesh("cpu", (3,))
        replicated, found = distribute_tensor(v, mesh, [Replicate()]), []
        for recorded in (False, False, True, True):  # plans are made in the first call, for all of them
            sharded = distribute_tensor(x, mesh, [placement])
            leaf = sharded.requires_grad_(recorded and call is not torch.Tensor.add_)
            result = call(leaf, replicated)
            # Neither a write to the result nor one to the operand reaches the other.
            with torch.no_grad():
                replicated.add_(1)
                found.append(result.full_tensor())
                result.zero_()
                replicated.sub_(1)
            if leaf.requires_grad and call is not torch.matmul:
                result.backward(distribute_tensor(torch.ones(4, 4), mesh, [placement]))
                found.append(leaf.grad.full_tensor())
        return [*found, replicated.full_tensor()]

    leaf = x.clone().requires_grad_(call is not torch.Tensor.add_)
    result = call(leaf if leaf.requires_grad else leaf.clone(), v)
    expected = [result.detach()] * 4
    if leaf.requires_grad and call is not torch.matmul:
        (grad,) = torch.autograd.grad(result.sum(), leaf)
        expected[2:] = [result.detach(), grad, result.detach(), grad]
    for found in run_ranks(rank, 3, "torch"):
        for got, wanted in zip(found, [*expected, v], strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dim", [0, 1])
def test_an_operation_in_place_reads_a_replicated_operand_before_it_writes_its_memory(dim: int) -> None:
    def rank() -> list[Tensor]:
        mesh, found = DeviceMesh("cpu", (2,)), []
        for _ in range(2):
            operand = distribute_tensor(floats(4, 4), mesh, [Replicate()])
            # Every rank writes the rows or columns 1 and 2, and reads its own half.
            written = from_local(operand.to_local().narrow(dim, 1, 2), mesh, [Shard(dim)])
            found.append(written.add_(operand).full_tensor())
        return found

    expected = floats(4, 4) + floats(4, 4).narrow(dim, 1, 2).repeat(*((2, 1) if dim == 0 else (1, 2)))
    for found in run_ranks(rank, 2, "torch"):
        for got in found:
            torch.testing.assert_close(got, expected)


def test_a_saved_selection_does_not_hold_the_memory_of_the_operand() -> None:
    def rank() -> list[int]:
        mesh = DeviceMesh("cpu", (2,))
        x = distribute_tensor(floats(4, 4), mesh, [Shard(0)]).requires_grad_()
        operand = distribute_tensor(floats(4, 4), mesh, [Replicate()])
        return [(x * operand).grad_fn._saved_other.untyped_storage().nbytes() for _ in range(2)]

    assert run_ranks(rank, 2, "torch") == [[32, 32]] * 2


def test_a_selected_operand_is_no_saved_result_of_a_recomputation() -> None:
    def rank() -> list[Tensor]:
        mesh, found = DeviceMesh("cpu", (2,)), []
        constant = distribute_tensor(floats(6, 5), mesh, [Replicate()])

        def part(x: Any) -> Any:
            # The first forward makes the plans of these shapes, and the recomputation finds them.
            gathered = (x + constant).exp().redistribute(placements=[Replicate()])
            return gathered.sin().redistribute(placements=[Shard(0)])

        for run in (lambda x: checkpoint(part, x, platform=get_platform("torch"), save=["collectives"]), part):
            x = distribute_tensor(floats(6, 5) / 9, mesh, [Shard(0)]).requires_grad_()
            run(x).sum().backward()
            found.append(x.grad.full_tensor())
        return found

    for recomputed, expected in run_ranks(rank, 2, "torch"):
        assert torch.equal(recomputed, expected)
