"""The flat layout against exhaustive search on small cases, and its bounds on large ones."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from hp_fsdp._engine.buffer_layout import (
    SMALL_PADDING,
    Block,
    FlatLayout,
    padding_bound,
    plan_buffers,
    plan_layout,
)


def check_legal(layout: FlatLayout) -> None:
    """No overlaps, nothing outside, boundaries only between units, starts aligned."""
    placed = sorted(zip(layout.offsets, layout.blocks, strict=True), key=lambda pair: pair[0])
    for (offset, block), (following, _) in itertools.pairwise(placed):
        assert offset + block.numel <= following
    assert placed[-1][0] + placed[-1][1].numel <= layout.numel
    alignment = math.gcd(*(block.unit for block in layout.blocks))
    for offset, block in placed:
        assert offset % alignment == 0
        for boundary in range(layout.shard_numel, layout.numel, layout.shard_numel):
            if offset < boundary < offset + block.numel:
                assert (boundary - offset) % block.unit == 0
    for index, block in enumerate(layout.blocks):
        assert sum(layout.local_numels(index)) == block.numel


def smallest_shard(blocks: tuple[Block, ...], num_shards: int) -> int:
    """The optimum: every order, every start of every block."""
    alignment = math.gcd(*(block.unit for block in blocks))

    def fits(remaining: tuple[Block, ...], start: int, shard: int) -> bool:
        if not remaining:
            return True
        for index, block in enumerate(remaining):
            rest = remaining[:index] + remaining[index + 1 :]
            for offset in range(start, num_shards * shard - block.numel + 1):
                inside = range(offset + 1, offset + block.numel)
                boundaries = (boundary for boundary in range(shard, num_shards * shard, shard) if boundary in inside)
                if offset % alignment == 0 and all((boundary - offset) % block.unit == 0 for boundary in boundaries):
                    if fits(rest, offset + block.numel, shard):
                        return True
                    break
        return False

    lower = -(-sum(block.numel for block in blocks) // num_shards)
    return next(shard for shard in itertools.count(max(lower, 1)) if fits(blocks, 0, shard))


def random_blocks(rng: random.Random, count: int, units: list[int], max_rows: int) -> tuple[Block, ...]:
    return tuple(Block(unit * rng.randint(1, max_rows), unit) for unit in (rng.choice(units) for _ in range(count)))


@pytest.mark.parametrize("seed", range(150))
def test_small_groups_get_the_smallest_possible_shards(seed: int) -> None:
    rng = random.Random(seed)
    blocks = random_blocks(rng, rng.randint(1, 4), [1, 2, 3, 4, 5, 7], 5)
    num_shards = rng.randint(1, 4)
    layout = plan_layout(blocks, num_shards)
    check_legal(layout)
    assert layout.shard_numel == smallest_shard(blocks, num_shards)


@pytest.mark.parametrize("seed", range(60))
def test_padding_stays_within_its_bound(seed: int) -> None:
    rng = random.Random(1000 + seed)
    blocks = random_blocks(rng, rng.randint(5, 40), [1, 3, 8, 10, 12, 64, 96, 768], 50)
    num_shards = rng.choice([1, 2, 3, 7, 8, 64])
    layout = plan_layout(blocks, num_shards)
    check_legal(layout)
    assert 0 <= layout.padding <= padding_bound(blocks, num_shards)


def test_rows_that_divide_evenly_need_no_padding() -> None:
    blocks = (Block(4096 * 64, 64), Block(64 * 64, 64), *[Block(64, 1)] * 8)
    assert plan_layout(blocks, 8).padding == 0


@pytest.mark.parametrize("sizes", [(1,), (3,), (7,), (1, 3, 7)])
def test_fewer_rows_than_ranks_leave_ranks_without_any(sizes: tuple[int, ...]) -> None:
    layout = plan_layout(tuple(Block(size, 1) for size in sizes), 8)
    check_legal(layout)
    pieces = [layout.local_numels(index) for index in range(len(sizes))]
    assert [sum(piece) for piece in pieces] == list(sizes)
    assert any(0 in piece for piece in pieces)


def test_gaps_and_blocks_tile_the_buffer() -> None:
    layout = plan_layout((Block(21, 3), Block(10, 5), Block(7, 1)), 4)
    covered = [0] * layout.numel
    for offset, block in zip(layout.offsets, layout.blocks, strict=True):
        for position in range(offset, offset + block.numel):
            covered[position] += 1
    for offset, length in layout.gaps():
        for position in range(offset, offset + length):
            covered[position] += 1
    assert covered == [1] * layout.numel


def test_ill_assorted_rows_go_to_several_buffers() -> None:
    blocks = [Block(1001 * 3000, 1001), Block(1009 * 3000, 1009), Block(1013 * 3000, 1013)]
    assert plan_layout(tuple(blocks), 8).padding > sum(block.numel for block in blocks) // 8
    buffers = plan_buffers(blocks, 8)
    assert len(buffers) == 3
    for indices, layout in buffers:
        check_legal(layout)
        units = [blocks[i].unit for i in indices]
        assert layout.padding <= max(8 * max(units) + sum(units), SMALL_PADDING)


def test_ordinary_groups_stay_in_one_buffer() -> None:
    assert len(plan_buffers([Block(9 * 5, 5), Block(7, 1), Block(3 * 14, 14)], 3)) == 1


def mixture_of_experts_layer(num_experts: int) -> tuple[Block, ...]:
    hidden, intermediate = 7168, 2048
    attention = [(1536, hidden), (24576, 1536), (576, hidden), (32768, 512), (hidden, 16384)]
    expert = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    norms = [(hidden, 1), (hidden, 1), (1536, 1), (512, 1)]
    shapes = attention + expert * (num_experts + 1) + [(num_experts, hidden)] + norms
    return tuple(Block(rows * row, math.lcm(row, 8)) for rows, row in shapes)


def test_a_layout_of_61_layers_with_256_experts_is_planned_once_and_pads_little() -> None:
    """`benchmarks/fsdp_layout.py` has the time."""
    plan_layout.cache_clear()
    layouts = [plan_buffers(mixture_of_experts_layer(256), 256) for _ in range(61)]
    assert plan_layout.cache_info().misses == 1
    assert all(len(buffers) == 1 for buffers in layouts)
    parameters = sum(block.numel for _, layout in layouts[0] for block in layout.blocks)
    assert sum(layout.padding for _, layout in layouts[0]) <= parameters // 50
