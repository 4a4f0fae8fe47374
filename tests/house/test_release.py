"""Preparing a release: versions, ranges and changelogs; with nothing written unless asked."""

import datetime
import shutil
import subprocess
import sys
import zipfile

import pytest
import release
import workspace
from environments import SetupError
from release import next_version, range_problems, with_entries
from workspace import Version

DAY = datetime.date(2026, 1, 2)
LOG = "# Changelog\n\n## Unreleased\n\n- A mesh of torch is taken.\n\n## 0.1.0 (2025-01-01)\n\nFirst.\n"


@pytest.mark.parametrize(
    ("step", "is_released", "expected"),
    [
        ("", False, "0.1.0"),
        ("", True, "0.1.1"),
        ("patch", True, "0.1.1"),
        ("minor", True, "0.2.0"),
        ("major", False, "1.0.0"),
        ("0.3.0", True, "0.3.0"),
    ],
)
def test_the_next_version(step, is_released, expected):
    assert next_version(Version("0.1.0"), step, is_released) == Version(expected)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("big", "expected major, minor, patch or a version such as 0.2.0, got 'big'"),
        ("0.0.9", "0.0.9 does not come after 0.1.0"),
        ("0.1.0", "0.1.0 does not come after 0.1.0"),
    ],
)
def test_versions_that_cannot_be(step, message):
    with pytest.raises(SetupError, match=message):
        next_version(Version("0.1.0"), step, True)


def test_the_open_section_becomes_the_released_one():
    text = with_entries(LOG, Version("0.2.0"), DAY)
    assert text.index("## Unreleased") < text.index("## 0.2.0 (2026-01-02)\n\n- A mesh") < text.index("## 0.1.0")


@pytest.mark.parametrize("text", ["# Changelog\n", LOG.replace("- A mesh of torch is taken.", "")])
def test_a_release_without_a_word_is_refused(text):
    with pytest.raises(SetupError, match="nothing under '## Unreleased'"):
        with_entries(text, Version("0.2.0"), DAY)


def test_ranges_that_exclude_the_version_are_named():
    package = workspace.packages()["hp-dtensor"]
    assert list(range_problems(package, Version(package.version))) == []
    problems = list(range_problems(package, Version("9.0.0")))
    assert len(problems) == 5
    assert all("does not admit 9.0.0" in problem for problem in problems)


def test_every_changelog_has_an_open_section():
    missing = [name for name, package in workspace.packages().items() if release.UNRELEASED not in _changelog(package)]
    assert missing == []


def _changelog(package):
    return (package.folder / "CHANGELOG.md").read_text()


def test_a_dry_run_builds_the_next_version_and_leaves_the_tree_alone(tmp_path, monkeypatch):
    package = workspace.packages()["hp-moe"]
    before = {path: path.read_bytes() for path in package.folder.rglob("*") if path.is_file()}

    def build(folder, target):
        target.mkdir()
        command = [sys.executable, "-m", "zipfile", "-c", str(target / "x.whl"), str(folder / "pyproject.toml")]
        subprocess.run(command, check=True)
        shutil.copy(target / "x.whl", tmp_path / "saved.whl")
        return [target / "x.whl"]

    monkeypatch.setattr(release, "build_and_check", build)
    (tmp_path / "scratch").mkdir()
    lines = list(release.prepare("hp-moe", "0.1.7", False, tmp_path / "scratch"))
    assert lines[0] == "hp-moe: 0.1.0 -> 0.1.7"
    assert "git tag --annotate hp-moe-v0.1.7" in lines[-1]
    with zipfile.ZipFile(tmp_path / "saved.whl") as wheel:
        assert b'version = "0.1.7"' in wheel.read("pyproject.toml")
    assert {path: path.read_bytes() for path in package.folder.rglob("*") if path.is_file()} == before
