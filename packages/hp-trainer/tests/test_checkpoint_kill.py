"""kill -9 of any rank at any moment of a save leaves a checkpoint that loads, and the next save works."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from checkpoint_worker import main, weight_of

from hp_trainer.checkpoint import LocalStorage, list_checkpoints, open_latest

pytestmark = pytest.mark.real_ranks
WORKER = Path(__file__).with_name("checkpoint_worker.py")
SIZE = 3

COORDINATOR_PHASES = (
    "before the folder",
    "after the folder",
    "before the index",
    "within the index",
    "after the index",
    "before the rename",
    "after the rename",
    "before a deletion",
    "within a deletion",
)
SHARD_PHASES = ("before the shard", "within the shard", "after the shard")


def save(root: Path, meeting: Path, step: int) -> None:
    """Save on `SIZE` ranks, which are threads: processes would take longer to start than to save."""
    meeting.mkdir()
    with ThreadPoolExecutor(SIZE) as pool:
        list(pool.map(lambda rank: main(str(root), str(meeting), str(rank), str(SIZE), str(step)), range(SIZE)))


def save_and_kill(root: Path, meeting: Path, step: int, kill: int, phase: str) -> None:
    """Save on `SIZE` processes; the one that kills itself takes the others with it, as a launcher would."""
    meeting.mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(root), str(meeting), str(rank), str(SIZE), str(step), str(kill), phase]
        )
        for rank in range(SIZE)
    ]
    try:
        assert ranks[kill].wait(timeout=300) == -signal.SIGKILL
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(
    ("kill", "phase"),
    [(0, phase) for phase in COORDINATOR_PHASES] + [(rank, phase) for rank in (0, 2) for phase in SHARD_PHASES],
)
def test_a_killed_save_leaves_a_checkpoint_that_loads(tmp_path: Path, kill: int, phase: str) -> None:
    storage = LocalStorage(tmp_path / "checkpoints")
    save(storage.root, tmp_path / "first", 1)
    save_and_kill(storage.root, tmp_path / "killed", 2, kill, phase)

    published = phase in ("after the rename", "before a deletion", "within a deletion")
    latest = open_latest(storage)
    assert latest.step == (2 if published else 1)
    assert np.array_equal(latest.read("weight"), weight_of(latest.step))

    save(storage.root, tmp_path / "again", 3)
    assert np.array_equal(open_latest(storage).read("weight"), weight_of(3))
    assert storage.list_folders() == list_checkpoints(storage) == ["step-00000003"]
