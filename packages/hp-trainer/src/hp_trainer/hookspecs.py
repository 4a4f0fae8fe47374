"""Hook specifications of hp_trainer (entry-point group `hp_trainer`).

Registration hooks run in every `hp-train` command, also in `hp-train settings`, before a framework is loaded. The
modules that implement them must not import a framework; the builders that they register may.
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

    `build(options, platform)` returns an unsharded module of the platform, with an attribute `config` (`options`) and a
    method that parallelizes it; see `hp_trainer.models`.
    """


@hookspec
def hp_datasets(registry: Registry) -> None:
    """Called once, before the configuration is read. Registers datasets by name. Since 0.1.

    `build` is a `hp_trainer.data.DatasetSource` class. `build(options)` must not read any data.
    """


@hookspec
def hp_optimizers(registry: Registry) -> None:
    """Called once, before the configuration is read. Registers optimizers. Since 0.1.

    `build(parameters, options, platform)` gets `(dotted name, parameter)` pairs, either all DTensors or all plain
    tensors, and returns a `hp_trainer.training.Optimizer`. All optimizers of hp-trainer run on every
    platform. A platform with a faster one adds it under the same name and options, with `platform=` its name: `adamw`
    with `hp_trainer.config.AdamWConfig`, `adamw_8bit` with `hp_trainer.optimizers.AdamW8bitConfig`.

    The options may have two methods for `hp-train plan`. `state_bytes(name, shape, elements, itemsize)` returns the
    bytes of a rank's state for one parameter, from its dotted name and full shape, the number of its elements on the
    rank, and the bytes per element; the default is two moments. `update_bytes(held, is_host)` returns the temporary
    bytes of an update, beyond weights, gradients and state; `held` lists (name, full shape, elements) of the rank's
    parameters, and `is_host` is true on a CPU. The default is 0.
    """


@hookspec
def hp_trackers(registry: Registry) -> None:
    """Called once, before the configuration is read. Registers trackers of metrics by name. Since 0.1.

    `build(options, run_folder)` returns a `hp_trainer.metrics.Tracker`. Only rank 0 builds one.
    """


@hookspec
def hp_checkpoint_storages(registry: Registry) -> None:
    """Called once, before the configuration is read. Registers storages of checkpoints by name. Since 0.1.

    `build(options, folder)` returns a `hp_trainer.checkpoint.Storage`, used by every rank.
    """


@hookspec
def hp_checkpoint_formats(registry: Registry) -> None:
    """Called once, before a command that uses one. Registers foreign checkpoint formats by name. Since 0.1.

    `build()` returns a `hp_trainer.checkpoint.CheckpointFormat`, which `hp-train export --format` and
    `hp-train import --format` use.
    """


@hookspec(firstresult=True)
def hp_step_counter(platform: Platform) -> Callable[..., CountedStep] | None:
    """Return a function that counts a step of a module on tensors without memory, for plans. Since 0.1.

    Returns None for other platforms. Called by `hp-train plan` for a module without estimates of its own. `count(build,
    run, parts, dtype)` returns a `hp_trainer.records.CountedStep` of one forward and backward. `build()` returns the
    module. `run(module)` returns the scalar that backward starts from. `parts(module)` returns modules by dotted name,
    none within another, whose bytes are counted apart. `dtype` is the name of the dtype of computation, or None for the
    dtypes the module was built with.
    """


@hookspec
def hp_pipeline_schedules(registry: Registry) -> None:
    """Called once per process, before a schedule is first looked up. Registers pipeline schedules by name. Since 0.1.

    `build(num_ranks, stages_per_rank, num_microbatches)` returns a `hp_trainer.pipeline.Schedule`, or raises
    `ScheduleError` if there is none for these numbers.
    """


# Life cycle ------------------------------------------------------------------------------------------------


@hookspec
def hp_before_run(record: RunRecord) -> None:
    """Called on every rank when model, optimizer and data are ready, before the first step. Since 0.1."""


@hookspec
def hp_after_run(record: RunRecord) -> None:
    """Called on every rank after the last step and its checkpoint, unless the run failed. Since 0.1."""


@hookspec
def hp_before_step(record: StepRecord) -> None:
    """Called on every rank before an optimizer step; `loss` and `seconds` are None. Since 0.1."""


@hookspec
def hp_after_step(record: StepRecord) -> None:
    """Called on every rank after an optimizer step, with its results. Since 0.1."""


@hookspec
def hp_before_evaluation(record: StepRecord) -> None:
    """Called on every rank before an evaluation, with the record of the last step. Since 0.1."""


@hookspec
def hp_after_evaluation(record: EvaluationRecord) -> None:
    """Called on every rank after an evaluation. Since 0.1."""


@hookspec
def hp_before_checkpoint(record: CheckpointRecord) -> None:
    """Called on every rank before a checkpoint is written; `folder` is None. Since 0.1."""


@hookspec
def hp_after_checkpoint(record: CheckpointRecord) -> None:
    """Called on every rank once a checkpoint is complete, so that `hp-train resume` finds it. Since 0.1."""


@hookspec
def hp_on_error(record: ErrorRecord) -> None:
    """Called on the rank that raised, before the exception propagates. Must not communicate. Since 0.1."""
