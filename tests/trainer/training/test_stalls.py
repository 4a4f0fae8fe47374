"""Ranks that do not come to a collective are named, not those that wait for them."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest
from running_commands import END_SECONDS, ENDLESS, TWO_RANKS, wait_for_step
from training_runs import train_rank

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.testing import run_ranks
from hp_trainer.plugins import hookimpl


@pytest.mark.real_ranks
def test_a_stopped_rank_is_named_within_the_limit_and_stacks_are_written_on_request(folder, hp_train):
    command = hp_train("run.yaml", "--run.folder=out", *TWO_RANKS, *ENDLESS, "--launch.timeout_seconds=15")
    wait_for_step(folder / "out", 7, command)
    command.process.send_signal(signal.SIGUSR1)
    log = folder / "out" / "logs" / "rank1.log"
    deadline = time.monotonic() + END_SECONDS
    # Written line by line, that of the trainer after that of the thread.
    while "trainer.py" not in log.read_text().partition("Current thread")[2] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "trainer.py" in log.read_text(), "its Python stacks"

    os.kill(command.rank(1), signal.SIGSTOP)
    code, _, err = command.finish(END_SECONDS)
    assert code == 1
    # Outside of all modules are the loss of all ranks and the clipping.
    assert re.search(
        r"step \d+: rank 1 of 2 has not answered: stopped, killed, or unreachable; rank 0 waits after starting "
        r"\w+, (in module [\w. ]+, )?at ",
        err,
    )
    assert "waited 15 s (launch.timeout_seconds)" in err
    assert "rank 1 is stopped, as by SIGSTOP" in err
    assert "Go on with" in err or "continue with `hp-train resume out`" in err
    assert "Traceback" not in err.replace("Current thread", "")
    # It was reported early too, once.
    assert err.count("stacks in out/stalls") >= 1


class Leaver:
    """A hook that ends its process in the third step of rank 1."""

    def __init__(self, platform) -> None:
        self.platform = platform

    @hookimpl
    def hp_before_step(self, record) -> None:
        from hp_dtensor.comm.world import current_world

        if record.step == 3 and current_world(self.platform).rank == 1:
            sys.exit(0)


def test_a_rank_that_leaves_with_exit_code_0_is_named(lab, plugged):
    run = lab.start("run", {"dp_shard": 2})
    plugged(Leaver(lab.platform))
    with pytest.raises(LaunchError, match=rf"rank 1 has left with SystemExit\(0\) in step 3, called at {__file__}"):
        run_ranks(train_rank, 2, lab.platform, run, lab.platform)
