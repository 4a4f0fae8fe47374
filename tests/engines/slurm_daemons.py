"""Slurm's daemons for two nodes on this machine, and the commands that speak to them."""

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
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "clusters" / "slurm.sbatch"
# Debian has the daemons there, which is not on every user's path.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin"])
WAIT_SECONDS = 600
MISSING = "Slurm is not installed; on Debian, as root: apt install slurm-wlm munge"

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


def is_installed() -> bool:
    return all(shutil.which(each, path=PATH) for each in ("slurmd", "slurmctld", "munged"))


class Slurm:
    """The daemons of two nodes, and the commands that speak to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: dict[str, subprocess.Popen] = {}
        self._outputs: dict[str, Path] = {}
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH, "HP_DEVICE": "cpu"}
        # The names of the nodes do not resolve.
        self.environment |= {"HP_PLATFORM": "torch", "MASTER_ADDR": "127.0.0.1"}

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
            try:
                self._daemons[name].wait(30)
            except subprocess.TimeoutExpired:
                # The others have to end, too.
                self._daemons[name].kill()
                self._daemons[name].wait()

    def lose_node(self, node: str, ranks: list[int]) -> None:
        """Kill everything on a node, as a power failure does: its daemon, the managers of steps, and the ranks."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        managers = {int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{rank}/status").read_text())[1]) for rank in ranks}
        for pid in (*managers, *ranks):
            os.kill(pid, signal.SIGKILL)

    def run(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(command, env=self.environment, cwd=cwd, stdout=subprocess.PIPE, text=True)
        return done.stdout

    def submit(
        self, folder: Path, run: str, *options: str, tasks: int = 2, source: Path = SCRIPT, config: str = "run.yaml"
    ) -> str:
        """Submit the script, without GPUs, and return the number of the job."""
        script = folder / source.name
        script.write_text(re.sub("#SBATCH --gpus-per.*\n", "", source.read_text()))
        # CPUs of one machine are shared by both nodes, and perhaps by more tasks.
        shape = ["--nodes=2", f"--ntasks-per-node={tasks}", "--cpus-per-task=1", "--overcommit"]
        command = ["sbatch", "--parsable", *shape, f"--output={folder}/{run}.out", "--open-mode=append", *options]
        nodes = [] if source is SCRIPT else ["2"]
        job = self.run(*command, str(script), config, str(folder / "runs" / run), *nodes, cwd=folder).strip()
        self._outputs[job] = folder / f"{run}.out"
        return job

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))
        return found[1] if found else ""

    def wait_for(self, job: str, *states: str) -> None:
        wait_until(lambda: self.state(job) in states, f"job {job} to be {' or '.join(states)}", self._outputs[job])

    def _daemon(self, *command: str, name: str = "") -> None:
        log = (self._folder / f"{name or command[0]}.log").open("w")
        self._daemons[name or command[0]] = subprocess.Popen(
            command, env=self.environment, stdout=log, stderr=subprocess.STDOUT
        )


def wait_until(condition: Callable[[], bool], what: str, output: Path | None = None) -> None:
    """Wait until a condition holds. A failure quotes the job's `output`."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        said = output.read_text() if output is not None and output.exists() else ""
        assert time.monotonic() < deadline, f"waited for {what}\n{said}"
        time.sleep(0.2)
