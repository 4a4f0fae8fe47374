"""Interface of an optimizer, as a platform registers it and the training loop uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Tensor = Any


class Optimizer(Protocol):
    """Updates the parameters it was built with; works on local shards and never communicates.

    One that keeps its state in another form, such as 8-bit AdamW, makes the tensors of `state()` when they are asked
    for, and has two more methods: `set_state(name, slot, values)`, called after such a tensor has been written into,
    and `state_bytes(platform)`, the bytes that its state takes on this rank.

    Attributes:
        num_steps: updates done, which bias correction depends on; set when a checkpoint is loaded.
    """

    num_steps: int

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient, with this learning rate, and count the update."""

    def zero_grad(self) -> None:
        """Forget all gradients."""

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the state of each parameter by name and slot (`exp_avg`, ...), laid out as the parameter.

        Slots that no step has made yet are there, as zeros. Writing into the tensors changes the state.
        """
