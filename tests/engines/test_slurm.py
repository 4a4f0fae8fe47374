"""Training by the script for Slurm on two nodes of a real Slurm, whose daemons run on this machine for these tests."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hp_trainer.checkpoint import LocalStorage, find_latest
from hp_trainer.metrics import read_metrics

SCRIPT = Path(__file__).parents[2] / "examples" / "clusters" / "slurm.sbatch"
NODES_SCRIPT = SCRIPT.with_name("slurm_nodes.sbatch")
# Debian has the daemons there, which is not on every user's path.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin"])
WAIT_SECONDS = 600

pytestmark = pytest.mark.skipif(
    any(shutil.which(each, path=PATH) is None for each in ("slurmd", "slurmctld", "munged")),
    reason="Slurm is not installed; on Debian, as root: apt install slurm-wlm munge",
)

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A job that is requeued waits until the credentials of its first start have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
KillWait=5
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES OverSubscribe=YES:4
"""

NODES = """\
launch: {local_ranks: 2}
fault_tolerance: {interval: 1}
"""


class Slurm:
    """The daemons of two nodes, and the commands that speak to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: dict[str, subprocess.Popen] = {}
        self._environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH, "HP_DEVICE": "cpu"}
        # The names of the nodes do not resolve.
        self._environment |= {"HP_PLATFORM": "torch", "MASTER_ADDR": "127.0.0.1"}

    def start(self) -> None:
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in range(3)]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            ports = [probe.getsockname()[1] for probe in probes]
        texts = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": self._folder, "ports": ports}
        (self._folder / "slurm.conf").write_text(CONF.format(**texts))
        (self._folder / "state").mkdir()
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        own = [f"--{name}-file={self._folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        # --force: the folders above may be writable by others.
        self._daemon("munged", "--foreground", "--force", f"--socket={self._folder}/munge.socket", *own)
        wait_until((self._folder / "munge.socket").exists, "munged's socket")
        self._daemon("slurmctld", "-D")
        for node in ("n0", "n1"):
            self.start_node(node)

    def start_node(self, node: str) -> None:
        self._daemon("slurmd", "-D", "-N", node, name=node)
        wait_until(lambda: "idle" in self.run("sinfo", "-h", "-n", node, "-o", "%t"), f"node {node}")

    def stop(self) -> None:
        self.run("scancel", "--user", getpass.getuser())
        for name in reversed(list(self._daemons)):
            self._daemons[name].terminate()
            self._daemons[name].wait(30)

    def lose_node(self, node: str, ranks: list[int]) -> None:
        """Kill everything on a node, as a power failure does: its daemon, the managers of steps, and the ranks."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        managers = {int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{rank}/status").read_text())[1]) for rank in ranks}
        for pid in (*managers, *ranks):
            os.kill(pid, signal.SIGKILL)

    def run(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(command, env=self._environment, cwd=cwd, stdout=subprocess.PIPE, text=True)
        return done.stdout

    def submit(self, folder: Path, run: str, *options: str, tasks: int = 2, source: Path = SCRIPT) -> str:
        """Submit the script, without GPUs, and return the number of the job."""
        script = folder / source.name
        script.write_text(re.sub("#SBATCH --gpus-per.*\n", "", source.read_text()))
        # CPUs of one machine are shared by both nodes, and perhaps by more tasks.
        shape = ["--nodes=2", f"--ntasks-per-node={tasks}", "--cpus-per-task=1", "--overcommit"]
        command = ["sbatch", "--parsable", *shape, f"--output={folder}/{run}.out", "--open-mode=append", *options]
        config, nodes = ("run.yaml", []) if source is SCRIPT else ("nodes.yaml", ["2"])
        return self.run(*command, str(script), config, str(folder / "runs" / run), *nodes, cwd=folder).strip()

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))
        return found[1] if found else ""

    def wait_for(self, job: str, *states: str) -> None:
        wait_until(lambda: self.state(job) in states, f"job {job} to be {' or '.join(states)}")

    def _daemon(self, *command: str, name: str = "") -> None:
        log = (self._folder / f"{name or command[0]}.log").open("w")
        self._daemons[name or command[0]] = subprocess.Popen(
            command, env=self._environment, stdout=log, stderr=subprocess.STDOUT
        )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.2)


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
    assert [(each["size"], each["step"]) for each in starts_of(faults) if each["rank"] == 0] == [(4, 0), (4, 4)]
    assert losses_of(folder, "killed") == undisturbed


def test_a_rank_that_is_killed_costs_a_step_and_the_others_go_on(slurm, folder, faults, undisturbed) -> None:
    (faults / "SIGKILL-3-5").touch()
    (folder / "nodes.yaml").write_text((folder / "run.yaml").read_text() + NODES)
    job = slurm.submit(folder, "replaced", tasks=1, source=NODES_SCRIPT)
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
    wait_until(lambda: any(event.get("step", 0) >= 3 for event in read_metrics(metrics)), "step 3")
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
    wait_until(lambda: any(event.get("step", 0) >= 3 for event in read_metrics(metrics)), "step 3")
    slurm.lose_node("n1", [each["pid"] for each in starts_of(faults) if each["SLURM_NODEID"] == 1])
    slurm.wait_for(job, "PENDING")
    (faults / "slow").unlink()
    slurm.start_node("n1")
    slurm.wait_for(job, "COMPLETED", "FAILED")
    assert len([each for each in starts_of(faults) if each["rank"] == 0]) == 2
    assert losses_of(folder, "lost") == undisturbed


def test_the_script_gives_ranks_time_to_save() -> None:
    directives = [line.split()[1] for line in SCRIPT.read_text().splitlines() if "#SBATCH" in line]
    assert {"--requeue", "--signal=TERM@120"} <= set(directives)
