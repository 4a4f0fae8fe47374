"""The public names of the packages: which they are, since when, how stable, and what a change of them breaks.

python tools/public_api.py            check `api.toml` of each package, and changes since the last release
python tools/public_api.py --write    add new names to `api.toml`, and remove those that are gone

A name is public if the package, or a folder of it without a leading underscore, exports it. `packages/NAME/api.toml`
lists the names of a component package by the version that introduced them. What is listed as experimental may change in
any version; all else changes in a breaking version only.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import workspace
from environments import SetupError

FRAGMENT = re.compile(r"\+[\w-]+\.(breaking|deprecated|added|fixed|misc)\.md")
# In place of a version: names that the next release introduces.
NEXT = "next"
HEADER = "# Public names by the version that introduced them. `python tools/public_api.py --write` adds new ones.\n"


def public_names(source: Path) -> Iterator[tuple[str, str]]:
    """Yield each public name of a package and its public folders, with the module that defines it.

    A module of the folder `integrations` is imported by itself, as each requires another library.
    """
    found: dict[str, str] = {}
    for file in sorted(source.glob("integrations/[a-z]*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                found |= dict.fromkeys(ast.literal_eval(node.value), f"{source.name}.integrations.{file.stem}")
    for file in (source / "__init__.pyi", source / "__init__.py", *sorted(source.glob("[a-z]*/__init__.py"))):
        if file.is_file():
            for name, module in imported_names(file, source.name):
                module_name = defining_module(source, module, name)
                if module_name is not None:
                    found.setdefault(name, module_name)
    yield from found.items()


def imported_names(file: Path, package: str) -> Iterator[tuple[str, str]]:
    """Yield each public name that a module imports from its own package, with the source module."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            yield from ((alias.name, str(node.module)) for alias in node.names if not alias.name.startswith("_"))


def defining_module(source: Path, module: str, name: str) -> str | None:
    """Return the module that defines a name exported by `module`. None for modules, which have their own pages."""
    file = module_file(source, module)
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name in [getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)]:
            return module
    inner = dict(imported_names(file, source.name)).get(name)
    return None if inner is None else defining_module(source, inner, name)


def module_file(source: Path, module: str) -> Path:
    """Return the file of a module of the package in folder `source`."""
    base = source.parent / Path(*module.split("."))
    return base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"


def source_folder(package: workspace.Package) -> Path:
    """Return the folder of a package's modules."""
    return package.folder / "src" / package.module


@dataclass(frozen=True)
class ListedNames:
    """Content of a package's `api.toml`.

    Attributes:
        since: the version that introduced each name.
        experimental: names that may change in any version.
    """

    since: dict[str, str]
    experimental: frozenset[str]

    def problems(self, names: set[str]) -> Iterator[str]:
        """Yield a line for each difference from the public names of the sources."""
        for name in sorted(names - self.since.keys()):
            yield f"{name} is public and not listed"
        for name in sorted(self.since.keys() - names):
            yield f"{name} is listed and not public: a removal is a breaking change"
        for name in sorted(self.experimental - self.since.keys()):
            yield f"{name} is experimental and not listed under a version"

    def updated(self, names: set[str], version: str) -> ListedNames:
        """Return the list for the public names of the sources. New names get `version`."""
        return ListedNames({name: self.since.get(name, version) for name in names}, self.experimental & names)

    def as_toml(self) -> str:
        """Return the text of `api.toml`."""
        versions: dict[str, list[str]] = {}
        for name, version in self.since.items():
            versions.setdefault(version, []).append(name)
        listed = [f'"{each}" = [\n{_wrapped(versions[each])}]\n' for each in sorted(versions, key=_by_version)]
        unstable = f"experimental = [\n{_wrapped(self.experimental)}]\n" if self.experimental else "experimental = []\n"
        return f"{HEADER}{unstable}\n[since]\n{''.join(listed)}"


def _by_version(version: str) -> tuple[bool, workspace.Version]:
    return (version == NEXT, workspace.Version("0" if version == NEXT else version))


def _wrapped(names: list[str] | frozenset[str]) -> str:
    text = " ".join(f'"{name}",' for name in sorted(names))
    return textwrap.indent(textwrap.fill(text, 116, break_long_words=False, break_on_hyphens=False), "    ") + "\n"


def listed_names(folder: Path) -> ListedNames:
    """Return what `api.toml` in the folder of a package lists; nothing for platform packages, which export no names."""
    file = folder / "api.toml"
    table = tomllib.loads(file.read_text()) if file.is_file() else {}
    since = {name: version for version, names in table.get("since", {}).items() for name in names}
    return ListedNames(since, frozenset(table.get("experimental", ())))


def breaking_changes(module: str, old: Path, new: Path) -> list[tuple[str, str]]:
    """Return each change of a public name that can break a program: the name, and a line.

    Args:
        module: import name of the package.
        old: folder that contains the released package, such as `src`.
        new: folder that contains the package of today.
    """
    import griffe

    before, after = (dict(public_names(folder / module)) for folder in (old, new))
    lines = [(name, f"{name} was removed") for name in sorted(before.keys() - after.keys())]
    # A public name itself, or a member of it that is not private. All other objects belong to no program.
    names = "|".join(re.escape(f"{where}.{name}") for name, where in before.items() if name in after)
    public = re.compile(rf"({names})(\.(?!_(?!_))\w+)*")
    loaded = [griffe.load(module, search_paths=[folder], resolve_aliases=False) for folder in (old, new)]
    for change in griffe.find_breaking_changes(*loaded):
        path = change.obj.path
        match = public.fullmatch(path)
        if match and not _is_named_tuples_init(path.removeprefix(f"{module}."), loaded[1]):
            explained = change.explain(griffe.ExplanationStyle.VERBOSE).splitlines()[1:]
            line = f"{path}: {' '.join(part.strip() for part in explained) or change.kind.value}"
            lines.append((match[1].rpartition(".")[2], line))
    return lines


def _is_named_tuples_init(path: str, module: Any) -> bool:
    """Return True for `__init__` of a class that is a NamedTuple now: griffe knows the one of a dataclass only."""
    name, _, member = path.rpartition(".")
    return member == "__init__" and "NamedTuple" in map(str, module[name].bases)


def changes_since(package: workspace.Package, tag: str | None) -> list[str]:
    """Return the breaking changes of a package since a release, which `tag` names; none if there is no release.

    Names that were experimental in the release may change. One that was not, and has become it, is a breaking change.
    """
    if tag is None:
        return []
    with workspace.scratch_folder("hp-api-") as scratch:
        released = workspace.unpack_release(package.name, tag, scratch)
        before, now = listed_names(released), listed_names(package.folder)
        changes = breaking_changes(package.module, released / "src", package.folder / "src")
    less_stable = (now.experimental & before.since.keys()) - before.experimental
    return [
        *(line for name, line in changes if name not in before.experimental),
        *(f"{name} became experimental" for name in sorted(less_stable)),
    ]


def fragments(package: workspace.Package) -> dict[str, str]:
    """Return the kind of each changelog fragment of a package, by file name.

    Raises:
        SetupError: a file in the folder is not a fragment.
    """
    names = sorted(path.name for path in (package.folder / "changes").glob("*") if not path.name.startswith("."))
    kinds = {name: FRAGMENT.fullmatch(name) for name in names}
    wrong = [name for name, match in kinds.items() if match is None]
    if wrong:
        raise SetupError(
            f"packages/{package.name}/changes: {', '.join(wrong)}: expected names such as +torch-mesh.added.md, whose "
            "kind is breaking, deprecated, added, fixed or misc (not shown to users)"
        )
    return {name: match[1] for name, match in kinds.items() if match}


def name_problems(package: workspace.Package, changes: list[str]) -> Iterator[str]:
    """Yield a line for each wrong entry of `api.toml`, and for breaking `changes` that no fragment announces."""
    names = {name for name, _ in public_names(source_folder(package))}
    for problem in listed_names(package.folder).problems(names):
        yield f"packages/{package.name}/api.toml: {problem}"
    if changes and "breaking" not in fragments(package).values():
        yield from changes
        yield f"packages/{package.name}/changes has no fragment +WHAT.breaking.md that says what users write instead"


def removals(text: str) -> Iterator[tuple[str, str]]:
    """Yield each name that a module marks as deprecated, and the version that is to remove it."""
    for node in ast.walk(ast.parse(text)):
        for decorator in getattr(node, "decorator_list", []):
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).split(".")[-1] == "deprecated":
                yield (
                    node.name,
                    next(ast.literal_eval(each.value) for each in decorator.keywords if each.arg == "removal"),
                )


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status: 1 if a list is wrong."""
    problems = []
    for name, package in workspace.packages().items():
        names = {name for name, _ in public_names(source_folder(package))}
        tag = workspace.last_release(name)
        if "--write" in arguments and names:
            listed = listed_names(package.folder).updated(names, NEXT if tag else package.version)
            (package.folder / "api.toml").write_text(listed.as_toml())
        changes = changes_since(package, tag)
        problems += name_problems(package, changes)
        compared = f"{len(changes)} breaking changes since {tag}" if tag else "no release to compare with"
        print(f"{name}: {len(names)} names, {compared}")
        print("".join(f"  {change}\n" for change in changes), end="")
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SetupError as error:
        sys.exit(f"public_api: {error}")
