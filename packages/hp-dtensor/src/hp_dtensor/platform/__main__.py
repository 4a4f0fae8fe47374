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

PROJECT = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "hp-platform-{name}"
version = "0.1.0"
description = "The platform of hp-dtensor for {name}."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["{requirement}"]  # and the framework

[project.entry-points.hp_dtensor]
{name} = "{package}.plugin"

[project.entry-points.hp_fsdp]
{name} = "{package}.fsdp"

[tool.hatch.build.targets.wheel]
packages = ["src/{package}"]
"""

README = """\
# hp-platform-{name}

Written by `python -m hp_dtensor.platform new {name}`. Everything to do raises NotImplementedError and says what.

    pip install -e . pytest
    pytest -x tests          # the next test that fails, with its message
    pytest --pyargs {first} --hp-platform={name} --hp-ranks=simulated    # all tests of a step

The guide is docs/writing_a_platform.md of hp-dtensor. Write `tensor.py` first, then `platform.py`, `operations.py` and
`fsdp.py`. Remove steps from `tests/test_conformance.py` whose component is not installed.
"""

PLUGIN = '''\
"""The plugin for hp-dtensor, loaded through the entry-point group `hp_dtensor`."""

import functools

from hp_dtensor import hookimpl


@hookimpl
def hp_platform():
    return _platform()


# The same object each time. The framework is imported only here.
@functools.cache
def _platform():
    from {package}.platform import {title}Platform

    return {title}Platform()
'''

TENSOR = '''\
"""The framework's classes, and the class of DTensors."""

from hp_dtensor.tensor.dtensor import DTensor


class Tensor:
    """To do: remove this class, and import the framework's tensor class under this name."""


class Module:
    """To do: remove this class, and import the framework's module class under this name.

    Assignment to an attribute registers parameters and modules. It has `register_buffer(name, tensor)` and `training`.
    If the framework's class differs, define a subclass of it here.
    """


class {title}DTensor(DTensor, Tensor):
    """A DTensor: it is its shard, or holds it. `shape` is the global shape. `wrap` sets `_spec`."""

    @property
    def shape(self):
        return self._spec.shape
'''

PLATFORM_HEAD = '''\
"""`{title}Platform`: the methods that are required. docs/platform_interface.md lists those with a default."""

from hp_dtensor.comm.sockets import SocketProcesses
from hp_dtensor.dispatch.interception import build_ops
from hp_dtensor.platform.interface import Platform
from {package}.operations import KERNELS
from {package}.tensor import Module, Tensor, {title}DTensor


class {title}Platform(SocketProcesses, Platform):
    name = "{name}"
    Tensor = Tensor
    Module = Module
    DTensor = {title}DTensor
    device_types = ("cpu",)
    # To do: the framework's dtypes, {{"float32": framework.float32, ...}}, those of `DTYPE_NAMES` that it has.
    dtypes = {{}}
    # To do: names of modules with functions of tensors, such as "{name}".
    function_modules = ()
    # To do: names of functions that describe a shard, such as "data_ptr".
    shard_names = frozenset()

    def __init__(self):
        self.ops = build_ops(self, KERNELS)
        # To do: the framework's own functions, methods and operators on DTensors, `x[...]` first, by `intercepting` of
        # hp_dtensor.dispatch.interception: Tensor.__getitem__ = intercepting(self, "getitem", Tensor.__getitem__)

    @staticmethod
    def Parameter(x, requires_grad=True):
        """Return a tensor or DTensor as a leaf that modules register."""
        raise NotImplementedError("{title}Platform.Parameter: return the framework's parameter of x")
'''

FSDP = '''\
"""The plugin for hp-fsdp, loaded through the entry-point group `hp_fsdp`."""

from hp_dtensor import hookimpl
from hp_fsdp.storage import ParameterStorage


@hookimpl
def hp_fsdp_parameter(platform):
    return {title}Storage(platform) if platform.name == "{name}" else None


class {title}Storage(ParameterStorage):
    def view(self, buffer, start, shape, outer_dim=0):
        raise NotImplementedError("{title}Storage.view: a leaf over part of a buffer, sharing its memory")

    def address(self, x):
        raise NotImplementedError("{title}Storage.address: the address of the data of x")

    def on_gradient(self, tensor, hook):
        raise NotImplementedError("{title}Storage.on_gradient: call hook() when the gradient of tensor is known")

    def at_end_of_backward(self, callback):
        raise NotImplementedError("{title}Storage.at_end_of_backward: call callback() when this backward has ended")
'''

TESTS = '''\
"""The conformance suites, step by step. The first test that fails is the next to do."""

import os
import subprocess
import sys

import pytest

STEPS = [
{steps}
]


@pytest.mark.parametrize("step", STEPS)
def test_conformance(step):
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "--pyargs", step]
    # Real processes: leave out --hp-ranks and -m.
    command += ["--hp-platform={name}", "--hp-ranks=simulated", "-m", "not real_ranks"]
    # Wide, so that pytest does not shorten the messages of its summary.
    done = subprocess.run(command, env={{**os.environ, "COLUMNS": "300"}}, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(done.stdout[-6000:] + done.stderr[-2000:], pytrace=False)
'''


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
    methods = "".join(f"\n{text}" for text in _methods(words["title"]))
    steps = "\n".join(f'    "{step}",' for step in CONFORMANCE)
    source = f"src/{words['package']}"
    return {
        "pyproject.toml": PROJECT.format(**words),
        "README.md": README.format(**words, first=CONFORMANCE[0]),
        f"{source}/__init__.py": f'"""The platform of hp-dtensor for {name}."""\n',
        f"{source}/plugin.py": PLUGIN.format(**words),
        f"{source}/tensor.py": TENSOR.format(**words),
        f"{source}/operations.py": _operations(),
        f"{source}/platform.py": PLATFORM_HEAD.format(**words) + methods,
        f"{source}/fsdp.py": FSDP.format(**words),
        "tests/test_conformance.py": TESTS.format(**words, steps=steps),
    }


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
