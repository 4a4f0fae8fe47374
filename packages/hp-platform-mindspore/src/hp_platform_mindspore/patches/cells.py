"""Replacements for the lists of a Cell's parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

from hp_platform_mindspore.tensor import autograd


def accumulating_safely(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Have the parameters that a Cell lists accumulate gradients safely (`autograd.accumulate_safely`).

    A Cell goes through its parameters at its first call. Who trains lists them too: parameters that a Cell has made,
    or that are copies, come by here before a backward.
    """

    @functools.wraps(plain)
    def parameters_and_names(self: nn.Cell, name_prefix: str = "", expand: bool = True) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in plain(self, name_prefix, expand):
            if isinstance(parameter, ms.Parameter):
                autograd.accumulate_safely(parameter)
            yield name, parameter

    return parameters_and_names
