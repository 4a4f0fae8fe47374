"""Recording: the digests of a model's steps, taken by hooks, gathered once per step, and stored in one small file."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hp_dtensor.comm.world import existing_world
from hp_dtensor.debug.digest import (
    BUCKETS,
    LENGTH,
    PROJECTIONS,
    SQUARES,
    Digest,
    Digester,
    Part,
    Region,
    combine,
    region_of_spec,
    summand_of_spec,
)
from hp_dtensor.exceptions import RecordingError
from hp_dtensor.platform.interface import Platform, Removable
from hp_dtensor.platform.selection import platform_of
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import fields_of

Tensor = Any
Module = Any

FORMAT = 1
# In the order in which a step computes them.
PASSES = ("forward", "loss", "backward", "gradient", "state", "weights")


# Name of the output of the model itself.
ROOT = "(model)"
# Between the name of a module and an operation of its forward.
OPERATION = ": "
# A larger tensor is recorded by its digest only.
MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Rows:
    """The samples and positions of this rank's activations, whose dimensions are samples, then positions.

    Attributes:
        samples: index of each local sample in the global batch, int64.
        num_samples: size of the global batch.
        positions: index of each local position in the full sequence; None: sequences are unsharded.
        length: length of the full sequence; read only with `positions`.

    Examples:
        >>> rows = Rows(np.array([2, 3]), 4)
        >>> [(each.tolist(), size) for each, size in rows.dims((2, 3))]
        [([2, 3], 4), ([0, 1, 2], 3)]
    """

    samples: np.ndarray
    num_samples: int
    positions: np.ndarray | None = None
    length: int = 0

    def dims(self, shape: Sequence[int], anywhere: bool = False) -> list[tuple[np.ndarray, int]] | None:
        """Return for each dimension its global indices and global size; None if these are not rows of the batch.

        Args:
            shape: of an activation `[samples, ...]`, `[samples, positions, ...]`, or `[samples * positions, ...]`.
            anywhere: positions may be another dimension than the second, as in attention, where heads come before.
        """
        others = [(np.arange(size), size) for size in shape]
        if not shape:
            return None
        leading = [(self.samples, self.num_samples)]
        if self.positions is None:
            return [*leading, *others[1:]] if shape[0] == len(self.samples) else None
        if len(shape) > 1 and shape[:2] == (len(self.samples), len(self.positions)):
            return [*leading, (self.positions, self.length), *others[2:]]
        if shape[0] == len(self.samples) * len(self.positions):
            tokens = (self.samples[:, None] * self.length + self.positions).ravel()
            return [(tokens, self.num_samples * self.length), *others[1:]]
        if anywhere and shape[0] == len(self.samples):
            if len(self.positions) == self.length:
                return [*leading, *others[1:]]
            at = next((dim for dim, size in enumerate(shape) if dim and size == len(self.positions)), None)
            if at is not None:
                return [*leading, *others[1:at], (self.positions, self.length), *others[at + 1 :]]
        return None


@dataclass(frozen=True, eq=False)
class Elements:
    """Elements of a tensor, or a summand of them, that a rank has at the product of global `indices` by dimension."""

    rank: int
    summand: int
    indices: tuple[np.ndarray, ...]
    values: np.ndarray

    def packed(self) -> list[Any]:
        indices = [_packed(each, "<i8") for each in self.indices]
        return [self.rank, self.summand, indices, _packed(self.values, "<f8")]

    @classmethod
    def unpacked(cls, rank: int, summand: int, indices: Sequence[str], values: str) -> Elements:
        found = tuple(_unpacked(each, "<i8").astype(np.int64) for each in indices)
        return cls(rank, summand, found, _unpacked(values, "<f8").reshape([len(each) for each in found]))


@dataclass(frozen=True)
class Event:
    """A recorded tensor of a step.

    Attributes:
        pass_: one of `PASSES`; `forward` and `backward` are the output of a module and its gradient, `loss` is a number
            of the global batch, the others belong to a parameter.
        name: the module or parameter, in the unsharded model; `name[i]` and `name[key]` are one of several outputs, a
            state of an optimizer is `parameter.slot`, and `module: 3 softmax` is the third operation of a module's
            forward.
        dtype: name of its dtype.
        digest: its digest.
        growth: change relative to its norm when the initial weights change by one rounding; None: not measured.
        elements: the tensor itself, where it was asked for.
    """

    pass_: str
    name: str
    dtype: str
    digest: Digest
    growth: float | None = None
    elements: tuple[Elements, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.pass_, self.name

    @property
    def operation(self) -> tuple[str, str] | None:
        """The module and the name of an operation; None: it is another tensor."""
        module, separator, operation = self.name.partition(OPERATION)
        return (module, operation.partition(" ")[2]) if separator and self.pass_ in ("forward", "backward") else None


@dataclass
class Recording:
    """The digests of some steps. Step 0 has the initial weights.

    Attributes:
        about: facts of the run as JSON values, such as `platform`, `dtype` and `layout`; `unplaced` are names of
            outputs that were not recorded.
        steps: the events of each step, in the order of their computation.
    """

    about: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, list[Event]] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write the recording to a file. An existing file is replaced at the end, when all is written."""
        draft = Path(path).with_name(f"{Path(path).name}.incomplete")
        draft.unlink(missing_ok=True)
        append(draft, self.about, None)
        for step in self.steps:
            append(draft, self.steps[step], step)
        draft.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read a file of `save`. One that is missing, damaged or of another version raises a RecordingError."""
        found, known = cls(), None
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                header = json.loads(file.readline())
                if header["format"] != FORMAT:
                    raise RecordingError(f"{path} has format {header['format']}, expected {FORMAT}; record it again")
                found.about = header["about"]
                for line in file:
                    entry = json.loads(line)
                    if "about" in entry:
                        # Outputs that were not recorded are known after a step only.
                        found.about = entry["about"]
                        continue
                    known = entry.get("events") or known
                    assert known is not None
                    found.steps[entry["step"]] = _events(known, entry)
        except RecordingError:
            raise
        except (OSError, EOFError, ValueError, KeyError, TypeError, AssertionError) as error:
            raise RecordingError(f"{path} is not a complete recording of digests: {error!r}") from error
        return found


def append(path: str | Path, content: Any, step: int | None) -> None:
    """Append the facts of a run (`step` None) or the events of a step, as a line in a gzip member of its own."""
    entry = {"format": FORMAT, "about": content} if step is None else {"step": step, **_entry(content)}
    with gzip.open(path, "at", encoding="utf-8") as file:
        file.write(json.dumps(entry, separators=(",", ":")) + "\n")


def _entry(events: Sequence[Event]) -> dict[str, Any]:
    """Return events as JSON values, their numbers as base64 of little-endian arrays."""
    parts = [[_part(each) for each in (*e.digest.parts, *e.digest.replicas)] for e in events]
    exact = [e.digest.values[: SQUARES + 1] for e in events]
    # Buckets locate differences and estimate their norm, for which float32 is enough.
    buckets = [e.digest.buckets() for e in events]
    growth = [-1.0 if e.growth is None else e.growth for e in events]
    elements = {str(at): [each.packed() for each in e.elements] for at, e in enumerate(events) if e.elements}
    return {
        **({"elements": elements} if elements else {}),
        "events": [[e.pass_, e.name, e.dtype, e.digest.shape, e.digest.count, len(e.digest.parts)] for e in events],
        "parts": [each if len(each) > 1 else [] for each in parts],
        "values": _packed(np.concatenate(exact) if exact else np.zeros(0), "<f8"),
        "buckets": _packed(np.concatenate([b.ravel() for b in buckets]) if buckets else np.zeros(0), "<f4"),
        "growth": _packed(np.array(growth), "<f4"),
    }


def _part(part: Part) -> list[Any]:
    return [part.rank, part.region, part.numel, part.summand, _packed(part.values[: PROJECTIONS + 1], "<f8")]


def _packed(array: np.ndarray, dtype: str) -> str:
    return base64.b64encode(array.astype(dtype).tobytes()).decode()


def _unpacked(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).astype(np.float64)


def _events(facts: Sequence[Any], entry: Mapping[str, Any]) -> list[Event]:
    values, buckets = _unpacked(entry["values"], "<f8"), _unpacked(entry["buckets"], "<f4")
    growth, found, at = _unpacked(entry["growth"], "<f4"), [], 0
    for number, (pass_, name, dtype, shape, count, num_parts) in enumerate(facts):
        full = np.zeros(LENGTH)
        full[: SQUARES + 1] = values[number * (SQUARES + 1) : (number + 1) * (SQUARES + 1)]
        digest = Digest(tuple(shape), full)
        size = digest.num_bucketed * BUCKETS
        full[SQUARES + 1 : SQUARES + 1 + size] = buckets[at : at + size]
        at += size
        parts = [
            Part(rank, region, numel, summand, _padded(_unpacked(text, "<f8")))
            for rank, region, numel, summand, text in entry["parts"][number]
        ]
        digest = Digest(tuple(shape), full, tuple(parts[num_parts:]), count, tuple(parts[:num_parts]))
        elements = tuple(Elements.unpacked(*each) for each in entry.get("elements", {}).get(str(number), ()))
        found.append(Event(pass_, name, dtype, digest, growth[number] if growth[number] >= 0 else None, elements))
    return found


def _padded(values: np.ndarray) -> np.ndarray:
    return np.concatenate([values, np.full(LENGTH - len(values), np.nan)])


@dataclass
class _Call:
    """A running forward of a module, and the number of operations that it has run itself; no module: its hooks run."""

    module: str | None = None
    count: int = 0


@dataclass(frozen=True)
class _Local:
    """This rank's record of a tensor in a step: a `Part` before it is gathered, with `values` on the device."""

    shape: tuple[int, ...]
    dtype: str
    summand: int
    at: float
    values: Tensor
    region: int
    numel: int
    elements: tuple[Elements, ...] = ()


class Recorder:
    """Records the steps of a model on this rank, from its hooks. Every rank has one.

    Recording reads tensors only: what the model computes stays the same bit by bit.

    Args:
        module: the model, plain or parallelized; with the parameters of `hp_fsdp`, of torch's own `fully_shard` and
            `DTensor`, or with replicated ones.
        platform: default: that of the module.
        select: whether to record the outputs of a module, by its name, which is empty for the model; None: of all.
        select_gradients: whether to record the gradients of these outputs too, which local code may compute in parts.
        rename: the name in the unsharded model of a module or parameter, where a wrapper has changed it.
        views: (name of a parameter, its full tensor) -> views of the tensor by name, which are recorded in its place;
            none: the tensor is. For models that store several parameters as one, or transposed.
        elements: (pass, name) of a tensor to record itself in every step too, if it has at most 2^20 elements; None: of
            none. Elements of an update are those of the pass `weights`.
        buffers: record floating-point buffers as weights; they must be equal on all ranks that have them.
        about: facts for `Recording.about`.
        first_step: the step after which the weights are those of now.

    Attributes:
        recording: the steps so far, the same on all ranks.
        rows: where the rows of this rank's activations are in the global batch. None: DTensors are global, and plain
            activations have the batches of all ranks one after the other, equally many samples each.
        gradient_factor: factor on gradients of outputs, such as 1 / ranks where each rank's loss is the mean over its
            own samples.
        operations: whether to record also the operations in a module's own forward, by its name; None: of no module.
        unplaced: names of modules whose outputs on this rank have other rows than those of the batch, such as a scalar
            loss, and are not recorded. Those of all ranks are in `recording.about`.

    Examples:
        >>> with nn.building(platform):
        ...     layer = nn.Linear(4, 2)
        >>> recorder = Recorder(nn.ModuleList([layer]), platform)
        >>> with recorder.step(1):
        ...     platform.backward(platform.ops.sum(layer(platform.ops.ones((3, 4), platform.dtype("float32")))))
        >>> [event.key for event in recorder.recording.steps[1]]
        [('forward', '0'), ('backward', '0'), ('gradient', '0.weight'), ('weights', '0.weight')]
    """

    def __init__(
        self,
        module: Module,
        platform: Platform | str | None = None,
        *,
        select: Callable[[str], bool] | None = None,
        select_gradients: Callable[[str], bool] = lambda name: True,
        rename: Callable[[str], str] = str,
        views: Callable[[str, Tensor], Mapping[str, Tensor]] | None = None,
        elements: tuple[str, str] | None = None,
        buffers: bool = False,
        about: Mapping[str, Any] | None = None,
        first_step: int = 0,
    ) -> None:
        self.platform = platform_of(module, platform)
        self.rows: Rows | None = None
        self.gradient_factor = 1.0
        self.operations: Callable[[str], bool] | None = None
        self.unplaced: set[str] = set()
        self._calls: list[_Call] = []
        self._select_gradients = select_gradients
        self._module, self._select, self._rename, self._buffers = module, select, rename, buffers
        self._views, self._elements = views, elements
        self._digester = Digester(self.platform)
        self._found: dict[tuple[str, str], _Local] = {}
        self._hooked: set[tuple[str, int]] = set()
        self._again: list[tuple[str, _Local, _Local]] = []
        self._has_gradients = False
        self._start = time.monotonic()
        # First, since it joins the job of a program that has initialized torch.distributed itself.
        self.weights()
        self.recording = Recording({"world_size": existing_world(self.platform).size, **(about or {})})
        self._finish(first_step)

    @contextlib.contextmanager
    def step(self, number: int, rows: Rows | None = None) -> Iterator[Recorder]:
        """Record an optimizer step: forwards and backwards in the block, and gradients and weights at its end.

        Gradients must still exist at the end of the block unless `gradients` was called.

        Args:
            rows: see the attribute.

        Raises:
            RecordingError: ranks recorded other shapes, or not all elements of a tensor; on every rank.
        """
        self.rows = rows if rows is not None else self.rows
        self._found.clear()
        self._hooked.clear()
        self._again.clear()
        self._has_gradients = False
        with contextlib.ExitStack() as stack:
            for handle in self._add_hooks():
                stack.callback(handle.remove)
            if self.operations is not None:
                self._calls.clear()
                stack.enter_context(self.platform.watch_functions(self._after_operation))
            yield self
        if not self._has_gradients:
            self.gradients()
        self.weights()
        self._finish(number)

    def gradients(self) -> None:
        """Record the gradients of the parameters as they are now."""
        self._has_gradients = True
        for name, parameter in self.platform.named_parameters(self._module):
            gradient = self.platform.get_grad(parameter)
            if gradient is not None:
                self._record_parameter("gradient", name, gradient)

    def states(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Record optimizer states, given by parameter and slot. They are placed as the parameters."""
        for name, slots in states.items():
            for slot, tensor in slots.items():
                self._record_parameter("state", name, tensor, f".{slot}")

    def losses(self, values: Mapping[str, float | Sequence[float]]) -> None:
        """Record numbers of the step that every rank has, such as the mean loss of the global batch, by name."""
        device = next((self.platform.device_of(each.values) for each in self._found.values()), None)
        for name, value in values.items():
            x = np.asarray(value, self._digester.host_dtype)
            region = Region.of(x.shape, [np.arange(size) for size in x.shape])
            digest = self._digester.local(self.platform.from_numpy(x, device), region)
            at = time.monotonic() - self._start
            self._found["loss", name] = _Local(x.shape, x.dtype.name, 0, at, digest, region.key, region.numel)

    def weights(self) -> None:
        """Record the parameters as they are now."""
        named = [*self.platform.named_parameters(self._module)]
        for name, tensor in [*named, *(self.platform.named_buffers(self._module) if self._buffers else ())]:
            self._record_parameter("weights", name, tensor)

    def _record_parameter(self, pass_: str, name: str, x: Tensor, slot: str = "") -> None:
        views: Mapping[str, Tensor] = {}
        if self._views is not None:
            x = self.platform.as_dtensor(x)
            local = local_of(self.platform, x)
            # Shards would need the indices of their elements within the views.
            if tuple(local.shape) == tuple(x.shape):
                views = self._views(name, local)
        for title, tensor in (views or {self._rename(name): x}).items():
            self._record(pass_, title + slot, tensor, of_parameter=True)

    def _add_hooks(self) -> Iterator[Removable]:
        for name, module in self.platform.named_modules(self._module):
            if self.platform.is_container(module):
                continue
            title = self._rename(name) if name else ROOT
            if self._select is None or self._select(name):
                yield self.platform.add_forward_hook(module, self._after_forward(title, self._select_gradients(name)))
            # Last, so that the hook above is one of those that are not followed.
            if self.operations is not None:
                yield from self._follow(module, title if self.operations(name) else None)

    def _follow(self, module: Module, name: str | None) -> Iterator[Removable]:
        """Add hooks that note whether a module's own forward runs, and not hooks of it that gather or redistribute."""

        def enter(*_: Any) -> None:
            self._calls.append(_Call())

        def start(*_: Any) -> None:
            self._calls[-1] = _Call(name)

        def leave(*_: Any) -> None:
            self._calls.pop()

        platform = self.platform
        yield platform.add_forward_pre_hook(module, enter, prepend=True)
        yield platform.add_forward_pre_hook(module, start)
        yield platform.add_forward_hook(module, lambda *_: self._calls.__setitem__(-1, _Call()), prepend=True)
        yield platform.add_forward_hook(module, leave, always_call=True)

    def _after_operation(self, operation: str, result: Any) -> None:
        call = self._calls[-1] if self._calls else _Call()
        results = result if isinstance(result, (tuple, list)) else [result]
        tensors = [x for x in results if isinstance(x, self.platform.Tensor) and self.platform.is_floating(x.dtype)]
        if call.module is None or not tensors:
            return
        call.count += 1
        name = f"{call.module}{OPERATION}{call.count} {operation.rpartition('.')[2].strip('_')}"
        for index, x in enumerate(tensors):
            self._output(f"{name}[{index}]" if len(tensors) > 1 else name, x, True)

    def _after_forward(self, name: str, has_gradients: bool) -> Callable[..., None]:
        def after(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            several = dict(enumerate(output)) if isinstance(output, (tuple, list)) else fields_of(output)
            if several is None:
                self._output(name, output, has_gradients)
            for key, x in (several or {}).items():
                self._output(f"{name}[{key}]", x, has_gradients)

        return after

    def _output(self, name: str, x: Tensor, has_gradients: bool) -> None:
        platform = self.platform
        # A recomputation in backward repeats a forward that has been recorded.
        is_first = not platform.is_in_backward()
        placed = self._placed(x)
        if is_first:
            self._record("forward", name, x)
        # Within a node of autograd nothing is recorded by it, though its arguments require gradients.
        if placed is None or not (has_gradients and platform.is_grad_enabled() and platform.requires_grad(x)):
            return
        key = (name, placed[1].key)
        # A checkpointed forward that was not recorded by autograd gets its hooks when it is repeated.
        if is_first or key not in self._hooked:
            self._hooked.add(key)
            rows, before = self.rows, list[_Local]()
            platform.add_gradient_hook(x, lambda grad: self._backward(name, grad, rows, before))

    def _backward(self, name: str, gradient: Tensor, rows: Rows | None, before: list[_Local]) -> None:
        """Record the gradient of an output; `before` has the one of an earlier call for the same output."""
        current, self.rows = self.rows, rows
        try:
            found = self._digest("backward", name, gradient, self.gradient_factor)
        finally:
            self.rows = current
        if found is not None and before:
            self._again.append((name, before[0], found))
        elif found is not None:
            before.append(found)
            self._add("backward", name, found)

    def _record(self, pass_: str, name: str, x: Any, *, of_parameter: bool = False) -> None:
        """Add the digest of a tensor to the step."""
        found = self._digest(pass_, name, x, of_parameter=of_parameter)
        if found is not None:
            self._add(pass_, name, found)

    def _digest(
        self, pass_: str, name: str, x: Any, factor: float = 1.0, *, of_parameter: bool = False
    ) -> _Local | None:
        """Return the digest of a tensor; None: it has none."""
        platform = self.platform
        placed = self._placed(x, of_parameter)
        if placed is None:
            # Of integers, such as the experts that a router selects, nothing is recorded anywhere.
            if isinstance(x, platform.Tensor) and platform.is_floating(x.dtype) and OPERATION not in name:
                self.unplaced.add(name)
            return None
        local, region, summand = placed
        with platform.no_grad():
            values = self._digester.local(local, region)
            if factor != 1:
                scale = [factor] * LENGTH
                scale[SQUARES] = factor * factor
                weights = platform.from_numpy(np.array(scale), platform.device_of(values))
                values = platform.ops.mul(values, platform.ops.cast(weights, values.dtype))
        at = time.monotonic() - self._start
        # Modules of some models return a tuple of which the first one is the output.
        is_wanted = self._elements in ((pass_, name), (pass_, name.removesuffix("[0]")))
        elements: tuple[Elements, ...] = ()
        if is_wanted and math.prod(region.shape) <= MOST_ELEMENTS:
            with platform.no_grad():
                array = platform.to_numpy(platform.ops.cast(platform.detach(local), values.dtype))
            array = factor * array.astype(np.float64).reshape([len(each) for each in region.indices])
            elements = (Elements(existing_world(platform).rank, summand, region.indices, array),)
        dtype = platform.dtype_name(local.dtype)
        return _Local(region.shape, dtype, summand, at, values, region.key, region.numel, elements)

    def _add(self, pass_: str, name: str, found: _Local) -> None:
        known = self._found.setdefault((pass_, name), found)
        if known is not found:
            with self.platform.no_grad():
                values = self.platform.ops.add(known.values, found.values)
            region, numel = (known.region + found.region) % 2**62, known.numel + found.numel
            elements = known.elements + found.elements
            self._found[pass_, name] = replace(known, values=values, region=region, numel=numel, elements=elements)

    def _add_again(self) -> None:
        """Add gradients of outputs that had one already, unless a split backward has computed the same one again."""
        again, self._again = self._again, []
        if not again:
            return
        with self.platform.no_grad():
            pairs = [each.values for _, first, second in again for each in (first, second)]
            rows = self.platform.to_numpy(self.platform.ops.cat(pairs, 0)).reshape(-1, 2, LENGTH)
        for (name, _, second), (old, new) in zip(again, rows, strict=True):
            # Nodes written in Python run in both parts of a split backward (`Platform.split_backward`).
            if old.tobytes() != new.tobytes():
                self._add("backward", name, second)

    def _placed(self, x: Any, of_parameter: bool = False) -> tuple[Tensor, Region, int] | None:
        """Return the local tensor, its region in the global tensor, and its summand; None: it is not recorded."""
        platform = self.platform
        x = platform.as_dtensor(x)
        if not isinstance(x, platform.Tensor) or not platform.is_floating(x.dtype):
            return None
        if isinstance(x, DTensor):
            rows = (
                None if of_parameter or self.rows is None else self.rows.dims(x.spec.shape, self.operations is not None)
            )
            if rows is None and not (of_parameter or self.rows is None):
                return None
            return local_of(platform, x), region_of_spec(x.spec, rows), summand_of_spec(x.spec)
        shape = tuple(x.shape)
        dims: Sequence[tuple[np.ndarray, int]] | None = [(np.arange(size), size) for size in shape]
        if not of_parameter and self.rows is not None:
            dims = self.rows.dims(shape, self.operations is not None)
        elif not of_parameter and (world := existing_world(platform)).size > 1 and not shape:
            # Such as a loss, which is that of the rank's own samples.
            dims = None
        elif not of_parameter and shape:
            first, size = world.rank * shape[0], world.size * shape[0]
            dims = [(np.arange(first, first + shape[0]), size), *list(dims or [])[1:]]
        if dims is None:
            return None
        return x, Region.of([size for _, size in dims], [each for each, _ in dims]), 0

    def _finish(self, number: int) -> None:
        """Gather the digests of all ranks and combine them."""
        self._add_again()
        found, platform = self._found, self.platform
        facts = [[*key, e.shape, e.dtype, e.summand, e.at, e.region, e.numel] for key, e in found.items()]
        with platform.no_grad():
            # One copy to the host, which waits for the device once.
            values = [platform.to_numpy(platform.ops.cat([e.values for e in found.values()], 0))] if found else []
        elements = [[*key, [each.packed() for each in e.elements]] for key, e in found.items() if e.elements]
        lines = json.dumps([facts, sorted(self.unplaced), elements])
        payload = lines.encode() + b"\n" + b"".join(v.astype("<f8").tobytes() for v in values)
        gathered = existing_world(platform).all.all_gather_bytes(payload)
        # Ranks leave the collective together, which makes their times of the next step comparable. Clocks of machines
        # are not.
        self._start = time.monotonic()
        self.recording.steps[number] = _combined(gathered)
        unplaced = {name for each in gathered for name in json.loads(each.partition(b"\n")[0])[1]}
        if unplaced:
            self.recording.about["unplaced"] = sorted(unplaced)
        self._found = {}


def perturb_weights(module: Module, unit: float, platform: Platform | str | None = None, seed: int = 0) -> None:
    """Change every weight by the factor 1 + unit or 1 - unit, at random, as a rounding of that size would.

    A recording with perturbed weights shows how rounding grows (`measure_growth`).

    Args:
        unit: such as 2**-24 for float32, of the coarsest dtype of both sides. A smaller change than a weight's dtype
            can represent is rounded up to it.
    """
    platform = platform_of(module, platform)
    with platform.no_grad():
        for name, parameter in platform.named_parameters(module):
            x = platform.as_dtensor(parameter)
            local, region = local_of(platform, x), region_of_spec(x.spec) if isinstance(x, DTensor) else None
            key = [seed, 0 if region is None else region.key, *name.encode()]
            dtype = platform.dtype("float64")
            values = platform.to_numpy(platform.ops.cast(platform.detach(local), dtype))
            signs = np.random.default_rng(key).choice([-1.0, 1.0], values.shape)
            least = {8: 2.0**-52, 4: 2.0**-23}.get(platform.itemsize(local.dtype), 2.0**-8)
            factor = 1 + max(unit, least) * signs
            platform.copy_(local, platform.ops.cast(platform.from_numpy(values * factor), local.dtype))


def _combined(gathered: Sequence[bytes]) -> list[Event]:
    """Return the events of a step from the payload of every rank, in the order of their first occurrence."""
    parts: dict[tuple[str, str], list[Part]] = {}
    elements: dict[tuple[str, str], list[Elements]] = {}
    forms: dict[tuple[str, str], dict[tuple[Any, str], int]] = {}
    times: dict[tuple[str, str], float] = {}
    for rank, payload in enumerate(gathered):
        text, _, numbers = payload.partition(b"\n")
        values = np.frombuffer(numbers, "<f8").reshape(-1, LENGTH)
        facts, _, of_elements = json.loads(text)
        for pass_, name, packed in of_elements:
            elements.setdefault((pass_, name), []).extend(Elements.unpacked(*each) for each in packed)
        for index, (pass_, name, shape, dtype, summand, at, region, numel) in enumerate(facts):
            key = (pass_, name)
            parts.setdefault(key, []).append(Part(rank, region, numel, summand, values[index]))
            forms.setdefault(key, {}).setdefault((tuple(shape), dtype), rank)
            times[key] = min(at, times.get(key, at))
    problems, events = [], []
    for key in sorted(parts, key=lambda key: (PASSES.index(key[0]), times[key])):
        # What an operation returns may be local to a rank in every way.
        if OPERATION in key[1] and len(forms[key]) > 1:
            continue
        if len(forms[key]) > 1:
            different = " and ".join(f"{dtype}{list(shape)} on rank {r}" for (shape, dtype), r in forms[key].items())
            problems.append(f"{key[0]} of {key[1]} is {different}")
            continue
        [(shape, dtype)] = forms[key]
        digest = combine(shape, parts[key])
        if OPERATION in key[1] and digest.count != round(digest.count):
            continue
        if digest.count != round(digest.count):
            problems.append(f"{key[0]} of {key[1]} has {digest.count:.3g} times the elements of {list(shape)}")
        events.append(Event(*key, dtype, digest, elements=tuple(elements.get(key, ()))))
    if problems:
        raise RecordingError(
            f"ranks have not recorded the same tensors: {'; '.join(problems[:4])}. Expected every element once: pass "
            "the rows of each rank's activations, Recorder.step(rows=...)"
        )
    return events
