"""Times of each rank by kind of work, and the ranks that are slower than the others.

In a synchronous step all ranks take equally long, since each waits for the slowest one in collectives. So the time of a
rank's own work is measured, without waiting. Every few steps the times of all ranks are summed with the loss, each rank
in elements of its own, which needs no collective of its own.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hp_dtensor.comm.world import World
from hp_trainer.records import Straggler

WORK = ("data", "forward", "backward", "update")
KINDS = (*WORK, "waiting")
# Steps between two exchanges of times, and the number of exchanges in a row in which a rank must be slow: on a machine
# with more processes than cores each of them is slow now and then.
INTERVAL, PERSISTENCE = 10, 3
# Shorter differences per step are those of the clock and of the operating system.
_LEAST_SECONDS = 1e-3


class RankTimes:
    """Measures the work of this rank, and compares it with that of the others.

    Args:
        factor: time relative to the median of the others from which a rank is slow; None: nothing is measured.
        peers: groups of ranks with equal work, such as those of one pipeline stage.

    Attributes:
        stragglers: the ranks found slow by the last exchange; the same on all ranks.
        seconds: seconds per step of each rank by kind, of the last exchange.
    """

    def __init__(self, world: World, factor: float | None, peers: tuple[tuple[int, ...], ...]) -> None:
        self._factor = factor if world.size > 1 else None
        self._world, self._peers, self._stragglers = world, peers, _Detector(world.size)
        self._totals = dict.fromkeys(KINDS, 0.0)
        self._kind: str | None = None
        self._at = self._waited_at = 0.0
        # The first steps compile kernels and fill caches.
        self._is_warm, self._num_steps = False, 0
        self.stragglers: tuple[Straggler, ...] = ()
        self.seconds: Mapping[str, tuple[float, ...]] = {}

    @contextlib.contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Count the time in the block, without waiting in collectives and without blocks inside of it."""
        if self._factor is None:
            yield
            return
        outer = self._kind
        self._switch(kind)
        try:
            yield
        finally:
            self._switch(outer)

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """Count the block as forward within a measured step; a forward of an evaluation does not count."""
        return contextlib.nullcontext() if self._kind is None else self.measure("forward")

    def exchanged(self, step: int) -> np.ndarray:
        """Return the elements to sum over all ranks with the loss of this step, float32; none in most steps."""
        if self._factor is None:
            return np.empty(0, np.float32)
        self._num_steps += 1
        if step % INTERVAL:
            return np.empty(0, np.float32)
        table = np.zeros((self._world.size, len(KINDS)), np.float32)
        table[self._world.rank] = [self._totals[kind] / self._num_steps for kind in KINDS]
        self._totals, self._num_steps = dict.fromkeys(KINDS, 0.0), 0
        return table.reshape(-1)

    def compare(self, step: int, summed: list[float]) -> None:
        """Update the stragglers by the summed elements of `exchanged`."""
        self.seconds = {}
        if self._factor is None or not summed:
            return
        table = np.array(summed).reshape(self._world.size, len(KINDS))
        self.seconds = {
            kind: tuple(float(f"{each:.4g}") for each in table[:, index]) for index, kind in enumerate(KINDS)
        }
        if self._is_warm:
            self.stragglers = self._stragglers.update(step, table[:, : len(WORK)], self._peers, self._factor)
        self._is_warm = True

    def _switch(self, kind: str | None) -> None:
        now, waited = time.perf_counter(), sum(group.seconds_waited for group in self._world.groups())
        if self._kind is not None:
            # A thread may wait beside the computation, as for a checkpoint that is written in the background.
            waiting = min(max(0.0, waited - self._waited_at), now - self._at)
            self._totals[self._kind] += now - self._at - waiting
            self._totals["waiting"] += waiting
        self._kind, self._at, self._waited_at = kind, now, waited


@dataclass(frozen=True)
class _Slow:
    since: int
    count: int
    factor: float
    work: str


class _Detector:
    """Finds ranks that are slow in several exchanges in a row."""

    def __init__(self, world_size: int) -> None:
        self._slow: dict[int, _Slow] = {}
        # Not set by all launchers: without it, ranks are named only.
        self._node_size = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        self._is_one_node = self._node_size in (0, world_size)

    def update(
        self, step: int, table: np.ndarray, peers: tuple[tuple[int, ...], ...], factor: float
    ) -> tuple[Straggler, ...]:
        """Return the stragglers, given seconds per step `[rank, kind of work]`."""
        slow = {}
        for ranks in peers:
            for rank, times, work in _slower(table[list(ranks)], ranks, factor):
                before = self._slow.get(rank, _Slow(max(1, step - INTERVAL + 1), 0, 0.0, ""))
                slow[rank] = _Slow(before.since, before.count + 1, times, work)
        self._slow = slow
        return self._by_node({rank: each for rank, each in slow.items() if each.count >= PERSISTENCE})

    def _by_node(self, slow: Mapping[int, _Slow]) -> tuple[Straggler, ...]:
        nodes: dict[int, list[int]] = defaultdict(list)
        for rank in sorted(slow):
            nodes[rank if self._is_one_node else rank // self._node_size].append(rank)
        found = []
        for node, ranks in nodes.items():
            is_full = not self._is_one_node and len(ranks) == self._node_size
            for group in [ranks] if is_full else [[rank] for rank in ranks]:
                since = max(slow[rank].since for rank in group)
                times = statistics.median(slow[rank].factor for rank in group)
                found.append(
                    Straggler(
                        ranks=tuple(group),
                        node=node if is_full else None,
                        since=since,
                        factor=round(times, 2),
                        work=slow[group[0]].work,
                    )
                )
        return tuple(found)


def _slower(table: np.ndarray, ranks: tuple[int, ...], factor: float) -> Iterator[tuple[int, float, str]]:
    """Yield the slow ranks among peers, with their time relative to the others and the kind of work."""
    if len(ranks) < 2:
        return
    own = table.sum(1)
    # Without the slowest rank: of two ranks, one is compared with the other.
    usual = float(np.median(np.sort(own)[:-1]))
    for index in np.flatnonzero((own > factor * usual) & (own > usual + _LEAST_SECONDS)):
        excess = table[index] - np.median(table, axis=0)
        yield ranks[index], float(own[index] / max(usual, 1e-9)), WORK[int(excess.argmax())]
