"""Tables of MindSpore's abilities on each kind of device, by which native or composed forms are chosen."""

from __future__ import annotations

from dataclasses import dataclass

from hp_dtensor.platform.interface import DTYPE_NAMES

WITHOUT_BOOL = tuple(name for name in DTYPE_NAMES if name != "bool")

# The operations whose CPU kernels, forward and backward, take bfloat16. The others go through float32.
BFLOAT16_ON_CPU = frozenset(
    """
    zeros ones full arange zeros_like neg clone cast cat split chunk transpose permute reshape unsqueeze squeeze
    """.split()
)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of one kind of device.

    Attributes:
        target: MindSpore's name of the device.
        device_type: the name that meshes use.
        host_memory: tensors live in host memory, so NumPy arrays can share their storage.
        native_collectives: the collectives exist as kernels; otherwise they are composed from point-to-point
            transfers.
        native_operations: operations use MindSpore's own where the CPU has no kernel (embedding, topk, ...).
        bfloat16_operations: names in `hp_dtensor.platform.interface` whose kernels take bfloat16; None: all.
        moved_dtypes: dtypes that collectives move.
        reduced_dtypes: dtypes that collectives reduce.
    """

    target: str
    device_type: str
    host_memory: bool
    native_collectives: bool
    native_operations: bool
    bfloat16_operations: frozenset[str] | None
    moved_dtypes: tuple[str, ...] = DTYPE_NAMES
    reduced_dtypes: tuple[str, ...] = WITHOUT_BOOL


CPU = Capabilities(
    target="CPU",
    device_type="cpu",
    host_memory=True,
    native_collectives=False,
    native_operations=False,
    bfloat16_operations=BFLOAT16_ON_CPU,
)

ASCEND = Capabilities(
    target="Ascend",
    device_type="npu",
    host_memory=False,
    native_collectives=True,
    native_operations=True,
    bfloat16_operations=None,
    moved_dtypes=tuple(name for name in WITHOUT_BOOL if name != "float64"),
    reduced_dtypes=("float32", "float16", "bfloat16", "int64", "int32", "int8"),
)
