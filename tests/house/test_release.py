"""Preparing a release: versions, ranges and changelogs; with nothing written unless asked."""

import dataclasses
import datetime
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import compatibility
import pytest
import release
import workspace
from environments import SetupError
from public_api import ListedNames, listed_names
from release import next_version, range_problems
from workspace import Version


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


@pytest.mark.parametrize(("current", "expected"), [("0.1.3", "0.2.0"), ("1.4.2", "2.0.0")])
def test_a_breaking_change_takes_a_breaking_version(current, expected):
    assert next_version(Version(current), "", True, is_breaking=True) == Version(expected)
    with pytest.raises(SetupError, match=f"too small a step from {current} for a breaking change"):
        next_version(Version(current), "patch", True, is_breaking=True)


@pytest.mark.parametrize("name", workspace.PACKAGES)
def test_every_range_admits_the_version_of_today(name):
    package = workspace.packages()[name]
    assert list(range_problems(package, Version(package.version))) == []


def test_ranges_that_exclude_the_version_are_named(monkeypatch, tmp_path):
    texts = {
        "packages/a/pyproject.toml": 'dependencies = ["hp-moe>=0.1,<0.2", "hp-moe-other>=0.1,<0.2"]',
        "packages/b/pyproject.toml": '[project.optional-dependencies]\nexperts = ["hp-moe[x]>=0.2,<0.3"]',
        "examples/c/pyproject.toml": 'dependencies = [\n    "hp-moe<0.2",\n]',
        "docs/plugins/d.md": 'dependencies = ["hp-moe~=0.1.0"]',
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(workspace, "ROOT", tmp_path)
    problems = list(range_problems(workspace.packages()["hp-moe"], Version("0.2.0")))
    assert [each.split()[0] for each in problems] == [name for name in texts if name != "packages/b/pyproject.toml"]
    assert all("does not admit 0.2.0: widen the range there" in problem for problem in problems)


def test_fragments_have_a_known_kind(tmp_path):
    package = dataclasses.replace(workspace.packages()["hp-moe"], folder=tmp_path)
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "+torch-mesh.added.md").write_text("A mesh of torch is accepted.\n")
    assert release.fragments(package) == {"+torch-mesh.added.md": "added"}
    (tmp_path / "changes" / "+other.feature.md").write_text("")
    with pytest.raises(SetupError, match=r"\+other\.feature\.md: expected names such as \+torch-mesh\.added\.md"):
        release.fragments(package)


def test_a_release_removes_names_that_are_due(monkeypatch, tmp_path):
    package = dataclasses.replace(workspace.packages()["hp-platform-torch"], folder=tmp_path)
    source = tmp_path / "src" / package.module
    source.mkdir(parents=True)
    (source / "old.py").write_text('@deprecated(since="0.2.0", removal="0.3.0", instead="`g`")\ndef f():\n    pass\n')
    monkeypatch.setattr(release, "changes_since", lambda package, tag: [])
    assert list(release.public_problems(package, Version("0.2.9"))) == []
    due = "packages/hp-platform-torch/src/hp_platform_torch/old.py: f was to be removed in 0.3.0"
    assert list(release.public_problems(package, Version("0.3.0"))) == [due]


@pytest.mark.parametrize("name", workspace.PACKAGES)
def test_changes_since_the_last_release_have_a_fragment(name):
    package = workspace.packages()[name]
    kinds = release.fragments(package)
    tag = workspace.last_release(name)
    if tag is None:
        pytest.skip(f"{name} has no release, or this clone lacks the tags. {workspace.TAGS_ADVICE}")
    edited = subprocess.run(
        ["git", "diff", "--name-only", tag, "--", package.folder / "src"],
        cwd=workspace.ROOT,
        capture_output=True,
        text=True,
    ).stdout
    assert kinds or not edited, f"packages/{name}/changes needs a fragment: docs/releases.md"


BUILD_NOTHING = """
import sys
import release

def build(folder, target):
    target.mkdir()
    (target / "x.whl").write_text((folder / "pyproject.toml").read_text())
    return [target / "x.whl"]

release.build_and_check = build
sys.exit(release.main(sys.argv[1:]))
"""


def _undo_releases(package):
    """Make a package's folder that of 0.1.0 before its release, with today's sources."""
    shutil.rmtree(package / "changes", ignore_errors=True)
    project = package / "pyproject.toml"
    text = re.sub(r'^version = ".+"$', 'version = "0.1.0"', project.read_text(), count=1, flags=re.MULTILINE)
    project.write_text(re.sub(r'"(hp-[a-z-]+(?:\[.+?\])?)>=[^"]+"', r'"\1>=0.1,<0.2"', text))
    head, mark, _ = (package / "CHANGELOG.md").read_text().partition("<!-- releases -->\n")
    (package / "CHANGELOG.md").write_text(f"{head}{mark}\n## 0.1.0 (unreleased)\n\nThe first release.\n")
    if (package / "api.toml").is_file():
        listed = listed_names(package)
        first = ListedNames(dict.fromkeys(listed.since, "0.1.0"), listed.experimental)
        (package / "api.toml").write_text(first.as_toml())


@pytest.fixture
def clone(tmp_path, root):
    """A clone with today's sources and no release in its history, and a function that runs the command in it."""
    folder = tmp_path / "clone"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "clone", "--quiet", "--shared", "--no-tags", root, folder], check=True)
    subprocess.run(["git", "checkout", "--quiet", "--orphan", "unreleased"], cwd=folder, check=True)
    for name in ("tools", "packages"):
        shutil.copytree(
            root / name, folder / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "dist")
        )
    # Their ranges are for today's versions.
    shutil.rmtree(folder / "docs")
    shutil.rmtree(folder / "examples")
    for package in sorted((folder / "packages").iterdir()):
        _undo_releases(package)
    for key, value in (("user.name", "a"), ("user.email", "a@example.org")):
        subprocess.run(["git", "config", key, value], cwd=folder, check=True)

    def commit():
        subprocess.run(["git", "add", "--all"], cwd=folder, check=True)
        subprocess.run(["git", "commit", "--quiet", "--allow-empty", "--message", "a change"], cwd=folder, check=True)

    def run(*arguments):
        command = [sys.executable, "-c", BUILD_NOTHING, *arguments]
        return subprocess.run(command, cwd=folder / "tools", capture_output=True, text=True)

    commit()
    return SimpleNamespace(folder=folder, run=run, commit=commit, moe=folder / "packages" / "hp-moe")


def tags(clone):
    return subprocess.run(["git", "tag"], cwd=clone.folder, capture_output=True, text=True).stdout.split()


def test_a_dry_run_builds_and_leaves_the_tree_alone(clone):
    done = clone.run("hp-moe", "0.1.7")
    # 0.1.7 has no fragments: the changelog has a section for the first release only.
    assert done.returncode == 1
    assert "packages/hp-moe/changes has no fragment" in done.stderr
    (clone.moe / "changes").mkdir()
    (clone.moe / "changes" / "+early.added.md").write_text("A router.\n")
    assert "move the fragments to the section 0.1.0 of the changelog" in clone.run("hp-moe").stderr
    shutil.rmtree(clone.moe / "changes")
    done = clone.run("hp-moe")
    assert done.returncode == 0, done.stderr
    assert "hp-moe: 0.1.0 -> 0.1.0" in done.stdout
    assert "dry run: nothing was written" in done.stdout
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone.folder, capture_output=True, text=True).stdout
    assert (status, tags(clone)) == ("", [])


def test_releases_from_the_first_to_a_breaking_one(clone):
    first = clone.run("--all", "--write")
    assert first.returncode == 0, first.stderr
    assert tags(clone) == sorted(f"{name}-v0.1.0" for name in workspace.PACKAGES)
    assert f"## 0.1.0 ({datetime.date.today()})" in (clone.moe / "CHANGELOG.md").read_text()
    assert "hp-moe: hp-moe-v0.1.0; nothing has changed" in clone.run().stdout

    router = clone.moe / "src" / "hp_moe" / "router.py"
    router.write_text(router.read_text().replace("class TokenChoiceTopKRouter", "class TopKRouter"))
    exports = clone.moe / "src" / "hp_moe" / "__init__.py"
    exports.write_text(exports.read_text().replace("TokenChoiceTopKRouter", "TopKRouter"))
    assert "sources have changed without a fragment" in clone.run().stdout
    (clone.moe / "changes").mkdir(exist_ok=True)
    (clone.moe / "changes" / "+router.added.md").write_text("`TopKRouter` is added.\n")
    clone.commit()
    refused = clone.run("hp-moe", "--write")
    assert refused.returncode == 1
    assert "TopKRouter is public and not listed" in refused.stderr
    assert "TokenChoiceTopKRouter was removed" in refused.stderr
    assert "no fragment +WHAT.breaking.md" in refused.stderr

    listed = clone.moe / "api.toml"
    listed.write_text(listed.read_text().replace('"TokenChoiceTopKRouter", ', "") + '"next" = ["TopKRouter"]\n')
    (clone.moe / "changes" / "+name.breaking.md").write_text("`TokenChoiceTopKRouter` is `TopKRouter`.\n")
    (clone.moe / "changes" / "+inner.misc.md").write_text("A refactoring.\n")
    clone.commit()
    assert "hp-moe-v0.1.0 -> 0.2.0 (added, breaking, misc)" in clone.run().stdout
    excluded = clone.run("hp-moe", "--write")
    assert "packages/hp-trainer/pyproject.toml requires hp-moe<0.2,>=0.1, which does not admit 0.2.0" in excluded.stderr

    project = clone.folder / "packages" / "hp-trainer" / "pyproject.toml"
    project.write_text(project.read_text().replace("hp-moe>=0.1,<0.2", "hp-moe>=0.1,<0.3"))
    (clone.folder / "packages" / "hp-trainer" / "changes").mkdir(exist_ok=True)
    (clone.folder / "packages" / "hp-trainer" / "changes" / "+moe.added.md").write_text("hp-moe 0.2 is accepted.\n")
    clone.commit()
    both = clone.run("--all", "--write")
    assert both.returncode == 0, both.stderr
    assert {"hp-moe-v0.2.0", "hp-trainer-v0.1.1"} < set(tags(clone))
    text = (clone.moe / "CHANGELOG.md").read_text()
    assert "### Breaking changes\n\n- `TokenChoiceTopKRouter` is `TopKRouter`." in text
    assert text.index("## 0.2.0") < text.index("## 0.1.0")
    assert list((clone.moe / "changes").glob("+*")) == []
    assert '"0.2.0" = ["TopKRouter"]' in listed.read_text()
    assert 'version = "0.2.0"' in (clone.moe / "pyproject.toml").read_text()


def test_lost_tags_are_set_again_from_the_release_commits(clone):
    def commits():
        command = ["git", "for-each-ref", "refs/tags", "--format=%(refname:short) %(*objectname) %(contents:subject)"]
        return subprocess.run(command, cwd=clone.folder, capture_output=True, text=True).stdout

    assert clone.run("hp-dtensor", "--write").returncode == 0
    assert clone.run("hp-moe", "--write").returncode == 0
    # Neither the title of another change nor one with another version is a release.
    for title in ("hp-moe 0.1.9", "hp-moe 0.1.0 is released", "hp-other 0.1.0"):
        subprocess.run(["git", "commit", "--quiet", "--allow-empty", "--message", title], cwd=clone.folder, check=True)
    before = commits()
    assert "hp-moe-v0.1.0" in before
    subprocess.run(["git", "tag", "--delete", "hp-moe-v0.1.0"], cwd=clone.folder, capture_output=True, check=True)

    refused = clone.run("hp-moe", "--write")
    assert refused.returncode == 1
    assert "hp-moe 0.1.0 is released, but this clone lacks its tag" in refused.stderr
    listed = clone.run("--tags").stdout
    assert listed.startswith("hp-moe-v0.1.0 ")
    assert "nothing was written" in listed
    assert "hp-moe-v0.1.0" not in tags(clone)

    done = clone.run("--tags", "--write")
    assert done.returncode == 0, done.stderr
    assert commits() == before
    assert clone.run("--tags").stdout == "every release commit has its tag\n"


def test_combinations_are_those_that_ranges_admit_in_both_directions(monkeypatch):
    def needs(name, version):
        return ["hp-moe>=0.1,<0.2", "numpy>=1"] if version == Version("0.1.0") else ["hp-moe>=0.2,<0.3"]

    def package(name, version, *requirements):
        example = workspace.packages()["hp-moe"]
        return dataclasses.replace(example, name=name, version=version, requirements=requirements)

    today = {"hp-moe": package("hp-moe", "0.2.0"), "hp-trainer": package("hp-trainer", "0.3.0", "hp-moe>=0.2,<0.3")}
    monkeypatch.setattr(workspace, "packages", lambda: today)
    monkeypatch.setattr(compatibility, "released_requirements", needs)
    versions = [Version("0.1.0"), Version("0.2.0")]
    assert compatibility.admitted("hp-trainer", versions, today) == [Version("0.2.0")]
    monkeypatch.setattr(compatibility, "released_requirements", lambda name, version: [])
    assert compatibility.admitted("hp-moe", versions, today) == [Version("0.2.0")]


def test_the_page_of_versions_has_new_rows_in_place_of_old_ones():
    def result(framework, package, version, passed, failed):
        return compatibility.Result(framework, package, Version(version), passed, failed, 0, False)

    before = [
        ("torch", "hp-moe", "0.1.0", 5, 0),
        ("torch", "hp-fsdp", "0.1.0", 0, 0),
        ("torch", "hp-dtensor", "0.1.0", 9, 0),
    ]
    now = [("torch", "hp-moe", "0.2.0", 5, 1), ("mindspore", "hp-moe", "0.2.0", 3, 0)]
    # The ranges of today exclude hp-dtensor 0.1.0.
    possible = [(framework, name, Version(version)) for framework, name, version, *_ in (*before[:2], *now)]
    first = compatibility.page([result(*each) for each in before], "", [])
    assert "hp-dtensor 0.1.0" in first
    rows = compatibility.page([result(*each) for each in now], first, possible)
    assert rows.removeprefix(compatibility._HEAD + compatibility._TABLE).splitlines() == [
        "| mindspore | hp-moe 0.2.0 | works | 3 passed, 0 failed | 0 | core |",
        "| torch | hp-fsdp 0.1.0 | does not work | 0 passed, 0 failed | 0 | core |",
        "| torch | hp-moe 0.2.0 | does not work | 5 passed, 1 failed | 0 | core |",
    ]
    assert compatibility.page([], rows, []) == compatibility._HEAD + compatibility._NONE


def test_tests_of_the_released_package_are_left_out():
    assert "tests/fsdp/test_fully_shard.py" not in compatibility.selected("hp-fsdp", False)
    assert "tests/fsdp/test_fully_shard.py" in compatibility.selected("hp-moe", False)
    assert "hp_dtensor.testing.conformance" in compatibility.selected("hp-platform-torch", False)
    assert "--ignore=tests/moe" in compatibility.selected("hp-moe", True)
    missing = [path for path in compatibility.CORE if not (workspace.ROOT / path).is_file()]
    assert missing == []
