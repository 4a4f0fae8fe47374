"""Device models: memory, rates and links of known accelerators, of this machine's CPU, or from a YAML file."""

from __future__ import annotations

import difflib
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hp_dtensor.comm.links import Links
from hp_trainer._files import read_plain_text
from hp_trainer.exceptions import PlanError
from hp_trainer.sizes import parse_size

_DTYPES = ("float32", "bfloat16", "float16")
_POINT_TO_POINT = ("all_to_all", "exchange", "send")


@dataclass(frozen=True, kw_only=True)
class Device:
    """Rates of one device and of its links.

    Attributes:
        name: shown to people.
        memory: bytes.
        flops: peak rate of matrix products in operations per second, by dtype.
        memory_bandwidth: bytes per second of the device's own memory.
        ranks_per_node: devices that the fast links connect.
        inner_bandwidth: bytes per second that a rank sends within a node.
        outer_bandwidth: bytes per second that a rank sends to other nodes.
        inner_latency, outer_latency: least seconds of a collective within a node, and across nodes.
        host_bandwidth: bytes per second between the device and its host, each way (16 lanes of PCIe 4 by default).
        efficiency: share of `flops` that products in training reach.
        is_host: the device is a CPU.
    """

    name: str
    memory: float
    flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    ranks_per_node: int = 8
    inner_bandwidth: float
    outer_bandwidth: float
    inner_latency: float = 1e-5
    outer_latency: float = 3e-5
    host_bandwidth: float = 25e9
    efficiency: float = 0.6
    is_host: bool = False

    def links(self, collective: str, stride: int, size: int) -> Links:
        """Return the links of a collective over `size` ranks whose numbers in the job are `stride` apart.

        Within a node links are fast, and all ranks of a node share its links to other nodes.
        """
        inside = min(size, max(1, self.ranks_per_node // stride))
        if inside == size:
            return Links(self.inner_latency, self.inner_bandwidth)
        if collective in _POINT_TO_POINT:
            # Each rank sends equal shares to all others, of which `inside - 1` are in its node.
            near = (inside - 1) / (size - 1)
            bandwidth = 1 / (near / self.inner_bandwidth + (1 - near) / self.outer_bandwidth)
        else:
            # A ring enters and leaves each node once, so it can use the outer links of all its ranks of a node.
            bandwidth = min(self.inner_bandwidth, self.outer_bandwidth * inside)
        return Links(self.outer_latency, bandwidth)


def _accelerator(name: str, memory: float, half: float, single: float, rates: tuple[float, float, float]) -> Device:
    memory_bandwidth, inner, outer = rates
    return Device(
        name=name,
        memory=memory,
        flops={"bfloat16": half, "float16": half, "float32": single},
        memory_bandwidth=memory_bandwidth,
        inner_bandwidth=inner,
        outer_bandwidth=outer,
    )


# From the vendors' data sheets: dense rates, and one direction of the links. Nodes have eight devices with one network
# card each, of 400 Gb/s (Hopper) or 200 Gb/s. float32 products are those of TF32 tensor cores where these exist.
_KNOWN = {
    "H100": _accelerator("H100", 80 * 2**30, 989e12, 494e12, (3.35e12, 450e9, 50e9)),
    "H200": _accelerator("H200", 141e9, 989e12, 494e12, (4.8e12, 450e9, 50e9)),
    "A100": _accelerator("A100", 80 * 2**30, 312e12, 156e12, (2.04e12, 300e9, 25e9)),
    "910B": _accelerator("910B", 64 * 2**30, 376e12, 94e12, (1.6e12, 196e9, 25e9)),
}


def find_device(name: str) -> Device:
    """Return a device by its name, or from a YAML file with the fields of `Device`; `cpu` is measured now.

    Raises:
        PlanError: there is no such device or file, or fields of the file are missing, unknown or invalid.
    """
    known = {each.lower(): each for each in (*_KNOWN, "cpu")}
    if name.lower() == "cpu":
        return measure_cpu()
    if name.lower() in known:
        return _KNOWN[known[name.lower()]]
    path = Path(name)
    if path.is_file():
        return _read(path)
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f" Did you mean {known[near[0]]}?" if near else ""
    raise PlanError(
        f"device {name!r} is unknown; expected one of {', '.join(known.values())}, or a YAML file with "
        f"{', '.join(each.name for each in fields(Device))}.{hint}"
    )


def measure_cpu() -> Device:
    """Measure this machine's CPU: a matrix product and a copy; other rates are derived from these."""
    x = np.ones((768, 768), np.float32)
    product = _best(lambda: x @ x)
    large = np.ones(2**22, np.float32)
    target = np.empty_like(large)
    # Each byte is read and written.
    copied = 2 * large.nbytes / _best(lambda: np.copyto(target, large))
    # A product of n x n matrices has 2 n**3 operations.
    rate = 2 * 768**3 / product
    return Device(
        name="cpu",
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        # On CPUs, frameworks compute half precision in single precision.
        flops=dict.fromkeys(_DTYPES, rate),
        memory_bandwidth=copied,
        # All ranks of a measured CPU are on this machine.
        ranks_per_node=1 << 30,
        # A message between processes is copied about four times.
        inner_bandwidth=copied / 4,
        outer_bandwidth=copied / 4,
        host_bandwidth=copied,
        inner_latency=1e-4,
        outer_latency=1e-4,
        efficiency=0.5,
        is_host=True,
    )


def _best(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    # The fastest run is the least disturbed by other processes.
    return min(times)


def _read(path: Path) -> Device:
    try:
        given = yaml.safe_load(read_plain_text(path))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise PlanError(f"device file {path} is not YAML: {error}") from error
    names = {each.name: each for each in fields(Device)}
    if not isinstance(given, dict):
        raise PlanError(f"device file {path}: expected the fields {', '.join(names)}, got {given!r}")
    needed = [n for n, each in names.items() if each.default is MISSING and each.default_factory is MISSING]
    problems = [f"{key}: unknown field" for key in given if key not in names]
    problems += [f"{name}: missing" for name in needed if name not in given and name != "name"]
    values: dict[str, Any] = {"name": path.stem}
    for key, value in given.items():
        if key in names:
            try:
                values[key] = _value(key, value)
            except (TypeError, ValueError) as error:
                problems.append(f"{key}: {error}")
    if problems:
        raise PlanError(f"device file {path}: {'; '.join(problems)}. Expected {', '.join(names)}")
    return Device(**values)


def _value(key: str, value: Any) -> Any:
    if key == "name":
        return str(value)
    if key == "is_host":
        if not isinstance(value, bool):
            raise ValueError(f"expected true or false, got {value!r}")
        return value
    if key == "flops":
        if not isinstance(value, dict) or not value or any(each not in _DTYPES for each in value):
            raise ValueError(f"expected operations per second for some of {', '.join(_DTYPES)}, got {value!r}")
        return {dtype: _number(rate) for dtype, rate in value.items()}
    if key == "memory" and isinstance(value, str) and not value.replace(".", "").isdigit():
        return parse_size(value)
    number = _number(value)
    if key == "ranks_per_node":
        if number != int(number):
            raise ValueError(f"expected an integer, got {value!r}")
        return int(number)
    if key == "efficiency" and number > 1:
        raise ValueError(f"expected a number above 0, at most 1, got {value!r}")
    return number


def _number(value: Any) -> float:
    # YAML reads 989e12 as text. `float` refuses an integer of hundreds of digits, but takes its text as infinity.
    number = float(str(value)) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"expected a number above 0, got {value!r}")
    return number
