"""Training by the script for Slurm on two nodes of a real Slurm, whose daemons run on this machine for these tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from slurm_daemons import MISSING, SCRIPT, Slurm, is_installed, wait_until

from hp_trainer.checkpoint import LocalStorage, find_latest
from hp_trainer.metrics import read_metrics

NODES_SCRIPT = SCRIPT.with_name("slurm_nodes.sbatch")

pytestmark = pytest.mark.skipif(not is_installed(), reason=MISSING)

NODES = """\
launch: {local_ranks: 2}
fault_tolerance: {interval: 1}
"""


@pytest.fixture(scope="module")
def slurm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def losses_of(folder: Path, run: str) -> list[float]:
    metrics = folder / "runs" / run / "metrics.jsonl"
    steps = [event for event in read_metrics(metrics) if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 9)), (folder / f"{run}.out").read_text()
    return [event["loss"] for event in steps]


def starts_of(faults: Path) -> list[dict[str, int]]:
    """Return size, rank, process, number of steps done before, and variables of each rank that started."""
    starts = []
    for line in (faults / "places").read_text().splitlines() if (faults / "places").exists() else []:
        size, rank, pid, step, *_ = line.split()
        variables = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)}
        starts.append({"size": int(size), "rank": int(rank), "pid": int(pid), "step": int(step), **variables})
    return starts


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, folder: Path) -> list[float]:
    """The losses of four tasks that nothing disturbs."""
    slurm.wait_for(slurm.submit(folder, "undisturbed"), "COMPLETED", "FAILED")
    return losses_of(folder, "undisturbed")


def test_tasks_know_their_places(slurm, folder, faults) -> None:
    slurm.wait_for(slurm.submit(folder, "places"), "COMPLETED", "FAILED")
    assert len(losses_of(folder, "places")) == 8
    starts = sorted(starts_of(faults), key=lambda start: start["rank"])
    assert [(each["SLURM_NODEID"], each["SLURM_LOCALID"]) for each in starts] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_job_whose_rank_is_killed_is_requeued_and_goes_on(slurm, folder, faults, undisturbed) -> None:
    (faults / "SIGKILL-1-5").touch()
    slurm.wait_for(slurm.submit(folder, "killed"), "COMPLETED", "FAILED")
    starts = [(each["size"], each["step"]) for each in starts_of(faults) if each["rank"] == 0]
    assert starts == [(4, 0), (4, 4)], (folder / "killed.out").read_text()
    assert losses_of(folder, "killed") == undisturbed


def test_a_rank_that_is_killed_costs_a_step_and_the_others_go_on(slurm, folder, faults, undisturbed) -> None:
    (faults / "SIGKILL-3-5").touch()
    (folder / "nodes.yaml").write_text((folder / "run.yaml").read_text() + NODES)
    job = slurm.submit(folder, "replaced", tasks=1, source=NODES_SCRIPT, config="nodes.yaml")
    slurm.wait_for(job, "COMPLETED", "FAILED")
    starts = starts_of(faults)
    pids = {rank: {each["pid"] for each in starts if each["rank"] == rank} for rank in range(4)}
    # The job was not requeued: three ranks kept their processes, and the killed one has a second one.
    assert [len(pids[rank]) for rank in range(4)] == [1, 1, 1, 2], (folder / "replaced.out").read_text()
    assert {each["rank"]: each["GROUP_RANK"] for each in starts} == {0: 0, 1: 0, 2: 1, 3: 1}
    assert losses_of(folder, "replaced") == undisturbed


def test_sigterm_requeues_a_job_with_a_checkpoint_and_two_tasks_go_on(slurm, folder, faults, undisturbed) -> None:
    (faults / "slow").touch()
    job = slurm.submit(folder, "ended")
    metrics = folder / "runs" / "ended" / "metrics.jsonl"
    wait_until(lambda: any(event.get("step", 0) > 2 for event in read_metrics(metrics)), "step 3", folder / "ended.out")
    # What Slurm does before the time is up, by the script's --signal.
    slurm.run("scancel", "--signal=TERM", job)
    slurm.wait_for(job, "PENDING")
    slurm.run("scancel", job)
    newest = find_latest(LocalStorage(folder / "runs" / "ended" / "checkpoints")).checkpoint
    assert newest is not None
    assert 3 <= newest.step < 8
    assert f"checkpoint is of step {newest.step} of 8" in (folder / "ended.out").read_text()
    (faults / "slow").unlink()
    slurm.wait_for(slurm.submit(folder, "ended", tasks=1), "COMPLETED", "FAILED")
    assert starts_of(faults)[-1]["size"] == 2
    np.testing.assert_allclose(losses_of(folder, "ended"), undisturbed, rtol=2e-6)


def test_a_job_whose_node_goes_away_goes_on_when_there_is_one_again(slurm, folder, faults, undisturbed) -> None:
    (faults / "slow").touch()
    job = slurm.submit(folder, "lost")
    metrics = folder / "runs" / "lost" / "metrics.jsonl"
    wait_until(lambda: any(event.get("step", 0) > 2 for event in read_metrics(metrics)), "step 3", folder / "lost.out")
    slurm.lose_node("n1", [each["pid"] for each in starts_of(faults) if each["SLURM_NODEID"] == 1])
    slurm.wait_for(job, "PENDING")
    (faults / "slow").unlink()
    slurm.start_node("n1")
    slurm.wait_for(job, "COMPLETED", "FAILED")
    assert len([each for each in starts_of(faults) if each["rank"] == 0]) == 2
    assert losses_of(folder, "lost") == undisturbed


def test_a_job_with_invalid_input_is_not_started_again(slurm, folder, faults) -> None:
    (folder / "wrong.yaml").write_text((folder / "run.yaml").read_text() + "parallel: {tp: 3}\n")
    job = slurm.submit(folder, "wrong", config="wrong.yaml")
    slurm.wait_for(job, "COMPLETED", "FAILED")
    said = (folder / "wrong.out").read_text()
    assert "Restarts=0" in slurm.run("scontrol", "show", "job", job)
    assert "parallel.tp" in said, said
    assert starts_of(faults) == []


def test_the_script_gives_ranks_time_to_save() -> None:
    directives = [line.split()[1] for line in SCRIPT.read_text().splitlines() if "#SBATCH" in line]
    assert {"--requeue", "--signal=TERM@120"} <= set(directives)
