"""Device models: memory, rates and links of known accelerators, of this machine's CPU, or from a YAML file."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from hp_dtensor.comm.links import Links
from hp_trainer._files import read_plain_text
from hp_trainer.exceptions import PlanError
from hp_trainer.sizes import parse_size

_POINT_TO_POINT = ("all_to_all", "exchange", "send")


def _number(value: Any) -> Any:
    # pydantic would take true for 1, and an integer of hundreds of digits has no float.
    if isinstance(value, bool) or (isinstance(value, int) and value >= 2**1023):
        raise ValueError(f"expected a number above 0, got {value!r:.40}")
    return value


def _bytes(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) and not value.replace(".", "").isdigit() else _number(value)


# YAML reads 989e12 as text, which pydantic converts.
_Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
_Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
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
    memory: Annotated[float, BeforeValidator(_bytes), Field(gt=0, allow_inf_nan=False)]
    flops: Annotated[dict[_Dtype, _Positive], Field(min_length=1)] = field(hash=False)
    memory_bandwidth: _Positive
    ranks_per_node: Annotated[int, BeforeValidator(_number), Field(ge=1)] = 8
    inner_bandwidth: _Positive
    outer_bandwidth: _Positive
    inner_latency: _Positive = 1e-5
    outer_latency: _Positive = 3e-5
    host_bandwidth: _Positive = 25e9
    efficiency: Annotated[_Positive, Field(le=1)] = 0.6
    is_host: StrictBool = False

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


# From the vendors' data sheets: dense rates, and one direction of the links. Nodes have eight devices with one network
# card each, of 400 Gb/s (Hopper) or 200 Gb/s. float32 products are those of TF32 tensor cores where these exist.
_KNOWN = {
    name: Device(
        name=name,
        memory=memory,
        flops={"bfloat16": half, "float16": half, "float32": single},
        memory_bandwidth=memory_bandwidth,
        inner_bandwidth=inner,
        outer_bandwidth=outer,
    )
    for name, memory, half, single, memory_bandwidth, inner, outer in (
        ("H100", 80 * 2**30, 989e12, 494e12, 3.35e12, 450e9, 50e9),
        ("H200", 141e9, 989e12, 494e12, 4.8e12, 450e9, 50e9),
        ("A100", 80 * 2**30, 312e12, 156e12, 2.04e12, 300e9, 25e9),
        ("910B", 64 * 2**30, 376e12, 94e12, 1.6e12, 196e9, 25e9),
    )
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
        flops={"float32": rate, "bfloat16": rate, "float16": rate},
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
    names = ", ".join(each.name for each in fields(Device))
    if not isinstance(given, dict):
        raise PlanError(f"device file {path}: expected the fields {names}, got {given!r}")
    try:
        return TypeAdapter(Device).validate_python({"name": path.stem, **given})
    except ValidationError as error:
        found = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors(include_url=False)]
        problems = [f"{name}: {what.removeprefix('Value error, ')}" for name, what in found]
        raise PlanError(f"device file {path}: {'; '.join(problems)}. Expected {names}") from error
