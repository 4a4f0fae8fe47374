"""Stage the pages of the documentation site: all Markdown pages, and a reference of public names.

python tools/site_pages.py FOLDER

Pages keep their relative paths, so that links between them work. Other linked files are copied.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import workspace
from public_api import NEXT, ListedNames, listed_names, module_file, public_names, source_folder

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS = ("hp_dtensor", "hp_fsdp", "hp_moe", "hp_trainer")
# Headings of the reference, in the order of the page: what a user meets first comes first. Folders and modules that are
# not listed follow under their own names.
CHAPTERS = {
    "hp_dtensor.comm": "Device meshes and groups",
    "hp_dtensor.spec": "Placements",
    "hp_dtensor.tensor": "Distributed tensors",
    "hp_dtensor.redistribute": "Redistribution",
    "hp_dtensor.parallel": "Parallel layers and attention",
    "hp_dtensor.dispatch": "Operations and sharding rules",
    "hp_dtensor.optim": "Gradient clipping",
    "hp_dtensor.muon": "Muon",
    "hp_fsdp._fully_shard": "fully_shard",
    "hp_fsdp.policies": "Policies",
    "hp_fsdp._fsdp_module": "Methods of a sharded module",
    "hp_fsdp._hsdp": "hsdp",
    "hp_moe.moe": "The layer",
    "hp_moe.router": "Router",
    "hp_moe.experts": "Experts",
    "hp_moe.expert_parallel": "Expert parallelism",
    "hp_moe.dispatch": "Token dispatchers",
    "hp_trainer.parallel": "Parallel degrees",
    "hp_trainer.run": "Run folders",
    "hp_trainer.training": "Training",
    "hp_trainer.config": "Configuration",
    "hp_trainer.models": "Models",
    "hp_trainer.data": "Data",
    "hp_trainer.optimizers": "Optimizers",
    "hp_trainer.checkpoint": "Checkpoints",
    "hp_trainer.pipeline": "Pipelines",
    "hp_trainer.planning": "Plans",
    "hp_trainer.metrics": "Metrics",
    "hp_trainer.launch": "Launching",
}
LINK = re.compile(r"(\]\()([^)\s#]+)")


def stage(folder: Path) -> None:
    """Empty a folder, and fill it with all sources of the site."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.split():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page_text(ROOT / name))
        for linked in linked_files(ROOT / name):
            beside = folder / linked.relative_to(ROOT)
            beside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(linked, beside)
    shutil.copy(ROOT / "tools" / "site.css", folder)
    reference = folder / "reference"
    reference.mkdir(parents=True)
    for package in COMPONENTS:
        (reference / f"{package}.md").write_text(reference_page(package))


def page_text(page: Path) -> str:
    """Return the text of a page, with links to folders replaced by links to their pages."""
    text = page.read_text(encoding="utf-8")
    return LINK.sub(lambda found: found[1] + link_to_page(page, found[2]), text)


def link_to_page(page: Path, link: str) -> str:
    """Return a link to a page. A link to a folder becomes one to its README, if there is one."""
    target = page.parent / link
    if re.match(r"[a-z]+:", link) or not target.is_dir() or not (target / "README.md").is_file():
        return link
    return f"{link.rstrip('/')}/README.md"


def linked_files(page: Path) -> Iterator[Path]:
    """Yield the files in the repository that a page links to, except pages."""
    for found in LINK.finditer(page.read_text(encoding="utf-8")):
        target = (page.parent / found[2]).resolve()
        if target.is_file() and target.suffix != ".md" and target.is_relative_to(ROOT):
            yield target


def reference_page(package: str) -> str:
    """Return a page with the docstring of each public name of a package, grouped by the chapter that defines it."""
    distribution = workspace.packages()[package.replace("_", "-")]
    source, listed = source_folder(distribution), listed_names(distribution.folder)
    chapters: dict[str, list[str]] = {chapter: [] for chapter in CHAPTERS}
    for name, module_name in public_names(source):
        chapter = ".".join(module_name.split(".")[:2])
        chapters.setdefault(chapter, []).append(f"{module_name}.{name}")
    lines = [f"# {package}", "", docstring(source / "__init__.py")]
    for chapter, names in chapters.items():
        if names:
            heading = CHAPTERS.get(chapter) or chapter.partition(".")[2].strip("_").replace("_", " ").capitalize()
            lines += ["", f"## {heading}", "", docstring(module_file(source, chapter)).split("\n\n")[0]]
        for name in names:
            lines += [
                "",
                f"::: {name}",
                "    options:",
                "      heading_level: 3",
                "",
                since(listed, name.rpartition(".")[2]),
            ]
    return "\n".join(lines) + "\n"


def since(listed: ListedNames, name: str) -> str:
    """Return the line below a name in the reference: its first version, and a warning if it is experimental."""
    warning = ", experimental: it may change in any version" if name in listed.experimental else ""
    version = listed.since[name]
    return f"*Since {'the next version' if version == NEXT else version}{warning}.*"


def docstring(file: Path) -> str:
    """Return the docstring of a module, or an empty string."""
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
