"""Every public class and function shows a short example, which runs on any platform.

Examples are doctests, compared by `repr`. The names of its package and of hp_dtensor are at hand in an example, and
`platform` (`get_platform()`), `run_ranks` (simulated ranks) and `np` (NumPy).
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hp_dtensor import nn
from hp_dtensor.testing import run_ranks
from hp_trainer.pipeline import schedules

PACKAGES = ("hp_dtensor", "hp_fsdp", "hp_moe", "hp_trainer", "hp_trainer.pipeline")


def is_for_calling(value: Any) -> bool:
    """Tell if `value` is a function, or a class that is neither an exception, an enumeration nor a protocol."""
    if not inspect.isclass(value):
        return inspect.isroutine(value)
    return not (
        issubclass(value, BaseException) or hasattr(value, "__members__") or getattr(value, "_is_protocol", False)
    )


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of every public class and function."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            if is_for_calling(getattr(module, name)):
                yield f"{package}.{name}", getattr(module, name)


PUBLIC = dict(public_objects())


def examples_of(value: Any) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(value.__doc__ or "")


def names_at_hand(package: str, platform: Any) -> dict[str, Any]:
    names = {"__name__": "example", "platform": platform, "run_ranks": run_ranks, "np": np, "nn": nn}
    for each in ("hp_dtensor", package):
        module = importlib.import_module(each)
        names |= {name: getattr(module, name) for name in module.__all__}
    return names


def value_of(source: str, where: str, names: dict[str, Any]) -> Any:
    """Run `source`, and return the value of its last expression, which may stand inside a `with` block."""
    tree = ast.parse(source)
    block = tree.body
    while isinstance(block[-1], ast.With):
        block = block[-1].body
    assert isinstance(block[-1], ast.Expr), source
    block[-1] = ast.Assign([ast.Name("_value", ast.Store())], block[-1].value)
    exec(compile(ast.fix_missing_locations(tree), where, "exec"), names)
    return names.pop("_value")


def test_every_public_object_has_an_example() -> None:
    assert sorted(name for name, value in PUBLIC.items() if not examples_of(value)) == []
    # The section's name in Google's style. The site shows any other as a quotation.
    assert sorted(name for name, value in PUBLIC.items() if "Example:\n" in (value.__doc__ or "")) == []


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if examples_of(value)])
def test_the_example_runs(name: str, hp_platform: Any, tmp_path, monkeypatch) -> None:
    examples = examples_of(PUBLIC[name])
    if any("import torch" in example.source for example in examples):
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    # The example of `register_schedule` adds a schedule, which later tests of this process must not find.
    registered = schedules._registry()
    monkeypatch.setattr(registered, "_entries", dict(registered._entries))
    names = names_at_hand(name.rpartition(".")[0], hp_platform)
    for example in examples:
        if not example.want:
            exec(compile(example.source, name, "exec"), names)
        elif example.source.startswith("print("):
            printed = str(value_of(example.source.strip()[6:-1], name, names))
            assert printed.split() == example.want.split(), example.source
        else:
            assert repr(value_of(example.source, name, names)) == example.want.strip(), example.source
