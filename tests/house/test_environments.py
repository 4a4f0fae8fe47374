"""Environments are made once, again when they should be, and say what is wrong when they cannot be."""

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import environments
import pytest
from environments import Environment, SetupError, explain_pip_failure

UNREACHABLE = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_RETRIES": "1",
}


def say(python, code):
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def unreachable_index(monkeypatch):
    for name, value in UNREACHABLE.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def made(monkeypatch):
    """The folders made, in order."""
    folders = []
    make = environments._make
    monkeypatch.setattr(environments, "_make", lambda folder: (folders.append(folder.name), make(folder)))
    return folders


def test_an_environment_is_made_once(tmp_path, made):
    first = Environment("a").prepare(tmp_path / "a")
    assert Environment("a").prepare(tmp_path / "a") == first
    assert made == ["a"]
    assert say(first, "import sys; print(sys.prefix)") == str(tmp_path / "a")


def test_an_environment_is_made_anew_when_what_it_consists_of_changes(tmp_path, made):
    Environment("a").prepare(tmp_path / "a")
    Environment("a", fingerprint="another version").prepare(tmp_path / "a")
    Environment("a", fingerprint="another version").prepare(tmp_path / "a")
    assert made == ["a", "a"]


def test_a_half_made_environment_is_made_anew(tmp_path, made, unreachable_index):
    wanted = Environment("a", requirements=("some-requirement",))
    for _ in range(2):
        with pytest.raises(SetupError):
            wanted.prepare(tmp_path / "a")
    assert made == ["a", "a"]


def test_fresh_means_made_anew(tmp_path, made):
    python = Environment("a").prepare(tmp_path / "a")
    (environments.site_packages(tmp_path / "a") / "left_over.py").write_text("")
    Environment("a").prepare(tmp_path / "a", fresh=True)
    assert say(python, "import importlib.util as u; print(u.find_spec('left_over'))") == "None"


def test_two_at_once_make_it_once(tmp_path, made):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: Environment("a").prepare(tmp_path / "a"), range(2)))
    assert made == ["a"]


def test_a_shared_environment_is_included_and_its_change_noticed(tmp_path, made):
    Environment("source").prepare(tmp_path / "source")
    site = environments.site_packages(tmp_path / "source")
    (site / "framework.py").write_text("name = 'shared'")
    target = Environment("target", shared=lambda: (site,))
    python = target.prepare(tmp_path / "target")
    assert say(python, "import framework; print(framework.name)") == "shared"

    Environment("source", fingerprint="newer").prepare(tmp_path / "source")
    target.prepare(tmp_path / "target")
    assert made == ["source", "target", "source", "target"]


def test_a_shared_command_runs_with_the_own_interpreter(tmp_path):
    source = Environment("source").prepare(tmp_path / "source")
    command = source.with_name("where")
    command.write_text(f"#!{source}\nimport sys; print(sys.prefix)\n")
    site = environments.site_packages(tmp_path / "source")
    target = Environment("target", shared=lambda: (site,)).prepare(tmp_path / "target")
    done = subprocess.run([target.with_name("where")], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "target")


def test_a_command_of_its_own_is_not_replaced_by_a_shared_one(tmp_path, monkeypatch):
    source = Environment("source").prepare(tmp_path / "source")
    for name in ("both", "shared"):
        source.with_name(name).write_text(f"#!{source}\nprint('shared')\n")
    # Locked requirements are installed before the shared environments are complete.
    monkeypatch.setattr(Environment, "_locked_requirements", lambda self: [])
    monkeypatch.setattr(Environment, "_install", lambda self, python, _: python.with_name("both").write_text("own"))
    sites = (environments.site_packages(tmp_path / "source"),)
    target = Environment("target", shared=lambda: sites).prepare(tmp_path / "target")
    assert target.with_name("both").read_text() == "own"
    assert target.with_name("shared").read_text() == f"#!{target}\nprint('shared')\n"


def test_an_unreachable_index_is_named_as_the_cause(tmp_path, unreachable_index, capfd):
    with pytest.raises(SetupError) as caught:
        Environment("a", requirements=("some-requirement==1.0",)).prepare(tmp_path / "a")
    message = str(caught.value)
    assert message.startswith("pip could not install some-requirement==1.0: the package index could not be reached.")
    assert "What to do: check the network, and a proxy or a mirror" in message
    assert "Connection refused" in capfd.readouterr().err


def test_a_python_without_venv_is_told_what_to_install(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else find(name))
    with pytest.raises(SetupError) as caught:
        Environment("a").prepare(tmp_path / "a")
    assert f"this Python ({sys.executable}) cannot make virtual environments" in str(caught.value)
    assert "apt install python3-venv" in str(caught.value)


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (
            "NewConnectionError('...: [Errno 111] Connection refused')",
            "the package index could not be reached",
        ),
        ("[Errno -3] Temporary failure in name resolution", "the package index could not be reached"),
        ('ReadTimeoutError("...: Read timed out.")', "the package index could not be reached"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed", "a certificate that this machine does not trust"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        (
            "ERROR: No matching distribution found for torch==9",
            "no release that fits this Python and this machine",
        ),
        ("OSError: [Errno 13] Permission denied: '/x'", "a folder cannot be written"),
        ("something never seen", "pip's own words are above"),
    ],
)
def test_pip_failures_are_explained(output, cause):
    explanation = explain_pip_failure(output)
    assert cause in explanation
    assert "What to do: " in explanation


def test_the_stamp_can_be_read_by_a_person(tmp_path):
    Environment("a", fingerprint="x").prepare(tmp_path / "a")
    stamp = json.loads((tmp_path / "a" / environments.STAMP).read_text())
    assert stamp["fingerprint"] == "x"
    assert sys.version in stamp["python"]
