"""Planned against measured times of a step, of twelve layouts of a small decoder on ranks of this machine's CPU.

    python benchmarks/plan_accuracy.py [--ranks 2 | --ranks 4] [--rounds 5] [--device device.yaml]

The device is calibrated first: `hp-train doctor --to device.yaml` on as many ranks. Then the same ranks build all
layouts and run steps of them in turns. A layout's time is the shortest of its steps, of the slowest rank. Goals:
the orders of planned and measured times have a rank correlation (Spearman) of 0.9, and planned times are within 25 %.

Other programs on the same cores lengthen steps, and more so the steps of many messages.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hp_dtensor import get_platform
from hp_dtensor.launch import launch
from hp_trainer.config import TrainerConfig, parse_config
from hp_trainer.data import Batch
from hp_trainer.parallel import ParallelDims
from hp_trainer.planning import find_device, plan_step
from hp_trainer.plugins import registries
from hp_trainer.training.setup import RankSetup
from hp_trainer.training.step import OptimizerStep

YAML = """
model: {vocab_size: 2048, hidden_size: 256, num_hidden_layers: 4, num_attention_heads: 8, num_key_value_heads: 8,
        head_dim: 32, intermediate_size: 768}
data: {path: none.txt}
training: {steps: 1, global_batch_size: 8, sequence_length: 256}
"""
RECOMPUTED = {"training.recompute": "full"}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {},
        {"dp_replicate": 2},
        {"tp": 2},
        {"cp": 2},
        {"cp": 2, "cp_method": "ring"},
        {"pp": 2},
        {"pp": 2, "pipeline.schedule": "gpipe", "pipeline.microbatches": 2},
        {"pp": 2, "pipeline.microbatches": 4},
        RECOMPUTED,
        {"training.micro_batch_size": 1},
        {"training.micro_batch_size": 1, "reduce_gradients": "micro_batch"},
        {"tp": 2, **RECOMPUTED},
    ],
    4: [
        {},
        {"dp_replicate": 4},
        {"dp_replicate": 2},
        {"tp": 4},
        {"tp": 2},
        {"cp": 4},
        {"cp": 2},
        {"pp": 4},
        {"pp": 2},
        {"tp": 2, "pp": 2},
        {"tp": 2, "cp": 2},
        RECOMPUTED,
    ],
}


def config_of(changed: dict[str, Any]) -> TrainerConfig:
    """Return the small configuration in a layout; names without a dot are degrees and settings of `parallel`."""
    given = [(name if "." in name else f"parallel.{name}", str(value)) for name, value in changed.items()]
    return parse_config(YAML, given, registered=registries()).config


class Contender:
    """One layout on this rank, with a batch of random tokens."""

    def __init__(self, changed: dict[str, Any]) -> None:
        setup = RankSetup.build(None, config_of(changed), get_platform("torch"))
        self._step, dims, training = OptimizerStep(setup), setup.dims, setup.config.training
        share, length = training.global_batch_size // dims.dp_size, training.sequence_length
        rows = np.random.default_rng(0).integers(0, setup.config.model.options.vocab_size, (share, length + 1))
        count = training.global_batch_size * length
        self._batch = Batch(rows[:, :-1].copy(), rows[:, 1:].copy(), None, np.arange(share), count, count)

    def run(self) -> None:
        """Run one step."""
        self._step.accumulate_gradients(self._batch)
        self._step.clip()
        self._step.update(1e-3)


def measure(layouts: list[dict[str, Any]], rounds: int) -> list[float]:
    """Return this rank's shortest time of a step in each layout, measured in turns; a collective."""
    import torch

    torch.set_num_threads(1)
    contenders = [Contender(each) for each in layouts]
    best = [float("inf")] * len(layouts)
    # Steps of the first round allocate memory and start groups.
    for turn, (index, contender) in itertools.product(range(rounds + 1), list(enumerate(contenders))):
        torch.distributed.barrier()
        start = time.perf_counter()
        contender.run()
        torch.distributed.barrier()
        if turn:
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def spearman(a: list[float], b: list[float]) -> float:
    """Return the correlation of the ranks of two lists without equal numbers."""
    places = [np.argsort(np.argsort(each)) for each in (a, b)]
    return float(np.corrcoef(*places)[0, 1])


def main() -> None:
    """Calibrate, measure, and print a line for each layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=list(LAYOUTS), default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", help="a device file or name, in place of a calibration")
    options = parser.parse_args()
    layouts = LAYOUTS[options.ranks]
    with tempfile.TemporaryDirectory() as folder:
        path = options.device or str(Path(folder) / "device.yaml")
        if options.device is None:
            command = [str(Path(sys.executable).parent / "hp-train"), "doctor", f"--ranks={options.ranks}"]
            # Its exit code says whether it found problems, which a busy machine has.
            subprocess.run([*command, "--to", path], stdout=subprocess.DEVNULL, check=False)
        device = find_device(path)
    by_rank = launch(measure, (layouts, options.rounds), options.ranks, "torch")
    measured = [max(times) for times in zip(*by_rank, strict=True)]
    configs = [config_of(each) for each in layouts]
    dims = [ParallelDims.from_config(each.parallel, options.ranks) for each in configs]
    planned = [plan_step(a, b, device).time.total for a, b in zip(configs, dims, strict=True)]
    print(f"{'planned':>10}{'measured':>12}{'ratio':>8}")
    for changed, ours, theirs in zip(layouts, planned, measured, strict=True):
        name = ", ".join(f"{key}={value}" for key, value in changed.items()) or "dp_shard"
        print(f"{ours * 1e3:8.1f} ms{theirs * 1e3:9.1f} ms{ours / theirs:8.2f}  {name}")
    within = sum(abs(ours / theirs - 1) <= 0.25 for ours, theirs in zip(planned, measured, strict=True))
    print(f"Spearman {spearman(planned, measured):.2f} (goal 0.9), {within} of {len(layouts)} times within 25 %")


if __name__ == "__main__":
    main()
