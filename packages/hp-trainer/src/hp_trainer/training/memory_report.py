"""The message of a rank whose memory is used up: which rank, in which step, and what held the memory."""

from __future__ import annotations

import math

from hp_dtensor.tensor.conversions import local_of
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.memory import MemoryUse, memory_use
from hp_trainer.exceptions import TrainingError
from hp_trainer.machine_errors import LESS_MEMORY, is_out_of_memory
from hp_trainer.optimizers import state_bytes
from hp_trainer.training.setup import RankSetup


def out_of_memory(error: BaseException, setup: RankSetup, step: int) -> TrainingError | None:
    """Return the error to raise instead of one that says that memory is used up; None for any other error."""
    if not is_out_of_memory(error):
        return None
    held = {name: size for name, size in memory_by_kind(setup).items() if size}
    parts = ", ".join(f"{_size(size)} of {name}" for name, size in held.items())
    first, *_ = str(error).splitlines() or ["no more is given to this process"]
    return TrainingError(
        f"rank {setup.mesh.world.rank} has used up its memory in step {step}: {first.strip()}\n"
        f"It holds {parts}; what is more are activations and buffers, {_size(setup.platform.peak_memory())} in all at "
        f"most so far. {LESS_MEMORY}"
    )


def memory_by_kind(setup: RankSetup) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state that this rank holds now."""
    platform = setup.platform
    try:
        use = memory_use(setup.model)
    except FullyShardError:  # a model of somebody else's, laid out in another way
        whole = sum(_bytes(setup, parameter) for _, parameter in platform.named_parameters(setup.model))
        use = MemoryUse(shards=whole, full=0, full_gradients=0, sharded_gradients=0)
    averages = {} if setup.average is None else setup.average.state()
    return {
        "weights": use.shards,
        "gathered weights": use.full,
        "gradients": use.sharded_gradients,
        "gradients not reduced yet": use.full_gradients,
        "optimizer state": state_bytes(setup.optimizer, platform),
        "averages of weights": sum(_bytes(setup, tensor) for tensor in averages.values()),
    }


def _bytes(setup: RankSetup, tensor: object) -> int:
    local = local_of(setup.platform, tensor)
    return int(math.prod(local.shape) * setup.platform.itemsize(local.dtype))


def _size(count: int) -> str:
    """Return bytes in the unit that fits: `1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 2**10:.2f} KiB"
