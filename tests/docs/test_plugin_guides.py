"""The steps of each plugin guide: its files make a distribution, whose `try_it.py` runs.

A distribution that pip installed is a folder on the path with its metadata beside it; that is what is made here, so
that nothing is downloaded or built.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from pages import ROOT, Block, blocks

GUIDES: dict[str, list[Block]] = {}
for block in blocks():
    if block.title:
        GUIDES.setdefault(str(block.page.relative_to(ROOT)), []).append(block)
# Other pages have files with titles too; a plugin is installed.
GUIDES = {page: files for page, files in GUIDES.items() if any(each.title == "pyproject.toml" for each in files)}


# Runs a guide's program in a forked process. The commands that it starts are forked as well: each new interpreter would
# import the framework for seconds.
FORKING = """\
import runpy, subprocess
from hp_dtensor.launch import local_ranks
fork = local_ranks.start_process
subprocess.Popen = lambda args, **options: fork(args, start_new_session=True, **options)
runpy.run_path("try_it.py", run_name="__main__")
"""


def install(files: list[Block], site: Path) -> None:
    """Write a guide's files below `site`, and the metadata that installing its `pyproject.toml` would give."""
    for block in files:
        path = site / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.code)
    project = tomllib.loads((site / "pyproject.toml").read_text())["project"]
    metadata = site / f"{re.sub(r'[-.]+', '_', project['name'])}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project.get("entry-points", {})
    text = "".join(
        f"[{group}]\n" + "".join(f"{name} = {module}\n" for name, module in entries.items())
        for group, entries in groups.items()
    )
    (metadata / "entry_points.txt").write_text(text)


def test_there_is_a_guide_for_each_kind_of_plugin() -> None:
    assert {Path(page).stem for page in GUIDES} >= {
        "communication",
        "model_and_tracker",
        "pipeline_schedule",
        "sharding_rule",
        "token_dispatcher",
    }


@pytest.mark.real_ranks
@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize("page", GUIDES)
def test_the_steps_of_a_guide_work(page: str, hp_platform, fork_server, tmp_path) -> None:
    install(GUIDES[page], tmp_path)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HP_PLATFORM": hp_platform.name}
    (tmp_path / "forking.py").write_text(FORKING)
    done = fork_server.run([sys.executable, str(tmp_path / "forking.py")], 300, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
