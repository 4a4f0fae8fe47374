"""The variables that torchrun, msrun and Slurm set, and joining their jobs."""

from __future__ import annotations

import re

import array_platform
import pytest

from hp_dtensor.compat.process_groups import init_process_group
from hp_dtensor.exceptions import LaunchError
from hp_dtensor.launch import from_environment, is_launched, rank_environment
from hp_dtensor.launch.environment import first_host, launched_local_rank, local_rank_variable

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
MSRUN = {
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "8",
    "MS_NODE_ID": "5",
    "MS_SCHED_HOST": "10.0.0.1",
    "MS_SCHED_PORT": "8118",
    "DEVICE_ID": "1",
    "RANK_ID": "5",
}
SLURM = {
    "SLURM_JOB_ID": "70123",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
NAMES = {*TORCHRUN, *MSRUN, *SLURM, "SLURM_RESTART_COUNT"}


@pytest.fixture
def environ(monkeypatch):
    """Sets the launcher's variables, and no others, in this process."""

    def set_to(variables):
        for name in NAMES - set(variables):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    set_to({})
    return set_to


@pytest.mark.parametrize(
    ("launcher", "variables", "local_size", "address"),
    [
        ("torchrun", TORCHRUN, 4, "10.0.0.1:29500"),
        ("msrun", MSRUN, 1, "10.0.0.1:8118"),
        ("slurm", SLURM, 4, "gpu003:22123"),
        ("slurm", {**SLURM, "SLURM_RESTART_COUNT": "2"}, 4, "gpu003:17961"),
        ("slurm", {**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "1234"}, 4, "head:1234"),
        ("slurm", {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2"}, 2, "gpu003:22123"),
    ],
)
def test_a_ranks_place_in_the_job(launcher, variables, local_size, address):
    assert is_launched(variables)
    found = rank_environment(variables)
    assert (found.launcher, found.rank, found.size, found.local_rank) == (launcher, 5, 8, 1)
    assert (found.local_size, found.address, found.is_scheduler) == (local_size, address, False)


@pytest.mark.parametrize("variables", [TORCHRUN, MSRUN, SLURM])
def test_the_local_rank_is_known_before_the_address(environ, variables):
    environ({name: value for name, value in variables.items() if "ADDR" not in name and "PORT" not in name})
    assert launched_local_rank() == 1
    environ({})
    assert launched_local_rank() == 0


@pytest.mark.parametrize(
    ("variables", "name"),
    [({}, "LOCAL_RANK"), (TORCHRUN, "LOCAL_RANK"), (MSRUN, "DEVICE_ID"), (SLURM, "SLURM_LOCALID")],
)
def test_the_variable_of_the_local_rank_is_read(environ, variables, name):
    """A program without a launcher may set LOCAL_RANK; a launcher's own variable has the last word."""
    environ({**variables, "LOCAL_RANK": "2", name: "3"})
    assert local_rank_variable() == name
    assert launched_local_rank() == 3


@pytest.mark.parametrize(
    "variables",
    [{}, {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, {"DEVICE_ID": "3", "RANK_ID": "3"}],
    ids=["nothing", "batch script", "devices only"],
)
def test_other_processes_are_no_ranks(variables):
    assert not is_launched(variables)
    assert rank_environment(variables) is None


def test_all_problems_come_at_once():
    variables = {"RANK": "two", "WORLD_SIZE": "", "MASTER_ADDR": "a"}
    with pytest.raises(LaunchError) as caught:
        rank_environment(variables)
    assert str(caught.value) == (
        "this process looks started by torchrun, but MASTER_PORT is not set; RANK='two' is not a number >= 0; "
        "WORLD_SIZE is not set. Unset its variables to run without a launcher."
    )


@pytest.mark.parametrize("port", ["0", "99999"])
def test_a_port_that_does_not_exist_is_refused(port):
    with pytest.raises(LaunchError, match=f"MASTER_PORT={port} is not a port from 1 to 65535"):
        rank_environment({**TORCHRUN, "MASTER_PORT": port})
    with pytest.raises(LaunchError, match=f"MS_SCHED_PORT={port} is not a port from 1 to 65535"):
        rank_environment({**MSRUN, "MS_SCHED_PORT": port})


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(LaunchError, match="rank 8 is outside a world of 8"):
        rank_environment({**TORCHRUN, "RANK": "8"})


def test_msrun_without_node_rank_gets_advice():
    variables = {name: value for name, value in MSRUN.items() if name != "MS_NODE_ID"}
    with pytest.raises(LaunchError, match="MS_NODE_ID is not set; with several machines msrun needs --node_rank"):
        rank_environment(variables)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("gpu[003-006,9],cpu1", "gpu003"),
        ("a-1,a-2", "a-1"),
        ("r[1-2]n4", "r1n4"),
        ("rack[07]", "rack07"),
        ("rack[1-2]node[03-04,7],cpu1", "rack1node03"),
    ],
)
def test_the_first_host_of_slurms_short_form(nodes, host):
    assert first_host(nodes) == host


def test_a_job_at_a_given_address_has_the_local_rank_of_the_launcher(environ):
    environ({"LOCAL_RANK": "3", "RANK": "7", "WORLD_SIZE": "8"})
    platform = array_platform.ArrayPlatform()
    init_process_group(init_method="tcp://10.0.0.1:29500", rank=7, world_size=8, platform=platform)
    assert (platform.address, platform.local_rank) == ("10.0.0.1:29500", 3)


@pytest.mark.usefixtures("array_plugin")
def test_joining_gives_the_world_once(environ):
    environ(TORCHRUN)
    try:
        world = from_environment("array")
        assert (world.rank, world.size, array_platform.ARRAY.address) == (5, 8, "10.0.0.1:29500")
        assert from_environment("array") is world
    finally:
        array_platform.ARRAY.disconnect()


@pytest.mark.usefixtures("array_plugin")
def test_without_a_launcher_the_ways_to_start_ranks_are_named(environ):
    with pytest.raises(LaunchError, match=re.escape("start it with torchrun, msrun or srun")):
        from_environment("array")


@pytest.mark.usefixtures("array_plugin")
def test_msruns_scheduler_ends_well(environ):
    environ({**MSRUN, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"})
    with pytest.raises(SystemExit) as caught:
        from_environment("array")
    assert caught.value.code == 0
