"""A program under the frameworks' own launchers, on one machine; `trainer/cli/test_train.py` has two (on loopback)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("joined.py")
SECONDS = 200
pytestmark = pytest.mark.real_ranks


def torchrun(port, ranks, folder):
    address = [f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *address, str(PROGRAM), "torch"]


def msrun(port, ranks, folder):
    where = [f"--worker_num={ranks}", f"--local_worker_num={ranks}"]
    address = ["--master_addr=127.0.0.1", f"--master_port={port}", "--join=True", f"--log_dir={folder}/logs"]
    return [str(Path(sys.executable).with_name("msrun")), *where, *address, str(PROGRAM), "mindspore"]


LAUNCHERS = {"torch": torchrun, "mindspore": msrun}


def test_a_launchers_ranks_join_without_change(hp_platform, tmp_path, free_port):
    if hp_platform.name not in LAUNCHERS:
        pytest.skip(f"{hp_platform.name} has no launcher of its own")
    # msrun starts `python`, whichever comes first.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        LAUNCHERS[hp_platform.name](free_port(), 2, tmp_path),
        env={**os.environ, "PATH": path, "GLOG_v": "3", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    said = sorted(re.findall(r"rank \d of \d: \[.*?\]", done.stdout))
    assert said == [f"rank {rank} of 2: {[3.0] * 3}" for rank in range(2)]
