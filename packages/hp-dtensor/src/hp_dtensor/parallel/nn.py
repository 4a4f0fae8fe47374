"""Platform-neutral modules: a class deriving from `Module` becomes a module of the platform that it is built for.

class Scale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = self.parameter((dim,))

    def forward(self, x):
        return self.ops.mul(x, self.weight)

with nn.building(platform):
    scale = Scale(8)            # a torch.nn.Module on torch, a mindspore.nn.Cell on MindSpore
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform

Tensor = Any


class _Building(threading.local):
    """The platforms of this thread's `building` blocks: each simulated rank is a thread with its own."""

    def __init__(self) -> None:
        self.platforms: list[Platform] = []


_building = _Building()


@contextlib.contextmanager
def building(platform: Platform | str | None = None) -> Iterator[Platform]:
    """Build the modules created in the block for `platform` (default: the selected one)."""
    chosen = get_platform(platform)
    _building.platforms.append(chosen)
    try:
        yield chosen
    finally:
        _building.platforms.pop()


class Module:
    """Base of platform-neutral modules; an instance is also an instance of `platform.Module`."""

    platform: Platform

    if TYPE_CHECKING:  # what the platform's module class adds

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if hasattr(cls, "platform"):
            return super().__new__(cls)
        platform = _building.platforms[-1] if _building.platforms else get_platform()
        derived = _class_on(cls, platform)  # type: ignore[arg-type]
        # The framework's __new__ must create the object: object.__new__ refuses its classes.
        return derived.__new__(derived)

    @property
    def ops(self) -> SimpleNamespace:
        return self.platform.ops

    def parameter(self, shape: Sequence[int], dtype: str = "float32", requires_grad: bool = True) -> Tensor:
        """Return a parameter filled with zeros; `hp_dtensor.init_parameters` initializes it."""
        zeros = self.platform.zeros(tuple(shape), self.platform.dtype(dtype))
        return self.platform.Parameter(zeros, requires_grad=requires_grad)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")


# Cached, so that all instances of a class on a platform have one type.
@functools.cache
def _class_on(cls: type[Module], platform: Platform) -> type[Module]:
    """Return the subclass of `cls` and of the platform's module class."""
    return type(
        cls.__name__,
        (cls, platform.Module),
        {"platform": platform, "__module__": cls.__module__, "__qualname__": cls.__qualname__},
    )


class ModuleList(Module):
    """Modules in order, accessed by index; dotted names `0`, `1`, ..."""

    # Attributes named by index, so that every framework registers the modules under the names of its own lists.
    def __init__(self, modules: Sequence[Any] = ()) -> None:
        super().__init__()
        self.length = 0
        for module in modules:
            self.append(module)

    def append(self, module: Any) -> None:
        setattr(self, str(self.length), module)
        self.length += 1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} of a ModuleList of {self.length}")
        return getattr(self, str(index % self.length))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.length))


class Linear(Module):
    """`x @ weight.T + bias`; weight `[out_features, in_features]`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = self.parameter((out_features, in_features))
        self.bias = self.parameter((out_features,)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias)


class Embedding(Module):
    """Rows of `weight` `[num_embeddings, embedding_dim]` selected by integer ids of any shape."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.weight = self.parameter((num_embeddings, embedding_dim))

    def forward(self, ids: Tensor) -> Tensor:
        return self.ops.embedding(ids, self.weight)


class RMSNorm(Module):
    """Root-mean-square normalization over the last dimension (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = self.parameter((dim,))

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)
