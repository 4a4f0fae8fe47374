"""One rank's setup for a configuration without data on disk, and batches of random tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hp_dtensor.platform.selection import get_platform
from hp_trainer.config import TrainerConfig, parse_config
from hp_trainer.data import Batch
from hp_trainer.parallel.dims import dims_of
from hp_trainer.planning.shapes import StepShape
from hp_trainer.plugins import registries
from hp_trainer.training.setup import RankSetup
from hp_trainer.training.speed import memory_by_kind
from hp_trainer.training.step import OptimizerStep

YAML = """\
model: {vocab_size: 48, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 4,
        head_dim: 8, intermediate_size: 24, moe_intermediate_size: 12, load_balance_coeff: null}
data: {path: none.txt}
training: {steps: 1, global_batch_size: 8, sequence_length: 16, clip_norm: null}
"""


def config_of(**settings: Any) -> TrainerConfig:
    """Return the small configuration with other settings; two underscores stand for the dot."""
    given = [(name.replace("__", "."), "null" if value is None else str(value)) for name, value in settings.items()]
    return parse_config(YAML, given, registered=registries()).config


def shape_of(config: TrainerConfig, world_size: int) -> StepShape:
    """Return the shape of the step on so many ranks."""
    return StepShape.of(config, dims_of(config, world_size), is_host=True)


def setup_rank(config: TrainerConfig) -> RankSetup:
    """Build this rank's model, optimizer and pipeline; the data are the caller's."""
    return RankSetup.build(None, config, get_platform())


def random_batch(setup: RankSetup, step: int = 0) -> Batch:
    """Return this rank's share of a global batch."""
    training, dims = setup.config.training, setup.dims
    share = training.global_batch_size // dims.dp_size
    seed = step * 1000 + dims.batch_rank(setup.mesh.world.rank)
    length = training.sequence_length
    tokens = np.random.default_rng(seed).integers(0, setup.config.model.options.vocab_size, (share, length + 1))
    count = training.global_batch_size * length
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), None, np.arange(share), count, count)


# The last reference to what a rank has sent may be dropped by the thread that sends, whose frees the profiler does not
# see: what is counted is too much then, never too little. One step is counted, and more if its peak is not the planned
# one.
STEPS_COUNTED = (1, 4)


def measured_peak(settings: dict[str, Any], steps: int) -> int:
    """Return the bytes of tensors that this rank holds at the peak of a step; see `peak_of`."""
    return peak_of(config_of(**settings), steps)


def peak_of(config: TrainerConfig, steps: int) -> int:
    """Return the bytes of tensors that this rank holds at the peak of a step, as torch's allocator counts.

    There before the step are weights and the optimizer's state, which the engine counts itself.

    Args:
        steps: number of steps that are counted; the smallest peak is returned.
    """
    setup = setup_rank(config)
    step = OptimizerStep(setup)

    def run(index: int) -> None:
        step.accumulate_gradients(random_batch(setup, index))
        step.clip()
        step.update(1e-3)

    # The first step allocates the optimizer's state, and records the order in which groups are gathered.
    run(0)
    before = memory_by_kind(setup)
    assert before["gradients"] == before["gathered weights"] == 0
    return sum(before.values()) + min(_counted_peak(run, 1 + index) for index in range(steps))


def _counted_peak(run: Callable[[int], None], index: int) -> int:
    """Return the most bytes that torch's allocator gave in a step and that were held at once.

    Bytes that were there before the step count for nothing, also when they are freed in it: the garbage collector may
    find an earlier test's model at any moment.
    """
    import torch

    # `torch.profiler.profile` would import torch's compiler, which takes five seconds of each process.
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profile:
        run(index)
    held: dict[int, int] = {}
    live = peak = 0
    for address, size in _allocations(profile.kineto_results.experimental_event_tree()):
        # An address that is given again has been freed, perhaps by a thread that the profiler does not see.
        live -= held.pop(address, 0)
        if size > 0:
            held[address] = size
            live += size
            peak = max(peak, live)
    return peak


def _allocations(events: list[Any]) -> list[tuple[int, int]]:
    """Return address and bytes, negative for a free, of each allocation in a profile, in the order of time."""
    import torch

    found = []
    stack = list(events)
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, size) for _, address, size in sorted(found, key=lambda each: each[0])]
