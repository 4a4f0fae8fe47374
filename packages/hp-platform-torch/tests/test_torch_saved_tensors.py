"""Writing to a tensor that backward needs is an error, as it is with plain tensors."""

from __future__ import annotations

import pytest
import torch

from hp_dtensor import DTensor, Partial, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.exceptions import LaunchError
from hp_dtensor.testing import run_ranks

X = torch.arange(12.0).view(3, 4)


def write_to_result(x: torch.Tensor) -> torch.Tensor:
    y = x.amax(1, keepdim=True)
    y += 1
    return y


def write_to_input(x: torch.Tensor) -> torch.Tensor:
    source = x * 2
    y = source.amax(1)
    source += 1
    return y


@pytest.mark.parametrize("use", [write_to_result, write_to_input])
def test_an_extreme_whose_tensors_are_written_before_backward(use):
    def program():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(X, mesh, (Shard(1),)).requires_grad_()
        use(x).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        use(X.clone().requires_grad_()).sum().backward()
    with pytest.raises(LaunchError, match="modified in place"):
        run_ranks(program, 2, "torch")


def test_a_reduced_maximum_that_is_written_before_backward():
    def program():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = DTensor.from_local(X.clone(), mesh, (Partial("max"),)).requires_grad_()
        y = x.full_tensor()
        y.mul_(2)
        y.sum().backward()

    with pytest.raises(LaunchError, match="modified in place"):
        run_ranks(program, 2, "torch")
