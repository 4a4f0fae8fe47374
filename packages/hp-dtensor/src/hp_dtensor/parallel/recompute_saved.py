"""Recomputation of what autograd has saved, where a platform lets it be replaced.

Forward records its graph with a place in the stead of each tensor that it saves. The first of them that backward needs
repeats the part, which fills the places in the order of forward, and is broken off at the last one: the product at the
end of a block, and what is sent after it, are not repeated. torch.utils.checkpoint does the same
(`use_reentrant=False`).

A part that has collectives must save alike on all ranks, or some would skip what others wait for. Operations on
shards do, uneven and empty ones too, for what autograd saves depends on operations and not on sizes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from hp_dtensor.comm.saved_tensors import ANOTHER_WAY, Held, Keeper, keeping
from hp_dtensor.parallel.recompute_part import Part
from hp_dtensor.platform.recording import located

Tensor = Any
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
