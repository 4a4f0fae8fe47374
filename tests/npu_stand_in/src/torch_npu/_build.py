"""Compile the extension once per torch, Python and source, and load it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

_NAME = "_stand_in"
_SOURCES = [Path(__file__).with_name(name) for name in ("device.cpp", "group.cpp")]
# The operations are torch's, and compiled already.
_FLAGS = ["-std=c++20", "-O0", "-w", "-fPIC", f"-DTORCH_EXTENSION_NAME={_NAME}"]


def _folder() -> Path:
    """Return the folder of this build: `NPU_STAND_IN_CACHE`, the repository's `.nox`, or a temporary one."""
    key = hashlib.sha256(repr((torch.__version__, sys.version, _FLAGS)).encode())
    for source in _SOURCES:
        key.update(source.read_bytes())
    nox = Path(__file__).resolve().parents[4] / ".nox"
    default = nox if nox.is_dir() else Path(tempfile.gettempdir()) / f"npu_stand_in_{os.getuid()}"
    return Path(os.environ.get("NPU_STAND_IN_CACHE") or default / "npu_stand_in") / key.hexdigest()[:16]


def _compile(folder: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("the stand-in for Ascend needs g++, which is not installed; on Debian: apt install g++")
    package = Path(torch.__file__).parent
    includes = [package / "include", package / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    flags += [f"-I{each}" for each in includes]
    # Together, as most of the time is that of torch's headers.
    device, group = map(str, _SOURCES)
    compiled = folder / "stand_in.o"
    if subprocess.run([compiler, *flags, "-include", device, "-c", group, "-o", str(compiled)]).returncode:
        raise RuntimeError("the stand-in for Ascend does not compile; g++ has printed why")
    libraries = [f"-L{package / 'lib'}", *(f"-l{name}" for name in ("torch_python", "torch", "torch_cpu", "c10"))]
    unfinished = folder / "unfinished.so"
    subprocess.run([compiler, "-shared", str(compiled), *libraries, "-o", str(unfinished)], check=True)
    # Another process sees the library complete or not at all.
    unfinished.rename(folder / f"{_NAME}.so")


def _load() -> ModuleType:
    folder = _folder()
    library = folder / f"{_NAME}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(folder)
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


extension = _load()
