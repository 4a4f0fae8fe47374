"""The nox sessions: all explained, all run by default but those that train or measure."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import workspace

BOTH = {f"{name}({platform})" for name in ("chaos", "proof") for platform in ("mindspore", "torch")}
STATIC = {"docs", "lint", "public_api", "site", "types"}
INSTALLED = {"engines_core", "outside", "subsets"}
NOT_BY_DEFAULT = {
    "accelerator",
    "bench",
    "compatibility",
    "engines",
    "floor_tests",
    "lock",
    "loss_parity",
    "main",
    "npu",
    "release",
    *BOTH,
    *STATIC,
    *INSTALLED,
}


@pytest.fixture(scope="module")
def sessions():
    command = [sys.executable, "-m", "nox", "--list", "--json", "-f", str(workspace.ROOT / "noxfile.py")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(listed.stdout)


def test_every_session_is_explained(sessions):
    assert [each["session"] for each in sessions if not each["description"].endswith(".")] == []


def test_every_package_has_its_tests_run(sessions):
    tested = {each["call_spec"]["package"] for each in sessions if each["name"] == "tests"}
    assert tested == {folder.name for folder in (workspace.ROOT / "packages").iterdir()}


def test_all_but_training_and_measuring_runs_by_default():
    # Without a default, nox would run everything: the option names what is left out.
    command = [sys.executable, "-m", "nox", "--list", "-f", str(workspace.ROOT / "noxfile.py")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    skipped = {line.split()[1] for line in lines if line.startswith("- ")}
    assert skipped == NOT_BY_DEFAULT


@pytest.fixture
def silent_commands(monkeypatch):
    """The commands of sessions that run at once, which are noted instead of run."""
    import noxfile

    def run(session, python, *arguments, silent=False, **variables):
        assert silent, "their output would be mixed"
        commands.append(" ".join(arguments))
        return ""

    commands = []
    monkeypatch.setattr(noxfile, "run", run)
    return commands


def test_the_checks_that_use_one_core_run_at_once(monkeypatch, silent_commands):
    import noxfile

    for tools in ("components", "ruff", "house_tools", "site_tools"):
        monkeypatch.setattr(noxfile, tools, lambda: None)
    noxfile.static.func(type("Session", (), {"posargs": []})())
    wanted = {"mypy", "ruff check", "ruff format", "check_docs", "public_api", "site_pages", "mkdocs"}
    assert {name for name in wanted if any(name in command for command in silent_commands)} == wanted


def test_sessions_that_leave_a_core_idle_run_at_once(monkeypatch, silent_commands):
    import noxfile

    monkeypatch.setattr(noxfile, "with_engines", lambda: None)
    for name in ("wheels", "released", "outside"):
        monkeypatch.setattr(noxfile.workspace, name, lambda *_: None)
    noxfile.installed.func(type("Session", (), {"posargs": []})())
    assert sum("engines_core" in command for command in silent_commands) == 1
    assert sum("examples/hp-platform-paddle/tests" in command for command in silent_commands) == 1
    assert sum("check_subset" in command for command in silent_commands) == len(noxfile.SUBSETS)


@pytest.mark.parametrize(
    ("found", "tested"),
    [
        ({"torch": ("cpu", 0), "mindspore": ("cpu", 0)}, []),
        ({"torch": ("cuda", 1), "mindspore": ("cpu", 0)}, [("torch", {"HP_DEVICE": "cuda", "HP_BACKEND": "gloo"})]),
        (
            {"torch": ("cuda", 8), "mindspore": ("npu", 8)},
            [("mindspore", {"HP_DEVICE": "npu"}), ("torch", {"HP_DEVICE": "cuda"})],
        ),
    ],
)
def test_accelerators_are_tested_where_there_are_any(monkeypatch, found, tested):
    import noxfile

    ran, said = [], []
    monkeypatch.setattr(noxfile, "accelerators", lambda session, platform: found[platform])
    monkeypatch.setattr(noxfile, "cross", lambda session, platform, **variables: ran.append((platform, variables)))
    session = type("Session", (), {"log": staticmethod(said.append)})()
    noxfile.accelerator.func(session)
    assert sorted(ran, key=str) == sorted(tested, key=str)
    assert ("nothing was tested" in said[-1]) == (not tested)


def test_the_stand_in_for_ascend_is_tested_where_it_can_be_compiled(monkeypatch, tmp_path):
    import noxfile

    class Session:
        posargs = ()

        def skip(self, reason):
            raise LookupError(reason)

        def create_tmp(self):
            return str(tmp_path)

    ran = []
    monkeypatch.setattr(noxfile, "full", lambda framework: tmp_path / framework)
    monkeypatch.setattr(noxfile, "run", lambda session, python, *arguments, **named: ran.append((arguments, named)))
    monkeypatch.setattr(noxfile.shutil, "which", lambda name: name)
    noxfile.npu.func(Session())
    (tests, on), (training, also_on) = ran
    assert [each for each in tests if each.startswith("tests/") and not (workspace.ROOT / each).exists()] == []
    assert training[:2] == (str(tmp_path / "hp-train"), noxfile.MAIN_CONFIG)
    assert on == also_on
    assert (workspace.ROOT / on["PYTHONPATH"] / "torch_npu").is_dir()
    monkeypatch.setattr(noxfile.shutil, "which", lambda name: None)
    with pytest.raises(LookupError, match="apt install g"):
        noxfile.npu.func(Session())


def test_siblings_are_required_with_a_floor_and_a_ceiling():
    for package in workspace.packages().values():
        for requirement in map(workspace.Requirement, (*package.requirements, *package.extras)):
            if requirement.name in workspace.PACKAGES:
                assert {each.operator for each in requirement.specifier} == {">=", "<"}


def test_a_package_that_needs_unreleased_changes_of_a_sibling_is_told_to_release_it(monkeypatch, tmp_path):
    import noxfile

    def check(session, name, wanted, wheels):
        if name == "floor-hp-trainer":
            assert set(wanted) >= {"hp-trainer", "hp-platform-torch"}
            raise noxfile.CommandFailed("exit code 1")
        return f"{name} works\n"

    old = {name: tmp_path / f"{name.replace('-', '_')}-0.1.0-py3-none-any.whl" for name in workspace.PACKAGES}
    newest = {"hp-dtensor": "0.1.0", "hp-fsdp": "0.1.5", "hp-platform-torch": "0.1.0"}
    monkeypatch.setattr(noxfile, "check_subset", check)
    monkeypatch.setattr(workspace, "has_wheels", lambda framework: True)
    monkeypatch.setattr(workspace, "released_versions", lambda name: {workspace.Version(newest[name]): "tag"})
    monkeypatch.setattr(workspace, "is_changed", lambda name: name == "hp-dtensor")
    assert noxfile.check_floor(None, "hp-fsdp", {"hp-dtensor": old["hp-dtensor"]}) == "floor-hp-fsdp works\n"
    with pytest.raises(workspace.SetupError) as failure:
        noxfile.check_floor(None, "hp-trainer", {name: old[name] for name in newest})
    assert str(failure.value).splitlines() == [
        "hp-trainer does not work with the oldest siblings that packages/hp-trainer/pyproject.toml allows (see above).",
        "  If it needs what hp-dtensor has not released yet: release that first, and write its new version there:",
        "    python3 run.py nox -s release -- hp-dtensor --write",
        "  If it needs what hp-fsdp has since 0.1.5: write hp-fsdp>=0.1.5 there.",
    ]


def test_a_package_brings_its_siblings_and_nothing_else():
    assert workspace.closure(("hp-platform-torch",)) == ("hp-dtensor", "hp-platform-torch")
    assert workspace.closure(("hp-trainer",)) == ("hp-dtensor", "hp-fsdp", "hp-moe", "hp-trainer")


def test_a_floor_that_was_never_released_is_named(monkeypatch):
    old = workspace.Version("0.0.7")
    with pytest.raises(workspace.SetupError, match=r"there is no tag hp-dtensor-v0\.0\.7"):
        workspace.wheel_at(workspace.packages()["hp-dtensor"], old)


def test_packages_of_a_framework_without_wheels_for_this_python_are_left_out(monkeypatch):
    import noxfile

    assert noxfile.installable(workspace.PACKAGES) == list(workspace.PACKAGES) or sys.version_info >= (3, 13)
    monkeypatch.setattr(workspace, "_FIRST_WITHOUT_WHEELS", {"mindspore": sys.version_info[:2]})
    assert set(workspace.PACKAGES) - set(noxfile.installable(workspace.PACKAGES)) == {"hp-platform-mindspore"}
    with pytest.raises(workspace.NoWheelsError, match=r"mindspore==[\d.]+ has no wheels for Python 3\.\d+$"):
        workspace.framework_sites(("hp-platform-mindspore",))


@pytest.mark.parametrize("name", workspace.PACKAGES)
def test_a_package_names_the_pythons_that_continuous_integration_tests(name):
    workflow = (workspace.ROOT / ".github" / "workflows" / "tests.yml").read_text()
    tested = re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.+)\]", workflow)[1])
    package = workspace.packages()[name]
    first = workspace._FIRST_WITHOUT_WHEELS.get(package.framework, (4,))
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", package.text)
    assert named == [each for each in tested if tuple(map(int, each.split("."))) < first]


def test_a_scratch_folder_is_deleted_when_the_process_is_terminated(root, tmp_path):
    program = (
        "import time, workspace\n"
        "with workspace.scratch_folder('hp-test-') as folder:\n"
        "    (folder / 'file').write_text('')\n"
        "    print('made', flush=True)\n"
        "    time.sleep(60)\n"
    )
    variables = {**os.environ, "PYTHONPATH": str(root / "tools"), "TMPDIR": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", program], env=variables, **pipes) as process:
        assert process.stdout.readline() == b"made\n"
        assert len(list(tmp_path.glob("hp-test-*/file"))) == 1
        process.terminate()
        assert process.wait(timeout=60) == -signal.SIGINT
    assert list(tmp_path.iterdir()) == []
