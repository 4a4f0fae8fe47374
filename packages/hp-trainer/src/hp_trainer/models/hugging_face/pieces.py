"""Pieces: how boxes of the decoder's tensors lie in the tensors of a Hugging Face checkpoint.

A checkpoint may keep each expert by itself, gate and up side by side or alternating, and matrices transposed. All of it
is one affine map per dimension, so any box can be read, and any tensor be written, without the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hp_trainer.checkpoint import Box

Array = np.ndarray


@dataclass(frozen=True)
class Piece:
    """A box of one of the decoder's tensors, and its place in a tensor of the checkpoint.

    Attributes:
        source: name of the checkpoint's tensor.
        shape: its shape.
        box: the part of the decoder's tensor that it holds.
        axes: for each dimension of the checkpoint's tensor, the dimension of the decoder's; those of the decoder's
            that do not occur have one index in `box`.
        start, stride: index `i` of the box along `axes[d]` is index `start[d] + stride[d] * i` of dimension d.
    """

    source: str
    shape: tuple[int, ...]
    box: Box
    axes: tuple[int, ...]
    start: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self, part: Box, read_slices: Callable[[str, tuple[slice, ...]], Array]) -> Array:
        """Return some elements of the piece, shaped as their box.

        Args:
            part: within `box`.
            read_slices: (tensor of the checkpoint, slices) -> array.
        """
        found = read_slices(self.source, self._slices(part))
        order = sorted(range(len(self.axes)), key=lambda dimension: self.axes[dimension])
        return found.transpose(order).reshape(part.shape)

    def place(self, values: Array, into: Array) -> None:
        """Write the elements of the whole box, shaped as it, into the checkpoint's tensor `into`."""
        sizes = [self.box.shape[axis] for axis in sorted(self.axes)]
        ranks = {axis: rank for rank, axis in enumerate(sorted(self.axes))}
        into[self._slices(self.box)] = values.reshape(sizes).transpose([ranks[axis] for axis in self.axes])

    def _slices(self, part: Box) -> tuple[slice, ...]:
        found = []
        for axis, start, stride in zip(self.axes, self.start, self.stride, strict=True):
            first = start + stride * (part.offset[axis] - self.box.offset[axis])
            found.append(slice(first, first + stride * (part.shape[axis] - 1) + 1, stride))
        return tuple(found)


@dataclass(frozen=True)
class MappedTensor:
    """One tensor of the decoder: its global shape, and the pieces that it consists of."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def same(cls, source: str, shape: tuple[int, ...]) -> MappedTensor:
        """Return a tensor that is one of the checkpoint's as it stands there."""
        return cls.within(source, shape, shape)

    @classmethod
    def stacked(cls, sources: list[str], shape: tuple[int, ...]) -> MappedTensor:
        """Return a tensor whose first dimension counts tensors of the checkpoint, such as experts."""
        inner = shape[1:]
        zeros, ones = (0,) * len(inner), (1,) * len(inner)
        axes = tuple(range(1, len(shape)))
        boxes = [Box((i, *zeros), (1, *inner)) for i in range(len(sources))]
        pairs = zip(sources, boxes, strict=True)
        return cls(shape, tuple(Piece(source, inner, box, axes, zeros, ones) for source, box in pairs))

    @classmethod
    def within(
        cls,
        source: str,
        source_shape: tuple[int, ...],
        shape: tuple[int, ...],
        *,
        axes: tuple[int, ...] | None = None,
        start: tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> MappedTensor:
        """Return a tensor that is a part of one of the checkpoint's, perhaps transposed; arguments as in `Piece`."""
        count = len(shape)
        piece = Piece(
            source,
            source_shape,
            Box.full(shape),
            axes or tuple(range(count)),
            start or (0,) * count,
            stride or (1,) * count,
        )
        return cls(shape, (piece,))

    def read(self, wanted: Box, read_slices: Callable[[str, tuple[slice, ...]], Array]) -> Array:
        """Return a box of the tensor as float32, reading no more than it takes."""
        result = np.empty(wanted.shape, np.float32)
        for piece in self.pieces:
            part = piece.box.intersect(wanted)
            if part is not None:
                result[part.slices_in(wanted)] = piece.read(part, read_slices)
        return result
