"""Bytes and operations of one forward and backward of a module, counted without memory for its tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CountedParameter:
    """A parameter of a module.

    Attributes:
        name: dotted.
        shape: whole.
        itemsize: bytes of an element as the module was built.
        trainable: whether it gets a gradient.
        part: index, in `CountedStep.parts`, of the part that it belongs to; None: it lies outside of all.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    part: int | None


@dataclass(frozen=True, kw_only=True)
class CountedPart:
    """Bytes that are alive while one part of a module computes: all that there are but parameters and their gradients.

    Attributes:
        name: dotted.
        before, after: when its forward begins and ends.
        peak: at most while its backward runs, with the gradients of its own parameters.
        end: when its backward ends.
        is_reached: the backward comes to it; if not, `peak` and `end` are 0.
    """

    name: str
    before: int
    after: int
    peak: int = 0
    end: int = 0
    is_reached: bool = False


@dataclass(frozen=True, kw_only=True)
class CountedStep:
    """One forward and backward of a module.

    Attributes:
        parameters: each once, in the module's order.
        buffers: bytes of the module's other tensors, such as tables of positions.
        parts: in the order of forward; in front those that it does not call.
        after_forward: bytes alive between forward and backward.
        outside: most bytes from the end of the last part's forward to the beginning of its backward.
        flops: operations of matrix products and attention, both passes; attention without regard to a mask.
    """

    parameters: tuple[CountedParameter, ...]
    buffers: int
    parts: tuple[CountedPart, ...]
    after_forward: int
    outside: int
    flops: int
