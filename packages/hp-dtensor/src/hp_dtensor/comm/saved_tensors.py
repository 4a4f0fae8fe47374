"""Tensors saved for backward by custom functions, and results saved for recomputation.

`SavedTensors` holds what an autograd node needs in backward, and refuses to return a tensor that was written meanwhile.
`RecomputeRecord` holds results that recomputation does not compute again. They are stored on the first run and returned
on the second, in the order of the calls. `hp_dtensor.parallel.recompute` opens a record for each call of a recomputed
part of a model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar

from hp_dtensor.platform.interface import Platform
from hp_dtensor.trees import map_tensors, tensors_in

Tensor = Any
T = TypeVar("T")
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class SavedTensor(Protocol):
    """A tensor saved for backward, wherever it is stored until then."""

    def get(self) -> Tensor:
        """Return the tensor with the values that it had when it was saved."""

    def check(self) -> None:
        """Raise RuntimeError if the tensor is held by reference and has been written in place."""


class SavedReference:
    """A saved tensor, a leaf or outside the graph, that stays where it is and must not be written."""

    def __init__(self, platform: Platform, tensor: Tensor) -> None:
        self._platform, self._tensor, self._version = platform, tensor, platform.version(tensor)

    @property
    def is_unchanged(self) -> bool:
        """True if the tensor has not been written in place since, as far as the framework counts writes."""
        return self._platform.version(self._tensor) == self._version

    def get(self) -> Tensor:
        """Return the tensor. One that was written in place meanwhile raises a RuntimeError."""
        self.check()
        return self._tensor

    def check(self) -> None:
        """See `SavedTensor`."""
        if not self.is_unchanged:
            raise RuntimeError(MODIFIED.format(list(self._tensor.shape)))


class PackedTensor:
    """A saved tensor that the program's hooks have packed, such as those of torch's `save_on_cpu` and checkpoint."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], tensor: Tensor) -> None:
        self._packed, self._unpack = pack(tensor), unpack

    def get(self) -> Tensor:
        """Return the tensor."""
        return self._unpack(self._packed)

    def check(self) -> None:
        """Do nothing, as frameworks for tensors that hooks have packed."""


class SavedTensors:
    """Tensors that a custom function saves for its backward, plain and outside the graph.

    Data, class or gradient of the given tensor objects may be replaced afterwards. In-place writes raise. Each
    tensor is saved as `saver` returns.

    Raises:
        RuntimeError: from `tensors`, if one was written in place meanwhile (if the framework counts writes).
    """

    def __init__(self, platform: Platform, *tensors: Tensor) -> None:
        # A detached tensor shares storage and version counter, but is another object: data, class or grad of the
        # original may be replaced before backward. And a node that held its own output with its graph would be a
        # reference cycle, which only the garbage collector frees.
        save = saver(platform)
        self._saved = [save(platform.detach(x)) for x in tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors, each as `SavedTensor.get` returns it."""
        return [saved.get() for saved in self._saved]

    def check(self) -> None:
        """Raise RuntimeError if a tensor is held by reference and has been written in place."""
        for saved in self._saved:
            saved.check()


class _Saving(NamedTuple):
    """The function of a `saving_tensors`, and the innermost hooks at its start."""

    save: Callable[[Tensor], SavedTensor]
    hooks: Hooks | None


@contextlib.contextmanager
def saving_tensors(platform: Platform, save: Callable[[Tensor], SavedTensor] | None) -> Iterator[None]:
    """Save the tensors of `SavedTensors` in the block by `save` (None: as references), outside of hooks in it."""
    save = save or functools.partial(SavedReference, platform)
    # A context variable because each simulated rank is a thread.
    token = _saving.set(_Saving(save, platform.saving_hooks()))
    try:
        yield
    finally:
        _saving.reset(token)


def saver(platform: Platform) -> Callable[[Tensor], SavedTensor]:
    """Return the function that saves a tensor here: that of `saving_tensors`, of hooks, or by reference."""
    if is_hooked(platform):
        return functools.partial(PackedTensor, *platform.saving_hooks() or ())
    saving = _saving.get()
    return functools.partial(SavedReference, platform) if saving is None else saving.save


def is_hooked(platform: Platform) -> bool:
    """Return True inside hooks on saved tensors, such as the program's, unless a `saving_tensors` is further inside."""
    # Frameworks call the innermost hooks only, and those of a checkpoint count what they get.
    hooks, saving = platform.saving_hooks(), _saving.get()
    return hooks is not None and (saving is None or hooks != saving.hooks)


MODIFIED = (
    "backward needs a tensor of shape {} as it was in forward, but it has been modified in place since; write to a "
    "clone of it, or use an operation that is not in place"
)
_saving: ContextVar[_Saving | None] = ContextVar("hp_dtensor.comm.saved_tensors.saving", default=None)


ATTENTION, PRODUCTS, COLLECTIVES = KINDS = ("attention", "products", "collectives")
"""Kinds of operations whose results can be saved instead of recomputed."""


def saved_value(compute: Callable[[], T]) -> T:
    """Return `compute()` or, during recomputation, the value that the same call returned the first time.

    For decisions from data (which experts a token goes to), for counters, and for expensive values without gradient.

    Examples:
        >>> saved_value(lambda: 3)
        3
    """
    record = current_record.get()
    return compute() if record is None or record.is_computing else record.value(compute)


def restore_in_recomputation(variable: ContextVar[T], enter: Callable[[T], AbstractContextManager[Any]]) -> None:
    """Let recomputation run with a variable's value of forward; `enter` sets a value for a block."""
    _restored.append((variable, enter))


_restored: list[tuple[ContextVar[Any], Callable[[Any], AbstractContextManager[Any]]]] = []


def as_now(function: Callable[..., T]) -> Callable[..., T]:
    """Return `function` to be called by recomputation, at any time and in any thread, as it would be called now."""
    states = [(enter, variable.get()) for variable, enter in _restored]

    def called(*args: Any, **kwargs: Any) -> T:
        with contextlib.ExitStack() as stack:
            for enter, value in states:
                stack.enter_context(enter(value))
            return function(*args, **kwargs)

    return called


def recomputing_as_now(init: Callable[..., None]) -> Callable[..., None]:
    """Return an `__init__` of a framework's checkpoint frame whose function is recomputed `as_now`.

    So recomputation runs within the context parallelism of the forward. torch and MindSpore have the same frame.
    """

    @functools.wraps(init)
    def initialized(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        init(self, as_now(recompute_fn), *args, **kwargs)

    return initialized


def saved_result(kind: str, compute: Callable[[], T]) -> T:
    """Return `compute()` or, during a recomputation that saves results of this kind, the result of the first time.

    For use in the forward of an autograd node. Recomputation creates a new node around the saved result.

    Args:
        kind: one of `KINDS`.
        compute: returns plain tensors, or a tree of them, outside the graph.

    Examples:
        >>> saved_result("products", lambda: 3)
        3
    """
    record = current_record.get()
    if record is None or record.is_computing or kind not in record.kinds:
        return compute()
    results: T = record.result(compute)
    return results


def mark_reached(platform: Platform, x: Tensor) -> Tensor:
    """Return `x`, and mark this point as one that recomputation reaches on every rank.

    For use before a collective if this rank may save nothing for backward while others do, such as a rank whose experts
    receive no tokens. Recomputation ends at the last saved tensor. Without the mark such a rank would end earlier than
    the others, which then wait for it in their collectives.

    Args:
        x: plain.
    """
    if current_record.get() is None or not platform.recomputes_on_unpack or not platform.requires_grad(x):
        return x
    # Empty: it costs no memory, and only its place in the order of saved tensors counts.
    mark = SavedTensors(platform, platform.zeros((0,), x.dtype))

    def backward(grad: Tensor) -> Tensor:
        # Reading a saved tensor is what triggers its recomputation.
        _ = mark.tensors
        return grad

    return platform.custom_function(platform.detach, backward, x)


class RecomputeRecord:
    """Values saved by the first run of one recomputed call, in the order in which they were computed.

    Args:
        outer: the record of the recomputed call around this one. This record asks it for values, so that they are saved
            even if the outer call is recomputed entirely.
        kinds: kinds of operations whose results are saved.

    Attributes:
        is_computing: a value is being computed. Values inside of it are not recorded separately.

    Examples:
        >>> record = RecomputeRecord(platform)
        >>> with record.first():
        ...     saved_value(lambda: "once")
        'once'
        >>> with record.again():
        ...     saved_value(lambda: "twice")
        'once'
    """

    def __init__(self, platform: Platform, outer: RecomputeRecord | None = None, kinds: Collection[str] = ()) -> None:
        self.kinds = frozenset(kinds)
        self.is_computing = False
        self.platform = platform
        self._outer = outer
        self._operations = platform.saved_operations(self.kinds)
        self._values: list[Any] = []
        # Index of the next value to return during recomputation; None on the first run.
        self._position: int | None = None

    @property
    def position(self) -> int:
        """The number of values that the current run has reached."""
        return len(self._values) if self._position is None else self._position

    def value(self, compute: Callable[[], Any]) -> Any:
        """Return the next saved value; on the first run compute it, through the outer record, and save it."""
        outer = self._outer
        return self._next(compute if outer is None else lambda: outer.value(compute))

    def result(self, compute: Callable[[], Any]) -> Any:
        """Return the next results of an operation, as new tensors that share the memory of the saved ones."""

        def with_versions() -> tuple[Any, SavedTensors]:
            results = compute()
            return results, SavedTensors(self.platform, *tensors_in(results, self.platform.Tensor))

        values, saved = self._next(with_versions)
        # Forward may have written to the result, which recomputation would then return with the wrong values.
        saved.check()
        # An autograd node makes the tensors that its forward returns part of the graph. The record must not hold those.
        return map_tensors(values, self.platform.Tensor, self.platform.detach)

    def _next(self, compute: Callable[[], Any]) -> Any:
        if self._position is None:
            self._values.append(self._compute(compute))
            return self._values[-1]
        # More calls than in forward: the function depends on something that has changed since, and its gradient would
        # be that of another function.
        if self._position == len(self._values):
            raise RuntimeError(RECOMPUTED_DIFFERENTLY)
        self._position += 1
        return self._values[self._position - 1]

    def _compute(self, compute: Callable[[], Any]) -> Any:
        self.is_computing = True
        try:
            # Outside the graph: a value in it would hold the graph, which holds this record. And saved by reference: it
            # is not one of the tensors that recomputation replaces.
            with self._operations.paused(), self.platform.no_grad(), saving_tensors(self.platform, None):
                return compute()
        finally:
            self.is_computing = False

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Record the values that are computed in the block."""
        with _within(self), self._operations.first():
            yield

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Return the recorded values to the same calls in the block. Other calls raise a RuntimeError."""
        before, self._position = self._position, 0
        try:
            with _within(self), self._operations.again():
                yield
            if self._position != len(self._values):
                raise RuntimeError(RECOMPUTED_DIFFERENTLY)
        finally:
            # The first run may still be going on: the function may differentiate something inside of it.
            self._position = before


RECOMPUTED_DIFFERENTLY = (
    "a checkpointed function made other calls when it was recomputed in backward than in forward; "
    "expected the same calls of hp_dtensor.parallel.recompute.saved_value, and the same saved operations, in the same "
    "order"
)
current_record: ContextVar[RecomputeRecord | None] = ContextVar("hp_dtensor.comm.saved_tensors", default=None)


@contextlib.contextmanager
def _within(record: RecomputeRecord) -> Iterator[None]:
    """Make `record` the current one in the block."""
    token = current_record.set(record)
    try:
        yield
    finally:
        current_record.reset(token)
