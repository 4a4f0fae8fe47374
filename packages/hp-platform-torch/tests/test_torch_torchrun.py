"""torchrun starts the ranks: its agent serves the store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_ranks
PROGRAM = Path(__file__).with_name("torchrun_program.py")


@pytest.mark.parametrize(("group", "connections"), [("ours", 1), ("own", 2), ("device", 2)])
def test_ranks_of_torchrun_join_one_job(group, connections, fork_server, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    # The agent is forked; it starts its ranks as new processes.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = fork_server.run([*command, str(PROGRAM), group, str(tmp_path)], 300, env=environment)
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        lines = (tmp_path / f"rank{rank}").read_text().split("\n")
        assert lines == [f"{rank} of 3: [3.0, 3.0]"] * connections
        # Threads of groups that outlive the program's own may abort a process while Python shuts down.
        assert group == "ours" or (tmp_path / f"left{rank}").read_text() == "True"


def test_another_rank_than_torch_distributed_has_is_refused():
    code = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "from hp_dtensor.platform.selection import get_platform\n"
        "get_platform('torch').connect(1, 4, '127.0.0.1:1')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "PlatformError: torch.distributed is already rank 0 of 1; expected rank 1 of 4" in done.stderr
