"""Device models: memory, rates and links of known accelerators, or from a YAML file with rates or measurements."""

from __future__ import annotations

import difflib
import functools
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import field, fields
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import yaml
from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from hp_trainer.config.yaml_tree import read_yaml
from hp_trainer.exceptions import PlanError
from hp_trainer.launch.examination import FILE_FORMAT, block_options
from hp_trainer.models.estimates import MicroBatchShape
from hp_trainer.models.recomputation import NOTHING_RECOMPUTED
from hp_trainer.planning.memory import LayerCost, Work
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
_Share = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
_Seconds = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
# Nothing takes less than a nanosecond.
_Measured = Annotated[float, BeforeValidator(_number), Field(ge=1e-9, allow_inf_nan=False)]
_Count = Annotated[int, BeforeValidator(_number), Field(ge=1, lt=2**31)]
_Dtype = Literal["float32", "bfloat16", "float16", "float8"]
_Hidden = Literal["weights", "tp", "cp", "ep"]
# Validators are built on first use: most commands import this module for none of them.
_FIELDS = ConfigDict(extra="forbid", defer_build=True)
# Computation hides gathers of weights and reductions of gradients, hops of a ring, and chunks of tokens for experts.
_HIDDEN_BY: dict[str, _Hidden] = {
    "all_gather": "weights",
    "reduce_scatter": "weights",
    "all_reduce": "weights",
    "exchange": "cp",
    "all_to_all": "ep",
}


@dataclass(frozen=True, kw_only=True, config=_FIELDS)
class Device:
    """Rates of one device and of its links. `devices.yaml` has those of known ones, with their sources.

    Attributes:
        name: shown to people.
        memory: bytes.
        flops: peak rate of matrix products in operations per second, by dtype.
        memory_bandwidth: bytes per second of the device's own memory.
        ranks_per_node: devices that the fast links connect.
        inner_bandwidth: bytes per second that a rank sends within a node.
        outer_bandwidth: bytes per second that a rank sends to other nodes.
        inner_latency, outer_latency: least seconds of a collective within a node, and across nodes.
        hop_seconds: what each rank beyond two adds to the latency of a collective; nothing to that of a `send`.
        host_bandwidth: bytes per second between the device and its host, each way (16 lanes of PCIe 4 by default).
        efficiency: share of `flops` that large products reach. Smaller ones also wait for their operands.
        attention_efficiency: share of `flops` that fused attention reaches, of the operations that a causal mask lets
            through.
        ring_efficiency: share of that which attention reaches in the blocks of other `cp` ranks.
        link_efficiency: share of the links' bandwidth that collectives reach.
        traffic, compiled_traffic: bytes that cheap operations read and write for each byte that autograd saves.
        operation_seconds: seconds that an operation takes at least.
        forward_seconds: seconds of a micro-batch beyond its operations.
        hidden: share of the time of collectives that computation hides, by what they are for: `weights` and their
            gradients, `tp`, `cp` (hops of a ring) and `ep` (all chunks of tokens but one).
        products_dtype: dtype of the products of linear modules, if it is another than the run's, such as `float8`.
        processors: ranks of a node that compute at these rates at the same time; more share them. None: all do.
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
    hop_seconds: _Seconds = 0.0
    host_bandwidth: _Positive = 25e9
    efficiency: Annotated[_Positive, Field(le=1)] = 0.6
    attention_efficiency: Annotated[_Positive, Field(le=1)] = 0.4
    ring_efficiency: Annotated[_Positive, Field(le=1)] = 0.6
    link_efficiency: Annotated[_Positive, Field(le=1)] = 0.8
    traffic: _Positive = 8.6
    compiled_traffic: _Positive = 2.0
    operation_seconds: _Seconds = 3e-6
    forward_seconds: _Seconds = 0.0
    hidden: dict[_Hidden, _Share] = field(default_factory=lambda: {"weights": 1.0}, hash=False)
    products_dtype: _Dtype | None = None
    processors: Annotated[int, BeforeValidator(_number), Field(ge=1)] | None = None
    is_host: StrictBool = False

    def processor_share(self, world_size: int) -> float:
        """Return the share of a processor that each of so many ranks has."""
        ranks = min(world_size, self.ranks_per_node)
        return 1.0 if self.processors is None else min(1.0, self.processors / ranks)

    def link(self, collective: str, stride: int, size: int) -> tuple[float, float]:
        """Return latency and bandwidth of a collective over `size` ranks whose numbers in the job are `stride` apart.

        Within a node links are fast, and all ranks of a node share its links to other nodes.
        """
        inside = min(size, max(1, self.ranks_per_node // stride))
        # Two ranks exchange a message, however long the pipeline is.
        hops = 0.0 if collective == "send" else (size - 2) * self.hop_seconds
        if inside == size:
            return self.inner_latency + hops, self.inner_bandwidth * self.link_efficiency
        if collective in _POINT_TO_POINT:
            # Each rank sends equal shares to all others, of which `inside - 1` are in its node.
            near = (inside - 1) / (size - 1)
            bandwidth = 1 / (near / self.inner_bandwidth + (1 - near) / self.outer_bandwidth)
        else:
            # A ring enters and leaves each node once, so it can use the outer links of all its ranks of a node.
            bandwidth = min(self.inner_bandwidth, self.outer_bandwidth * inside)
        return self.outer_latency + hops, bandwidth * self.link_efficiency


@functools.cache
def known_devices() -> dict[str, Device]:
    """Return the devices of `devices.yaml` by name, which states the source of each number."""
    given = yaml.safe_load((files("hp_trainer.planning") / "devices.yaml").read_text())
    return {name: TypeAdapter(Device).validate_python({"name": name, **each}) for name, each in given.items()}


def find_device(name: str) -> Device:
    """Return a device by its name, or from a YAML file with the fields of `Device` or measurements of them.

    Raises:
        PlanError: there is no such device or file, or fields of the file are missing, unknown or invalid.
    """
    known = {each.lower(): each for each in known_devices()}
    if name.lower() in known:
        return known_devices()[known[name.lower()]]
    path = Path(name)
    if path.is_file():
        return _read(path)
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f" Did you mean {known[near[0]]}?" if near else ""
    raise PlanError(
        f"device {name!r} is unknown; expected one of {', '.join(known.values())}, or a YAML file with "
        f"{_fields()}, such as `hp-train doctor --to device.yaml` writes for this machine.{hint}"
    )


# Device files --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, config=_FIELDS)
class MeasuredProduct:
    """The time of one product of a (rows, inputs) by an (inputs, outputs) matrix, in a device file."""

    dtype: _Dtype
    rows: _Positive
    inputs: _Positive
    outputs: _Positive
    seconds: _Measured

    @property
    def flops(self) -> float:
        """Operations of the product."""
        return 2 * self.rows * self.inputs * self.outputs

    @property
    def bytes(self) -> float:
        """Bytes of operands and result."""
        elements = self.rows * (self.inputs + self.outputs) + self.inputs * self.outputs
        return elements * (4 if self.dtype == "float32" else 1 if self.dtype == "float8" else 2)


@dataclass(frozen=True, kw_only=True, config=_FIELDS)
class MeasuredBlock:
    """The time of forward and backward of a decoder of `block_options`, in a device file."""

    dtype: Literal["float32", "bfloat16", "float16"]
    hidden_size: Annotated[_Count, Field(multiple_of=64)]
    batch: _Count
    length: _Count
    seconds: _Measured

    @property
    def work(self) -> Work:
        """The operations and bytes of forward and backward."""
        model = block_options(self.hidden_size).estimates()
        sizes = MicroBatchShape(batch=self.batch, length=self.length, dtype=self.dtype)
        activations = model.activations(sizes)
        costs = (LayerCost.of(each, NOTHING_RECOMPUTED) for each in activations.blocks)
        return Work.of(LayerCost(*map(sum, zip(*costs, strict=True))), activations.head)


@dataclass(frozen=True, kw_only=True, config=_FIELDS)
class MeasuredCollective:
    """The time of one collective, in a device file.

    Attributes:
        ranks, nodes: ranks that take part, and the nodes that they are on.
        bytes: bytes that one rank sends.
        seconds: the collective alone.
        product_seconds, both_seconds: a computation alone, and both at the same time; None: not measured.
    """

    collective: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange", "send"]
    ranks: Annotated[int, BeforeValidator(_number), Field(ge=2)]
    nodes: Annotated[int, BeforeValidator(_number), Field(ge=1)] = 1
    bytes: _Positive
    seconds: _Measured
    product_seconds: _Measured | None = None
    both_seconds: _Measured | None = None

    @property
    def saved(self) -> tuple[float, float]:
        """Seconds that computation hid, and the most that it could hide; zeros if they were not measured."""
        if self.product_seconds is None or self.both_seconds is None:
            return 0.0, 0.0
        return self.product_seconds + self.seconds - self.both_seconds, min(self.product_seconds, self.seconds)


_T = TypeVar("_T", MeasuredProduct, MeasuredBlock)


def fit_products(products: Iterable[MeasuredProduct], memory_bandwidth: float) -> dict[str, Any]:
    """Return the fields of `Device` with which measured products of several shapes take the measured times."""
    fitted: dict[str, list[float]] = {}
    for dtype, every in _by_dtype(products).items():
        # Copies are at most half of the time, so that a bandwidth that is too low leaves a positive rest.
        seconds = [x.seconds - min(x.bytes / memory_bandwidth, x.seconds / 2) for x in every]
        fitted[dtype] = _fit([[1.0, x.flops] for x in every], seconds)
    rates = {dtype: 1 / each for dtype, (_, each) in fitted.items()}
    least = min((each for each, _ in fitted.values()), default=0.0)
    return {"flops": rates, "operation_seconds": least, "efficiency": 1.0} if rates else {}


def fit_blocks(blocks: Sequence[MeasuredBlock], memory_bandwidth: float) -> dict[str, Any]:
    """Return the fields of `Device` with which measured blocks take the measured times.

    The dtype with the most blocks gives all fields. Each other dtype has a rate of products of its own, with which its
    blocks take the measured times by the same other fields.
    """
    (dtype, every), *others = sorted(_by_dtype(blocks).items(), key=lambda each: len(each[1]), reverse=True)
    rows = [[w.operations, w.attention, w.saved, w.products] for w in (each.work for each in every)]
    operation, attention, saved, product = _fit(rows, _without_copies(every, memory_bandwidth))
    found: dict[str, Any] = {
        "flops": {dtype: 1 / product},
        "operation_seconds": operation,
        "attention_efficiency": min(1.0, product / attention) if attention else 1.0,
        "traffic": max(saved * memory_bandwidth, 1e-3),
    }
    for dtype, every in others:
        products = [[w.products + w.attention / found["attention_efficiency"]] for w in (each.work for each in every)]
        (product,) = _fit(products, _without_copies(every, memory_bandwidth, operation, saved))
        found["flops"][dtype] = 1 / product
    return found


def _without_copies(
    blocks: Sequence[MeasuredBlock], memory_bandwidth: float, operation: float = 0.0, saved: float = 0.0
) -> list[float]:
    """Return the seconds of each block less those of copies of operands, of single operations and of saved bytes.

    Args:
        operation, saved: seconds of an operation, and of a saved byte; 0: not subtracted.
    """
    found = []
    for each in blocks:
        work = each.work
        others = (work.operands + work.loss) / memory_bandwidth + operation * work.operations + saved * work.saved
        # As in `fit_products`.
        found.append(each.seconds - min(others, each.seconds / 2))
    return found


def _by_dtype(measured: Iterable[_T]) -> dict[str, list[_T]]:
    found: dict[str, list[_T]] = {}
    for each in measured:
        found.setdefault(each.dtype, []).append(each)
    return found


def fit_collectives(collectives: Iterable[MeasuredCollective]) -> dict[str, Any]:
    """Return the fields of `Device` with which measured collectives of several sizes take the measured times."""
    every = list(collectives)
    found: dict[str, Any] = {"link_efficiency": 1.0} if every else {}
    for where, chosen in (("inner", [x for x in every if x.nodes == 1]), ("outer", [x for x in every if x.nodes > 1])):
        if chosen:
            # Groups of one size do not show what another rank adds.
            several = len({x.ranks for x in chosen}) > 1
            units = [[several * (x.ranks - 2), 1.0, x.bytes] for x in chosen]
            hop, latency, byte = _fit(units, [x.seconds for x in chosen])
            found |= {f"{where}_latency": max(latency, 1e-9), f"{where}_bandwidth": 1 / byte}
            found["hop_seconds"] = max(hop, found.get("hop_seconds", 0.0))
    if "outer_bandwidth" not in found and "inner_bandwidth" in found:
        # One node was measured, and no others are known.
        found |= {"outer_latency": found["inner_latency"], "outer_bandwidth": found["inner_bandwidth"]}
    # Of all sizes together: most of the time of a small collective is noise of the measurement.
    saved = {name: [x.saved for x in every if _HIDDEN_BY.get(x.collective) == name] for name in _HIDDEN_BY.values()}
    sums = {name: [sum(each) for each in zip(*pairs, strict=True)] for name, pairs in saved.items() if pairs}
    hidden = {name: min(1.0, max(0.0, hid / most)) for name, (hid, most) in sums.items() if most}
    return found | ({"hidden": hidden} if hidden else {})


def _fit(units: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the seconds of a unit of each kind, those with the least relative errors, and none of them negative.

    Kinds whose seconds would be negative count as 0. The last kind is always positive.

    Args:
        units: for each measurement, the number of units of each kind.
        seconds: the time of each measurement.
    """
    rows = np.array(units, float) / np.array(seconds, float)[:, None]
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    # Fewer measurements than kinds determine the last kinds only.
    kinds = [kind for kind in range(max(0, len(units[0]) - len(units)), len(units[0])) if rows[:, kind].any()]
    while True:
        found = np.linalg.lstsq(rows[:, kinds] / scale[kinds], np.ones(len(rows)), rcond=None)[0]
        if found.min() > 0 or len(kinds) == 1:
            break
        kinds.pop(int(found[:-1].argmin()))
    result = np.zeros(len(units[0]))
    result[kinds] = found / scale[kinds]
    return [float(each) for each in result]


@dataclass(frozen=True, kw_only=True)
class _Measurements:
    """The measurements of a device file, and the format in which they are written."""

    format: int = 1
    products: tuple[MeasuredProduct, ...] = ()
    blocks: tuple[MeasuredBlock, ...] = ()
    collectives: tuple[MeasuredCollective, ...] = ()


def _fields() -> str:
    return ", ".join(each.name for each in (*fields(Device), *fields(_Measurements)))


def _fitted(measured: _Measurements, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `Device` with which everything takes the measured times."""
    found = fit_collectives(measured.collectives)
    if measured.products or measured.blocks:
        bandwidth = TypeAdapter(_Positive).validate_python(given.get("memory_bandwidth"))
        found |= fit_products(measured.products, bandwidth)
        if measured.blocks:
            blocks = fit_blocks(measured.blocks, bandwidth)
            found |= {**blocks, "flops": found.get("flops", {}) | blocks["flops"], "efficiency": 1.0}
    return found


def _read(path: Path) -> Device:
    try:
        given = read_yaml(path)
    except (OSError, ValueError) as error:
        raise PlanError(f"device file {path} is not YAML: {error}") from error
    if not isinstance(given, dict):
        raise PlanError(f"device file {path}: expected the fields {_fields()}, got {reprlib.repr(given)}")
    lists = {each.name: given.pop(each.name) for each in fields(_Measurements) if each.name in given}
    try:
        measured = TypeAdapter(_Measurements).validate_python(lists)
        if lists and measured.format != FILE_FORMAT:
            raise PlanError(
                f"device file {path}: expected measurements of format {FILE_FORMAT}, got format {measured.format}, in "
                f"which `seconds` may mean something else: run `hp-train doctor --to {path}` again; if you wrote the "
                f"measurements yourself, compare them with docs/how_to/plan_a_run.md and add `format: {FILE_FORMAT}`"
            )
        # What the file states goes before what its measurements give.
        return TypeAdapter(Device).validate_python({"name": path.stem, **_fitted(measured, given), **given})
    except ValidationError as error:
        found = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors(include_url=False)]
        problems = [f"{name or 'memory_bandwidth'}: {what.removeprefix('Value error, ')}" for name, what in found]
        raise PlanError(f"device file {path}: {'; '.join(problems)}. Expected {_fields()}") from error
