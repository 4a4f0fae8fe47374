"""The start of `hp-train`: when each line appears, and processor time against one import of the framework.

    python benchmarks/start.py [--platform torch] [--ranks 1,2,4]

One import of the framework is the limit: a run needs one, whatever its number of ranks. The processor time of a run is
that of all its processes over two steps. Walls depend on the load of the machine, processor times hardly do.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = Path(__file__).parents[1] / "examples" / "moe_small.yaml"
SHORT = (
    "--training.steps=2",
    "--training.eval_interval=null",
    "--checkpoint.interval=null",
    "--metrics.trackers=[{name: progress, interval_seconds: 0}]",
    "--generate.prompts=[]",
)


def run(*arguments):
    """Run Python, and return the lines of its output with their times, its wall and its processor seconds."""
    before, since = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-P", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}, **pipes) as process:
        lines = [(time.perf_counter() - since, line.rstrip()) for line in process.stdout]
    if process.returncode:
        raise SystemExit("\n".join(line for _, line in lines))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return lines, time.perf_counter() - since, spent


def best(*arguments, repeats):
    """Return the repetition with the least processor time."""
    return min((run(*arguments) for _ in range(repeats)), key=lambda found: found[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default=os.environ.get("HP_PLATFORM", "torch"))
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    hp_train, platform = ("-m", "hp_trainer"), f"--platform={options.platform}"
    _, wall, limit = best("-c", f"import {options.platform}", repeats=options.repeats)
    print(f"{f'import {options.platform}':24}{wall:8.2f} s wall{limit:8.2f} s processor")
    commands = {"--help": ("--help",), "check": ("check", str(CONFIG), platform)}
    for name, arguments in commands.items():
        _, wall, spent = best(*hp_train, *arguments, repeats=options.repeats)
        print(f"{name:24}{wall:8.2f} s wall{spent:8.2f} s processor{spent / limit:7.2f} imports", flush=True)
    for ranks in options.ranks.split(","):
        with tempfile.TemporaryDirectory() as folder:
            place = (f"--launch.local_ranks={ranks}", f"--run.folder={folder}/run")
            lines, wall, spent = run(*hp_train, str(CONFIG), platform, *place, *SHORT)
        print(f"{f'{ranks} ranks, 2 steps':24}{wall:8.2f} s wall{spent:8.2f} s processor{spent / limit:7.2f} imports")
        for when, line in lines:
            print(f"{when:12.2f} s  {line[:90]}", flush=True)


if __name__ == "__main__":
    main()
