"""A recorded training step compared with a plain one: time and peak memory of a dense decoder and one with experts.

    python benchmarks/recording.py [--platform torch] [--rounds 9] [--hidden 192] [--layers 4] [--length 256]

Without arguments it runs on the installed platform, on one rank. A run that records its steps and a plain one take
turns in one process. Prints the best processor time of a step (on devices the best elapsed time) and the ratio, and the
peak memory of each in a process of its own. The number of recorded tensors tells how fine the recording is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hp_dtensor import get_platform
from hp_dtensor.debug import Recording
from hp_trainer._coordination import StopRequest
from hp_trainer.config import parse_config
from hp_trainer.plugins import registries
from hp_trainer.run import create_run
from hp_trainer.training import Trainer

WARM_UP = 2
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1}
MODELS = {"dense": {}, "experts": EXPERTS}


def trainer(folder: Path, model: str, options: argparse.Namespace, steps: int, *, records: bool) -> Trainer:
    """Return a new run of one rank."""
    hidden = options.hidden
    sizes = {"hidden_size": hidden, "num_hidden_layers": options.layers, "head_dim": 32, "qk_norm": "head"}
    heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": max(1, hidden // 96)}
    widths = {"intermediate_size": hidden * 8 // 3, "moe_intermediate_size": hidden * 2 // 3}
    settings = {f"model.{name}": value for name, value in (sizes | heads | widths | MODELS[model]).items()}
    settings |= {"training.steps": steps, "training.sequence_length": options.length}
    settings |= {"training.global_batch_size": options.batch, "training.eval_interval": "null"}
    settings |= {"checkpoint.interval": "null", "metrics.trackers": "[]", "generate.prompts": "[]"}
    settings |= {"training.record_steps": steps} if records else {}
    given = [(name, str(value)) for name, value in settings.items()]
    config = parse_config("model: {name: decoder}\n", given, registered=registries()).config
    run = create_run(folder / f"{model}-{records}", config)
    return Trainer(run, config, get_platform(options.platform))


def measure(folder: Path, model: str, options: argparse.Namespace) -> tuple[dict[bool, float], int]:
    """Return the best seconds of a plain step and of a recorded one, and the number of tensors of a recorded step."""
    platform = get_platform(options.platform)
    clock = time.process_time if platform.device_types[0] == "cpu" else time.perf_counter
    steps = WARM_UP + options.rounds
    trainers = {records: trainer(folder, model, options, steps, records=records) for records in (False, True)}
    best = {records: float("inf") for records in trainers}
    for step in range(steps):
        for records, each in trainers.items():
            start = clock()
            each.train_step(StopRequest())
            best[records] = min(best[records], clock() - start) if step >= WARM_UP else best[records]
    recorded = Recording.load(trainers[True].run_folder.digests_file)
    return best, len(recorded.steps[steps])


def peak(model: str, records: bool, options: argparse.Namespace) -> int:
    """Return the peak memory of two steps in a process of their own."""
    sizes = [f"--{name}={getattr(options, name)}" for name in ("hidden", "layers", "length", "batch")]
    command = [sys.executable, __file__, f"--peak={model}", *(["--records"] if records else []), *sizes]
    command += [f"--platform={options.platform}"] if options.platform else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default=None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--peak", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--records", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    platform, found = get_platform(options.platform), {}
    with tempfile.TemporaryDirectory() as folder:
        if options.peak:
            one = trainer(Path(folder), options.peak, options, WARM_UP, records=options.records)
            for _ in range(WARM_UP):
                one.train_step(StopRequest())
            print(platform.peak_memory())
            return
        print(f"{platform.name} on {platform.device_types[0]}: a recorded step / a plain one")
        for model in MODELS:
            best, tensors = measure(Path(folder), model, options)
            plain, recorded = (peak(model, records, options) for records in (False, True))
            print(
                f"{model:8s} {best[True] * 1e3:8.1f} / {best[False] * 1e3:7.1f} ms = {best[True] / best[False]:4.2f},"
                f" {recorded / 2**20:6.0f} / {plain / 2**20:5.0f} MiB = {recorded / plain:5.3f}, {tensors} tensors",
                flush=True,
            )
            found[model] = {"seconds": best, "peak_bytes": [plain, recorded], "tensors": tensors}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
