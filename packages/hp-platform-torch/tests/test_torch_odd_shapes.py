"""Losses of nothing, arguments that do not fit, overlapping pieces: values and errors are torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import Replicate, Shard, distribute_tensor, init_device_mesh, replicate_like
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.testing import run_ranks

LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_over_nothing_is_no_number(name: str, reduction: str) -> None:
    def program() -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2,), platform="torch")
        x = distribute_tensor(torch.ones(0, 3), mesh, [Shard(0)])
        return getattr(F, name)(x, x, reduction=reduction).full_tensor()

    expected = getattr(F, name)(torch.ones(0, 3), torch.ones(0, 3), reduction=reduction)
    for found in run_ranks(program, 2, "torch"):
        torch.testing.assert_close(found, expected, equal_nan=True)


WRONG = {
    "instance_norm": (lambda x, like: F.instance_norm(x), (4,)),
    "instance_norm of rows": (lambda x, like: F.instance_norm(x), (4, 3)),
    "interpolate": (lambda x, like: F.interpolate(x, 3), (4, 3)),
    "conv1d": (lambda x, like: F.conv1d(x, like(torch.ones(4, 4, 1))), (4,)),
    "conv2d": (lambda x, like: F.conv2d(x, like(torch.ones(4, 4, 1, 1))), (4, 4)),
    "conv_transpose2d": (lambda x, like: F.conv_transpose2d(x, like(torch.ones(4, 4, 1, 1))), (4, 4)),
    "conv1d with stride 0": (lambda x, like: F.conv1d(x, like(torch.ones(4, 4, 1)), stride=0), (2, 4, 3)),
    "max_pool1d with stride 0": (lambda x, like: F.max_pool1d(x, 2, 0), (2, 4, 3)),
    "interpolate to no size": (lambda x, like: F.interpolate(x), (2, 4, 3)),
    "interpolate by two factors": (lambda x, like: F.interpolate(x, scale_factor=(2.0, 2.0)), (2, 4, 3)),
    "scatter of fewer dimensions": (
        lambda x, like: x.scatter(0, like(torch.zeros(2, 3, dtype=torch.int64)), like(torch.zeros(3))),
        (4, 3),
    ),
    "chunk": (lambda x, like: x.chunk(0), (4,)),
    "split": (lambda x, like: x.split(0), (4,)),
    "repeat": (lambda x, like: x.repeat(2), (4, 3)),
    "repeat_interleave": (lambda x, like: x.repeat_interleave(-1, 0), (4,)),
    "unfold": (lambda x, like: x.unfold(0, 2, 0), (4,)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_torchs_error(name: str) -> None:
    call, shape = WRONG[name]
    with pytest.raises((ValueError, RuntimeError, NotImplementedError, IndexError)) as expected:
        call(torch.ones(shape), lambda weight: weight)

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,), platform="torch")
        for placement in (Replicate(), *map(Shard, range(len(shape)))):
            x = distribute_tensor(torch.ones(shape), mesh, [placement])
            with pytest.raises(type(expected.value)) as caught:
                call(x, lambda weight, x=x: replicate_like(weight, x))
            assert str(caught.value) == str(expected.value)

    run_ranks(program, 2, "torch")


REFUSED = {
    "expand": (lambda x: x.expand(-1, 4, 3), r"cannot expand \[4, 3\] to \[-1, 4, 3\]"),
    "sum": (lambda x: x.sum((0, -2)), r"dimensions \(0, -2\) of which one is given twice"),
    "logsumexp": (lambda x: x.logsumexp((0, 0)), r"dimensions \(0, 0\) of which one is given twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_torch_refuses_are_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(RuntimeError):
        call(torch.ones(4, 3))

    def program() -> None:
        with pytest.raises(ShardingRuleError, match=message):
            call(distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,), platform="torch"), [Shard(0)]))

    run_ranks(program, 2, "torch")


def test_empty_chunks_of_an_empty_tensor() -> None:
    def program() -> list[tuple[int, ...]]:
        x = distribute_tensor(torch.ones(0), init_device_mesh("cpu", (2,), platform="torch"), [Shard(0)])
        return [tuple(each.shape) for each in x.split(0)]

    assert run_ranks(program, 2, "torch") == [[(0,)]] * 2


@pytest.mark.parametrize("indices", [(3, 1), (-2, -4), (4, 4, 0, 9)])
def test_pieces_may_overlap(indices: tuple[int, ...]) -> None:
    full = torch.arange(15.0).view(5, 3)
    weights = [torch.arange(piece.numel() + 1.0)[1:].view(piece.shape) for piece in full.tensor_split(indices)]

    def gradient(x: torch.Tensor) -> torch.Tensor:
        pieces = torch.tensor_split(x, indices)
        sum((piece * replicate_like(w, x)).sum() for piece, w in zip(pieces, weights, strict=True)).backward()
        return x.grad

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,), platform="torch")
        for placement in (Replicate(), Shard(0), Shard(1)):
            x = distribute_tensor(full, mesh, [placement]).requires_grad_()
            for piece, expected in zip(torch.tensor_split(x, indices), full.tensor_split(indices), strict=True):
                assert torch.equal(piece.detach().full_tensor(), expected)
            assert torch.equal(gradient(x).full_tensor(), gradient(full.clone().requires_grad_()))

    run_ranks(program, 2, "torch")
