"""Speed of a run against what its model and its devices would allow.

A profile of chosen steps of a run.

The message of a rank whose memory is used up: which rank, in which step, and what held the memory.
"""

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
    """Model FLOP/s of a job and their part of the devices' peak rate; both are None where nobody tells them.

    A model tells its operations by `training_flops_per_token(sequence_length)`, forward and backward, without what is
    computed again.
    """

    def __init__(self, setup: RankSetup) -> None:
        training, world_size = setup.config.training, setup.mesh.world.size
        per_token = getattr(setup.model, "training_flops_per_token", None)
        tokens = training.global_batch_size * training.sequence_length
        self._step = None if per_token is None else tokens * float(per_token(training.sequence_length))
        rate = setup.platform.peak_flops(training.dtype)
        self._peak = None if rate is None else rate * world_size

    def flops_per_second(self, seconds: float) -> float | None:
        """Return the model FLOP/s of a step that took so long."""
        return None if self._step is None else self._step / seconds

    def utilization(self, seconds: float) -> float | None:
        """Return the fraction of the devices' peak rate that such a step has used."""
        return None if self._step is None or self._peak is None else self._step / seconds / self._peak


class StepProfile:
    """Profiles the steps from `profile.first` to `profile.last` on every rank; ends what has begun with its block.

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
            opened, self._open = self._open, None
            opened.__exit__(kind, error, trace)

    def before_step(self, step: int) -> None:
        """Begin with the first step to profile; a run that goes on in their midst begins there."""
        first, last = self._config.first, self._config.last
        if self._open is None and first is not None and first <= step <= (last or first):
            self._folder.mkdir(exist_ok=True)
            self._open = self._platform.profile(self._folder, self._rank)
            self._open.__enter__()

    def after_step(self, step: int) -> None:
        """End after the last step to profile, and write the files."""
        if self._open is not None and step >= (self._config.last or self._config.first or 0):
            self.__exit__(None, None, None)


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
