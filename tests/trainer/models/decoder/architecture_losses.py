"""The first losses of the example of each architecture, in any layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from training_runs import Lab, losses

from hp_trainer.config import load_config
from hp_trainer.plugins import registries
from hp_trainer.run import create_run

EXAMPLES = Path(__file__).parents[4] / "examples" / "architectures"
ARCHITECTURES = sorted(file.stem for file in EXAMPLES.glob("*.yaml"))
# Made by one rank on PyTorch; where an example is changed, `first_losses` there gives its new ones.
REFERENCE = json.loads(Path(__file__).with_name("architecture_losses.json").read_text())
# The rate is low enough that float32's rounding is not amplified, and high enough that every step changes the loss.
SETTINGS = {
    "training.global_batch_size": 4,
    "training.sequence_length": 32,
    "optimizer.lr": 5e-4,
    "optimizer.eps": 1e-5,
    "metrics.trackers": "[jsonl]",
    "generate.prompts": "[]",
}
LAYOUTS = {
    "1 rank": {"world": 1},
    "2 ranks, sharded": {"world": 2},
    "2 ranks, tensor parallel": {"world": 2, "tp": 2},
    "4 ranks, sharded and tensor parallel": {"world": 4, "tp": 2},
    "4 ranks, replicated and sharded": {"world": 4, "dp_replicate": 2},
}


def first_losses(lab: Lab, name: str, layout: str, steps: int) -> list[float]:
    """The losses of the first steps of an example; experts are spread over the ranks where there are any."""
    degrees = dict(LAYOUTS[layout])
    world_size = degrees.pop("world")
    given = {**SETTINGS, "training.steps": steps, "lr_schedule.kind": "constant", "lr_schedule.warmup_steps": 0}
    given |= {f"parallel.{degree}": size for degree, size in degrees.items()}
    given |= {"data.path": lab.text, "parallel.ep": 2 if world_size > 1 and "num_experts" in text_of(name) else 1}
    given["parallel.etp"] = 1
    overrides = [(path, str(value)) for path, value in given.items()]
    config = load_config(EXAMPLES / f"{name}.yaml", overrides, registered=registries()).config
    run = create_run(lab.folder / f"{name}-{layout.replace(' ', '-')}", config)
    return losses(lab.train(run, world_size))


def text_of(name: str) -> str:
    return (EXAMPLES / f"{name}.yaml").read_text()


def assert_as_on_one_rank_of_torch(lab: Lab, name: str, layout: str, steps: int) -> None:
    # Sums in float32 in another order, over up to twenty steps.
    np.testing.assert_allclose(first_losses(lab, name, layout, steps), REFERENCE[name][:steps], rtol=1e-5)
