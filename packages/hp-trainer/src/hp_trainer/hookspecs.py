"""Hook specifications of hp_trainer (entry-point group `hp_trainer`).

Registration hooks run in every `hp-train` command, `--help` included, before a framework is loaded: the
module that implements them must import none, and leave that to the builders it registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform
    from hp_dtensor.platform.registry import Registry
    from hp_trainer.records import CheckpointRecord, CountedStep, ErrorRecord, EvaluationRecord, RunRecord, StepRecord


hookspec = pluggy.HookspecMarker("hp")


# Registration ----------------------------------------------------------------------------------------------


@hookspec
def hp_models(registry: Registry) -> None:
    """Called once, before the configuration is read. Registers models by name. Since 0.1.

    `build(options, platform)` returns a module of the platform, unsharded, with a `config` (`options`) and a
    method that lays it out; see `hp_trainer.models`.
    """


@hookspec
def hp_datasets(registry: Registry) -> None:
    """Called once, before the configuration is read. Registers datasets by name. Since 0.1.

    `build` is a `hp_trainer.data.DatasetSource` class; `build(options)` reads nothing yet.
    """


@hookspec
def hp_optimizers(registry: Registry) -> None:
    """Called once, before the configuration is read. Registers optimizers, one per platform. Since 0.1.

    `build(parameters, options, platform)` takes `(dotted name, parameter)` pairs, all of them DTensors or all
    plain, and returns a `hp_trainer.training.Optimizer`. AdamW is registered as `adamw` with
    `hp_trainer.config.AdamWConfig` as its options.

    Options may have a method `state_bytes(name, shape, elements, itemsize)`, by which `hp-train plan` knows the bytes
    of a rank's state for a parameter: its dotted name and whole shape, the elements of it that the rank holds, and
    the bytes of one. Without it two moments are counted. A method `update_bytes(held, is_host)` tells the bytes that an
    update needs beside weights, gradients and state; `held` lists (name, whole shape, elements) of what a rank holds,
    and `is_host` is true on a CPU. Without it none are counted.
    """


@hookspec
def hp_trackers(registry: Registry) -> None:
    """Called once, before the configuration is read. Registers trackers of metrics by name. Since 0.1.

    `build(options, run_folder)` returns a `hp_trainer.metrics.Tracker`, used by rank 0 alone.
    """


@hookspec
def hp_checkpoint_storages(registry: Registry) -> None:
    """Called once, before the configuration is read. Registers places for checkpoints by name. Since 0.1.

    `build(options, folder)` returns a `hp_trainer.checkpoint.Storage`, used by every rank.
    """


@hookspec
def hp_checkpoint_formats(registry: Registry) -> None:
    """Called once, before a command that names one. Registers other formats of checkpoints by name. Since 0.1.

    `build()` returns a `hp_trainer.checkpoint.CheckpointFormat`, by which `hp-train export --format` writes and
    `hp-train import --format` reads.
    """


@hookspec(firstresult=True)
def hp_step_counter(platform: Platform) -> Callable[..., CountedStep] | None:
    """Return a function that counts a step of a module on tensors without memory, or None for other platforms. Since
    0.1.

    Called by `hp-train plan` for a module without estimates of its own. `count(build, run, parts, dtype)` returns a
    `hp_trainer.records.CountedStep` of one forward and backward. `build()` returns the module. `run(module)` returns
    the scalar that backward starts from. `parts(module)` returns modules by dotted name, none within another, whose
    bytes are counted apart. `dtype` is the name of the dtype of computation, or None for the dtypes the module was
    built with.
    """


# Life cycle ------------------------------------------------------------------------------------------------


@hookspec
def hp_pipeline_schedules(registry: Registry) -> None:
    """Add pipeline schedules: `registry.add(name, build)`.

    Called once per process, when a schedule is first asked for. `build(num_ranks, stages_per_rank, num_microbatches)`
    returns a `hp_trainer.pipeline.Schedule`, or raises `ScheduleError` where it cannot be made. Since 0.1.
    """


@hookspec
def hp_before_run(record: RunRecord) -> None:
    """Called on every rank when model, optimizer and data are ready, before the first step. Since 0.1."""


@hookspec
def hp_after_run(record: RunRecord) -> None:
    """Called on every rank after the last step and its checkpoint, when the run ended well. Since 0.1."""


@hookspec
def hp_before_step(record: StepRecord) -> None:
    """Called on every rank before an optimizer step; `loss` and `seconds` are None. Since 0.1."""


@hookspec
def hp_after_step(record: StepRecord) -> None:
    """Called on every rank after an optimizer step, with its numbers. Since 0.1."""


@hookspec
def hp_before_evaluation(record: StepRecord) -> None:
    """Called on every rank before evaluation, with the last step's record. Since 0.1."""


@hookspec
def hp_after_evaluation(record: EvaluationRecord) -> None:
    """Called on every rank after evaluation. Since 0.1."""


@hookspec
def hp_before_checkpoint(record: CheckpointRecord) -> None:
    """Called on every rank before a checkpoint is written; `folder` is None. Since 0.1."""


@hookspec
def hp_after_checkpoint(record: CheckpointRecord) -> None:
    """Called on every rank once the checkpoint is complete and will be found by `resume`. Since 0.1."""


@hookspec
def hp_on_error(record: ErrorRecord) -> None:
    """Called on the rank that raised, before the exception goes on. Must not communicate. Since 0.1."""
