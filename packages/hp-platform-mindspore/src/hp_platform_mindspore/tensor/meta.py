"""Tensors without data, on MindSpore's meta device, and parameters that are made so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint

from hp_dtensor.platform.thread_region import ThreadRegion

META = "meta"
IS_THERE = not ms.__version__.startswith("2.9")


_making = ThreadRegion()


def making_meta() -> AbstractContextManager[None]:
    """Make the parameters of this thread, and `Platform.empty`, without data inside the block."""
    return _making.of_all()


def is_making_meta() -> bool:
    """Return whether this thread is inside `making_meta`."""
    return _making.depth > 0


def meta_tensor(shape: Sequence[int], dtype: Any) -> Tensor:
    """Return a tensor that has a shape and no memory."""
    return mint.empty(tuple(shape), dtype=dtype, device=META)


def without_data(x: Tensor) -> Tensor:
    """Return `x`, inside `making_meta` one without data like it."""
    return meta_tensor(x.shape, x.dtype) if is_making_meta() and type(x) is Tensor and not x.is_meta else x


def making_parameters(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that gives `Parameter` its data so that inside `making_meta` it gives none.

    An initializer is not run then.
    """

    @functools.wraps(own)
    def new_arguments(data: Any, *args: Any) -> Any:
        if is_making_meta():
            if not isinstance(data, Tensor):
                kind, *given = own(data, *args)
                data = kind(*given)
            return Tensor, without_data(data)
        return own(data, *args)

    return new_arguments
