"""One call of a function that backward computes again, and what it takes to do the same the second time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from hp_dtensor.comm.saved_tensors import Kept, Record, current
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any


class Part:
    """A call `function(x, *args)`, for `checkpoint`.

    Args:
        local: the data of `x`, in the graph.
        keep: kinds of operations whose results stay; within another such call none do, for its input alone is to stay.

    Example:
        >>> x = platform.zeros((2,), platform.dtype("float32"))
        >>> part = Part(platform, platform.ops.silu, x, x, (), keep=())
        >>> part.first(x).shape, part.again(part.leaf()).shape
        (torch.Size([2]), torch.Size([2]))
    """

    def __init__(
        self,
        platform: Platform,
        function: Callable[..., Tensor],
        x: Tensor,
        local: Tensor,
        args: tuple[Any, ...],
        keep: Collection[str],
    ) -> None:
        self.platform = platform
        enter = way_back(x)
        # Backward calls it outside of a function that is compiled around forward; what is saved must be the same.
        self._call = platform.uncompiled(lambda local: function(enter(local), *args))
        # It notes the version of the input: one that is written before backward would be recomputed to something else.
        self._given = Kept(platform, local)
        outer = current.get()
        self._record = Record(platform, outer, keep if outer is None else ())
        self._random, self._precision = _Random(platform), platform.automatic_precision()

    @property
    def position(self) -> int:
        """The number of kept values that the call, or its repetition, has come by."""
        return self._record.position

    def first(self, local: Tensor) -> Tensor:
        """Return the result for the data of `x`."""
        with self._precision(), self._record.first(), self._random.first():
            return self._call(local)

    def leaf(self) -> Tensor:
        """Return the data of `x` as it was, as a leaf: what is computed from it has a graph that ends there.

        Raises:
            RuntimeError: it has been written since.
        """
        leaf = self.platform.detach(self._given.tensors[0])
        self.platform.set_requires_grad(leaf, True)
        return leaf

    def again(self, leaf: Tensor) -> Tensor:
        """Return the result once more, with recording.

        Raises:
            RuntimeError: the function goes another way.
        """
        with self.platform.enable_grad(), self._precision(), self._record.again(), self._random.again():
            return self._call(leaf)


class _Random:
    """Numbers of the platform's generators, which a repetition draws once more."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._before: Any = None

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        self._before = self._platform.random_state()
        yield
        # Most parts draw nothing, and need nothing kept.
        if self._platform.is_random_state(self._before):
            self._before = None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        if self._before is None:
            yield
            return
        after = self._platform.random_state()
        self._platform.set_random_state(self._before)
        try:
            yield
        finally:
            self._platform.set_random_state(after)


def way_back(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function from a local tensor to one like `x`.

    Example:
        >>> way_back(platform.zeros((2,), platform.dtype("float32")))(3)
        3
    """
    if not isinstance(x, DTensor):
        return lambda local: local
    return functools.partial(DTensor.from_local, device_mesh=x.device_mesh, placements=x.placements, shape=x.spec.shape)
