"""Imports run one way: between the folders of every package, and inside each folder.

The graph is drawn from the sources. Imports inside functions, for typing and by name through importlib count too.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tuple(sorted(folder.name.replace("-", "_") for folder in (ROOT / "packages").iterdir() if folder.is_dir()))

# Folders of hp_dtensor in the order in which they build on each other: each imports itself and earlier ones only.
# Those of one line are beside each other. Modules on top of the package count as folders of their own.
ORDER = (
    ("deprecation", "exceptions", "trees"),
    ("platform",),
    ("comm", "launch"),
    ("spec",),
    ("redistribute",),
    ("tensor",),
    ("rules",),
    ("dispatch",),
    ("comm_debug", "debug", "visualize", "muon"),
    ("optim",),
    ("parallel",),
    ("compat",),
    ("testing",),
)

# Circles that exist, each with its reason; one that no longer exists is removed from here.
CIRCLES_BETWEEN: dict[str, str] = {}
CIRCLES_INSIDE: dict[str, str] = {}


def modules_of(package: str) -> dict[str, Path]:
    """Return every module of a package by its dotted name."""
    source = ROOT / "packages" / package.replace("_", "-") / "src"
    files = sorted((source / package).rglob("*.py"))
    assert files, f"no sources of {package} below {source}"
    return {".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


@functools.cache
def imports_of(package: str) -> dict[str, set[str]]:
    """Return the modules of the package that each of its modules imports, itself and its own parents aside."""
    modules = modules_of(package)
    graph = {}
    for name, file in modules.items():
        named = imported_names(ast.parse(file.read_text(encoding="utf-8")), name, file.name == "__init__.py")
        found = {nearest for each in named if (nearest := nearest_module(each, modules)) is not None}
        graph[name] = {each for each in found if each != name and not name.startswith(f"{each}.")}
    return graph


def imported_names(tree: ast.AST, module: str, is_folder: bool) -> set[str]:
    """Return the dotted names that a module imports: `import a.b`, `from a import b` (as `a.b`), and by name."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(node, module, is_folder)
            names.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _imports_by_name(node):
            names.add(node.args[0].value)  # type: ignore[attr-defined]
    return names


def _base_of(node: ast.ImportFrom, module: str, is_folder: bool) -> str:
    if not node.level:
        return str(node.module)
    up = node.level - (1 if is_folder else 0)
    parts = module.split(".")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def _imports_by_name(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", None))
    return (
        name in ("import_module", "__import__")
        and bool(call.args)
        and isinstance(getattr(call.args[0], "value", None), str)
    )


def nearest_module(name: str, modules: dict[str, Path]) -> str | None:
    """Return the module that a dotted name belongs to, or None when it belongs to none of these."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def folder_of(module: str) -> str:
    """Return the part of a package that a module belongs to: a folder, or a module on top; "" is the package itself."""
    return [*module.split("."), ""][1]


def folder_graph(package: str) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for module, imported in imports_of(package).items():
        targets = graph.setdefault(folder_of(module), set())
        targets.update({folder_of(each) for each in imported} - {folder_of(module), ""})
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node, sorted (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found)


def examples(package: str, members: list[str], part: bool) -> str:
    """Return the imports among the members of a circle, one a line."""
    place = folder_of if part else str
    lines = [
        f"  {module} -> {each}"
        for module, imported in sorted(imports_of(package).items())
        for each in sorted(imported)
        if place(module) in members and place(each) in members and place(module) != place(each)
    ]
    return "\n".join(lines)


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_do_not_import_each_other_in_a_circle(package):
    graph = folder_graph(package)
    stated = {key for key in CIRCLES_BETWEEN if key.startswith(f"{package}:")}
    found = {f"{package}: {' '.join(members)}": examples(package, members, True) for members in circles(graph)}
    assert found.keys() == stated, "\n".join([*found, *found.values()])


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_of_a_folder_do_not_import_each_other_in_a_circle(package):
    graph = imports_of(package)
    inside = {
        module: {each for each in imported if folder_of(each) == folder_of(module)}
        for module, imported in graph.items()
        if folder_of(module)
    }
    stated = {key for key in CIRCLES_INSIDE if key.startswith(f"{package}.")}
    found = {" ".join(members): examples(package, members, False) for members in circles(inside)}
    assert found.keys() == stated, "\n".join([*found, *found.values()])


def test_every_folder_of_hp_dtensor_has_its_place():
    folders = {folder_of(module) for module in modules_of("hp_dtensor")} - {""}
    assert folders == {each for line in ORDER for each in line}


def test_no_folder_of_hp_dtensor_imports_a_later_one():
    height = {folder: level for level, line in enumerate(ORDER) for folder in line}
    upward = [
        f"{module} -> {each}"
        for module, imported in sorted(imports_of("hp_dtensor").items())
        for each in sorted(imported)
        if folder_of(module) and folder_of(each) and height[folder_of(each)] > height[folder_of(module)]
    ]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("import p.a.x", {"p.a.x"}),
        ("from p.a import x", {"p.a.x"}),
        ("def f():\n    from p.b.y import name", {"p.b.y.name"}),
        ("if TYPE_CHECKING:\n    from p.b import y", {"p.b.y"}),
        ("from . import y\nfrom ..b import z", {"p.a.y", "p.b.z"}),
        ("importlib.import_module('p.b.y')", {"p.b.y"}),
    ],
)
def test_the_reader_sees_every_kind_of_import(source, named):
    assert imported_names(ast.parse(source), "p.a.x", False) == named


def test_the_search_finds_circles():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert circles(graph) == [["a", "b", "c"], ["f", "g"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
