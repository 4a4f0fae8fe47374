"""The layout of parameters in a flat buffer: where each one starts, where shards end, and the padding between.

The full buffer is `num_shards` shards of `shard_numel` elements, one after another, as an all-gather leaves
them. Each parameter is one contiguous block of it, so that the unsharded parameter is a view of the gathered
buffer, without a copy. A shard boundary inside a block must be a multiple of the block's unit (a row, or a few
rows) after its start, so that every rank holds complete rows. Equal shards and this condition are what padding
is needed for. (The planner of veScale-FSDP, arXiv 2602.22437, solves the same problem. The best layout is
NP-hard to find; this is a search over a few shard sizes and orders, whose padding has a proved bound.)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Below this many elements padding is cheaper than a second collective, whatever fraction of the buffer it is.
SMALL_PADDING = 16384
# Blocks start at multiples of this many bytes, because vectorised kernels and tensor cores read aligned memory faster.
ALIGNMENT_BYTES = 16
# Number of shard sizes tried one by one above the lower bound; most blocks for which every order is tried.
FINE_STEPS = 64
ALL_ORDERS = 4


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor to place: `numel` elements, which a shard boundary may split every `unit` elements from its start."""

    numel: int
    unit: int


def block_of(shape: Sequence[int], shard_dim: int, itemsize: int) -> Block:
    """Return the block of a tensor in a flat buffer whose elements have `itemsize` bytes."""
    row_numel = math.prod(shape[:shard_dim]) * math.prod(shape[shard_dim + 1 :])
    # A unit is a multiple of both a row and 16 bytes: shards hold complete rows, and every view is aligned.
    return Block(math.prod(shape), math.lcm(max(1, row_numel), max(1, ALIGNMENT_BYTES // itemsize)))


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Blocks placed in a buffer of `num_shards * shard_numel` elements.

    Attributes:
        num_shards: number of ranks, each of which holds one shard.
        shard_numel: elements of one shard, padding included.
        blocks: the placed tensors.
        offsets: start of each block in the full buffer, in elements.
    """

    num_shards: int
    shard_numel: int
    blocks: tuple[Block, ...]
    offsets: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the full buffer."""
        return self.num_shards * self.shard_numel

    @property
    def padding(self) -> int:
        """Elements of the full buffer that belong to no block."""
        return self.numel - sum(block.numel for block in self.blocks)

    def range_in_shard(self, index: int, shard: int) -> tuple[int, int]:
        """Return (offset in the shard, length) of the part of a block that a shard holds, in elements.

        The length is 0 where the shard holds nothing of the block.
        """
        start, stop = self.offsets[index], self.offsets[index] + self.blocks[index].numel
        # Both ends clamped to the block, so that an empty range has length 0.
        first = min(max(start, shard * self.shard_numel), stop)
        last = max(min(stop, (shard + 1) * self.shard_numel), first)
        return (first - shard * self.shard_numel if last > first else 0), last - first

    def local_numels(self, index: int) -> tuple[int, ...]:
        """Return the number of elements of a block that each shard holds, in rank order."""
        return tuple(self.range_in_shard(index, shard)[1] for shard in range(self.num_shards))

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of each span of padding in the full buffer, in ascending order."""
        end = 0
        for offset, block in sorted(zip(self.offsets, self.blocks, strict=True), key=lambda pair: pair[0]):
            if offset > end:
                yield end, offset - end
            end = max(end, offset + block.numel)
        if end < self.numel:
            yield end, self.numel - end


def padding_bound(blocks: Sequence[Block], num_shards: int) -> int:
    """Return an upper bound of the padding that `plan_layout` leaves, in elements."""
    # Let L be the least common multiple of the units. In shards of a multiple of L elements every boundary is legal for
    # a block that starts at a multiple of its unit. Each block then wastes less than the unit of the next one, and the
    # end wastes less than L per shard.
    units = [block.unit for block in blocks]
    return num_shards * math.lcm(*units) + sum(units)


@functools.lru_cache(maxsize=1024)
def plan_layout(blocks: tuple[Block, ...], num_shards: int) -> FlatLayout:
    """Place all blocks in one buffer, with the smallest shards that the search finds.

    Complexity: a few hundred placements of O(blocks) each. The cache plans layers of equal shapes once.
    """
    # No shard can be smaller than the mean.
    lower = max(1, -(-sum(block.numel for block in blocks) // num_shards))
    indices = range(len(blocks))
    by_unit = sorted(indices, key=lambda i: (-blocks[i].unit, -blocks[i].numel))
    by_numel = sorted(indices, key=lambda i: -blocks[i].numel)
    # All orders of a few blocks are tried, and three of many.
    orders: Iterable[Sequence[int]] = dict.fromkeys((tuple(by_unit), tuple(by_numel), tuple(indices)))
    if len(blocks) <= ALL_ORDERS:
        orders = list(itertools.permutations(indices))
    best: tuple[int, tuple[int, ...]] | None = None
    # Every start is a multiple of it. Units are multiples of 16 bytes (`block_of`), and so is this.
    alignment = math.gcd(*(block.unit for block in blocks))
    for shard_numel in _shard_sizes(blocks, num_shards, lower, alignment):
        if best is not None and shard_numel >= best[0]:
            continue
        placed = (_place(blocks, order, num_shards, shard_numel, alignment) for order in orders)
        offsets = next((each for each in placed if each is not None), None)
        if offsets is not None:
            best = shard_numel, offsets
    assert best is not None, "the last shard size always fits"
    return FlatLayout(num_shards, best[0], blocks, best[1])


def plan_buffers(blocks: Sequence[Block], num_shards: int) -> list[tuple[list[int], FlatLayout]]:
    """Distribute blocks over as few buffers as keep the padding small. Nearly always that is one buffer.

    The padding of a buffer is at most the largest of: 1/8 of its parameters, one largest unit per shard plus one
    unit per block, and `SMALL_PADDING` elements. Blocks for which no such layout is found in one buffer are
    distributed over several, in each of which every unit divides the largest one.

    Returns:
        (indices of the blocks, layout) of each buffer.
    """
    single = plan_layout(tuple(blocks), num_shards)
    units, eighth = [block.unit for block in blocks], sum(block.numel for block in blocks) // 8
    if single.padding <= max(eighth, num_shards * max(units) + sum(units), SMALL_PADDING):
        return [(list(range(len(blocks))), single)]
    chains = _divisor_chains(blocks)
    return [(chain, plan_layout(tuple(blocks[i] for i in chain), num_shards)) for chain in chains]


def _divisor_chains(blocks: Sequence[Block]) -> list[list[int]]:
    """Partition the blocks into chains, in each of which every unit divides the unit of the first block."""
    chains: list[list[int]] = []
    for index in sorted(range(len(blocks)), key=lambda i: -blocks[i].unit):
        unit = blocks[index].unit
        # By descending unit, so that the first block of a chain has its largest unit.
        chain = next((chain for chain in chains if blocks[chain[0]].unit % unit == 0), None)
        if chain is None:
            chains.append([index])
        else:
            chain.append(index)
    return chains


def _shard_sizes(blocks: Sequence[Block], num_shards: int, lower: int, alignment: int) -> Iterator[int]:
    """Yield the shard sizes to try. The last one always fits, see `padding_bound`."""
    # Three kinds of candidates: just above the lower bound, multiples on which most boundaries are legal, and the bound
    # of `padding_bound`.
    yield from itertools.islice(_multiples(alignment, lower), FINE_STEPS)
    for multiple in _common_units(blocks, lower):
        yield from itertools.islice(_multiples(multiple, lower), 4)
    total = sum(block.numel + block.unit for block in blocks)
    yield next(_multiples(math.lcm(*(block.unit for block in blocks)), -(-total // num_shards)))


def _common_units(blocks: Sequence[Block], lower: int) -> Iterator[int]:
    """Yield the least common multiples of the units of the largest block, the two largest, and so on."""
    # Large blocks come first because most shard boundaries are inside them.
    multiple = 0
    for block in sorted(blocks, key=lambda b: -b.numel):
        before, multiple = multiple, math.lcm(multiple or 1, block.unit)
        if multiple != before:
            yield multiple
        if multiple > 2 * lower:
            break


def _multiples(unit: int, lower: int) -> Iterator[int]:
    """Yield the multiples of `unit` that are at least `lower`, in ascending order."""
    return itertools.count(-(-lower // unit) * unit, unit)


def _place(
    blocks: Sequence[Block], order: Sequence[int], num_shards: int, shard_numel: int, alignment: int
) -> tuple[int, ...] | None:
    """Place each block at its first legal multiple of `alignment`, in this order. Return None if they do not fit.

    For a given order no other placement ends earlier.
    """
    offsets = [0] * len(blocks)
    end, limit = 0, num_shards * shard_numel
    for index in order:
        start = _earliest(blocks[index], end + -end % alignment, shard_numel)
        if start is None or start + blocks[index].numel > limit:
            return None
        offsets[index] = start
        end = start + blocks[index].numel
    return tuple(offsets)


def _earliest(block: Block, start: int, shard_numel: int) -> int | None:
    """Return the first legal start at or after `start`, or None if a block of this size and unit never fits."""
    # Two tries: in the shard of `start`, and from the start of the next one, where a block has the most space.
    for _ in range(2):
        boundary = start - start % shard_numel + shard_numel
        if start + block.numel <= boundary:
            return start
        # The next shard boundary is a multiple of the unit after this start. All further ones are too if the unit
        # divides the shard.
        aligned = start + (boundary - start) % block.unit
        is_split_once = aligned + block.numel <= boundary + shard_numel
        if aligned < boundary and (is_split_once or shard_numel % block.unit == 0):
            return aligned
        start = boundary
    return None
