"""`hp-train` starts its own ranks, or joins those of a launcher; either way the run is prepared once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_ranks
PROGRAM = Path(__file__).with_name("launched_program.py")


@pytest.fixture
def start(fork_server) -> Callable[..., subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return lambda *command: fork_server.popen([sys.executable, *command], env=environment, **options)


def finish(process: subprocess.Popen[str]) -> str:
    """The output of a process that ends by itself."""
    try:
        return process.communicate(timeout=300)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def ranks_seen(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("rank-*")}


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize("local_ranks", [1, 2])
def test_local_ranks_are_started_after_the_run_is_prepared(start, tmp_path: Path, local_ranks: int) -> None:
    process = start(str(PROGRAM), str(tmp_path / "run"), str(local_ranks))
    output = finish(process)
    assert process.returncode == 0, output
    # Several ranks are processes of their own, with the number of their machine.
    machine = "0" if local_ranks > 1 else ""
    expected = {f"rank-{rank}-of-{local_ranks}": f"step-00000007 1000 {machine}" for rank in range(local_ranks)}
    assert ranks_seen(tmp_path / "run") == expected


@pytest.mark.usefixtures("torch_suffices")
def test_the_error_of_a_local_rank_reaches_the_user(start, tmp_path: Path) -> None:
    process = start(str(PROGRAM), str(tmp_path / "run"), "2", "fail")
    output = finish(process)
    assert process.returncode != 0
    assert "rank 1 of 2 failed" in output
    assert "this rank was asked to fail" in output


@pytest.fixture
def torchrun() -> list[str]:
    pytest.importorskip("torch")
    return ["-m", "torch.distributed.run"]


def test_a_run_that_cannot_be_prepared_ends_every_rank_of_torchrun(start, tmp_path: Path, torchrun: list[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("x")
    process = start(*torchrun, "--nproc-per-node=2", str(PROGRAM), str(tmp_path / "run"), "1")
    output = finish(process)
    assert process.returncode != 0
    assert "preparing the run failed; rank 0: RunFolderError" in output
    assert "has files that do not belong to a run" in output
