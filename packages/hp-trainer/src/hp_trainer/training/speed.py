"""Speed of a run: model FLOP/s, profiles, out-of-memory errors, and the ranks that are slower than the others.

In a synchronous step all ranks take equally long, since each waits for the slowest one in collectives. So the time of a
rank's own work is measured, without waiting. Every few steps the all-reduce of the loss has further elements, some for
each rank, which gather the times of all ranks without another collective."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from hp_dtensor.comm.world import World
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.memory import MemoryUse, memory_use
from hp_trainer.config import ProfileConfig
from hp_trainer.exceptions import LESS_MEMORY, TrainingError, is_out_of_memory
from hp_trainer.optimizers import state_bytes
from hp_trainer.records import Straggler
from hp_trainer.sizes import format_size
from hp_trainer.training.setup import RankSetup


class ModelSpeed:
    """Model FLOP/s of a job, and their fraction of the devices' peak rate (MFU).

    A model reports its FLOPs by a method `training_flops_per_token(sequence_length)`: forward and backward, without
    recomputation. Both values are None if the model has no such method, and utilization if the peak is unknown.
    """

    def __init__(self, setup: RankSetup) -> None:
        training, world_size = setup.config.training, setup.mesh.world.size
        per_token = getattr(setup.model, "training_flops_per_token", None)
        # Constant over the run: the estimate counts padding of a packed row as tokens.
        tokens = training.global_batch_size * training.sequence_length
        self._step = None if per_token is None else tokens * float(per_token(training.sequence_length))
        rate = setup.platform.peak_flops(training.dtype)
        self._peak = None if rate is None else rate * world_size

    def flops_per_second(self, seconds: float) -> float | None:
        """Return the model FLOP/s of a step of this duration."""
        return None if self._step is None else self._step / seconds

    def utilization(self, seconds: float) -> float | None:
        """Return the fraction of the devices' peak rate in a step of this duration."""
        return None if self._step is None or self._peak is None else self._step / seconds / self._peak


class StepProfile:
    """Profiles the steps from `profile.first` to `profile.last` on every rank. Leaving the block ends the profile."""

    def __init__(self, config: ProfileConfig, folder: Path, platform: Platform, rank: int) -> None:
        self._config, self._folder, self._platform, self._rank = config, folder, platform, rank
        self._open: AbstractContextManager[None] | None = None

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            # Cleared first: a profiler that fails to write must not be closed a second time.
            opened, self._open = self._open, None
            opened.__exit__(kind, error, trace)

    def before_step(self, step: int) -> None:
        """Start the profile at its first step, or later if a resumed run starts within its steps."""
        first, last = self._config.first, self._config.last
        if self._open is None and first is not None and first <= step <= (last or first):
            self._folder.mkdir(exist_ok=True)
            self._open = self._platform.profile(self._folder, self._rank)
            self._open.__enter__()

    def after_step(self, step: int) -> None:
        """End the profile after its last step, and write the files."""
        if self._open is not None and step >= (self._config.last or self._config.first or 0):
            self.__exit__(None, None, None)


def out_of_memory(error: BaseException, setup: RankSetup, step: int) -> TrainingError | None:
    """Return the error to raise for an out-of-memory error, with the memory by kind; None for any other error."""
    if not is_out_of_memory(error):
        return None
    # Local shards only; nothing here communicates, since other ranks may still be in the step.
    held = {name: size for name, size in memory_by_kind(setup).items() if size}
    kinds = ", ".join(f"{format_size(size)} of {name}" for name, size in held.items())
    first, *_ = str(error).splitlines() or ["an allocation failed"]
    return TrainingError(
        f"rank {setup.mesh.world.rank} has used up its memory in step {step}: {first.strip()}\n"
        f"It has {kinds}; the rest are activations and buffers. The peak so far is "
        f"{format_size(setup.platform.peak_memory())}. {LESS_MEMORY}"
    )


def memory_by_kind(setup: RankSetup) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state on this rank, by kind."""
    platform = setup.platform
    try:
        use = memory_use(setup.model)
    except FullyShardError:  # a model of a plugin that does not use fully_shard
        weights = sum(_bytes(setup, parameter) for _, parameter in platform.named_parameters(setup.model))
        use = MemoryUse(shards=weights, full=0, full_gradients=0, sharded_gradients=0)
    averages = {} if setup.average is None else setup.average.state()
    return {
        "weights": use.shards,
        "gathered weights": use.full,
        "gradients": use.sharded_gradients,
        "gradients not reduced yet": use.full_gradients,
        "optimizer state": state_bytes(setup.optimizer, platform),
        "averages of weights": sum(_bytes(setup, tensor) for tensor in averages.values()),
    }


def _bytes(setup: RankSetup, tensor: object) -> int:
    local = local_of(setup.platform, tensor)
    return int(math.prod(local.shape) * setup.platform.itemsize(local.dtype))


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
        """Count the time in the block as `kind`, without blocks inside of it; in collectives it counts as `waiting`."""
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
        """Return float32 `[ranks * kinds]`, this rank's mean seconds, to sum over all; empty in most steps."""
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
        """Add the time since the last switch to the running kind, and start another one; None: measure nothing."""
        now, waited = time.perf_counter(), sum(group.seconds_waited for group in self._world.groups())
        if self._kind is not None:
            # A thread may wait beside the computation, as for a checkpoint that is written in the background.
            waiting = min(max(0.0, waited - self._waited_at), now - self._at)
            self._totals[self._kind] += now - self._at - waiting
            self._totals["waiting"] += waiting
        self._kind, self._at, self._waited_at = kind, now, waited


@dataclass(frozen=True)
class _Slow:
    """A rank that is slow since step `since`, in `count` exchanges in a row; `factor` and `work` as in `Straggler`."""

    since: int
    count: int
    factor: float
    work: str


class _Detector:
    """Finds ranks that are slow in several exchanges in a row."""

    def __init__(self, world_size: int) -> None:
        self._slow: dict[int, _Slow] = {}
        # Not set by all launchers: without it, slow ranks are not combined to a slow node.
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
