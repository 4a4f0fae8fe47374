"""Weights whose class says how they are gathered: which they are, and how they are cut."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hp_dtensor.exceptions import CapabilityError
from hp_fsdp._engine.layout import Block, FlatLayout
from hp_fsdp._engine.original_parameters import OriginalParameter
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.storage import ParameterStorage


def find_extensions(storage: ParameterStorage, originals: Sequence[OriginalParameter]) -> None:
    """Find out which parameters have a gather of their own.

    Raises:
        FullyShardError: naming those whose gather cannot be used, and why.
    """
    problems = []
    for original in originals:
        try:
            original.extension = storage.gather_extension(original.tensor)
        except CapabilityError as error:
            problems.append(f"{original.name}: {error}")
    if problems:
        raise FullyShardError(
            f"{'; '.join(problems)}. Shard plain weights, and send them in fewer bits by communication='fp8' or "
            "another Communication (examples/hp-fsdp-quantized); or leave these out (ignored_params)"
        )


def extension_problems(original: OriginalParameter) -> list[str]:
    """Return why a parameter's own gather does not go with how it is to be cut; an empty list if it does."""
    if original.extension is None or original.cut_dim == 0:
        return []
    return [
        f"{original.name}: shard_placement_fn cuts dimension {original.cut_dim}, expected 0, because the gather of "
        f"{original.extension.kind} joins shards along the first dimension"
    ]


def chunked_layout(original: OriginalParameter, num_shards: int) -> FlatLayout:
    """Lay out one parameter in as many rows for each shard, and fewer for the last ones, as torch's `chunk` cuts it."""
    rows = -(-original.local_shape[0] // num_shards)
    block = Block(math.prod(original.local_shape), max(1, original.row_numel))
    return FlatLayout(num_shards, max(1, rows * original.row_numel), (block,), (0,))
