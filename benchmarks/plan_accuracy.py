"""Planned against measured times of a step, of twelve layouts of a small decoder on ranks of this machine's CPU.

    python benchmarks/plan_accuracy.py [--ranks 2 | --ranks 4] [--rounds 8] [--folder FOLDER]

The device is calibrated first: `hp-train doctor --to device.yaml` on as many ranks. Then the same ranks build all
layouts and run steps of them in turns. A layout's time is the mean of the faster half of its steps, as for exchanges in
the calibration. Goals: the orders of planned and measured times have a rank correlation (Spearman) of 0.9, and planned
times are within 25 %.

Other programs on the same cores lengthen steps, and more so the steps of many messages. The last row compares two
measurements, each of half of the rounds, for all such halves: a plan cannot order layouts better than that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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


def measure(layouts: list[dict[str, Any]], rounds: int) -> list[list[float]]:
    """Return this rank's time of a step in each round and layout; a collective."""
    import torch

    torch.set_num_threads(1)
    contenders = [Contender(each) for each in layouts]
    times: list[list[float]] = []
    # Steps of the first round allocate memory and start groups.
    for _ in range(rounds + 1):
        times.append([])
        for contender in contenders:
            torch.distributed.barrier()
            start = time.perf_counter()
            contender.run()
            torch.distributed.barrier()
            times[-1].append(time.perf_counter() - start)
    return times[1:]


def step_times(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the time of a step in each layout: the mean of the faster half of the rounds."""
    return [float(each) for each in np.sort(rounds, axis=0)[: max(1, len(rounds) // 2)].mean(axis=0)]


def spearman(a: list[float], b: list[float]) -> float:
    """Return the correlation of the ranks of two lists without equal numbers."""
    places = [np.argsort(np.argsort(each)) for each in (a, b)]
    return float(np.corrcoef(*places)[0, 1])


def repeated_orders(rounds: list[list[float]]) -> list[float]:
    """Return the rank correlations of two measurements, for all ways to divide the rounds into two halves."""
    everything = set(range(len(rounds)))
    halves = itertools.combinations(sorted(everything), len(rounds) // 2)
    times = [[step_times([rounds[i] for i in chosen]) for chosen in (half, everything - {*half})] for half in halves]
    return [spearman(*each) for each in times]


def main() -> None:
    """Calibrate, measure, and print a line for each layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=list(LAYOUTS), default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--folder", type=Path, help="of device.yaml and times.json, which are not measured if they exist"
    )
    options = parser.parse_args()
    layouts = LAYOUTS[options.ranks]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        device_file, times_file = folder / "device.yaml", folder / "times.json"
        if not device_file.exists():
            command = [str(Path(sys.executable).parent / "hp-train"), "doctor", f"--ranks={options.ranks}"]
            # Its exit code says whether it found problems, which a busy machine has.
            subprocess.run([*command, "--to", str(device_file)], stdout=subprocess.DEVNULL, check=False)
        if not times_file.exists():
            by_rank = launch(measure, (layouts, options.rounds), options.ranks, "torch")
            times_file.write_text(json.dumps(np.max(by_rank, axis=0).tolist()))
        device, rounds = find_device(str(device_file)), json.loads(times_file.read_text())
    measured = step_times(rounds)
    configs = [config_of(each) for each in layouts]
    dims = [ParallelDims.from_config(each.parallel, options.ranks) for each in configs]
    planned = [plan_step(a, b, device).time.total for a, b in zip(configs, dims, strict=True)]
    print(f"{'planned':>10}{'measured':>12}{'ratio':>8}")
    for changed, ours, theirs in zip(layouts, planned, measured, strict=True):
        name = ", ".join(f"{key}={value}" for key, value in changed.items()) or "dp_shard"
        print(f"{ours * 1e3:8.1f} ms{theirs * 1e3:9.1f} ms{ours / theirs:8.2f}  {name}")
    within = sum(abs(ours / theirs - 1) <= 0.25 for ours, theirs in zip(planned, measured, strict=True))
    print(f"Spearman {spearman(planned, measured):.2f} (goal 0.9), {within} of {len(layouts)} times within 25 %")
    repeated = repeated_orders(rounds)
    print(f"two measurements of the same layouts: Spearman {np.mean(repeated):.2f}, at least {min(repeated):.2f}")


if __name__ == "__main__":
    main()
