"""Memory, descriptors, threads and disk that a run holds on to while it trains, at each of its checkpoints."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from training_runs import Lab, train_rank

from hp_dtensor.testing import run_ranks
from hp_trainer.plugins import hookimpl

SECONDS = 3000.0  # for what takes a tenth of it on an idle machine


@dataclass(frozen=True)
class Holding:
    """Resources of a process at one moment; `memory` (resident) and `disk` (all checkpoints) are in bytes."""

    memory: int
    descriptors: int
    threads: int
    disk: int


class Sampler:
    """A plugin that looks after every `interval` checkpoints, which are in the folder `checkpoints`."""

    def __init__(self, interval: int, checkpoints: Path) -> None:
        self.interval, self.folder = interval, checkpoints
        self.checkpoints = 0
        self.found: list[Holding] = []

    @hookimpl
    def hp_after_checkpoint(self, record) -> None:
        self.checkpoints += 1
        if self.checkpoints % self.interval == 0:
            self.found.append(holding(self.folder))


def train(lab: Lab, plugged, *, checkpoints: int, steps_each: int, background: bool) -> list[Holding]:
    """Train one rank; return what it holds at twenty moments, or as many as there are checkpoints."""
    sampler = Sampler(max(1, checkpoints // 20), lab.folder / "run" / "checkpoints")
    plugged(sampler)
    run = lab.start(
        "run",
        model__num_hidden_layers=1,
        training__steps=checkpoints * steps_each,
        training__global_batch_size=1,
        training__sequence_length=8,
        lr_schedule__kind="constant",
        optimizer__lr=1e-4,
        checkpoint__interval=steps_each,
        checkpoint__keep=2,
        checkpoint__background=background,
    )
    run_ranks(train_rank, 1, lab.platform, run, lab.platform, timeout_seconds=SECONDS)
    assert sampler.checkpoints == checkpoints
    return sampler.found


def assert_constant(found: list[Holding], memory: int) -> None:
    """Compare the second half of a run with its first quarter's end, when everything has been used once.

    Args:
        memory: bytes that the resident set may grow by.
    """
    first, later = found[len(found) // 4], found[len(found) // 2 :]
    assert {each.descriptors for each in later} <= {first.descriptors - 1, first.descriptors, first.descriptors + 1}
    assert {each.threads for each in later} <= {first.threads - 1, first.threads, first.threads + 1}
    # The numbers in their descriptions have more digits as time goes on.
    assert all(abs(each.disk - first.disk) <= first.disk // 100 + 200 for each in later)
    assert max(each.memory for each in later) <= first.memory + memory


def holding(checkpoints: Path) -> Holding:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = [path for path in checkpoints.rglob("*") if path.is_file()]
    return Holding(
        memory=pages * os.sysconf("SC_PAGE_SIZE"),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        disk=sum(path.stat().st_size for path in files),
    )
