"""A program that starts or joins ranks as `hp-train` does; each writes into the run folder what it sees.

Usage: launched_program.py FOLDER LOCAL_RANKS [fail]
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from hp_dtensor.platform.selection import get_platform
from hp_trainer.config import parse_config
from hp_trainer.data import Corpus
from hp_trainer.launch import job
from hp_trainer.plugins import registries
from hp_trainer.registries import Registries
from hp_trainer.run import RunFolder, create_run

CONFIG = """\
training: {{steps: 1, sequence_length: 8}}
data: {{max_tokens: 1000}}
optimizer: {{name: nothing}}
launch: {{local_ranks: {local_ranks}, timeout_seconds: 250}}
"""


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    pass


def note_rank(folder: str, owner: str, checkpoint: str | None, platform: str, samples: bool, choice: str) -> None:
    """Stands in for training."""
    world = get_platform(platform).world
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    if (Path(folder) / "fail").exists() and rank == size - 1:
        raise ValueError("this rank was asked to fail")
    tokens = Corpus(next(Path(folder).parent.glob(".data/*"))).info.tokens
    RunFolder(Path(folder), owner).check_owner()
    Path(folder, f"rank-{rank}-of-{size}").write_text(f"{checkpoint} {tokens} {os.environ.get('GROUP_RANK', '')}")


def known() -> Registries:
    found = registries()
    if "nothing" not in found.optimizers.names():
        found.optimizers.add("nothing", lambda *arguments: None, options=NoOptions)
    return found


def main(folder: str, local_ranks: str, *, fail: bool) -> None:
    job.run_rank = note_rank
    job.write_samples = lambda run, config: []
    config = parse_config(CONFIG.format(local_ranks=local_ranks), registered=known()).config

    def prepare() -> str:
        run = create_run(Path(folder), config)
        if fail:
            (run.path / "fail").touch()
        return "step-00000007"

    job.launch_training(config, Path(folder), prepare)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], fail=len(sys.argv) > 3)
