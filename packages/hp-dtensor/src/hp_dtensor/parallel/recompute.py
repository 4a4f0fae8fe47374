"""One call of a function that backward computes again, and what it takes to do the same the second time.

Recomputation of what autograd has saved, where a platform lets it be replaced.

Forward records its graph with a place in the stead of each tensor that it saves. The first of them that backward needs
repeats the part, which fills the places in the order of forward, and is broken off at the last one: the product at the
end of a block, and what is sent after it, are not repeated. torch.utils.checkpoint does the same
(`use_reentrant=False`).

A part that has collectives must save alike on all ranks, or some would skip what others wait for. Operations on
shards do, uneven and empty ones too, for what autograd saves depends on operations and not on sizes.

Recomputation as one autograd node, on a platform where nothing replaces what autograd saves.

Forward records nothing; the node's backward computes the part again, with recording, and runs that graph's own backward
(Chen et al., 2016, arXiv 1604.06174).

Activation checkpointing: a part of a model keeps its input alone, and is computed again in backward.

Where the platform lets others replace what its autograd saves, backward repeats a part no further than to what it needs
(`recompute_saved`); elsewhere the part is one autograd node, which repeats all of it (`recompute_node`). Results of
operations that are dear to repeat may stay: attention, matrix products, collectives.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from hp_dtensor.comm.saved_tensors import (
    ANOTHER_WAY,
    KINDS,
    Held,
    Keeper,
    Kept,
    Record,
    current,
    keeping,
    saved_result,
    saved_value,
)
from hp_dtensor.exceptions import GradientPathError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.recording import located
from hp_dtensor.tensor.dtensor import DTensor

__all__ = ["KINDS", "checkpoint", "is_checkpointed", "noticed", "saved_result", "saved_value"]


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


Form = tuple[tuple[int, ...], Any, int]


def without_saved(part: Part, local: Tensor) -> Tensor:
    """Return the result of a part whose graph holds no tensors but parameters.

    Args:
        local: what the part is called with.

    Example:
        >>> x = platform.from_numpy(np.zeros(2, np.float32))
        >>> platform.set_requires_grad(x, True)
        >>> without_saved(Part(platform, platform.ops.silu, x, x, (), keep=()), x).shape
        torch.Size([2])
    """
    places = _Places(part)
    with part.platform.saving(places.save, _get), keeping(places.keep):
        return part.first(local)


class _Places:
    """The places of a part's saved tensors, in the order of forward.

    The graph holds them, and they hold this: a place that backward is through with is gone, and not filled again.
    """

    def __init__(self, part: Part) -> None:
        self._part, self._platform = part, part.platform
        self._forms: list[Form] = []
        self._places: list[Callable[[], _Place | None]] = []
        # Not of a bound method, with which this would hold itself.
        self._located_repeat = located(_Places._repeat)

    def save(self, x: Tensor) -> Keeper:
        """Keep a tensor that autograd saves: a parameter itself, a place for another one."""
        if not (self._platform.is_leaf(x) and self._platform.requires_grad(x)):
            return self.keep(x)
        self._add(x, lambda: None)
        return Held(self._platform, x)

    def keep(self, x: Tensor) -> Keeper:
        """Keep a place."""
        place = _Place(self)
        self._add(x, weakref.ref(place))
        return place

    def _add(self, x: Tensor, place: Callable[[], _Place | None]) -> None:
        self._forms.append(_form(self._part, x))
        self._places.append(place)

    def fill(self) -> None:
        """Repeat the part until all places that backward may come to are filled.

        Raises:
            RuntimeError: the part goes another way than in forward, or its input has been written.
        """
        self._located_repeat(self)

    def _repeat(self) -> None:
        found = ((index, place()) for index, place in enumerate(self._places))
        empty = {index: place for index, place in found if place is not None and place.kept is None}
        repetition = _Repetition(self._part, self._forms, empty)
        try:
            self._run(repetition)
            repetition.check()
        except BaseException:
            # Another attempt begins anew.
            for place in empty.values():
                place.kept = None
            raise
        finally:
            repetition.forget()

    def _run(self, repetition: _Repetition) -> None:
        try:
            leaf = self._part.leaf()
            with self._platform.saving(repetition.save, _get), keeping(repetition.keep):
                self._part.again(leaf)
        except Exception:
            # `_Enough`, or what a function that has caught it has come to.
            if not repetition.is_over:
                raise
        if not repetition.is_over:
            raise RuntimeError(f"{ANOTHER_WAY}. It has saved fewer tensors for its own backward")


class _Place:
    """One saved tensor, while a repetition has made it and backward has not come to it."""

    def __init__(self, places: _Places) -> None:
        self._places = places
        self.kept: Held | None = None

    def get(self) -> Tensor:
        """Return the tensor and let go of it: a graph that is retained is as small as before, and repeated again."""
        if self.kept is None:
            self._places.fill()
        kept, self.kept = self.kept, None
        assert kept is not None
        return kept.get()

    def check(self) -> None:
        """See `Keeper`: forward's tensor may be written, for it is not what backward gets."""


class _Enough(Exception):
    """Ends a repetition, as an error would: for none but an `Exception` do frameworks call hooks with `always_call`."""


class _Repetition:
    """Fills empty places, given by their numbers, with what the graph of a repetition saves.

    Attributes:
        is_over: all are filled.
    """

    def __init__(self, part: Part, forms: list[Form], empty: Mapping[int, _Place]) -> None:
        self._part, self._platform = part, part.platform
        self._forms, self._empty, self._last = forms, empty, max(empty)
        self._index = 0
        self._saved: list[Held] = []
        self.is_over = False

    def save(self, x: Tensor) -> Keeper:
        # MindSpore counts the writes to a detached tensor apart: those to this one are looked at in the end.
        self._saved.append(Held(self._platform, x))
        with self._platform.no_grad():
            # Else the place would hold the graph of the repetition.
            return self.keep(self._platform.detach(x))

    def keep(self, x: Tensor) -> Keeper:
        index, self._index = self._index, self._index + 1
        form = _form(self._part, x)
        # Behind the last one comes a function that has caught `_Enough`, and is told again.
        if index <= self._last and form != self._forms[index]:
            raise RuntimeError(
                f"{ANOTHER_WAY}. It saves {_described(form)} for its own backward, where forward saved "
                f"{_described(self._forms[index])}"
            )
        kept = Held(self._platform, x)
        if index in self._empty:
            self._empty[index].kept = kept
        if index >= self._last:
            self.is_over = True
            raise _Enough
        return kept

    def check(self) -> None:
        """Refuse a tensor that the part has written after an operation had saved it."""
        for saved in self._saved:
            saved.check()

    def forget(self) -> None:
        """Let go of the graph of the repetition."""
        self._saved.clear()


def _get(kept: Keeper) -> Tensor:
    return kept.get()


def _form(part: Part, x: Tensor) -> Form:
    return tuple(x.shape), x.dtype, part.position


def _described(form: Form) -> str:
    shape, dtype, position = form
    return f"a tensor of shape {list(shape)} and {dtype} after {position} kept values"


def as_one_node(part: Part, local: Tensor) -> Tensor:
    """Return the result of a part as that of a node which repeats the whole part.

    Args:
        local: what the part is called with.

    Raises:
        GradientPathError: from a backward to given inputs, and in `parallelize_value_and_grad`.

    Example:
        >>> x = platform.from_numpy(np.zeros(2, np.float32))
        >>> platform.set_requires_grad(x, True)
        >>> as_one_node(Part(platform, platform.ops.silu, x, x, (), keep=()), x).shape
        torch.Size([2])
    """
    if _for_given_inputs.get():
        raise GradientPathError(_GIVEN_INPUTS)
    platform = part.platform
    leave: list[Callable[[Tensor], Tensor]] = []

    def forward(local: Tensor) -> Tensor:
        # Nodes in here are dropped at once, so that what they keep need not be offloaded.
        with platform.no_grad(), keeping(None):
            y = part.first(local)
        leave[:] = [way_back(y)]
        return platform.detach(platform.unwrap(y)) if isinstance(y, DTensor) else y

    def backward(grad: Tensor) -> Tensor | None:
        # The inner backward below accumulates into `grad` of parameters, which a backward to given inputs promises not
        # to touch.
        if not platform.is_for_parameters():
            raise GradientPathError(_GIVEN_INPUTS)
        # The inner backward ends at this leaf, so that its gradient can be handed on; parameters are leaves too, and
        # accumulate there directly.
        leaf = part.leaf()
        y = part.again(leaf)
        with platform.enable_grad():
            end = _end_of(platform, y.to_local() if isinstance(y, DTensor) else y, grad)
            # Nobody reads the result of the repetition: its memory is not held through the backward.
            del y
            platform.backward(end)
        return platform.get_grad(leaf)

    result = platform.custom_function(forward, backward, local)
    return leave[0](result)


@contextlib.contextmanager
def for_given_inputs() -> Iterator[None]:
    """Refuse `as_one_node` in the block, because the backward of its results will be to given inputs.

    Where none of the inputs lies in front of it, the backward itself would not come by and notice.
    """
    # A context variable, for each simulated rank is a thread, and async code may interleave.
    token = _for_given_inputs.set(True)
    try:
        yield
    finally:
        _for_given_inputs.reset(token)


_GIVEN_INPUTS = (
    "a backward to given inputs (platform.grad, parallelize_value_and_grad, mindspore.value_and_grad) comes to what "
    "hp_dtensor.parallel.recompute.checkpoint has not kept. It would miss the gradients of parameters inside, which "
    "would be left in their grad. Use platform.backward(loss) and read grad, or leave checkpoint out"
)
_for_given_inputs: ContextVar[bool] = ContextVar("hp_dtensor.parallel.recompute.for_given_inputs", default=False)


def _end_of(platform: Platform, y: Tensor, grad: Tensor) -> Tensor:
    """Return a scalar without the data of `y`, from which backward goes on with `grad` as the gradient of `y`."""
    # Of float32, for the scalar's own gradient, which nobody looks at: MindSpore's CPU makes none of bfloat16.
    return platform.custom_function(lambda y: platform.zeros((), platform.dtype("float32")), lambda _: grad, y)


def checkpoint(
    function: Callable[..., Tensor], x: Tensor, *args: Any, platform: Platform, keep: Collection[str] = ()
) -> Tensor:
    """Return `function(x, *args)`, computed again in backward instead of keeping what it would need there.

    Forward and recomputation do the same: what is decided from data goes through `kept`, random operations draw the
    same numbers, and automatic mixed precision (`torch.autocast`) is that of forward. Where nothing is recorded, or `x`
    needs no gradient, this is a plain call.

    Args:
        function: a module, say; gradients reach its parameters.
        x: plain or distributed; the result may be either too.
        args: what no gradient goes to.
        keep: kinds of operations (`KINDS`) whose results stay from forward to backward, for which they are not computed
            again: `attention`; `products`, those of matrices; `collectives`, what other ranks have sent. Within the
            function of another call none stay.

    Raises:
        ValueError: there is no such kind.
        CapabilityError: the platform cannot keep one of the kinds.
        RuntimeError: from backward, if the recomputation goes another way, or `x` has been written.
        GradientPathError: from a backward to given inputs, and in `parallelize_value_and_grad`, on a platform that
            repeats parts as nodes (MindSpore).
    """
    unknown = sorted(set(keep) - set(KINDS))
    if unknown:
        raise ValueError(f"checkpoint: keep takes {', '.join(KINDS)}, got {', '.join(unknown)}")
    local = x.to_local() if isinstance(x, DTensor) else x
    if not (platform.is_grad_enabled() and platform.requires_grad(local)):
        return function(x, *args)
    if (calls := _calls.get()) is not None:
        calls.append(1)
    part = Part(platform, function, x, local, args, keep)
    return without_saved(part, local) if platform.repeats_for_saved else as_one_node(part, local)


def is_checkpointed() -> bool:
    """Return whether the current code is part of a training pass that is computed again in backward."""
    return current.get() is not None


@contextlib.contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether something in the block is computed again in backward.

    Example:
        >>> x = platform.from_numpy(np.zeros(2, np.float32))
        >>> platform.set_requires_grad(x, True)
        >>> with noticed() as is_repeated:
        ...     _ = checkpoint(platform.ops.silu, x, platform=platform)
        >>> is_repeated()
        True
    """
    calls: list[int] = []
    # A context variable, for each simulated rank is a thread.
    token = _calls.set(calls)
    try:
        yield lambda: bool(calls)
    finally:
        _calls.reset(token)


_calls: ContextVar[list[int] | None] = ContextVar("hp_dtensor.parallel.recompute.noticed", default=None)
