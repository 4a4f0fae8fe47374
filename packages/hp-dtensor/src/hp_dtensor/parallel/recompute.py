"""Activation checkpointing: a function saves only its input, and is recomputed in backward.

Where the platform has hooks on saved tensors, forward records its graph with a placeholder instead of each saved
tensor. The first placeholder that backward reads starts the recomputation, which fills the placeholders in the order of
forward and stops at the last one: the last product of a block, and communication after it, are not repeated.
`torch.utils.checkpoint` does the same (`use_reentrant=False`). A function with collectives must save the same number of
tensors on all ranks, or some ranks would stop before a collective that others wait for. Operations on shards do so, on
uneven and empty shards too, because what autograd saves depends on operations and not on sizes.

Elsewhere the function is one autograd node: forward records nothing, backward recomputes all of it with recording and
runs that graph's own backward (Chen et al., 2016, arXiv 1604.06174).

Results of expensive operations can be saved instead: attention, matrix products, collectives.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from hp_dtensor.comm.saved_tensors import (
    KINDS,
    RECOMPUTED_DIFFERENTLY,
    RecomputeRecord,
    SavedReference,
    SavedTensor,
    SavedTensors,
    as_now,
    current_record,
    saved_result,
    saved_value,
    saving_tensors,
)
from hp_dtensor.exceptions import GradientPathError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.recording import located
from hp_dtensor.tensor.dtensor import DTensor

__all__ = ["KINDS", "checkpoint", "detect_checkpoint", "is_checkpointed", "saved_result", "saved_value"]


Tensor = Any


class CheckpointedCall:
    """A call `function(x, *args)` made by `checkpoint`, with what recomputation needs to repeat it exactly.

    Args:
        local: the local data of `x`, in the graph.
        save: kinds of operations whose results are saved. Ignored within another checkpointed call, which saves only
            its own input.
    """

    def __init__(
        self,
        platform: Platform,
        function: Callable[..., Tensor],
        x: Tensor,
        local: Tensor,
        args: tuple[Any, ...],
        save: Collection[str],
    ) -> None:
        self.platform = platform
        # The graph is recorded on local data; `enter` rebuilds the DTensor inside the call.
        enter = to_layout_of(x)
        # Never compiled: backward calls it outside of a compiled function around forward, and both must save the same
        # tensors.
        self._call = platform.uncompiled(lambda local: function(enter(local), *args))
        self._call_again = as_now(self._call)
        # Records the version of the input: if it were written before backward, recomputation would give other values.
        self._given = SavedTensors(platform, local)
        outer = current_record.get()
        self._record = RecomputeRecord(platform, outer, save if outer is None else ())
        self._random, self._precision = _Random(platform), platform.automatic_precision()

    @property
    def position(self) -> int:
        """The number of `saved_value` and `saved_result` calls that the current run has passed."""
        return self._record.position

    def first(self, local: Tensor) -> Tensor:
        """Return the result for the local data of `x`."""
        with self._precision(), self._record.first(), self._random.first():
            return self._call(local)

    def leaf(self) -> Tensor:
        """Return the local data of `x`, unwritten since forward, as a leaf at which a recomputation ends."""
        # Reading `tensors` checks the version of the input.
        leaf = self.platform.detach(self._given.tensors[0])
        self.platform.set_requires_grad(leaf, True)
        return leaf

    def again(self, leaf: Tensor) -> Tensor:
        """Return the recomputed result, with recording. A function on another path raises a RuntimeError."""
        # Backward runs without recording; the recomputation needs its graph's saved tensors.
        with self.platform.enable_grad(), self._precision(), self._record.again(), self._random.again():
            return self._call_again(leaf)


class _Random:
    """The states of the platform's random generators, restored for a recomputation."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._before: Any = None

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Note the state at the start of the block, unless the block draws no numbers."""
        self._before = self._platform.random_state()
        yield
        # Most functions draw no random numbers, and need no saved state.
        if self._platform.is_random_state(self._before):
            self._before = None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Start the block in the noted state."""
        if self._before is None:
            yield
            return
        # Restored afterwards, so that backward does not change the numbers of the next forward.
        after = self._platform.random_state()
        self._platform.set_random_state(self._before)
        try:
            yield
        finally:
            self._platform.set_random_state(after)


def to_layout_of(x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that converts a local tensor to a DTensor placed as `x`, or returns it if `x` is plain."""
    if not isinstance(x, DTensor):
        return lambda local: local
    return functools.partial(DTensor.from_local, device_mesh=x.device_mesh, placements=x.placements, shape=x.spec.shape)


Form = tuple[tuple[int, ...], Any, int]


def with_placeholders(call: CheckpointedCall, local: Tensor) -> Tensor:
    """Return the result of a call on `local` whose graph holds no saved tensors except parameters."""
    placeholders = _Placeholders(call)
    platform = call.platform
    with platform.saving(placeholders.save, _get), saving_tensors(platform, placeholders.save_detached):
        return call.first(local)


class _Placeholders:
    """The placeholders for a call's saved tensors, in the order of forward.

    The graph holds the placeholders, and these hold this object. A placeholder that backward has consumed is freed, and
    is not filled again.
    """

    def __init__(self, call: CheckpointedCall) -> None:
        self._call, self._platform = call, call.platform
        self._forms: list[Form] = []
        self._placeholders: list[Callable[[], _Placeholder | None]] = []
        # Not a bound method, which would be a reference cycle.
        self._located_recompute = located(_Placeholders._recompute)

    def save(self, x: Tensor) -> SavedTensor:
        """Return what autograd saves in place of `x`: a parameter itself, else a placeholder."""
        # Parameters exist anyway. A placeholder would only make backward recompute for them.
        if not (self._platform.is_leaf(x) and self._platform.requires_grad(x)):
            return self.save_detached(x)
        self._add(x, lambda: None)
        return SavedReference(self._platform, x)

    def save_detached(self, x: Tensor) -> SavedTensor:
        """Return a placeholder for a tensor outside the graph, or a leaf."""
        placeholder = _Placeholder(self)
        self._add(x, weakref.ref(placeholder))
        return placeholder

    def _add(self, x: Tensor, placeholder: Callable[[], _Placeholder | None]) -> None:
        self._forms.append(_form(self._call, x))
        self._placeholders.append(placeholder)

    def fill(self) -> None:
        """Recompute until all remaining placeholders are filled; refuse another path or a written input."""
        self._located_recompute(self)

    def _recompute(self) -> None:
        # Weak references: placeholders that backward has consumed are gone, and are skipped.
        found = ((index, placeholder()) for index, placeholder in enumerate(self._placeholders))
        empty = {
            index: placeholder for index, placeholder in found if placeholder is not None and placeholder.tensor is None
        }
        recomputation = _Recomputation(self._call, self._forms, empty)
        try:
            self._run(recomputation)
            recomputation.check()
        except BaseException:
            # Another backward must recompute from the start.
            for placeholder in empty.values():
                placeholder.tensor = None
            raise
        finally:
            recomputation.forget()

    def _run(self, recomputation: _Recomputation) -> None:
        """Call the function again, until the recomputation stops it."""
        try:
            leaf, platform = self._call.leaf(), self._platform
            with platform.saving(recomputation.save, _get), saving_tensors(platform, recomputation.save_detached):
                self._call.again(leaf)
        except Exception:
            # `_AllFilled`, or an error raised by a function that caught it.
            if not recomputation.is_over:
                raise
        if not recomputation.is_over:
            raise RuntimeError(f"{RECOMPUTED_DIFFERENTLY}. It saved fewer tensors for its own backward")


class _Placeholder:
    """The placeholder of one saved tensor; holds the tensor between recomputation and its use in backward."""

    def __init__(self, placeholders: _Placeholders) -> None:
        self._placeholders = placeholders
        self.tensor: SavedReference | None = None

    def get(self) -> Tensor:
        """Return the tensor and release it: a retained graph stays small, and a second backward recomputes again."""
        if self.tensor is None:
            self._placeholders.fill()
        tensor, self.tensor = self.tensor, None
        assert tensor is not None
        return tensor.get()

    def check(self) -> None:
        """Do nothing: forward's tensor may be written, because backward gets the recomputed one."""


class _AllFilled(Exception):
    """Stops a recomputation. An `Exception`: frameworks call hooks with `always_call` for these only."""


class _Recomputation:
    """Fills empty placeholders by index with the tensors that a recomputation saves, until it `is_over`."""

    def __init__(self, call: CheckpointedCall, forms: list[Form], empty: Mapping[int, _Placeholder]) -> None:
        self._call, self._platform = call, call.platform
        self._forms, self._empty, self._last = forms, empty, max(empty)
        self._index = 0
        self._saved: list[SavedReference] = []
        self.is_over = False

    def save(self, x: Tensor) -> SavedTensor:
        """Fill the next placeholder with `x`, which may be part of the graph of the recomputation."""
        # MindSpore counts writes to a detached tensor separately, so the original is checked at the end.
        self._saved.append(SavedReference(self._platform, x))
        with self._platform.no_grad():
            # Detached: the placeholder would hold the graph of the recomputation otherwise.
            return self.save_detached(self._platform.detach(x))

    def save_detached(self, x: Tensor) -> SavedTensor:
        """Fill the next placeholder with a tensor outside the graph, and stop the function at the last one."""
        index, self._index = self._index, self._index + 1
        # Shape, dtype and the position among saved values identify a saved tensor without comparing data.
        form = _form(self._call, x)
        # An index beyond the last means that the function caught `_AllFilled`; it is raised again below.
        if index <= self._last and form != self._forms[index]:
            raise RuntimeError(
                f"{RECOMPUTED_DIFFERENTLY}. It saved {_described(form)} for its own backward, where forward saved "
                f"{_described(self._forms[index])}"
            )
        held = SavedReference(self._platform, x)
        if index in self._empty:
            self._empty[index].tensor = held
        # Stops the function by an exception at the last tensor that backward needs.
        if index >= self._last:
            self.is_over = True
            raise _AllFilled
        return held

    def check(self) -> None:
        """Raise if the function wrote a tensor in place after an operation had saved it."""
        for saved in self._saved:
            saved.check()

    def forget(self) -> None:
        """Release the graph of the recomputation."""
        self._saved.clear()


def _get(holder: SavedTensor) -> Tensor:
    return holder.get()


def _form(call: CheckpointedCall, x: Tensor) -> Form:
    """Return what a saved tensor of a recomputation is compared by: shape, dtype, number of values saved before it."""
    return tuple(x.shape), x.dtype, call.position


def _described(form: Form) -> str:
    shape, dtype, position = form
    return f"a tensor of shape {list(shape)} and {dtype} after {position} saved values"


def as_one_node(call: CheckpointedCall, local: Tensor) -> Tensor:
    """Return the result of a call on `local` as that of one autograd node, whose backward recomputes all of it."""
    # Refused in forward already: the backward to given inputs may not reach this node.
    if _backward_to_given_inputs.get():
        raise GradientPathError(_GIVEN_INPUTS)
    platform = call.platform
    leave: list[Callable[[Tensor], Tensor]] = []

    def forward(local: Tensor) -> Tensor:
        # Nodes made here are freed at once, so what they save need not be offloaded.
        with platform.no_grad(), saving_tensors(platform, None):
            y = call.first(local)
        # The node returns local data; the DTensor is rebuilt from it outside, with autograd's own view of it.
        leave[:] = [to_layout_of(y)]
        return platform.detach(platform.unwrap(y)) if isinstance(y, DTensor) else y

    def backward(grad: Tensor) -> Tensor | None:
        # The inner backward below accumulates into `grad` of parameters, which a backward to given inputs must not
        # touch.
        if not platform.is_for_parameters():
            raise GradientPathError(_GIVEN_INPUTS)
        # The inner backward ends at this leaf, whose gradient is returned. Parameters are leaves too, and accumulate
        # their gradients directly.
        leaf = call.leaf()
        y = call.again(leaf)
        with platform.enable_grad():
            # A scalar whose backward passes `grad` to the result and that does not hold its data. Its own gradient is
            # ignored; float32, because MindSpore's CPU cannot make ones of bfloat16.
            end = platform.custom_function(
                lambda _: platform.zeros((), platform.dtype("float32")),
                lambda _: grad,
                y.to_local() if isinstance(y, DTensor) else y,
            )
            # The recomputed result is not needed, so its memory is freed before the backward.
            del y
            platform.backward(end)
        return platform.get_grad(leaf)

    result = platform.custom_function(forward, backward, local)
    return leave[0](result)


@contextlib.contextmanager
def backward_to_given_inputs() -> Iterator[None]:
    """Declare that the backward of forwards in the block will be to given inputs. `as_one_node` raises in forward then.

    If none of the inputs precedes the node, that backward does not reach it and could not raise the error itself.
    """
    # A context variable, for each simulated rank is a thread, and async code may interleave.
    token = _backward_to_given_inputs.set(True)
    try:
        yield
    finally:
        _backward_to_given_inputs.reset(token)


_GIVEN_INPUTS = (
    "a backward to given inputs (platform.grad, parallelize_value_and_grad, mindspore.value_and_grad) reaches a "
    "function of hp_dtensor.parallel.recompute.checkpoint. It would miss the gradients of parameters inside, which "
    "would be left in their grad. Use platform.backward(loss) and read grad, or leave checkpoint out"
)
_backward_to_given_inputs: ContextVar[bool] = ContextVar(
    "hp_dtensor.parallel.recompute.backward_to_given_inputs", default=False
)


def checkpoint(
    function: Callable[..., Tensor], x: Tensor, *args: Any, platform: Platform, save: Collection[str] = ()
) -> Tensor:
    """Return `function(x, *args)`, recomputed in backward instead of saving intermediate results.

    Recomputation repeats forward exactly: values decided from data go through `saved_value`, random operations draw the
    same numbers, and automatic mixed precision (`torch.autocast`) is that of forward. If nothing is recorded, or `x`
    needs no gradient, this is a plain call.

    Args:
        function: for example a module; gradients reach its parameters.
        x: plain or distributed; the result may be either too.
        args: further arguments, which get no gradient.
        save: kinds of operations (`KINDS`) whose results are saved in forward and not recomputed: `attention`;
            `products` (of matrices); `collectives` (data received from other ranks). Ignored within another
            checkpointed function.

    Raises:
        ValueError: unknown kind.
        CapabilityError: the platform cannot save one of the kinds.
        RuntimeError: from backward, if recomputation takes another path than forward, or `x` has been written.
        GradientPathError: from a backward to given inputs, and in `parallelize_value_and_grad`, on a platform without
            hooks on saved tensors (MindSpore 2.9).
    """
    unknown = sorted(set(save) - set(KINDS))
    if unknown:
        raise ValueError(f"checkpoint: save takes {', '.join(KINDS)}, got {', '.join(unknown)}")
    # Autograd nodes work on local tensors.
    local = x.to_local() if isinstance(x, DTensor) else x
    if not (platform.is_grad_enabled() and platform.requires_grad(local)):
        return function(x, *args)
    if (calls := _calls.get()) is not None:
        calls.append(1)
    call = CheckpointedCall(platform, function, x, local, args, save)
    return with_placeholders(call, local) if platform.recomputes_on_unpack else as_one_node(call, local)


def is_checkpointed() -> bool:
    """Return whether the current code is within a training forward, or recomputation, of `checkpoint`."""
    return current_record.get() is not None


@contextlib.contextmanager
def detect_checkpoint() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether `checkpoint` was used in the block with recording.

    Examples:
        >>> x = platform.from_numpy(np.zeros(2, np.float32))
        >>> platform.set_requires_grad(x, True)
        >>> with detect_checkpoint() as is_recomputed:
        ...     _ = checkpoint(platform.ops.silu, x, platform=platform)
        >>> is_recomputed()
        True
    """
    calls: list[int] = []
    # A context variable, for each simulated rank is a thread.
    token = _calls.set(calls)
    try:
        yield lambda: bool(calls)
    finally:
        _calls.reset(token)


_calls: ContextVar[list[int] | None] = ContextVar("hp_dtensor.parallel.recompute.detect_checkpoint", default=None)
