"""Train on a Ray cluster: python examples/clusters/ray_job.py CONFIG STORAGE --ranks=16 [--gpus] [--a.b=value ...]

The run is in STORAGE/NAME, a folder that every node sees. The same command continues it.
"""

from __future__ import annotations

import argparse

from ray import train

from hp_trainer.integrations.ray import HPTrainer


def main() -> None:
    """Train, and print the newest metrics and checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("storage")
    parser.add_argument("--name", default="first")
    parser.add_argument("--ranks", required=True, help="number, or range such as 4-16: as many as fit")
    parser.add_argument("--gpus", action="store_true", help="one GPU for each rank")
    parser.add_argument("--max-failures", type=int, default=3)
    options, settings = parser.parse_known_args()
    least, _, most = options.ranks.partition("-")
    trainer = HPTrainer(
        options.config,
        dict(each.removeprefix("--").split("=", 1) for each in settings),
        scaling_config=train.ScalingConfig(
            num_workers=(int(least), int(most)) if most else int(least), use_gpu=options.gpus
        ),
        run_config=train.RunConfig(
            options.name, options.storage, failure_config=train.FailureConfig(max_failures=options.max_failures)
        ),
    )
    result = trainer.fit()
    print(result.metrics, result.checkpoint)


if __name__ == "__main__":
    main()
