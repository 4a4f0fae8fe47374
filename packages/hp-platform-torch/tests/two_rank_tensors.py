"""Tensors sharded over two simulated ranks of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hp_dtensor import DeviceMesh, Shard, distribute_tensor, get_platform
from hp_dtensor.testing import run_ranks

Tensor = torch.Tensor


ROWS = torch.arange(35.0).reshape(7, 5) % 11 - 4


def on_two_ranks(program: Callable[[DeviceMesh], Any]) -> Any:
    def run() -> Any:
        return program(DeviceMesh("cpu", (2,), platform=get_platform("torch")))

    first, second = run_ranks(run, 2, "torch")
    assert str(first) == str(second)
    return first


def shard(x: Tensor, mesh: DeviceMesh, placement: Any = None) -> Any:
    return distribute_tensor(x.clone(), mesh, (placement or Shard(0),), src_data_rank=None)
