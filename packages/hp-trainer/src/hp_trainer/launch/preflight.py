"""Checks that a run can be done, made before any rank starts: all problems at once, each with its place."""

from __future__ import annotations

import dataclasses
import difflib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from hp_dtensor.exceptions import RegistryError
from hp_dtensor.launch import is_launched
from hp_trainer.config import LoadedConfig, TrainerConfig, settings_by_path
from hp_trainer.exceptions import ParallelDimsError, Problem, join_choices
from hp_trainer.launch.platforms import chosen_platform, compile_backends, max_local_ranks
from hp_trainer.launch.step_checks import find_memory_problems, find_model_part_problems, find_pipeline_problems
from hp_trainer.models.hugging_face import ModelDirectory
from hp_trainer.optimizers import group_problems
from hp_trainer.parallel import (
    DEGREES,
    ParallelDims,
    context_problems,
    degrees_from_config,
    find_model_problems,
)
from hp_trainer.registries import Registries
from hp_trainer.run import RunFolder
from hp_trainer.run.folder import PROBE

# What decides which samples a step reads, and what the weights mean: fixed when a run begins.
_FIXED = ("model.", "data.", "training.seed", "training.sequence_length")

# What a process with a framework takes before it trains anything, at the very least.
_LEAST_RANK_BYTES = 64 * 2**20


def check_settings(loaded: LoadedConfig, world_size: int, registered: Registries) -> list[Problem]:
    """Return the problems of `check_new_run` that lie in the configuration alone: every process finds the same."""
    return loaded.locate(list(_run_problems(loaded.config, world_size, registered)))


def check_new_run(loaded: LoadedConfig, folder: Path, world_size: int, registered: Registries) -> list[Problem]:
    """Return everything that would keep a new run in `folder` from training on `world_size` ranks."""
    config = loaded.config
    problems = [*_run_problems(config, world_size, registered), *_data_problems(config, registered)]
    problems += _weight_problems(config)
    reason = RunFolder.check_new(folder)
    if reason is not None:
        hint = "another --run.folder"
        if RunFolder.is_begun(folder):
            hint += f", or `hp-train resume {folder}`"
        problems.append(Problem(path="run.folder", what=reason, expected="a new folder", got=str(folder), hint=hint))
    else:
        problems += _unwritable("run.folder", folder)
    if getattr(config.data.options, "cache", None) is not None:
        problems += _unwritable("data.cache", Path(config.data.options.cache))
    if config.checkpoint.folder is not None:
        problems += _unwritable("checkpoint.folder", Path(config.checkpoint.folder))
    return loaded.locate(problems)


def check_resumed_run(
    loaded: LoadedConfig, before: TrainerConfig, world_size: int, registered: Registries
) -> list[Problem]:
    """Return everything that would keep a run begun as `before` from going on as `loaded` on `world_size` ranks."""
    problems = [*_run_problems(loaded.config, world_size, registered), *_changed(before, loaded.config)]
    return loaded.locate(problems)


def check_evaluation(config: TrainerConfig, world_size: int, registered: Registries) -> list[Problem]:
    """Return everything that would keep a model from being evaluated on `world_size` ranks laid out as configured."""
    size = config.training.micro_batch_size or config.training.global_batch_size
    training = dataclasses.replace(config.training, global_batch_size=size * world_size, micro_batch_size=size)
    problems = list(_run_problems(dataclasses.replace(config, training=training), world_size, registered))
    if config.parallel.pp > 1:
        what = "an evaluation runs no pipeline"
        problems.append(Problem(path="parallel.pp", what=what, expected="1", got=str(config.parallel.pp)))
    return problems


def training_problems(
    dims: ParallelDims, config: TrainerConfig, max_microbatches: int | None = None
) -> Iterator[Problem]:
    """Yield why valid degrees cannot train this model on this batch; paths are within the configuration.

    Args:
        max_microbatches: as of `find_pipeline_problems`.
    """
    length = config.training.sequence_length
    # Context parallel ranks share any length; tensor parallel ones alone have to share it evenly.
    for problem in (
        *find_model_problems(dims, config.model.options, None if dims.cp_enabled else length),
        *context_problems(dims, config.model.options, length),
    ):
        # What `ParallelDims` calls seq_len has another name in the file.
        hint = problem.hint.replace("seq_len=", "training.sequence_length=")
        yield dataclasses.replace(problem, hint=hint).within("parallel")
    yield from batch_problems(dims, config)
    if config.training.compile and dims.tp_enabled:
        yield Problem(
            path="training.compile",
            what="tensor parallel blocks compute on DTensors, which are not compiled; they would only get slower",
            expected="false, or parallel.tp = 1",
            got="true",
        )
    if config.training.compile and dims.cp_enabled:
        yield Problem(
            path="training.compile",
            what="attention of context parallel ranks exchanges keys or heads, which is not compiled",
            expected="false, or parallel.cp = 1",
            got="true",
        )
    yield from find_pipeline_problems(dims, config, max_microbatches)


def _run_problems(config: TrainerConfig, world_size: int, registered: Registries) -> Iterator[Problem]:
    platform = chosen_platform(config.platform)
    if isinstance(platform, Problem):
        yield platform
    else:
        yield from _entry_problems(config, platform, registered)
        if config.parallel.pp > 1:
            yield from find_model_part_problems(config, platform, registered)
        yield from _device_problems(config, platform)
        if config.training.compile:
            yield from _compiler_problems(config.training.compile_backend, platform)
    yield from group_problems(config.parameter_groups, config.optimizer.options)
    found = list(layout_problems(config, world_size))
    yield from found
    if not found and isinstance(platform, str):
        num_experts = getattr(config.model.options, "num_experts", None)
        dims = ParallelDims.from_config(config.parallel, world_size, num_experts)
        yield from find_memory_problems(dims, config, platform)


def layout_problems(config: TrainerConfig, world_size: int) -> Iterator[Problem]:
    """Yield why the layout of a configuration cannot train on so many ranks; paths are within the configuration."""
    yield from _idle_degrees(config)
    num_experts = getattr(config.model.options, "num_experts", None)
    try:
        dims = ParallelDims.from_config(config.parallel, world_size, num_experts)
    except ParallelDimsError as error:
        for problem in [*error.problems, *_unfitting(config, error, world_size)]:
            hint = problem.hint.replace("world_size=", "launch.local_ranks=")
            hint = hint.replace("seq_len=", "training.sequence_length=")
            yield dataclasses.replace(problem, hint=hint).within("parallel")
    else:
        yield from training_problems(dims, config)


def _idle_degrees(config: TrainerConfig) -> Iterator[Problem]:
    """Yield degrees that would be taken without a word and change nothing."""
    parallel = config.parallel
    if parallel.ep > 1 and getattr(config.model.options, "num_experts", 0) is None:
        yield Problem(
            path="parallel.ep",
            what="the model has no experts that so many ranks could share",
            expected="1, or model.num_experts",
            got=str(parallel.ep),
            hint="parallel.ep=1",
        )
    if parallel.cp == 1 and (parallel.ulysses_degree or 1) > 1:
        yield Problem(
            path="parallel.ulysses_degree",
            what="parallel.cp = 1, so no ranks share a sequence",
            expected="null, or parallel.cp a multiple of it",
            got=str(parallel.ulysses_degree),
            hint=f"parallel.cp={parallel.ulysses_degree}, or parallel.ulysses_degree=null",
        )


def _device_problems(config: TrainerConfig, platform: str) -> Iterator[Problem]:
    """Yield more local ranks than this machine has accelerators: the second rank of one would die in its start."""
    ranks = config.launch.local_ranks or 1
    setting = "cpu_ranks" if config.launch.local_ranks is None else "local_ranks"
    asked, most = getattr(config.launch, setting), _most_processes()
    if asked > most and not is_launched():
        yield Problem(
            path=f"launch.{setting}",
            what="each rank is a process of its own, and so many do not fit in the memory of this machine",
            expected=f"at most {most}",
            got=str(asked),
        )
        return
    # One rank always fits, and need not wait for a framework to count.
    devices = max_local_ranks(platform) if ranks > 1 and not is_launched() else None
    if devices is not None and devices < ranks:
        there = "is only one accelerator" if devices == 1 else f"are only {devices} accelerators"
        yield Problem(
            path="launch.local_ranks",
            what=f"there {there} on this machine, and each rank needs its own",
            expected=f"at most {devices}",
            got=str(ranks),
            hint=f"launch.local_ranks={devices}, or in the environment HP_DEVICE=cpu, to train on the CPU, or "
            "HP_BACKEND=gloo, to share accelerators",
        )


def _most_processes() -> int:
    """Return how many ranks could be started here at all, whatever they train."""
    return max(1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _LEAST_RANK_BYTES)


def _compiler_problems(backend: str, platform: str) -> Iterator[Problem]:
    """Yield that the platform has no such compiler, or none at all."""
    known = compile_backends(platform)
    if known == ():
        what = f"platform {platform} does not compile modules"
        yield Problem(path="training.compile", what=what, expected="false", got="true")
    elif known is not None and backend not in known:
        near = next(iter(difflib.get_close_matches(backend, known, n=1)), "inductor")
        yield Problem(
            path="training.compile_backend",
            what=f"platform {platform} has no such compiler",
            expected=join_choices(sorted(known)),
            got=backend,
            hint=f"training.compile_backend={near}",
        )


def _unfitting(config: TrainerConfig, error: ParallelDimsError, world_size: int) -> Iterator[Problem]:
    """Degrees that do not fit each other may not fit the model either; told together."""
    if all(problem.what != "impossible degree" for problem in error.problems):
        degrees = SimpleNamespace(**dict.fromkeys(DEGREES, 1) | degrees_from_config(config.parallel, world_size))
        length = config.training.sequence_length if degrees.cp == 1 else None  # context parallel ranks share any
        yield from find_model_problems(degrees, config.model.options, length)


def _entry_problems(config: TrainerConfig, platform: str, registered: Registries) -> Iterator[Problem]:
    for path, registry in (("model", registered.models), ("optimizer", registered.optimizers)):
        try:
            registry.get(getattr(config, path).name, platform)
        except RegistryError as error:
            yield Problem(path=f"{path}.name", what=str(error))


def batch_problems(dims: ParallelDims, config: TrainerConfig) -> Iterator[Problem]:
    """Yield that data-parallel ranks cannot share the global batch equally, if so."""
    batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    shares = dims.dp_size
    unit = shares * (micro or 1)
    if batch % unit:
        nearest = sorted({max(1, batch // unit) * unit, -(-batch // unit) * unit})
        per_rank = "" if micro is None else f" of micro-batches of {micro}"
        yield Problem(
            path="training.global_batch_size",
            what=f"cannot be shared by dp_replicate*dp_shard = {dims.dp_replicate}*{dims.dp_shard} = {shares} "
            f"ranks{per_rank}",
            expected=f"a multiple of {unit}",
            got=str(batch),
            hint=f"training.global_batch_size={join_choices(nearest)}",
        )


def _data_problems(config: TrainerConfig, registered: Registries) -> Iterator[Problem]:
    source = registered.datasets.get(config.data.name).build(config.data.options)
    problems = list(source.problems())
    yield from (problem.within("data") for problem in problems)
    if problems:
        return
    needed, vocab_size = source.tokenizer().vocab_size, getattr(config.model.options, "vocab_size", None)
    most, length = getattr(config.data.options, "max_tokens", None), config.training.sequence_length
    if most is not None and most <= length:
        yield Problem(
            path="data.max_tokens",
            what=f"one sample takes training.sequence_length + 1 = {length + 1} tokens",
            expected=f"a whole number > {length}",
            got=str(most),
        )
    if vocab_size is not None and vocab_size < needed:
        yield Problem(
            path="model.vocab_size",
            what="smaller than the number of tokens in the data",
            expected=f"a whole number >= {needed}",
            got=str(vocab_size),
            hint=f"model.vocab_size={needed}",
        )


def _weight_problems(config: TrainerConfig) -> Iterator[Problem]:
    """Yield why the model cannot begin with the weights of `model.from`."""
    if config.model.source is not None:
        for problem in ModelDirectory(Path(config.model.source), config.model.options).problems():
            yield problem.within("model.from")


def _unwritable(setting: str, folder: Path) -> Iterator[Problem]:
    """Yield why nothing can be written into a folder, which is there or will be made."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        what = f"cannot be made: {existing} is no folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        what = f"cannot be written: {existing} belongs to another user or is read-only"
    else:
        try:
            # Rights alone do not tell: the disk may be full, and root may write everywhere but in /proc.
            # Most file systems give this file no name, so that nothing stays of a process that is killed here.
            with tempfile.TemporaryFile(prefix=PROBE, dir=existing):
                return
        except OSError as error:
            what = f"cannot be written: {existing}: {error.strerror}"
    yield Problem(path=setting, what=what, expected="a folder that you may write to", got=str(folder))


def _changed(before: TrainerConfig, after: TrainerConfig) -> Iterator[Problem]:
    was, now = settings_by_path(before), settings_by_path(after)
    for path in {**was, **now}:
        if was.get(path) != now.get(path) and path.startswith(_FIXED):
            yield Problem(
                path=path,
                what="is fixed when a run begins",
                expected=str(was.get(path)),
                got=str(now.get(path)),
                hint="a new run with `hp-train CONFIG`",
            )
