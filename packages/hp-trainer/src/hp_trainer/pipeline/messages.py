"""Descriptions of the tensors that pass between two stages: sent once per step, ahead of the first micro-batch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.mesh_axes import MeshAxis
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement, Replicate, Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_trainer.exceptions import PipelineError

Tensor = Any
# Of one size, so that a header can be received before its length is known; what is longer follows in a second message.
HEADER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Everything that a receiver must know of a tensor to make a buffer for it.

    Attributes:
        shape: of the data that travels: a DTensor's local shard.
        dtype: name of its dtype.
        requires_grad: a gradient comes back for it.
        axes: of a DTensor, its mesh's axes as (name, sizes, strides); empty: it is plain.
        shards: of a DTensor, per axis the dimension that is cut, or None: replicated.
        global_shape: of a DTensor.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    axes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    shards: tuple[int | None, ...] = ()
    global_shape: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The tensors of one micro-batch that pass from a stage to the next, and the structure that they stand in.

    Attributes:
        tensors: in the order of the structure.
        structure: nested `["tuple", ...]`, `["list", ...]`, `["dict", {...}]`, `["tensor"]`, `["value", json]`.
    """

    tensors: tuple[TensorMeta, ...]
    structure: Any

    def to_bytes(self) -> bytes:
        """Return the layout as JSON."""
        return json.dumps([[asdict(each) for each in self.tensors], self.structure]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> MessageLayout:
        """Return the layout that `to_bytes` wrote."""
        tensors, structure = json.loads(data)
        return cls(tuple(TensorMeta(**{k: _tuple(v) for k, v in each.items()}) for each in tensors), structure)

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the structure with these tensors in it."""
        remaining = list(tensors)
        return _rebuild(self.structure, remaining)


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def layout_of(platform: Platform, tree: Any, who: str) -> tuple[MessageLayout, list[Tensor]]:
    """Return the layout of a stage's output, and its tensors.

    Args:
        who: names the stage in errors.

    Raises:
        PipelineError: the output holds what cannot travel: objects, or partial DTensors.
    """
    tensors: list[Tensor] = []
    structure = _structure(platform, tree, tensors, who)
    return MessageLayout(tuple(_meta(platform, each, who) for each in tensors), structure), tensors


def _structure(platform: Platform, tree: Any, tensors: list[Tensor], who: str) -> Any:
    if isinstance(tree, platform.Tensor):
        tensors.append(tree)
        return ["tensor"]
    if isinstance(tree, (tuple, list)):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return [kind, [_structure(platform, each, tensors, who) for each in tree]]
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return ["dict", {key: _structure(platform, each, tensors, who) for key, each in tree.items()}]
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return ["value", tree]
    raise PipelineError(
        f"{who} returns a {type(tree).__name__}, which cannot be sent to the next stage; expected tensors, numbers, "
        "strings and None, in tuples, lists and dicts with string keys"
    )


def _rebuild(structure: Any, remaining: list[Tensor]) -> Any:
    kind, *content = structure
    if kind == "tensor":
        return remaining.pop(0)
    if kind == "value":
        return content[0]
    if kind == "dict":
        return {key: _rebuild(each, remaining) for key, each in content[0].items()}
    items = [_rebuild(each, remaining) for each in content[0]]
    return tuple(items) if kind == "tuple" else items


def _meta(platform: Platform, x: Tensor, who: str) -> TensorMeta:
    shape = platform.local_shape(x)
    needs = platform.requires_grad(x) and platform.is_grad_enabled()
    dtype = platform.dtype_name(x.dtype)
    if not isinstance(x, DTensor):
        return TensorMeta(shape, dtype, needs)
    global_shape: tuple[int, ...] = tuple(x.spec.shape)
    shards = tuple(_shard(placement, x, who) for placement in x.placements)
    axes = tuple((axis.name, axis.sizes, axis.strides) for axis in x.device_mesh.axes)
    return TensorMeta(shape, dtype, needs, axes, shards, global_shape)


def _shard(placement: Placement, x: Any, who: str) -> int | None:
    if placement.is_replicate():
        return None
    if type(placement) is Shard:
        return placement.dim
    raise PipelineError(
        f"{who} returns a DTensor with placements {list(x.placements)}; between stages expected Shard or Replicate, "
        "so redistribute it first"
    )


def as_distributed(x: Tensor, meta: TensorMeta, mesh: DeviceMesh | None, who: str) -> Tensor:
    """Return a received tensor as the DTensor that was sent, on this stage's part of its mesh.

    Args:
        mesh: of the pipeline; it is of the same ranks as the tensor's.

    Raises:
        PipelineError: there is none.
    """
    if not meta.axes:
        return x
    if mesh is None:
        raise PipelineError(f"{who} receives a DTensor; give the pipeline a mesh (mesh['pp']), not a process group")
    placements = [Replicate() if dim is None else Shard(dim) for dim in meta.shards]
    axes = [MeshAxis(*axis) for axis in meta.axes]
    return DTensor.from_local(x, mesh.along(axes), placements, shape=meta.global_shape)


def send_header(group: ProcessGroup, layout: MessageLayout, platform: Platform) -> list[tuple[Any, Tensor]]:
    """Send a layout to the second rank of a group of two; return the works under way with their buffers."""
    data = layout.to_bytes()
    head = len(data).to_bytes(8, "little") + data
    parts = [head[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), head[HEADER_BYTES:]]
    buffers = [platform.from_numpy(np.frombuffer(part, np.uint8).copy()) for part in parts if part]
    return [(group.send(buffer, 1, async_op=True), buffer) for buffer in buffers]


def receive_header(group: ProcessGroup, platform: Platform) -> MessageLayout:
    """Receive a layout from the first rank of a group of two."""
    first = platform.empty((HEADER_BYTES,), platform.dtype("uint8"))
    group.receive(first, 0).wait()
    data = platform.to_numpy(first).tobytes()
    length = int.from_bytes(data[:8], "little")
    if length > HEADER_BYTES - 8:
        rest = platform.empty((length + 8 - HEADER_BYTES,), platform.dtype("uint8"))
        group.receive(rest, 0).wait()
        data += platform.to_numpy(rest).tobytes()
    return MessageLayout.from_bytes(data[8 : 8 + length])
