"""DTensors in `torch.distributed.checkpoint`: the boxes of the global tensor on this rank, and their memory.

`TorchDTensor` has the three methods with which torch asks a tensor for them. A shard may consist of several boxes, so
ragged and strided placements work too.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from hp_dtensor.exceptions import PlacementError
from hp_dtensor.spec.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Tensor = torch.Tensor
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) in the global tensor."""


def chunks(spec: TensorSpec) -> list[ChunkStorageMetadata]:
    """Return the boxes of the global tensor that are stored on this rank."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in _boxes(spec)]


def write_items(name: str, spec: TensorSpec, local: Tensor) -> list[WriteItem]:
    """Return a write item per box of this rank; torch drops duplicates that another rank writes too."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, torch.Size(spec.shape)),
        )
        for chunk in chunks(spec)
    ]


def part(spec: TensorSpec, local: Tensor, index: MetadataIndex) -> Tensor:
    """Return the view of the local data that is the box at `index.offset`."""
    if not math.prod(spec.shape):
        return local.new_empty(spec.shape)
    # The boxes follow each other in the local data: each starts where the lengths before it add up to.
    lengths = ([stop - start for start, stop in ranges] for ranges in spec.ranges())
    starts = itertools.product(*(list(itertools.accumulate(each, initial=0))[:-1] for each in lengths))
    for start, (offset, shape) in zip(starts, _boxes(spec), strict=True):
        if index.offset is None or tuple(index.offset) == offset:
            for dim, (begin, length) in enumerate(zip(start, shape, strict=True)):
                local = local.narrow(dim, begin, length)
            return local
    raise ValueError(f"{index.fqn}: this rank has no box at {index.offset} of {spec!r}")


def _boxes(spec: TensorSpec) -> list[Box]:
    """Return a box per combination of ranges; one for a tensor without elements, so that its shape is saved."""
    if spec.is_partial:
        raise PlacementError(f"a checkpoint of partial values, {spec!r}: reduce them first, x.reduce_partial()")
    if spec.mesh.get_coordinate() is None:
        return []
    if not math.prod(spec.shape):
        return [((0,) * spec.ndim, spec.shape)]
    return [
        (tuple(start for start, _ in box), tuple(stop - start for start, stop in box))
        for box in itertools.product(*spec.ranges())
    ]
