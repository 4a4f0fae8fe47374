"""One rank in each Ray worker: python examples/clusters/ray_job.py CONFIG RUN_FOLDER --ranks=16 [--gpus=1]

Each worker gets the variables that torchrun would set and runs `hp-train run` as its rank of the job.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

import ray


@ray.remote
class Rank:
    """A worker that is one rank."""

    def meeting_point(self) -> tuple[str, int]:
        """Return this worker's address and a port that is free there now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def train(self, rank: int, size: int, address: str, port: int, command: list[str]) -> int:
        """Run a command as a rank, and return its exit code."""
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "MASTER_ADDR": address, "MASTER_PORT": port}
        return subprocess.call(command, env=os.environ | {name: str(value) for name, value in place.items()})


def main() -> int:
    """Start the ranks, and return the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("run_folder", help="seen by every worker")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of a rank")
    options = parser.parse_args()
    ray.init()
    # All ranks at once or none: a job with half of its ranks would wait for the others.
    group = ray.util.placement_group([{"CPU": 1, "GPU": options.gpus} if options.gpus else {"CPU": 1}] * options.ranks)
    ray.get(group.ready())
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    ranks = [
        Rank.options(num_gpus=options.gpus, num_cpus=1, scheduling_strategy=strategy).remote()
        for _ in range(options.ranks)
    ]
    address, port = ray.get(ranks[0].meeting_point.remote())
    command = [sys.executable, "-P", "-m", "hp_trainer", "run", options.config, f"--run.folder={options.run_folder}"]
    waiting = [each.train.remote(rank, options.ranks, address, port, command) for rank, each in enumerate(ranks)]
    return next((code for code in ray.get(waiting) if code), 0)


if __name__ == "__main__":
    raise SystemExit(main())
