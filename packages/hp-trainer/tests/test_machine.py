"""Problems of machines that `hp-train doctor` names, from facts as ranks gather them, without ranks."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from hp_dtensor.comm.links import Links
from hp_dtensor.comm.meeting_point import MeetingPoint
from hp_dtensor.exceptions import PlatformError
from hp_dtensor.platform import hookspecs
from hp_dtensor.platform.plugins import PluginManager, hookimpl
from hp_trainer import cli
from hp_trainer.cli import doctor
from hp_trainer.exceptions import Problem
from hp_trainer.launch import machine, platforms
from hp_trainer.launch.examination import Check, Examination, Overlap, Product
from hp_trainer.launch.machine import (
    Pair,
    RankFacts,
    find_mismatches,
    find_slow_links,
    find_slow_machines,
    find_slow_ranks,
    machines_of,
)
from hp_trainer.planning import find_device

GIB = 2**30
FACTS = RankFacts(
    host="a",
    system="Linux 6 x86_64",
    versions={"Python": "3.11.9", "torch": "2.13.0"},
    processor_ids=tuple(range(8)),
    quota=None,
    load=0.5,
    memory=64 * GIB,
    available=60 * GIB,
    shared_memory=32 * GIB,
    threads=4,
    device_type="cpu",
    device="cpu",
    device_memory=64 * GIB,
    accelerators=0,
)


def messages(problems) -> str:
    return "\n".join(map(str, problems))


def test_two_ranks_that_share_a_good_machine_have_no_problem() -> None:
    ranks = [FACTS, FACTS]
    assert not [*find_mismatches(ranks), *find_slow_machines(ranks), *find_slow_ranks([1e9, 0.9e9])]


@pytest.mark.parametrize(
    ("changes", "count", "expected"),
    [
        ({"threads": 8}, 2, "2 ranks with 8 threads each share 8 processors\n    try: OMP_NUM_THREADS=4"),
        # Unset, each rank starts a thread per processor.
        ({"threads": None}, 4, "4 ranks with 8 threads each share 8 processors\n    try: OMP_NUM_THREADS=2"),
        ({"quota": 1, "threads": 1}, 2, "2 ranks share 1 processors\n    try: at most 1 ranks"),
        ({"load": 9.25}, 1, "other programs use the processors: the load was 9.2 on 8 processors"),
        ({"shared_memory": 64 * 2**20}, 2, "/dev/shm has 64 MiB, .*\n    try: docker run --shm-size=8g"),
        ({"available": 3 * GIB}, 2, "3.0 GiB of memory are available to 2 ranks"),
    ],
)
def test_what_makes_a_machine_slow_is_said(changes, count, expected) -> None:
    found = list(find_slow_machines([replace(FACTS, **changes)] * count))
    assert len(found) == 1
    with pytest.raises(AssertionError, match=expected.replace("(", r"\(")):
        raise AssertionError(messages(found))


def test_ranks_bound_to_processors_of_their_own_are_not_too_many() -> None:
    ranks = [replace(FACTS, processor_ids=(2 * i, 2 * i + 1), threads=None) for i in range(4)]
    assert not list(find_slow_machines(ranks))


def test_other_versions_or_devices_on_some_ranks_are_problems() -> None:
    other = replace(FACTS, host="b", versions={"Python": "3.11.9", "torch": "2.12.1"}, device_type="cuda")
    found = messages(find_mismatches([FACTS, FACTS, other]))
    assert "ranks differ in torch: 2.13.0 on rank 0, 2.12.1 on rank 2" in found
    assert "rank 0 uses cpu, rank 2 uses cuda" in found
    assert "Python:" not in found
    assert "compared nothing" in messages(find_mismatches([replace(FACTS, checks_run=False)]))


def test_a_link_slower_than_the_others_of_its_kind_is_named() -> None:
    ranks = [replace(FACTS, host=host) for host in "aabb"]
    assert machines_of(ranks) == [[0, 1], [2, 3]]
    inside, between = [Pair((0, 1), 1e-6, 9e9), Pair((2, 3), 1e-6, 9e9)], [(0, 2), (1, 3), (0, 3)]
    slow = [*inside, *(Pair(pair, 1e-5, 0.2e9 if pair == (1, 3) else 1e9) for pair in between)]
    found = messages(find_slow_links(slow, ranks))
    assert "ranks 1 and 3 exchange 0.2 GB/s, other ranks of different machines 1 GB/s" in found
    # Links between machines are slower than those within one, which is no problem.
    assert len(found.splitlines()) == 2


def test_a_rank_that_computes_slower_is_named() -> None:
    found = messages(find_slow_ranks([10e9, 11e9, 3e9, 10e9]))
    assert found.startswith("devices: rank 2 computes 3 Gflop/s, others 10")


def test_versions_of_drivers_are_read_from_the_files_that_a_platform_names(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "x86_64-linux").mkdir()
    (tmp_path / "x86_64-linux" / "toolkit.info").write_text("package_name=kit\nversion=9.1.0 \n")
    (tmp_path / "driver").write_text("no number")

    class Plugin:
        @hookimpl
        def hp_driver_files(self) -> dict[str, tuple[str, str]]:
            files = {"kit": "*-linux/toolkit.info", "driver": "driver", "other": "none"}
            return {name: (f"{tmp_path}/{file}", r"(?m)^version=(.+)$") for name, file in files.items()}

    manager = PluginManager("hp_dtensor", hookspecs)
    manager.register(Plugin(), "third")
    monkeypatch.setattr(machine, "plugin_manager", lambda: manager)
    assert machine.find_versions("third").keys() - machine.find_versions("torch").keys() == {"kit"}
    assert machine.find_versions("third")["kit"] == "9.1.0"


def examination(**changes) -> Examination:
    """Figures of two machines with two ranks each."""
    values = {
        "platform": "torch",
        "facts": tuple(replace(FACTS, host=host) for host in ("secret-1", "secret-1", "secret-2", "secret-2")),
        "products": (Product("float32", (256, 256, 256), 4e10), Product("float32", (1024, 1024, 1024), 8e10)),
        "rates": (8e10,) * 4,
        # Measured on CPUs only.
        "blocks": (),
        "copy_bandwidth": 1e10,
        "host_bandwidth": 5e9,
        "axes": {"machine": 2, "local": 2},
        "links": Links({"machine": 3e-5, "local": 1e-5}, {"machine": 1e9, "local": 4e9}),
        "pairs": (Pair((0, 1), 1e-5, 4e9),),
        "overlaps": tuple(
            Overlap(axis, 2, machines, size, latency + size / rate, 2e-2, 2e-2 + (latency + size / rate) / 2)
            for axis, machines, latency, rate in (("machine", 2, 3e-5, 1e9), ("local", 1, 1e-5, 4e9))
            for size in (2**16, 2**20, 2**24)
        ),
        "checks": (Check("collectives: all_reduce float32 sum", 0.1),),
    }
    return Examination(**values | changes)


def test_a_device_file_has_the_links_within_and_between_machines(tmp_path: Path) -> None:
    file = tmp_path / "device.yaml"
    file.write_text(doctor._device_file(examination()))
    device = find_device(str(file))
    assert device.ranks_per_node == 2
    # The times are those of these links, of which computation hides half.
    assert (device.inner_bandwidth, device.outer_bandwidth) == (pytest.approx(4e9, 1e-3), pytest.approx(1e9, 1e-3))
    assert (device.inner_latency, device.outer_latency) == (pytest.approx(1e-5, 1e-2), pytest.approx(3e-5, 1e-2))
    assert device.hidden == {"weights": pytest.approx(0.5, 1e-2)}
    assert device.flops["float32"] == pytest.approx(8e10, 0.1)


def test_a_report_does_not_name_the_machines() -> None:
    found = examination()
    text = "\n".join(doctor._describe(found, "torch"))
    assert "4 ranks on 2 machines" in text
    assert "machine of 2 ranks: latency 30 us, bandwidth 1 GB/s" in text
    assert "secret" not in doctor._report(text, found)
    assert len(text.splitlines()) < 30
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("address", ["gpu17.corp.example", "10.1.2.3"])
def test_a_report_of_a_failed_meeting_names_neither_machines_nor_the_home_folder(monkeypatch, address) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu18.corp.example")
    monkeypatch.setenv("MASTER_ADDR", address)
    point = MeetingPoint(1, 2, f"{address}:29500", False, 1.0)
    errors = [socket.gaierror(), ConnectionRefusedError(), TimeoutError(), OSError("no route to 10.1.2.9:29500")]
    text = "\n".join(f"could not reach {point.address}: {point._explain(error)}" for error in errors)
    text += f"\ngpu18 and gpu17 differ; torch 2.13.0, cudnn 9.10.2.21, 127.0.0.1:1, {Path.home() / 'venv' / 'x.py'}:3"
    monkeypatch.setenv("HOSTNAME", "gpu17")
    report = doctor._report(text, None)
    assert not re.search(rf"gpu1|corp|10\.1\.|{Path.home()}", report)
    assert report.count("HOST:29500") == 5
    assert "HOST and HOST differ; torch 2.13.0, cudnn 9.10.2.21, 127.0.0.1:1, ~/venv/x.py:3" in report


def test_a_wrong_result_is_a_problem() -> None:
    wrong = Check("gradients: rows", 0.1, "on rank 1: S -> S in (0, 1): expected shape")
    found: list[Problem] = list(doctor._wrong_results(examination(checks=(wrong,))))
    assert messages(found).startswith("checks: gradients: rows: wrong result on rank 1: S -> S")


# The command without ranks -------------------------------------------------------------------------------


def test_several_platforms_of_which_none_is_chosen_are_a_problem(monkeypatch, capsys) -> None:
    monkeypatch.delenv("HP_PLATFORM", raising=False)
    for module in (platforms, doctor):
        monkeypatch.setattr(module, "installed_platforms", lambda: ["mindspore", "torch"])
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("hp-train doctor: nothing was measured\nversions     Python 3.")
    assert "platform: several platforms are installed and none is chosen" in out
    assert "try: --platform=mindspore" in out


def test_no_platform_is_a_problem(monkeypatch, capsys) -> None:
    for module in (platforms, doctor):
        monkeypatch.setattr(module, "installed_platforms", list)
    assert cli.main(["doctor"]) == 1
    assert "no platform is installed\n    try: pip install hp-platform-FRAMEWORK" in capsys.readouterr().out


def test_a_framework_that_does_not_import_is_a_problem(monkeypatch, capsys) -> None:
    def broken(name: str) -> None:
        raise PlatformError("numpy 2.1.0 is too new for mindspore; expected numpy < 2: pip install 'numpy<2'")

    monkeypatch.setattr(doctor, "chosen_platform", lambda name: "mindspore")
    monkeypatch.setattr(doctor, "import_platform", broken)
    assert cli.main(["doctor"]) == 1
    assert "mindspore: numpy 2.1.0 is too new for mindspore; expected numpy < 2" in capsys.readouterr().out


def test_more_ranks_than_devices_are_a_problem(monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "chosen_platform", lambda name: "torch")
    monkeypatch.setattr(doctor, "import_platform", lambda name: None)
    monkeypatch.setattr(doctor, "max_local_ranks", lambda name: 2)
    assert cli.main(["doctor", "--ranks=3"]) == 1
    assert "there are 2 devices on this machine, and each rank needs its own" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--to=report.txt"], "expected a report .md or a device file .yaml, got 'report.txt'"),
        (["--to=nowhere/report.md"], "expected a file in an existing folder, got 'nowhere/report.md'"),
        (["--ranks=0"], "0 is not in the range 1<=x<=1024"),
        (["--timeout=0"], "0.0 is not in the range x>=1"),
        (["run.yaml"], "Got unexpected extra argument 'run.yaml'"),
    ],
)
def test_bad_arguments_are_refused(words, expected, capsys) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert expected in capsys.readouterr().err
