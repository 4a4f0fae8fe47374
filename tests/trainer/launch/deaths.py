"""A plugin for ranks: kills its process at points of the run, which KILLS names; each once, marked by a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hp_dtensor.launch import current_generation
from hp_trainer.plugins import hookimpl
from hp_trainer.training import recovery, setup, trainer
from hp_trainer.training.step import OptimizerStep

# By "step:rank:point", the signal. The step of a newcomer is "new" before its first one.
KILLS: dict[str, int] = json.loads(os.environ.get("KILLS", "{}"))
_step = 0


def die_at(point: str) -> None:
    generation = current_generation()
    step = _step or ("new" if generation is not None and generation.number else 0)
    key = f"{step}:{os.environ.get('RANK')}:{point}"
    if key in KILLS and not Path(key).exists():
        Path(key).touch()
        os.kill(os.getppid() if point == "parent" else os.getpid(), KILLS[key])
        # A stopped process goes on when it is woken; it must not, since it is replaced.
        time.sleep(60)


def wrap(owner: Any, name: str, *, before: str = "", after: str = "") -> None:
    call: Callable[..., Any] = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        die_at(before)
        result = call(*arguments, **named)
        die_at(after)
        return result

    setattr(owner, name, wrapped)


if os.environ.get("RANK"):
    wrap(OptimizerStep, "loss_sum", before="forward", after="backward")
    wrap(OptimizerStep, "agree", before="collective")
    wrap(OptimizerStep, "update", before="clipped", after="optimizer")
    wrap(trainer.Trainer, "evaluate", before="evaluation")
    wrap(recovery.StateCopies, "take", after="snapshot")
    wrap(recovery.Snapshot, "restore", before="restore")
    wrap(setup.RankSetup, "batch_reader", before="set-up")


@hookimpl
def hp_before_step(record: Any) -> None:
    global _step
    _step = record.step
    die_at("parent")


@hookimpl
def hp_before_checkpoint(record: Any) -> None:
    die_at("checkpoint")
