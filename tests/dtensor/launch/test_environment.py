"""The same program under the frameworks' own launchers, on one machine and on two (two launchers on loopback)."""

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


def torchrun(port, node, nodes, ranks, folder):
    where = [f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={ranks}"]
    address = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *where, *address, str(PROGRAM), "torch"]


def msrun(port, node, nodes, ranks, folder):
    where = [f"--worker_num={nodes * ranks}", f"--local_worker_num={ranks}", f"--node_rank={node}"]
    address = ["--master_addr=127.0.0.1", f"--master_port={port}", "--join=True", f"--log_dir={folder}/{node}"]
    return [str(Path(sys.executable).with_name("msrun")), *where, *address, str(PROGRAM), "mindspore"]


LAUNCHERS = {"torch": torchrun, "mindspore": msrun}


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 2)])
def test_a_launchers_ranks_join_without_change(hp_platform, tmp_path, nodes, ranks, free_port):
    if hp_platform.name not in LAUNCHERS:
        pytest.skip(f"{hp_platform.name} has no launcher of its own")
    if hp_platform.name == "mindspore" and nodes > 1:
        pytest.skip("slow to start; hp-train does the same in tests/trainer/cli/test_runs.py")
    port = free_port()
    # msrun starts `python`, whichever comes first.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    machines = [
        subprocess.Popen(
            LAUNCHERS[hp_platform.name](port, node, nodes, ranks, tmp_path),
            env={**os.environ, "PATH": path, "GLOG_v": "3", "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(nodes)
    ]
    output = "".join(machine.communicate(timeout=SECONDS)[0] for machine in machines)
    assert [machine.returncode for machine in machines] == [0] * nodes, output
    size = nodes * ranks
    total = [size * (size + 1) / 2] * 3
    said = sorted(re.findall(r"rank \d of \d: \[.*?\]", output))
    assert said == [f"rank {rank} of {size}: {total}" for rank in range(size)]
