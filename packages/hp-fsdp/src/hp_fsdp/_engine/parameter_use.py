"""One use of a group's parameters in a forward: the autograd nodes made for it, and what backward has to check."""

from __future__ import annotations

from typing import Any

from hp_fsdp._engine.flat_buffer import FlatBuffer
from hp_fsdp.storage import Gradients

Tensor = Any


class ParameterUse:
    """One use of a group's parameters in a forward pass.

    Attributes:
        forward_pass: the `ForwardPass` that it belongs to, or None for a recomputation during backward.
        unsharded: the tensors that the modules compute with, per buffer.
        indices: of the trainable parameters, per buffer that has some.
        waiting: buffers whose autograd node has not run yet in the current backward.
        versions: of the parameters that the forward computed with, per buffer in `indices`.
    """

    def __init__(self, forward_pass: object | None) -> None:
        self.forward_pass = forward_pass
        self.unsharded: list[list[Tensor]] = []
        self.indices: dict[FlatBuffer, list[int]] = {}
        self.waiting: list[FlatBuffer] = []
        self.versions: dict[FlatBuffer, list[int]] = {}

    def changed_parameters(self, buffer: FlatBuffer, grads: Gradients) -> list[str]:
        """Return the names of parameters that have, in backward, other values than the forward computed with.

        Autograd compares the versions of what operations have saved; it cannot see that a buffer was filled again from
        shards that an optimizer has changed. Parameters without a gradient may have changed: this backward does not
        use them.
        """
        then, now = self.versions[buffer], buffer.versions.of_full
        if then == now:
            return []
        used = (index for index, grad in zip(self.indices[buffer], grads, strict=True) if grad is not None)
        return [buffer.parameters[index].name for index in used if then[index] != now[index]]
