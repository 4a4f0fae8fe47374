"""Time to plan the layout of a model of DeepSeek-V3's shapes: 61 layers, 58 of them with 256 routed experts.

    python benchmarks/fsdp_layout.py

One group per layer, over 8 to 2048 ranks. Layers of the same shapes are planned once; the second column is without
that cache. Goal: under a second. The last column is the padding as a fraction of the parameters.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

from hp_fsdp._engine.buffer_layout import Block, plan_buffers, plan_layout

HIDDEN, DENSE, EXPERT, EXPERTS, LAYERS, DENSE_LAYERS = 7168, 18432, 2048, 256, 61, 3
ATTENTION = ((1536, HIDDEN), (24576, 1536), (576, HIDDEN), (32768, 512), (HIDDEN, 16384))
NORMS = ((HIDDEN, 1), (HIDDEN, 1), (1536, 1), (512, 1))


def feed_forward(width: int) -> tuple[tuple[int, int], ...]:
    return (width, HIDDEN), (width, HIDDEN), (HIDDEN, width)


def layer(index: int) -> tuple[Block, ...]:
    """Return the blocks of a layer in bfloat16. The matrices of each expert are separate parameters."""
    if index < DENSE_LAYERS:
        shapes = (*ATTENTION, *feed_forward(DENSE), *NORMS)
    else:
        shapes = (*ATTENTION, *feed_forward(EXPERT) * (EXPERTS + 1), (EXPERTS, HIDDEN), *NORMS)
    return tuple(Block(rows * row, math.lcm(row, 8)) for rows, row in shapes)


def plan(layers: Sequence[tuple[Block, ...]], num_ranks: int, uncached: bool) -> tuple[float, float]:
    """Plan all layers; return (seconds, padding / parameters)."""
    plan_layout.cache_clear()
    padding = parameters = 0
    start = time.perf_counter()
    for blocks in layers:
        for _, layout in plan_buffers(blocks, num_ranks):
            padding += layout.padding
            parameters += layout.numel - layout.padding
        if uncached:
            plan_layout.cache_clear()
    return time.perf_counter() - start, padding / parameters


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    layers = [layer(index) for index in range(LAYERS)]
    print(f"{sum(map(len, layers))} parameters")
    print(f"{'ranks':>6} {'seconds':>9} {'uncached':>10} {'padding':>9}")
    for num_ranks in (8, 64, 256, 2048):
        seconds, padding = plan(layers, num_ranks, uncached=False)
        uncached, _ = plan(layers, num_ranks, uncached=True)
        print(f"{num_ranks:6d} {seconds:9.3f} {uncached:10.3f} {padding:9.3%}")


if __name__ == "__main__":
    main()
