"""Speed and memory of a run: model FLOP/s and utilization, profiles of steps, and out-of-memory errors."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.memory import MemoryUse, memory_use
from hp_trainer.config import ProfileConfig
from hp_trainer.exceptions import TrainingError
from hp_trainer.failures import LESS_MEMORY, is_out_of_memory
from hp_trainer.optimizers import state_bytes
from hp_trainer.training.setup import RankSetup


class ModelSpeed:
    """Model FLOP/s of a job, and their fraction of the devices' peak rate (MFU).

    A model reports its FLOPs by a method `training_flops_per_token(sequence_length)`: forward and backward, without
    recomputation. Both values are None if the model has no such method, and utilization if the peak is unknown.
    """

    def __init__(self, setup: RankSetup) -> None:
        training, world_size = setup.config.training, setup.mesh.world.size
        per_token = getattr(setup.model, "training_flops_per_token", None)
        # Constant over the run: the estimate counts padding of a packed row as tokens.
        tokens = training.global_batch_size * training.sequence_length
        self._step = None if per_token is None else tokens * float(per_token(training.sequence_length))
        rate = setup.platform.peak_flops(training.dtype)
        self._peak = None if rate is None else rate * world_size

    def flops_per_second(self, seconds: float) -> float | None:
        """Return the model FLOP/s of a step of this duration."""
        return None if self._step is None else self._step / seconds

    def utilization(self, seconds: float) -> float | None:
        """Return the fraction of the devices' peak rate in a step of this duration."""
        return None if self._step is None or self._peak is None else self._step / seconds / self._peak


class StepProfile:
    """Profiles the steps from `profile.first` to `profile.last` on every rank. Leaving the block ends the profile.

    Args:
        folder: `profile/` of the run folder.
    """

    def __init__(self, config: ProfileConfig, folder: Path, platform: Platform, rank: int) -> None:
        self._config, self._folder, self._platform, self._rank = config, folder, platform, rank
        self._open: AbstractContextManager[None] | None = None

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            # Cleared first: a profiler that fails to write must not be closed a second time.
            opened, self._open = self._open, None
            opened.__exit__(kind, error, trace)

    def before_step(self, step: int) -> None:
        """Start the profile at its first step, or later if a resumed run starts within its steps."""
        first, last = self._config.first, self._config.last
        if self._open is None and first is not None and first <= step <= (last or first):
            self._folder.mkdir(exist_ok=True)
            self._open = self._platform.profile(self._folder, self._rank)
            self._open.__enter__()

    def after_step(self, step: int) -> None:
        """End the profile after its last step, and write the files."""
        if self._open is not None and step >= (self._config.last or self._config.first or 0):
            self.__exit__(None, None, None)


def out_of_memory(error: BaseException, setup: RankSetup, step: int) -> TrainingError | None:
    """Return the error to raise for an out-of-memory error, with the memory by kind; None for any other error."""
    if not is_out_of_memory(error):
        return None
    # Local shards only; nothing here communicates, since other ranks may still be in the step.
    held = {name: size for name, size in memory_by_kind(setup).items() if size}
    kinds = ", ".join(f"{_size(size)} of {name}" for name, size in held.items())
    first, *_ = str(error).splitlines() or ["an allocation failed"]
    return TrainingError(
        f"rank {setup.mesh.world.rank} has used up its memory in step {step}: {first.strip()}\n"
        f"It has {kinds}; the rest are activations and buffers. The peak so far is "
        f"{_size(setup.platform.peak_memory())}. {LESS_MEMORY}"
    )


def memory_by_kind(setup: RankSetup) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state on this rank, by kind."""
    platform = setup.platform
    try:
        use = memory_use(setup.model)
    except FullyShardError:  # a model of a plugin that does not use fully_shard
        weights = sum(_bytes(setup, parameter) for _, parameter in platform.named_parameters(setup.model))
        use = MemoryUse(shards=weights, full=0, full_gradients=0, sharded_gradients=0)
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
    """Format bytes in a suitable unit: `1.50 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 2**10:.2f} KiB"
