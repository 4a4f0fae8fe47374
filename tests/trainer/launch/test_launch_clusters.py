"""The examples for Slurm and Ray, as far as a machine without them goes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from running_commands import BIN, LAUNCHERS_VARIABLES, START_SECONDS, steps_of

CLUSTERS = Path(__file__).parents[3] / "examples" / "clusters"

# What Slurm's srun does for a step of two tasks on one machine, --kill-on-bad-exit included.
SRUN = """\
#!{python}
import os, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--") and "kill" in word]
assert options == ["--kill-on-bad-exit=1"], sys.argv
command = [word for word in sys.argv[1:] if word not in options]
step = dict(SLURM_JOB_ID=str(os.getpid()), SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NODELIST="localhost",
            SLURM_STEP_TASKS_PER_NODE="2")
tasks = [subprocess.Popen(command, env=os.environ | step | dict(SLURM_PROCID=str(n), SLURM_LOCALID=str(n)))
         for n in range(2)]
codes = [task.wait() for task in tasks]
sys.exit(max(codes))
"""


@pytest.mark.real_ranks
def test_the_slurm_script_trains(folder, hp_platform) -> None:
    if hp_platform.name != "torch":
        pytest.skip("one framework is enough for a shell script")
    (folder / "bin").mkdir()
    (folder / "bin" / "srun").write_text(SRUN.format(python=sys.executable))
    (folder / "bin" / "srun").chmod(0o755)
    environment = {key: text for key, text in os.environ.items() if key not in LAUNCHERS_VARIABLES}
    environment |= {"HP_PLATFORM": hp_platform.name, "OMP_NUM_THREADS": "1", "HP_DEVICE": "cpu"}
    environment["PATH"] = os.pathsep.join([str(folder / "bin"), str(BIN), environment["PATH"]])
    command = ["bash", str(CLUSTERS / "slurm.sbatch"), "run.yaml", "out"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * START_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert steps_of(folder / "out") == [1, 2, 3, 4, 5, 6]


def test_the_slurm_script_gives_ranks_time_to_save() -> None:
    directives = [line.split()[1] for line in (CLUSTERS / "slurm.sbatch").read_text().splitlines() if "#SBATCH" in line]
    assert {"--requeue", "--signal=TERM@120"} <= set(directives)


def test_the_ray_job_starts_every_rank_with_its_place(monkeypatch, capsys) -> None:
    started: list[tuple[dict, list[str]]] = []
    monkeypatch.setitem(sys.modules, "ray", fake_ray())
    monkeypatch.setattr(subprocess, "call", lambda command, env: started.append((env, command)) or 0)
    monkeypatch.setattr(sys, "argv", ["ray_job.py", "run.yaml", "out", "--ranks=3", "--gpus=1"])
    spec = importlib.util.spec_from_file_location("ray_job", CLUSTERS / "ray_job.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main() == 0
    places = [tuple(env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")) for env, _ in started]
    assert places == [(str(rank), "3", "0", "10.0.0.1") for rank in range(3)]
    assert len({env["MASTER_PORT"] for env, _ in started}) == 1
    assert all(command[-3:] == ["run", "run.yaml", "--run.folder=out"] for _, command in started)


def fake_ray() -> ModuleType:
    """The part of Ray that the example uses, all of it in this process."""

    class Method:
        def __init__(self, function) -> None:
            self.remote = function

    class Actor:
        def __init__(self, worker) -> None:
            self.meeting_point, self.train = Method(worker.meeting_point), Method(worker.train)

    def remote(cls):
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda: Actor(cls())))

    ray = ModuleType("ray")
    ray.init, ray.get, ray.remote = (lambda: None), (lambda value: value), remote
    ray.util = SimpleNamespace(
        get_node_ip_address=lambda: "10.0.0.1",
        placement_group=lambda bundles: SimpleNamespace(ready=lambda: None, bundles=bundles),
        scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group: group),
    )
    return ray
