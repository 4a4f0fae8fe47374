"""Device types, and the table of the collectives that their backends have; `groups.py` composes the others.

To add a device type: a line in `BACKEND_NAMES` and `CAPABILITIES`, and a function in `_BACKENDS` of `world.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from hp_dtensor.comm.process_group import no_average_of
from hp_dtensor.exceptions import CapabilityError, PlatformError

Tensor = torch.Tensor

BACKEND_NAMES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""Device type -> the backend of torch.distributed that communicates its tensors."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one backend of torch.distributed can do.

    Attributes:
        native_shards: use the native all-gather and reduce-scatter. Otherwise each rank sends shards to the others as
            messages; a reduce-scatter reduces them in rank order. On gloo that is faster at every size measured
            (reduce-scatter: 2 to 4 ranks, 1 KB to 16 MB; all-gather: 2 ranks, 256 KB to 16 MB, and below that the same
            processor time) and needs less memory: gloo's all-gather fills a buffer of its own and copies it. A
            reduction accumulates bfloat16 in float32.
        as_bytes: dtypes that are sent as bytes. Complex ones always are; they are summed as pairs of real numbers.
        as_int32: dtypes that are reduced as int32.
    """

    native_shards: bool
    as_bytes: frozenset[torch.dtype] = frozenset({torch.int16})
    as_int32: frozenset[torch.dtype] = frozenset({torch.int16})


CAPABILITIES = {
    "cpu": Capabilities(native_shards=False),
    "cuda": Capabilities(native_shards=True),
    "npu": Capabilities(
        native_shards=True,
        as_bytes=frozenset({torch.int16, torch.bool}),
        as_int32=frozenset({torch.int16, torch.bool, torch.uint8}),
    ),
}


def shares_devices() -> bool:
    """Return True if ranks may share an accelerator because their collectives use gloo (`HP_BACKEND=gloo`).

    Raises:
        PlatformError: `HP_BACKEND` names another backend.
    """
    wanted = os.environ.get("HP_BACKEND")
    if wanted not in (None, "", "gloo"):
        raise PlatformError(
            f"HP_BACKEND is {wanted!r}; expected gloo, by which ranks share an accelerator, or nothing for the "
            "device's own backend"
        )
    return wanted == "gloo"


def movable(x: Tensor) -> Tensor:
    """Return `x`, or a view of it as bytes with the same number of rows where the backend cannot send its dtype."""
    if x.dtype not in CAPABILITIES[x.device.type].as_bytes and not x.is_complex():
        return x
    # Flattened first: empty tensors may have any strides, and torch reinterprets the dtype of contiguous ones only.
    rows = x.shape[0] if x.dim() else 1
    return x.view(-1).view(torch.uint8).view(rows, x.numel() * x.element_size() // max(rows, 1))


def check_reduction(x: Tensor, op: str) -> None:
    """Raise CapabilityError if the dtype of `x` has no reduction `op`, for example an average of integers."""
    if x.is_complex() and op != "sum":
        raise CapabilityError(f"the reduction {op!r} of complex numbers, got {x.dtype}; they can be reduced with 'sum'")
    if op == "avg" and not x.is_floating_point():
        raise no_average_of(x.dtype)


def device_types() -> tuple[str, ...]:
    """Return the device types that torch can use on this machine, fastest first; the last is `cpu`."""
    found = ["cpu"]
    if torch.cuda.is_available():
        found.insert(0, "cuda")
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        found.insert(0, "npu")
    return tuple(found)
