"""Low-rank adapters (LoRA, arXiv 2106.09685), which are trained while the model's own weights are frozen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.distribute_module import place_parameter
from hp_dtensor.spec.placements import Replicate, Shard
from hp_trainer.config import section
from hp_trainer.exceptions import Problem

Tensor = Any

# Hugging Face's name of a projection -> its path in a block. Experts have no adapters.
TARGETS = {
    **{name: f"attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: f"attention.{name}" for name in ("q_a_proj", "q_b_proj", "kv_b_proj")},
    "kv_a_proj_with_mqa": "attention.kv_a_proj",
    "gate_proj": "feed_forward.w1",
    "up_proj": "feed_forward.w3",
    "down_proj": "feed_forward.w2",
}
_ROWWISE = ("o_proj", "down_proj")
_REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa")


@section
class LoraConfig:
    """Low-rank adapters of named projections. If a rank is set, only they are trained."""

    rank: int | None = Field(None, ge=1, description="width of the adapters; null: no adapters")
    alpha: float = Field(16.0, gt=0, description="the adapters' output is multiplied by alpha / rank")
    targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        description="projections with adapters, by their names in transformers",
    )

    def check(self) -> Iterator[Problem]:
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets:
            got = ", ".join(unknown) or "none"
            yield Problem(path="targets", what="not projections", expected=", ".join(TARGETS), got=got)

    @property
    def scale(self) -> float:
        """Factor on the adapters' output."""
        assert self.rank is not None
        return self.alpha / self.rank


class LoraLinear(nn.Linear):
    """A linear layer with an adapter: `x @ weight.T + bias + scale * lora_B(lora_A(x))`.

    Weight and bias have the names they have without an adapter; the adapter's names are PEFT's.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, config: LoraConfig) -> None:
        super().__init__(in_features, out_features, bias)
        assert config.rank is not None
        self.scale = config.scale
        self.lora_A = nn.Linear(in_features, config.rank)
        self.lora_B = nn.Linear(config.rank, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Transform rows: `[..., in_features]` -> `[..., out_features]`."""
        return self.ops.add(super().forward(x), self.ops.mul(self.lora_B(self.lora_A(x)), self.scale))


def add_adapters(block: Any, config: LoraConfig) -> list[str]:
    """Add adapters to the targets of a block; return the targets that the block has."""
    found = []
    for target in config.targets:
        owner_name, _, name = TARGETS[target].partition(".")
        owner = getattr(block, owner_name, None)
        layer = None if owner is None else getattr(owner, name, None)
        if layer is not None:
            setattr(owner, name, LoraLinear(layer.in_features, layer.out_features, layer.bias is not None, config))
            found.append(target)
    return found


def place_adapters(block: Any, mesh: DeviceMesh) -> None:
    """Shard the adapters of a block over the tensor parallel ranks to match their projections."""
    for target, layer in adapters_of(block):
        # weight = B A: a colwise layer shards the rows of B, a rowwise one the columns of A.
        a, b = (Replicate(), Shard(0)) if target not in _ROWWISE else (Shard(1), Replicate())
        b = Replicate() if target in _REPLICATED else b
        place_parameter(layer.lora_A, "weight", mesh, (a,), src_data_rank=None)
        place_parameter(layer.lora_B, "weight", mesh, (b,), src_data_rank=None)


def adapters_of(block: Any) -> Iterator[tuple[str, LoraLinear]]:
    """Yield the name and the layer of each target of a block that has an adapter."""
    for target, path in TARGETS.items():
        owner_name, _, name = path.partition(".")
        layer = getattr(getattr(block, owner_name, None), name, None)
        if isinstance(layer, LoraLinear):
            yield target, layer


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def initial_bound(in_features: int) -> float:
    """Return the bound of the uniform initial values of an adapter's first matrix, as in PEFT."""
    return 1 / math.sqrt(in_features)
