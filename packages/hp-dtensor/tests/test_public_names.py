"""The public names of hp_dtensor."""

from __future__ import annotations

import types

import hp_dtensor


def test_an_import_of_everything_brings_no_module():
    names: dict[str, object] = {"nn": "the program's own"}
    exec("from hp_dtensor import *", names)
    assert names["nn"] == "the program's own"
    assert [name for name in hp_dtensor.__all__ if isinstance(getattr(hp_dtensor, name), types.ModuleType)] == []


def test_modules_are_attributes():
    assert isinstance(hp_dtensor.nn, types.ModuleType)
