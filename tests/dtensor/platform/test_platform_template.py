"""`python -m hp_dtensor.platform new` writes a package that is found and whose failing tests are the to-do list."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hp_dtensor
from hp_dtensor.platform.__main__ import CONFORMANCE, main, package_of
from hp_dtensor.platform.composition import PRIMITIVES
from hp_dtensor.platform.interface import Platform


@pytest.fixture
def environment(tmp_path):
    """Variables with which another Python finds the new package, as if it were installed."""
    folder = tmp_path / "new"
    assert main(["new", "demo", "--to", str(folder)]) == 0
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    installed = tmp_path / "hp_platform_demo-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    points = [f"[{group}]\ndemo = {each['demo']}\n" for group, each in project["entry-points"].items()]
    (installed / "entry_points.txt").write_text("\n".join(points))
    path = [str(folder / "src"), str(tmp_path), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HP_LOAD_PLUGINS": "demo"}


def _run(environment, tmp_path, *command):
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )


def test_the_package_is_found_and_says_what_to_do(environment, tmp_path):
    program = (
        "from hp_dtensor.platform.selection import get_platform\n"
        "p = get_platform('demo')\n"
        "try: p.detach(None)\n"
        "except NotImplementedError as error: print(p.name, error)\n"
        "try: p.ops.add(1, 2)\n"
        "except NotImplementedError as error: print(error)\n"
    )
    done = _run(environment, tmp_path, "-c", program)
    assert done.stdout.splitlines() == [
        "demo DemoPlatform.detach: Return the same data outside the autograd graph, requiring no gradient.",
        "operation add(x, y): as torch's add",
    ], done.stderr


@pytest.mark.parametrize(("version", "end"), [(hp_dtensor.__version__, None), ("0.7.3", "0.8"), ("1.4.0", "2")])
def test_it_requires_the_version_that_wrote_it(monkeypatch, version, end):
    monkeypatch.setattr(hp_dtensor, "__version__", version)
    (requirement,) = tomllib.loads(package_of("demo")["pyproject.toml"])["project"]["dependencies"]
    assert Requirement(requirement).specifier.contains(version)
    assert end is None or requirement == f"hp-dtensor>={version},<{end}"


def test_its_first_failing_test_names_the_first_step(environment, tmp_path):
    suite = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--pyargs", CONFORMANCE[0]]
    done = _run(environment, tmp_path, *suite, "--hp-platform=demo", "--hp-ranks=simulated")
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr
    assert "NotImplementedError: DemoPlatform." in done.stdout


def test_it_has_all_required_methods_and_operations():
    files = package_of("some_name")
    methods = set(re.findall(r"    def (\w+)\(", files["src/hp_platform_some_name/platform.py"]))
    assert methods >= Platform.__abstractmethods__ - {"connect"}
    operations = re.findall(r'^    "(\w+)":', files["src/hp_platform_some_name/operations.py"], re.MULTILINE)
    assert operations == list(PRIMITIVES)
    for path, text in files.items():
        if path.endswith(".py"):
            compile(text, path, "exec")
            assert max(map(len, text.splitlines())) <= 120, path


def test_the_steps_are_all_modules_of_the_suite():
    from hp_dtensor.testing import conformance

    modules = {f"{conformance.__name__}.{path.stem}" for path in Path(conformance.__file__).parent.glob("test_*.py")}
    assert modules <= set(CONFORMANCE)


@pytest.mark.parametrize("name", ["Demo", "a-b", "class"])
def test_a_name_that_no_package_may_have_is_refused(name, capsys):
    with pytest.raises(SystemExit):
        main(["new", name])
    assert "must be a Python name in lower case" in capsys.readouterr().err
