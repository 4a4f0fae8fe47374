"""One parameter in its two forms: the sharded DTensor of the optimizer, the unsharded tensor of the module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hp_dtensor.spec.tensor_spec import TensorSpec

Tensor = Any
Module = Any


@dataclass(slots=True)
class FSDPParameter:
    """A parameter of a flat buffer.

    Attributes:
        name: dotted name below the first module of the group; the first one of a tied parameter.
        owners: every (module, attribute) that holds it.
        sharded: the DTensor parameter that users and optimizers see; the same object for ever.
        full_spec: the spec of the unsharded parameter, if it was a DTensor before `fully_shard` (tensor parallel).
        view: the plain unsharded parameter, a view of the full buffer.
        leaf: the unsharded parameter outside the graph of a forward, without gradients or in a recomputation; autograd
            accumulates the gradients of the latter here.
        start: offset of this rank's piece in the shard, in elements.
        local_shape: shape of that piece.
        first_dim: the dimension that is outermost in memory, in the full buffer and in the shard.
    """

    name: str
    owners: list[tuple[Module, str]]
    sharded: Tensor
    full_spec: TensorSpec | None
    view: Tensor
    leaf: Tensor
    start: int
    local_shape: tuple[int, ...]
    first_dim: int
