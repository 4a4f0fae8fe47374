"""The parameters that a backward has used on any rank: only they have gradients, as on a single device.

On one device a parameter that a loss does not use keeps `grad` None, and optimizers leave it alone; with a gradient of
zeros AdamW would decay and move it. Ranks may use different parameters, so that this is decided over all of them: each
sends one bit per parameter and reduction with the message by which call orders are compared. A few elements at the end
of the reduction would do too, but would have to be read from the device.
"""

from __future__ import annotations

from collections.abc import Sequence

# Bits in one message; of more parameters, neighbours share a bit.
FLAG_BYTES = 1024


class UsedParameters:
    """The parameters of one reduction that have gradients.

    Attributes:
        indices: of those with gradients on this rank; once ranks have compared, of those with gradients on any.
        count: of all parameters in the buffer.
    """

    def __init__(self, indices: frozenset[int], count: int) -> None:
        self.indices = indices
        self.count = count


def pack_flags(reductions: Sequence[UsedParameters]) -> bytes:
    """Pack one bit per parameter of these reductions, in order, into `FLAG_BYTES` bytes."""
    total = sum(each.count for each in reductions)
    flags, begin = 0, 0
    for each in reductions:
        for index in each.indices:
            flags |= 1 << _bit(begin + index, total)
        begin += each.count
    return flags.to_bytes(FLAG_BYTES, "little")


def unpack_flags(messages: Sequence[bytes], reductions: Sequence[UsedParameters]) -> None:
    """Set the indices of these reductions to those that some rank's message has a bit of."""
    if not reductions:
        return
    flags = 0
    for message in messages:
        flags |= int.from_bytes(message, "little")
    total, begin = sum(each.count for each in reductions), 0
    for each in reductions:
        each.indices = frozenset(i for i in range(each.count) if flags >> _bit(begin + i, total) & 1)
        begin += each.count


def _bit(position: int, total: int) -> int:
    """Return the bit of a parameter; neighbours share one where there are more parameters than bits."""
    bits = FLAG_BYTES * 8
    return position if total <= bits else position * bits // total
