"""The plugin for hp-fsdp, loaded through the entry-point group `hp_fsdp`: flat buffers that are never freed."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import paddle

from hp_dtensor import hookimpl
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp.storage import Gradients, ParameterStorage, moved_to_front
from hp_platform_paddle import autograd


@hookimpl
def hp_fsdp_parameter(platform: Platform) -> ParameterStorage | None:
    return PaddleStorage(platform) if platform.name == "paddle" else None


class _Pass(threading.local):
    """The forward of this thread. Simulated ranks are threads.

    Attributes:
        hooked: a tensor of each node of `before_backward` since the last gather node.
    """

    def __init__(self) -> None:
        self.hooked: list[paddle.Tensor] = []


class PaddleStorage(ParameterStorage):
    def __init__(self, platform: Platform) -> None:
        super().__init__(platform)
        self._pass = _Pass()

    def view(self, buffer: paddle.Tensor, start: int, shape: Sequence[int], outer_dim: int = 0) -> paddle.Tensor:
        stored = moved_to_front(shape, outer_dim)
        # `_slice` shares memory, but not the counter of writes.
        made = buffer.detach()._slice(start, start + math.prod(shape)).reshape(stored)
        if outer_dim:
            made = made.transpose([*range(1, outer_dim + 1), 0, *range(outer_dim + 1, len(shape))])
        return made.detach()

    def address(self, x: paddle.Tensor) -> int:
        return self.platform.unwrap(x).data_ptr()

    def on_gradient(self, tensor: paddle.Tensor, hook: Callable[[], None]) -> None:
        def call(gradient: paddle.Tensor) -> None:
            hook()

        tensor.register_hook(call)

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        autograd.running.at_end.append(callback)

    # Paddle's engine visits nodes first come, first served. So the hooks of `before_backward` are nodes, which the next
    # gather node of forward has as inputs: backward visits them after it.

    def anchor(self) -> paddle.Tensor:
        self._pass.hooked = []
        return super().anchor()

    def gather_node(
        self, token: paddle.Tensor, views: Sequence[paddle.Tensor], backward: Callable[[Gradients], None]
    ) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
        hooked, self._pass.hooked = self._pass.hooked, []
        if hooked:
            token = self.platform.custom_function(
                lambda first, *others: autograd.alias(first), lambda gradient: [gradient] * (1 + len(hooked)),
                token, *hooked,
            )  # fmt: skip
        return super().gather_node(token, views, backward)

    def before_backward(self, tensors: Sequence[paddle.Tensor], hook: Callable[[], None]) -> list[paddle.Tensor]:
        platform = self.platform

        def run(*gradients: paddle.Tensor | None) -> Gradients:
            if any(gradient is not None for gradient in gradients[:-1]):
                hook()
            return gradients[:-1]

        *outputs, hooked = platform.custom_function(
            lambda *inputs: (*map(autograd.alias, inputs), paddle.zeros([1])), run, *map(platform.unwrap, tensors)
        )
        self._pass.hooked.append(hooked)
        return [
            platform.wrap(y, x.spec) if isinstance(x, DTensor) else y for x, y in zip(tensors, outputs, strict=True)
        ]
