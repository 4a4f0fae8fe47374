"""Training on a real Ray cluster of two nodes on this machine: failures, a lost node, other trainers, and Tune."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from ray import train, tune
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

from hp_trainer.checkpoint import Checkpoint, LocalStorage
from hp_trainer.integrations.ray import HPTrainer, loop_config, train_loop
from hp_trainer.metrics import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
# Of a cluster, whose node has to start within 30 seconds, which a busy machine exceeds.
STARTS = 3


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    """One node with two CPUs. Nodes have the environment of their start, the plugin's path included."""
    cluster = start_cluster()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def start_cluster() -> Cluster:
    """Start the first node and connect to it, again if it does not start within Ray's own 30 seconds."""
    for attempt in itertools.count(1):
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=2, include_dashboard=False)
            ray.init(address=cluster.address, log_to_driver=False)
            return cluster
        # Ray's errors of a slow start are of many types, and have no common one.
        except Exception as error:
            ray.shutdown()
            cluster.shutdown()
            if attempt == STARTS:
                pytest.fail(f"Ray's cluster has not started in {STARTS} attempts: {type(error).__name__}: {error}")
            print(f"Ray's cluster has not started, attempt {attempt} of {STARTS}: {error}", file=sys.stderr)
    raise AssertionError


@pytest.fixture
def second_node(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """Two more CPUs on a second node. Returns a function that removes it as a failure does."""
    node = cluster.add_node(num_cpus=2)
    yield lambda: cluster.remove_node(node)
    if node in cluster.list_all_nodes():
        cluster.remove_node(node)


@pytest.fixture
def trainer(folder: Path, cluster: Cluster):
    """Makes trainers of runs in the folder's `runs`."""

    def make(name: str, workers, failures: int = 0, **settings) -> HPTrainer:
        settings = {"data.path": str(folder / "corpus.txt"), **settings}
        return HPTrainer(
            folder / "run.yaml",
            {key.replace("__", "."): value for key, value in settings.items()},
            scaling_config=train.ScalingConfig(num_workers=workers),
            run_config=train.RunConfig(
                name, str(folder / "runs"), failure_config=train.FailureConfig(max_failures=failures)
            ),
        )

    return make


def losses_of(folder: Path, name: str) -> list[float]:
    metrics = folder / "runs" / name / "hp-train" / "metrics.jsonl"
    steps = [event for event in read_metrics(metrics) if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 9))
    return [event["loss"] for event in steps]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Callable[[int], list[float]]:
    """Returns the losses of that many ranks which hp-train itself starts, and which nothing disturbs."""

    @functools.cache
    def train_undisturbed(ranks: int) -> list[float]:
        run = folder / "runs" / f"undisturbed-{ranks}" / "hp-train"
        command = [sys.executable, "-m", "hp_trainer", "run", "run.yaml", f"--launch.local_ranks={ranks}"]
        # Without the plugin.
        path = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
        environment = os.environ | {"PYTHONPATH": path}
        subprocess.run([*command, f"--run.folder={run}"], cwd=folder, env=environment, check=True)
        return losses_of(folder, f"undisturbed-{ranks}")

    return train_undisturbed


def places_of(faults: Path) -> list[dict[str, int]]:
    """Return the variables of each rank that started, in order of their starts."""
    lines = (faults / "places").read_text().splitlines()
    return [{name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)} for line in lines]


def first_steps_of(faults: Path) -> list[tuple[int, int]]:
    """Return, for each start of the run, the number of ranks and of steps done before."""
    starts = [line.split() for line in (faults / "places").read_text().splitlines()]
    return [(int(size), int(step)) for size, rank, _, step, *_ in starts if rank == "0"]


@pytest.mark.engines_core
def test_a_worker_that_is_killed_starts_all_again_from_the_newest_checkpoint(
    trainer, faults, folder, undisturbed
) -> None:
    (faults / "SIGKILL-1-5").touch()
    result = trainer("killed", 2, failures=1).fit()
    assert first_steps_of(faults) == [(2, 0), (2, 4)]
    assert losses_of(folder, "killed") == undisturbed(2)
    # The metrics and the checkpoint of the last step, which is read where it is.
    assert result.metrics["step"] == 8
    assert result.metrics["train/loss"] == losses_of(folder, "killed")[-1]
    newest = Path(result.checkpoint.path)
    assert newest.parent == folder / "runs" / "killed" / "hp-train" / "checkpoints"
    assert Checkpoint(LocalStorage(newest.parent), newest.name).step == 8


@pytest.mark.parametrize("fault", ["SIGKILL-3-5", "SIGTERM-0-5"])
def test_four_workers_on_two_nodes_start_again(trainer, second_node, faults, folder, undisturbed, fault) -> None:
    (faults / fault).touch()
    trainer(fault, 4, failures=1).fit()
    assert first_steps_of(faults) == [(4, 0), (4, 4)]
    assert losses_of(folder, fault) == undisturbed(4)
    places = sorted(places_of(faults)[:4], key=lambda place: place["RANK"])
    # Both nodes of the cluster have the address of this machine, which is one node for Train.
    assert [(place["GROUP_RANK"], place["LOCAL_RANK"]) for place in places] == [(0, rank) for rank in range(4)]
    assert {place["LOCAL_WORLD_SIZE"] for place in places} == {4}


def test_a_node_that_goes_away_leaves_two_ranks_that_go_on(trainer, second_node, faults, folder, undisturbed) -> None:
    def lose_a_node() -> None:
        metrics = folder / "runs" / "lost" / "hp-train" / "metrics.jsonl"
        while not any(event["event"] == "step" and event["step"] >= 5 for event in read_metrics(metrics)):
            time.sleep(0.1)
        second_node()

    (faults / "slow").touch()
    thread = threading.Thread(target=lose_a_node, daemon=True)
    thread.start()
    trainer("lost", (2, 4), failures=1).fit()
    thread.join()
    (first, _), (second, step) = first_steps_of(faults)
    assert (first, second) == (4, 2)
    assert step in (4, 6)
    np.testing.assert_allclose(losses_of(folder, "lost"), undisturbed(4), rtol=2e-6)


def test_a_trainer_of_the_users_own_runs_the_same_loop(cluster, folder, undisturbed) -> None:
    TorchTrainer(
        train_loop,
        train_loop_config=loop_config(folder / "run.yaml", {"data.path": str(folder / "corpus.txt")}),
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig("own", str(folder / "runs")),
    ).fit()
    np.testing.assert_allclose(losses_of(folder, "own"), undisturbed(2), rtol=2e-6)


def test_tune_compares_runs(cluster, folder) -> None:
    def trial(config: dict) -> None:
        HPTrainer(
            folder / "run.yaml",
            {"data.path": str(folder / "corpus.txt"), "optimizer.lr": config["lr"]},
            scaling_config=train.ScalingConfig(num_workers=1),
            run_config=train.RunConfig(f"lr={config['lr']}", str(folder / "runs"), callbacks=[TuneReportCallback()]),
        ).fit()

    tuner = tune.Tuner(
        trial,
        param_space={"lr": tune.grid_search([1e-7, 5e-3])},
        # Each trial holds a CPU for its driver: two at once would wait for ever for those of their workers.
        tune_config=tune.TuneConfig(metric="train/loss", mode="min", max_concurrent_trials=1),
        run_config=tune.RunConfig("sweep", storage_path=str(folder / "tune")),
    )
    best = tuner.fit().get_best_result()
    assert best.config == {"lr": 5e-3}
    assert best.metrics["step"] == 8
    assert best.metrics["checkpoint_path"].startswith(str(folder / "runs" / "lr=0.005" / "hp-train" / "checkpoints"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"training__stepz": 3}, r"try: training\.steps"),
        ({"launch__nodes": 2}, r"FailureConfig\(max_failures=\.\.\.\)"),
    ],
)
def test_a_wrong_setting_is_named(trainer, setting, message) -> None:
    # Ray prints the beginning and the end of long errors.
    with pytest.raises(train.TrainingFailedError, match=message):
        trainer("wrong", 1, **setting).fit()


def test_the_example_trains(cluster, folder, undisturbed) -> None:
    command = [sys.executable, str(EXAMPLES / "ray_job.py"), "run.yaml", str(folder / "runs"), "--name=example"]
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    done = subprocess.run(
        [*command, "--ranks=1-2", "--training.steps=8"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses_of(folder, "example"), undisturbed(2), rtol=2e-6)
