"""Processor times of alternatives, measured in turns."""

from __future__ import annotations

import time

ROUNDS = 9


def _mean_time(function, calls):
    start = time.process_time()
    for _ in range(calls):
        function()
    return (time.process_time() - start) / calls


def compare(functions, seconds):
    """Return the best mean time of a call of each alternative, in microseconds, over alternating rounds."""
    counts = []
    for function in functions:
        for _ in range(20):
            function()
        counts.append(max(1, int(seconds / ROUNDS / max(_mean_time(function, 3), 1e-7))))
    best = [float("inf")] * len(functions)
    for _ in range(ROUNDS):
        for i, (function, calls) in enumerate(zip(functions, counts, strict=True)):
            best[i] = min(best[i], _mean_time(function, calls) * 1e6)
    return best
