"""`python -m hp_dtensor.platform new NAME`: write a package for a new platform, with all required methods as to-dos.

The package can be installed, is found through its entry points, and fails the conformance suites in the order in which
to write it. Methods, signatures and docstrings are those of `Platform`, so the template cannot be outdated.
"""

from __future__ import annotations

import argparse
import inspect
import keyword
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hp_dtensor
from hp_dtensor.platform.composition import PRIMITIVES
from hp_dtensor.platform.interface import OP_SIGNATURES, Platform
from hp_dtensor.platform.selection import registrant_of

CONFORMANCE = (
    *(
        f"hp_dtensor.testing.conformance.{step}"
        for step in (
            *("test_tensors", "test_autograd", "test_ops", "test_modules", "test_collectives", "test_duals"),
            *("test_dtensor", "test_own_functions", "test_redistribution", "test_rules"),
        )
    ),
    *(f"hp_fsdp.testing.conformance.{step}" for step in ("test_storage", "test_training")),
    "hp_moe.testing.conformance",
    "hp_trainer.testing.conformance",
)
"""The modules of the suites, in the order in which to pass them."""

TEMPLATE = Path(__file__).with_name("template")
"""The files of the package, with `.txt` behind their names; fields in braces are filled in."""


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hp_dtensor.platform", description="Tools for authors of platforms."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="write the package of a new platform")
    new.add_argument("name", metavar="NAME", help="import name of the framework; no installed platform may have it")
    new.add_argument("--to", metavar="DIR", type=Path, help="folder to write (default: hp-platform-NAME)")
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", given.name) or keyword.iskeyword(given.name):
        parser.error(f"NAME must be a Python name in lower case, got {given.name!r}")
    if owner := registrant_of(given.name):
        parser.error(f"{given.name!r} is the name of {owner}; choose another NAME, or uninstall that distribution")
    folder = given.to or Path(f"hp-platform-{given.name}")
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty; choose another folder with --to")
    for path, text in package_of(given.name).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    print(f"Wrote {folder}. Next: pip install -e {folder} && pytest -x {folder / 'tests'}")
    return 0


def package_of(name: str) -> dict[str, str]:
    """Return the files of the package by path."""
    words = {"name": name, "package": f"hp_platform_{name}", "title": name.title().replace("_", "")}
    words["requirement"] = _requirement(hp_dtensor.__version__)
    words["first"], words["operations"] = CONFORMANCE[0], _operations()
    words["steps"] = "\n".join(f'    "{step}",' for step in CONFORMANCE)
    words["methods"] = "".join(f"\n{text}" for text in _methods(words["title"]))
    found = {}
    for file in sorted(TEMPLATE.rglob("*.txt")):
        path = file.relative_to(TEMPLATE).with_suffix("").as_posix().replace("PACKAGE", words["package"])
        found[path] = file.read_text(encoding="utf-8").format(**words)
    return found


def _requirement(version: str) -> str:
    """Return the requirement of this hp-dtensor or a newer one, before the next breaking version."""
    first, second, _ = map(int, version.split("."))
    return f"hp-dtensor>={version},<{f'0.{second + 1}' if first == 0 else first + 1}"


def _methods(title: str) -> Iterator[str]:
    """Yield each required method, in the order of the interface, with its docstring."""
    required = Platform.__abstractmethods__ - {"connect"}  # by SocketProcesses
    for owner in Platform.__mro__[1:]:
        for name, function in vars(owner).items():
            if name in required:
                yield _method(title, name, function)


def _method(title: str, name: str, function: Any) -> str:
    """Return the source of a method of `Platform` whose body is a to-do."""
    signature = inspect.signature(function)
    plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    text = inspect.getdoc(function) or inspect.getdoc(getattr(Platform, name.removeprefix("_"))) or ""
    shown = textwrap.indent(text, " " * 8).lstrip()
    return (
        f"    def {name}{signature.replace(parameters=plain, return_annotation=signature.empty)}:\n"
        f'        """{shown}{chr(10) + " " * 8 if chr(10) in text else ""}"""\n'
        f"{_raising(f'{title}Platform.{name}', text.partition(chr(10) * 2)[0], 8)}"
    )


def _operations() -> str:
    """Return the module of operations on plain tensors."""
    parts = [
        '"""The operations that cannot be composed, on plain tensors, recorded by the framework.\n\n'
        "Results have torch's dtypes: a number does not widen a tensor, but a fraction makes integers float32.\n"
        'Integers are divided as float32, and added up in int64.\n"""\n'
    ]
    for name in PRIMITIVES:
        arguments, _, meaning = OP_SIGNATURES[name].partition(")")
        what = f"as torch's {name}{meaning}"
        parts.append(f"\n\ndef {name}_{arguments}):\n{_raising(f'operation {name}{arguments})', what, 4)}")
    parts.append("\n\nKERNELS = {\n" + "".join(f'    "{name}": {name}_,\n' for name in PRIMITIVES) + "}\n")
    return "".join(parts)


def _raising(where: str, what: str, indent: int) -> str:
    """Return a `raise` statement whose message says `what` to do at `where`, in lines of at most 120 characters."""
    lines = textwrap.wrap(f"{where}: {' '.join(what.split())}", 105, drop_whitespace=False)
    listed = "".join(f"{' ' * (indent + 4)}{line!r}\n" for line in lines)
    return f"{' ' * indent}raise NotImplementedError(\n{listed}{' ' * indent})\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
