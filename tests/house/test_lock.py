"""The lock file holds for what the environments ask for now, and releases are required within tested ranges."""

import os
import sys

import environments
import lock
import pytest
import workspace
from environments import Environment, SetupError

NEEDS_PYTHON = pytest.mark.skipif(
    lock.read_lock().python != lock.this_python(), reason="the lock file is for another interpreter or system"
)


@pytest.fixture
def locked(monkeypatch):
    """Makes a lock file for an environment."""

    def lock_as(asked, packages, python=None):
        digests = {release: tuple(found) for release, found in packages.items()}
        made = lock.Lock(python or lock.this_python(), digests, {"a": (tuple(sorted(asked)), tuple(digests))})
        monkeypatch.setattr(lock, "read_lock", lambda: made)

    return lock_as


@pytest.fixture
def pip_calls(monkeypatch):
    """Return a list that gets the arguments of each call of pip, which installs nothing."""
    calls = []
    monkeypatch.setattr(environments, "_pip", lambda python, arguments: calls.append(arguments))
    return calls


@NEEDS_PYTHON
@pytest.mark.parametrize("name", workspace.PACKAGES)
def test_the_lock_is_for_what_the_tests_of_a_package_ask_for_now(monkeypatch, name):
    asked = []
    monkeypatch.setattr(workspace, "wheels", lambda kind: dict.fromkeys(workspace.PACKAGES, workspace.ROOT))
    monkeypatch.setattr(workspace, "framework_sites", lambda names: ())
    monkeypatch.setattr(Environment, "prepare", lambda self, folder: asked.append(self))
    import noxfile

    noxfile.for_tests(name)
    (environment,) = asked
    assert environment._locked_requirements() is not None, "run `python3 run.py nox -s lock`"


@NEEDS_PYTHON
@pytest.mark.skipif("HP_TORCH" in os.environ, reason="another torch is tested, which is not locked")
def test_the_lock_is_for_what_all_other_environments_ask_for_now(monkeypatch):
    asked = []
    monkeypatch.setattr(workspace, "wheels", lambda kind: dict.fromkeys(workspace.PACKAGES, workspace.ROOT))
    monkeypatch.setattr(workspace, "framework_sites", lambda names: ())
    monkeypatch.setattr(Environment, "prepare", lambda self, folder: asked.append(self))
    import noxfile

    others = noxfile.ruff, noxfile.house_tools, noxfile.site_tools
    for make in (noxfile.training, noxfile.with_engines, noxfile.components, *others):
        make()
    for framework, environment in workspace.FRAMEWORKS.items():
        noxfile.full(framework)
        asked.append(environment)
    stale = [each.locked_as for each in asked if each._locked_requirements() is None]
    assert stale == [], "run `python3 run.py nox -s lock`"


@NEEDS_PYTHON
def test_every_release_in_the_lock_has_a_digest_and_torch_is_left_out():
    found = lock.read_lock()
    assert all(digest.startswith("sha256:") for digests in found.packages.values() for digest in digests)
    assert all(found.packages.values())
    names = {release.partition("==")[0] for release in found.packages}
    assert {"numpy", "mindspore", "pytest"} <= names
    assert not names & lock.UNLOCKED


def test_locked_releases_are_installed_by_digest_and_nothing_else(tmp_path, locked, pip_calls):
    locked(["b>=1", "torch==2"], {"b==1.5": ["sha256:12", "sha256:34"], "c==3": ["sha256:56"]})
    Environment("a", requirements=("torch==2",), needs=("b>=1",), locked_as="a").prepare(tmp_path / "a")
    lines = (tmp_path / "a" / "locked.txt").read_text()
    assert lines == "b==1.5 --hash=sha256:12 --hash=sha256:34\nc==3 --hash=sha256:56\n"
    options = ["--no-deps", "--require-hashes", "--requirement", str(tmp_path / "a" / "locked.txt")]
    # Its own index decides which build of torch.
    assert pip_calls == [options, ["torch==2"]]


@pytest.mark.parametrize("python", [None, "cpython 2.7 plan9 vax"])
def test_other_requirements_or_another_python_go_by_the_requirements(tmp_path, locked, pip_calls, capsys, python):
    locked(["b>=1"], {"b==1.5": ["sha256:12"]}, python)
    wanted = "b>=2" if python is None else "b>=1"
    Environment("a", requirements=(wanted,), locked_as="a").prepare(tmp_path / "a")
    assert pip_calls == [[wanted]]
    assert "[setup] a: not from tools/lock.toml, which was written for others" in capsys.readouterr().out


def test_an_environment_is_made_anew_when_its_lock_changes(tmp_path, locked, pip_calls):
    for digest in ("sha256:12", "sha256:12", "sha256:34"):
        locked(["b>=1"], {"b==1.5": [digest]})
        Environment("a", requirements=("b>=1",), locked_as="a").prepare(tmp_path / "a")
    assert len(pip_calls) == 2


@pytest.mark.parametrize("is_locked", [True, False])
def test_only_unlocked_requirements_are_resolved_after_shared_packages_are_installed(
    tmp_path, locked, pip_calls, is_locked
):
    locked(["b>=1"], {"b==1.5": ["sha256:12"]})
    installed = []

    def shared():
        installed.append(bool(pip_calls))
        return ()

    name = "a" if is_locked else ""
    Environment("a", requirements=("b>=1",), locked_as=name, shared=shared).prepare(tmp_path / "a")
    assert installed[0] is is_locked


def test_a_file_with_another_digest_is_explained(tmp_path, monkeypatch, locked):
    locked(["b>=1"], {"b==1.5": ["sha256:12"]})
    monkeypatch.setattr(environments, "_pip", lambda python, arguments: "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES")
    with pytest.raises(SetupError, match=r"other files than those that tools/lock\.toml was written for"):
        Environment("a", requirements=("b>=1",), locked_as="a").prepare(tmp_path / "a")


def test_what_is_installed_is_written_down_without_our_packages(tmp_path):
    site = tmp_path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for name in ("hp_dtensor-0.1.0", "torch-2.13.0+cpu", "Jinja2-3.1.6", "ruamel.yaml-1.0"):
        (site / f"{name}.dist-info").mkdir(parents=True)
    assert lock._installed(tmp_path) == ["jinja2==3.1.6", "ruamel-yaml==1.0"]


@pytest.mark.parametrize("name", workspace.PACKAGES)
def test_releases_are_required_up_to_a_tested_version(name):
    for requirement in map(workspace.Requirement, workspace.packages()[name].requirements):
        assert any(each.operator == "<" for each in requirement.specifier), str(requirement)
