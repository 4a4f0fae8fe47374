"""Boxes: rectangular parts of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: the elements with `offset[i] <= index[i] < offset[i] + shape[i]`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that is all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the common part of two boxes, or None where there is none."""
        begin = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = zip(self._end, other._end, begin, strict=True)
        shape = tuple(min(a, b) - start for a, b, start in ends)
        return Box(begin, shape) if all(size > 0 for size in shape) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices at which this box stands within an array that holds the box `outer`."""
        begins = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.shape, strict=True))

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Return whether the box is a part of a tensor of this shape."""
        return (
            len(self.offset) == len(self.shape) == len(shape)
            and all(begin >= 0 and size >= 0 for begin, size in zip(self.offset, self.shape, strict=True))
            and all(end <= size for end, size in zip(self._end, shape, strict=True))
        )

    @property
    def _end(self) -> tuple[int, ...]:
        return tuple(begin + size for begin, size in zip(self.offset, self.shape, strict=True))


def cover_exactly(boxes: Sequence[Box], shape: Sequence[int]) -> str | None:
    """Return why the boxes are no tiling of a tensor of this shape, or None when they are one.

    O(n log n) for boxes that do not overlap on the first dimension.
    """
    outside = [box for box in boxes if not box.is_inside(shape)]
    if outside:
        return f"{outside[0]} is outside the shape {tuple(shape)}"
    ordered = sorted((box for box in boxes if box.numel), key=lambda box: box.offset)
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if shape and other.offset[0] >= box.offset[0] + box.shape[0]:
                break
            if box.intersect(other) is not None:
                return f"{box} and {other} overlap"
    missing = math.prod(shape) - sum(box.numel for box in ordered)
    return f"{missing} of {math.prod(shape)} elements are in no box" if missing else None
