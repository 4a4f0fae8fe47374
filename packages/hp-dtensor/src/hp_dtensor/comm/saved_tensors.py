"""Tensors that a custom function keeps for its backward.

Results that stay from a computation to its repetition in backward, instead of being computed again.

`hp_dtensor.parallel.recompute` opens a record for each call of a part of a model that backward computes again. What has
been put into the record the first time is taken from it the second time, call by call in the same order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from hp_dtensor.platform.interface import Platform
from hp_dtensor.trees import map_tensors

Tensor = Any


class Keeper(Protocol):
    """One tensor that is kept for backward, wherever it lies until then."""

    def get(self) -> Tensor:
        """Return the tensor as it was when it was given."""

    def check(self) -> None:
        """Raise RuntimeError if it has been written while it had to stay the same."""


class Held:
    """A tensor that stays where it is, and must not be written before the last `get`.

    Args:
        tensor: a leaf, or outside the graph.

    Example:
        >>> Held(platform, platform.zeros((2, 3), platform.dtype("float32"))).get().shape
        torch.Size([2, 3])
    """

    def __init__(self, platform: Platform, tensor: Tensor) -> None:
        self._platform, self._tensor, self._version = platform, tensor, platform.version(tensor)

    @property
    def is_unchanged(self) -> bool:
        """True if the tensor has not been written in place since, as far as the framework counts that."""
        return self._platform.version(self._tensor) == self._version

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it has been written in place meanwhile (where the framework counts that).
        """
        self.check()
        return self._tensor

    def check(self) -> None:
        """See `Keeper`."""
        if not self.is_unchanged:
            raise RuntimeError(MODIFIED.format(list(self._tensor.shape)))


class Kept:
    """Tensors as a forward had them, plain and outside the graph.

    They stay the same whatever becomes of the objects that were given. Within `keeping` they are kept as it says.

    Raises:
        RuntimeError: from `tensors`, if one has been written in place meanwhile (where the framework counts that).
    """

    def __init__(self, platform: Platform, *tensors: Tensor) -> None:
        # Detached, they share storage and version counter but not the object, whose data, class or grad may be
        # exchanged before backward. The node must not hold its own output's graph either: that would be a circle which
        # only the garbage collector frees.
        keep = _keeper.get() or functools.partial(Held, platform)
        self._kept = [keep(platform.detach(x)) for x in tensors]

    @property
    def tensors(self) -> list[Tensor]:
        return [kept.get() for kept in self._kept]

    def check(self) -> None:
        """Refuse to go on if a tensor has been written."""
        for kept in self._kept:
            kept.check()


@contextlib.contextmanager
def keeping(keep: Callable[[Tensor], Keeper] | None) -> Iterator[None]:
    """Keep the tensors of each `Kept` that is made in the block by `keep`; None: where they are.

    Example:
        >>> from hp_dtensor.comm.saved_tensors import Kept
        >>> with keeping(None):
        ...     len(Kept(platform, platform.zeros((2,), platform.dtype("float32"))).tensors)
        1
    """
    # A context variable, for each simulated rank is a thread.
    token = _keeper.set(keep)
    try:
        yield
    finally:
        _keeper.reset(token)


MODIFIED = (
    "backward needs a tensor of shape {} as it was in forward, but it has been modified in place since; write to a "
    "clone of it, or use an operation that is not in place"
)
_keeper: ContextVar[Callable[[Tensor], Keeper] | None] = ContextVar("hp_dtensor.comm.saved_tensors", default=None)


T = TypeVar("T")

ATTENTION, PRODUCTS, COLLECTIVES = KINDS = ("attention", "products", "collectives")
"""Kinds of operations whose results can be kept."""


def saved_value(decide: Callable[[], T]) -> T:
    """Return `decide()` or, while a part of a model is computed again, the value that the same call gave at first.

    For decisions from data (which experts a token goes to), for counting, and for what is dear and needs no gradient.

    Example:
        >>> saved_value(lambda: 3)
        3
    """
    record = current.get()
    return decide() if record is None or record.is_making else record.next(decide)


def saved_result(kind: str, compute: Callable[[], T]) -> T:
    """Return `compute()` or, while a part is computed again that keeps results of this kind, that of the first time.

    For use in the forward of an autograd node, which is made anew around the kept result.

    Args:
        kind: one of `KINDS`.
        compute: returns plain tensors, or a tree of them, outside the graph.

    Example:
        >>> saved_result("products", lambda: 3)
        3
    """
    record = current.get()
    if record is None or record.is_making or kind not in record.keep:
        return compute()
    results: T = record.result(compute)
    return results


def reached(platform: Platform, x: Tensor) -> Tensor:
    """Return `x` from a place that a repetition comes to on every rank.

    For use in front of a collective where other ranks may have saved something for backward and this one nothing, such
    as one whose experts have no tokens. A repetition ends at the last thing saved; what others send on the way there,
    this rank must send and receive too.

    Args:
        x: plain.

    Example:
        >>> reached(platform, platform.zeros((2,), platform.dtype("float32"))).shape
        torch.Size([2])
    """
    if current.get() is None or not platform.repeats_for_saved or not platform.requires_grad(x):
        return x
    mark = Kept(platform, platform.zeros((0,), x.dtype))

    def backward(grad: Tensor) -> Tensor:
        # To ask for it is to have it made again.
        _ = mark.tensors
        return grad

    return platform.custom_function(platform.detach, backward, x)


class Record:
    """Values of one call, in order; a nested call takes over those of the outer one.

    Args:
        outer: of the call that this one is within.
        keep: kinds of operations whose results stay.

    Attributes:
        platform: of the part.
        is_making: a value that will be kept is being made; what is within is not called again.

    Example:
        >>> record = Record(platform)
        >>> with record.first():
        ...     saved_value(lambda: "once")
        'once'
        >>> with record.again():
        ...     saved_value(lambda: "twice")
        'once'
    """

    def __init__(self, platform: Platform, outer: Record | None = None, keep: Collection[str] = ()) -> None:
        self.keep = frozenset(keep)
        self.is_making = False
        self.platform = platform
        self._outer = outer
        self._operations = platform.kept_operations(self.keep)
        self._values: list[Any] = []
        self._position: int | None = None

    @property
    def position(self) -> int:
        """The number of values that the call has come by, the first time or the second."""
        return len(self._values) if self._position is None else self._position

    def next(self, decide: Callable[[], Any]) -> Any:
        """Return a decision: of this call, or of the outer one where that is being repeated."""
        outer = self._outer
        return self._once(decide if outer is None else lambda: outer.next(decide))

    def result(self, compute: Callable[[], Any]) -> Any:
        """Return results of an operation, as new tensors that share the memory of those that are kept."""
        values, kept_tensors = self._once(lambda: self._noted(compute()))
        # Forward may write into what it was given: as a result of the repetition that would be another one.
        kept_tensors.check()
        # An autograd node makes the tensors that its forward returns part of the graph: the record keeps others.
        return map_tensors(values, self.platform.Tensor, self.platform.detach)

    def _noted(self, values: Any) -> tuple[Any, Kept]:
        """Return results, and their versions."""
        tensors: list[Any] = []
        map_tensors(values, self.platform.Tensor, tensors.append)
        return values, Kept(self.platform, *tensors)

    def _once(self, make: Callable[[], Any]) -> Any:
        if self._position is None:
            self._values.append(self._made(make))
            return self._values[-1]
        # More calls than in forward: the part depends on something that has changed, and its gradient would be that of
        # another function.
        if self._position == len(self._values):
            raise RuntimeError(ANOTHER_WAY)
        self._position += 1
        return self._values[self._position - 1]

    def _made(self, make: Callable[[], Any]) -> Any:
        self.is_making = True
        try:
            # A value in the graph would hold it, which holds this; nor is it one of the graph's saved tensors.
            with self._operations.paused(), self.platform.no_grad(), keeping(None):
                return make()
        finally:
            self.is_making = False

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Keep what is computed in the block."""
        with _within(self), self._operations.first():
            yield

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Give what has been kept to the same calls in the block.

        Raises:
            RuntimeError: the calls are others.
        """
        before, self._position = self._position, 0
        try:
            with _within(self), self._operations.again():
                yield
            if self._position != len(self._values):
                raise RuntimeError(ANOTHER_WAY)
        finally:
            # Forward may go on: the part itself may differentiate something of its own.
            self._position = before


ANOTHER_WAY = (
    "a checkpointed function went another way when it was computed again in backward than in forward; "
    "expected the same calls of hp_dtensor.parallel.recompute.saved_value and the same saved operations, in the same "
    "order"
)
current: ContextVar[Record | None] = ContextVar("hp_dtensor.comm.saved_tensors", default=None)


@contextlib.contextmanager
def _within(record: Record) -> Iterator[None]:
    token = current.set(record)
    try:
        yield
    finally:
        current.reset(token)
