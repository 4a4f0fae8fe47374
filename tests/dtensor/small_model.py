"""A two-layer network on any platform, its weights and data as NumPy arrays, and its single-rank gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform

IN, HIDDEN, OUT, ROWS = 6, 7, 5, 5


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(IN, HIDDEN, bias=True)
        self.down = nn.Linear(HIDDEN, OUT, bias=True)

    def forward(self, x: Any) -> Any:
        return self.down(self.ops.silu(self.up(x)))


def make_model(platform: Platform, seed: int = 0) -> Any:
    with nn.building(platform):
        model = TwoLayers()
    rng = np.random.default_rng(seed)
    with platform.no_grad():
        for _, parameter in platform.named_parameters(model):
            values = rng.uniform(-1, 1, tuple(parameter.shape)).astype(np.float32)
            platform.copy_(parameter, platform.from_numpy(values))
    return model


def make_data(platform: Platform, seed: int = 1) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x, weight = (rng.uniform(-1, 1, (ROWS, width)).astype(np.float32) for width in (IN, OUT))
    return platform.from_numpy(x), platform.from_numpy(weight)


def loss_of(platform: Platform, output: Any, weight: Any) -> Any:
    return platform.ops.sum(platform.ops.mul(platform.ops.square(output), weight))


def reference(platform: Platform) -> dict[str, np.ndarray]:
    """Gradients by parameter name on one rank."""
    model = make_model(platform)
    x, weight = make_data(platform)
    platform.backward(loss_of(platform, model(x), weight))
    return {name: platform.to_numpy(platform.get_grad(p)) for name, p in platform.named_parameters(model)}
