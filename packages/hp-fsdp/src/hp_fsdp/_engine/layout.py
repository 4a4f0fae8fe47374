"""The place of each parameter in a flat buffer: equal shards, cut only between units, little padding.

The full buffer is `num_shards` shards of `shard_numel` elements, one after another, as an all-gather leaves
them. Each tensor is one contiguous block of it, so that it is a view of the gathered buffer. A shard boundary
inside a block must lie a whole number of the tensor's units (rows, or a few rows) after the block's start,
so that every rank holds whole rows. (Same problem as the planner of veScale-FSDP, arXiv 2602.22437: choosing
the best layout is NP-hard; this one is a search over a few shard sizes and orders with a proved bound.)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Below this many elements padding is cheaper than a second collective, however large a share it is.
SMALL_PADDING = 16384
# Blocks start at multiples of this many bytes, which vectorised kernels and tensor cores want.
ALIGNMENT_BYTES = 16
# Shard sizes tried one by one above the lower bound, and the largest group whose every order is tried.
FINE_STEPS = 64
ALL_ORDERS = 4


@dataclass(frozen=True, slots=True)
class Block:
    """One tensor to place: `numel` elements that may be cut every `unit` elements from its start."""

    numel: int
    unit: int


def cut_dim_of(shape: Sequence[int]) -> int:
    """Return the dimension to cut where none is named: the first one longer than 1, where parts are contiguous."""
    return next((dim for dim, size in enumerate(shape) if size > 1), 0)


def block_of(shape: Sequence[int], cut_dim: int, itemsize: int) -> Block:
    """Return the block that a tensor takes in a flat buffer whose elements have `itemsize` bytes."""
    row_numel = math.prod(shape[:cut_dim]) * math.prod(shape[cut_dim + 1 :])
    return Block(math.prod(shape), math.lcm(max(1, row_numel), max(1, ALIGNMENT_BYTES // itemsize)))


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Blocks placed in a buffer of `num_shards * shard_numel` elements.

    Attributes:
        num_shards: ranks that hold one shard each.
        shard_numel: elements of one shard, padding included.
        blocks: what was placed.
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

    def piece(self, index: int, shard: int) -> tuple[int, int]:
        """Return (offset in the shard, length) of a shard's piece of a block, in elements; the length may be 0."""
        start, stop = self.offsets[index], self.offsets[index] + self.blocks[index].numel
        first = min(max(start, shard * self.shard_numel), stop)
        last = max(min(stop, (shard + 1) * self.shard_numel), first)
        return (first - shard * self.shard_numel if last > first else 0), last - first

    def pieces(self, index: int) -> tuple[int, ...]:
        """Return how many elements of a block each shard holds, in rank order."""
        return tuple(self.piece(index, shard)[1] for shard in range(self.num_shards))

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, length) of each stretch of padding in the full buffer, ascending."""
        end = 0
        for offset, block in sorted(zip(self.offsets, self.blocks, strict=True), key=lambda pair: pair[0]):
            if offset > end:
                yield end, offset - end
            end = max(end, offset + block.numel)
        if end < self.numel:
            yield end, self.numel - end


def padding_bound(blocks: Sequence[Block], num_shards: int) -> int:
    """Return the number of elements that the padding of `plan_layout` never exceeds.

    With L the least common multiple of the units, shards of a multiple of L let blocks start at multiples of
    their unit and be cut anywhere: every block wastes less than its successor's unit, the end less than L per
    shard.
    """
    units = [block.unit for block in blocks]
    return num_shards * math.lcm(*units) + sum(units)


@functools.lru_cache(maxsize=1024)
def plan_layout(blocks: tuple[Block, ...], num_shards: int) -> FlatLayout:
    """Place all blocks in one buffer with the smallest shards that the search finds.

    Complexity: a few hundred placements of O(blocks) each; identical groups are planned once.
    """
    lower = max(1, -(-sum(block.numel for block in blocks) // num_shards))
    orders = _orders(blocks)
    best: tuple[int, tuple[int, ...]] | None = None
    for shard_numel in _shard_sizes(blocks, num_shards, lower):
        if best is not None and shard_numel >= best[0]:
            continue
        offsets = _first_fit(blocks, orders, num_shards, shard_numel)
        if offsets is not None:
            best = shard_numel, offsets
    assert best is not None, "the last shard size always fits"
    return FlatLayout(num_shards, best[0], blocks, best[1])


def plan_buffers(blocks: Sequence[Block], num_shards: int) -> list[tuple[list[int], FlatLayout]]:
    """Distribute blocks over the fewest buffers with little padding, nearly always one.

    Returns:
        (indices of the blocks, layout) of each buffer.

    A buffer pads at most 1/8 of its parameters, or one largest unit per shard plus one unit per block, or
    `SMALL_PADDING` elements, whichever is most. Blocks whose units are so ill-assorted that no layout found
    keeps this together go to several buffers, in each of which every unit divides the largest.
    """
    everything = list(range(len(blocks)))
    whole = plan_layout(tuple(blocks), num_shards)
    if whole.padding <= _tolerance(blocks, num_shards):
        return [(everything, whole)]
    chains = _divisor_chains(blocks)
    return [(chain, plan_layout(tuple(blocks[i] for i in chain), num_shards)) for chain in chains]


def _tolerance(blocks: Sequence[Block], num_shards: int) -> int:
    units = [block.unit for block in blocks]
    eighth = sum(block.numel for block in blocks) // 8
    return max(eighth, num_shards * max(units) + sum(units), SMALL_PADDING)


def _divisor_chains(blocks: Sequence[Block]) -> list[list[int]]:
    chains: list[list[int]] = []
    for index in sorted(range(len(blocks)), key=lambda i: -blocks[i].unit):
        unit = blocks[index].unit
        home = next((chain for chain in chains if blocks[chain[0]].unit % unit == 0), None)
        if home is None:
            chains.append([index])
        else:
            home.append(index)
    return chains


def _orders(blocks: Sequence[Block]) -> list[tuple[int, ...]]:
    indices = range(len(blocks))
    if len(blocks) <= ALL_ORDERS:
        return list(itertools.permutations(indices))
    by_unit = sorted(indices, key=lambda i: (-blocks[i].unit, -blocks[i].numel))
    by_numel = sorted(indices, key=lambda i: -blocks[i].numel)
    return list(dict.fromkeys((tuple(by_unit), tuple(by_numel), tuple(indices))))


def _shard_sizes(blocks: Sequence[Block], num_shards: int, lower: int) -> Iterator[int]:
    """Yield shard sizes worth trying; the last one fits for certain (see `padding_bound`)."""
    step = _alignment(blocks)
    yield from itertools.islice(_multiples(step, lower), FINE_STEPS)
    for multiple in _common_units(blocks, lower):
        yield from itertools.islice(_multiples(multiple, lower), 4)
    total = sum(block.numel + block.unit for block in blocks)
    yield next(_multiples(math.lcm(*(block.unit for block in blocks)), -(-total // num_shards)))


def _common_units(blocks: Sequence[Block], lower: int) -> Iterable[int]:
    """Return least common multiples of the units of ever more blocks, the largest blocks (cut most often) first."""
    multiple = 1
    found: dict[int, None] = {}
    for block in sorted(blocks, key=lambda b: -b.numel):
        multiple = math.lcm(multiple, block.unit)
        found[multiple] = None
        if multiple > 2 * lower:
            break
    return found


def _multiples(unit: int, lower: int) -> Iterator[int]:
    return itertools.count(-(-lower // unit) * unit, unit)


def _first_fit(
    blocks: Sequence[Block], orders: Iterable[Sequence[int]], num_shards: int, shard_numel: int
) -> tuple[int, ...] | None:
    for order in orders:
        offsets = _place(blocks, order, num_shards, shard_numel)
        if offsets is not None:
            return offsets
    return None


def _place(blocks: Sequence[Block], order: Sequence[int], num_shards: int, shard_numel: int) -> tuple[int, ...] | None:
    """Place each block as far left as it goes, in this order; for one order no other placement ends earlier."""
    alignment = _alignment(blocks)
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
    """Return the first legal start at or after `start`, or None when the shard size rules the block out."""
    for _ in range(2):
        boundary = start - start % shard_numel + shard_numel
        if start + block.numel <= boundary:
            return start
        aligned = start + (boundary - start) % block.unit
        cut_once = aligned + block.numel <= boundary + shard_numel
        if aligned < boundary and (cut_once or shard_numel % block.unit == 0):
            return aligned
        start = boundary
    return None


def _alignment(blocks: Sequence[Block]) -> int:
    """Return a number of which every start is a multiple: units given in multiples of 16 bytes keep views aligned."""
    return math.gcd(*(block.unit for block in blocks))
