"""Tests in `on_device` need the stand-in in their process; `test_core.py` and `nox -s npu` start processes with it."""

import importlib.util
from pathlib import Path

_found = importlib.util.find_spec("torch_npu")
_is_here = _found is not None and Path(str(_found.origin)).is_relative_to(Path(__file__).parent)
collect_ignore = [] if _is_here else ["on_device"]
