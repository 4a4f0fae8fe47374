"""Checks of a run before any rank starts. All problems are reported at once, each with its path in the YAML file."""

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
from hp_trainer.parallel.dims import dims_of
from hp_trainer.registries import Registries
from hp_trainer.run import RunFolder
from hp_trainer.run.folder import PROBE

# Settings that determine the samples of a step and the meaning of the weights. A resumed run cannot change them.
_FIXED = ("model.", "data.", "training.seed", "training.sequence_length")

# Lower bound of the memory of a process with a framework loaded.
_LEAST_RANK_BYTES = 64 * 2**20


def check_settings(loaded: LoadedConfig, world_size: int, registered: Registries) -> list[Problem]:
    """Return the problems that depend only on the configuration, so that every process finds the same ones."""
    return loaded.locate(list(_run_problems(loaded.config, world_size, registered)))


def check_new_run(loaded: LoadedConfig, folder: Path, world_size: int, registered: Registries) -> list[Problem]:
    """Return all problems of a new run in `folder` on `world_size` ranks."""
    config = loaded.config
    problems = [*_run_problems(config, world_size, registered), *_data_problems(config, registered)]
    if config.model.source is not None:
        directory = ModelDirectory(Path(config.model.source), config.model.options)
        problems += (problem.within("model.from") for problem in directory.problems())
    # Everything is collected before any error is raised: one start reports all problems.
    reason = RunFolder.check_new(folder)
    if reason is not None:
        hint = "another --run.folder"
        if RunFolder.exists(folder):
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
    """Return all problems of continuing a run, configured as `before`, with `loaded` on `world_size` ranks."""
    problems = [*_run_problems(loaded.config, world_size, registered), *_changed(before, loaded.config)]
    return loaded.locate(problems)


def check_evaluation(config: TrainerConfig, world_size: int, registered: Registries) -> list[Problem]:
    """Return all problems of evaluating a model on `world_size` ranks in the configured layout."""
    size = config.training.micro_batch_size or config.training.global_batch_size
    # A batch that divides evenly on any number of ranks, since evaluation may use other ranks than training.
    training = dataclasses.replace(config.training, global_batch_size=size * world_size, micro_batch_size=size)
    problems = list(_run_problems(dataclasses.replace(config, training=training), world_size, registered))
    if config.parallel.pp > 1:
        what = "evaluation does not support pipelines"
        problems.append(Problem(path="parallel.pp", what=what, expected="1", got=str(config.parallel.pp)))
    return problems


def training_problems(dims: ParallelDims, config: TrainerConfig, *, is_shortened: bool = False) -> Iterator[Problem]:
    """Yield the problems of training this model and batch with valid degrees of parallelism.

    Args:
        is_shortened: as in `find_pipeline_problems`.
    """
    length = config.training.sequence_length
    # Context parallelism shards any length. Without it, tensor parallel ranks need to shard the sequence evenly.
    for problem in (
        *find_model_problems(dims, config.model.options, None if dims.cp_enabled else length),
        *context_problems(dims, config.model.options, length),
    ):
        # `ParallelDims` calls the setting seq_len.
        hint = problem.hint.replace("seq_len=", "training.sequence_length=")
        yield dataclasses.replace(problem, hint=hint).within("parallel")
    yield from batch_problems(dims, config)
    if config.training.compile and dims.tp_enabled:
        what = "tensor parallel blocks compute on DTensors, which cannot be compiled and would only get slower"
        yield Problem(path="training.compile", what=what, expected="false, or parallel.tp = 1", got="true")
    if config.training.compile and dims.cp_enabled:
        what = "context parallel attention communicates, which cannot be compiled"
        yield Problem(path="training.compile", what=what, expected="false, or parallel.cp = 1", got="true")
    yield from find_pipeline_problems(dims, config, is_shortened=is_shortened)


def _run_problems(config: TrainerConfig, world_size: int, registered: Registries) -> Iterator[Problem]:
    platform = chosen_platform(config.platform)
    if isinstance(platform, Problem):
        yield platform
    else:
        for path, registry in (("model", registered.models), ("optimizer", registered.optimizers)):
            try:
                registry.get(getattr(config, path).name, platform)
            except RegistryError as error:
                yield Problem(path=f"{path}.name", what=str(error))
        if config.parallel.pp > 1:
            yield from find_model_part_problems(config, platform, registered)
        yield from _device_problems(config, platform)
        if config.training.compile:
            yield from _compiler_problems(config.training.compile_backend, platform)
        if config.fault_tolerance.copies is not None and not is_launched():
            yield from recovery_problems(config, world_size)
    if config.launch.nodes is not None and config.fault_tolerance.copies is None:
        what = "hp-train starts the ranks of several machines only to replace those that die"
        hint = "fault_tolerance.copies=1, or launch.nodes=null and a launcher that starts all ranks"
        yield Problem(path="launch.nodes", what=what, expected="null", got=str(config.launch.nodes), hint=hint)
    yield from group_problems(config.parameter_groups, config.optimizer.options)
    reference = config.training.compare_with
    # On other machines the first rank may be the only one that has it.
    if reference is not None and not is_launched() and not Path(reference).exists():
        yield Problem(
            path="training.compare_with",
            what="does not exist",
            expected="a run with training.record_steps, or a file of `hp-train diff CONFIG --record=FILE`",
            got=reference,
        )
    if config.generate.prompts and not getattr(config.model.options, "is_causal", True):
        yield Problem(
            path="generate.prompts",
            what="this model is not causal (model.routing = expert_choice), so it cannot continue text",
            expected="[]",
            got=str(list(config.generate.prompts)),
            hint="generate.prompts=[]",
        )
    # Memory is estimated only for a layout that exists.
    found = list(layout_problems(config, world_size))
    yield from found
    if not found and isinstance(platform, str):
        dims = dims_of(config, world_size)
        yield from find_memory_problems(dims, config, platform)


def layout_problems(config: TrainerConfig, world_size: int, *, is_shortened: bool = False) -> Iterator[Problem]:
    """Yield the problems of a configuration's layout on `world_size` ranks.

    Args:
        is_shortened: as in `find_pipeline_problems`.
    """
    yield from _idle_degrees(config)
    try:
        dims = dims_of(config, world_size)
    except ParallelDimsError as error:
        for problem in [*error.problems, *_unfitting(config, error, world_size)]:
            hint = problem.hint.replace("world_size=", "launch.local_ranks=")
            hint = hint.replace("seq_len=", "training.sequence_length=")
            yield dataclasses.replace(problem, hint=hint).within("parallel")
    else:
        yield from training_problems(dims, config, is_shortened=is_shortened)


def _idle_degrees(config: TrainerConfig) -> Iterator[Problem]:
    """Yield the degrees that would silently have no effect."""
    parallel = config.parallel
    if parallel.ep > 1 and getattr(config.model.options, "num_experts", 0) is None:
        yield Problem(
            path="parallel.ep",
            what="the model has no experts",
            expected="1, or model.num_experts",
            got=str(parallel.ep),
            hint="parallel.ep=1",
        )
    if parallel.cp == 1 and (parallel.ulysses_degree or 1) > 1:
        yield Problem(
            path="parallel.ulysses_degree",
            what="parallel.cp = 1, so sequences are not sharded",
            expected="null, or parallel.cp a multiple of it",
            got=str(parallel.ulysses_degree),
            hint=f"parallel.cp={parallel.ulysses_degree}, or parallel.ulysses_degree=null",
        )


def _device_problems(config: TrainerConfig, platform: str) -> Iterator[Problem]:
    """Yield a problem for more local ranks than accelerators or memory: a second rank on a device fails at start."""
    # The default is one rank per accelerator, which always fits.
    ranks = config.launch.local_ranks or 1
    setting = "cpu_ranks" if config.launch.local_ranks is None else "local_ranks"
    # The most processes that fit into the memory of this machine, whatever they train.
    most = max(1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _LEAST_RANK_BYTES)
    asked = getattr(config.launch, setting)
    if asked > most and not is_launched():
        what = "each rank is a process, and so many do not fit into the memory of this machine"
        yield Problem(path=f"launch.{setting}", what=what, expected=f"at most {most}", got=str(asked))
        return
    # One rank always fits; counting devices would load the framework, which takes seconds.
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


def recovery_problems(config: TrainerConfig, world_size: int) -> Iterator[Problem]:
    """Yield the problems of going on after the death of a local rank."""
    path, copies = "fault_tolerance.copies", config.fault_tolerance.copies
    if world_size < 2:
        yield Problem(path=path, what="a single rank has no partner", expected="null", got=str(copies))
    elif copies == 0 and config.parallel.dp_replicate < 2:
        what = "without copies, the state of a dead rank is only in its replicas, and there are none"
        expected = "1, or parallel.dp_replicate of at least 2"
        yield Problem(path=path, what=what, expected=expected, got="0", hint=f"{path}=1")
    if config.parallel.ep_move_interval is not None:
        yield Problem(
            path="parallel.ep_move_interval",
            what="experts that move have other places in each copy, which cannot be restored",
            expected=f"null, or {path} = null",
            got=str(config.parallel.ep_move_interval),
            hint="parallel.ep_move_interval=null",
        )


def _compiler_problems(backend: str, platform: str) -> Iterator[Problem]:
    """Yield a problem if the platform does not have the compiler."""
    known = compile_backends(platform)
    # Empty: the platform never compiles. None: it could not be loaded, which is reported elsewhere.
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
    """Yield the problems of the degrees with the model as well, where the degrees already do not fit each other."""
    if all(problem.what != "impossible degree" for problem in error.problems):
        degrees = SimpleNamespace(**dict.fromkeys(DEGREES, 1) | degrees_from_config(config.parallel, world_size))
        length = config.training.sequence_length if degrees.cp == 1 else None  # cp shards any length
        yield from find_model_problems(degrees, config.model.options, length)


def batch_problems(dims: ParallelDims, config: TrainerConfig) -> Iterator[Problem]:
    """Yield a problem if the global batch cannot be split evenly over the data parallel ranks."""
    batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    shares = dims.dp_size
    unit = shares * (micro or 1)
    if batch % unit:
        # The multiples just below and above, but never 0.
        nearest = sorted({max(1, batch // unit) * unit, -(-batch // unit) * unit})
        per_rank = "" if micro is None else f" of micro-batches of {micro}"
        yield Problem(
            path="training.global_batch_size",
            what=f"cannot be split over dp_replicate*dp_shard = {dims.dp_replicate}*{dims.dp_shard} = {shares} "
            f"ranks{per_rank}",
            expected=f"a multiple of {unit}",
            got=str(batch),
            hint=f"training.global_batch_size={join_choices(nearest)}",
        )


def _data_problems(config: TrainerConfig, registered: Registries) -> Iterator[Problem]:
    source = registered.datasets.get(config.data.name).build(config.data.options)
    problems = list(source.problems())
    yield from (problem.within("data") for problem in problems)
    # The tokenizer cannot be opened without the data.
    if problems:
        return
    needed, vocab_size = source.tokenizer().vocab_size, getattr(config.model.options, "vocab_size", None)
    most, length = getattr(config.data.options, "max_tokens", None), config.training.sequence_length
    if most is not None and most <= length:
        what = f"one sample needs training.sequence_length + 1 = {length + 1} tokens"
        yield Problem(path="data.max_tokens", what=what, expected=f"an integer > {length}", got=str(most))
    if vocab_size is not None and vocab_size < needed:
        yield Problem(
            path="model.vocab_size",
            what="smaller than the number of tokens in the data",
            expected=f"an integer >= {needed}",
            got=str(vocab_size),
            hint=f"model.vocab_size={needed}",
        )


def _unwritable(setting: str, folder: Path) -> Iterator[Problem]:
    """Yield a problem if a folder, or the folder in which it would be created, is not writable."""
    existing = folder.absolute()
    # The nearest ancestor that exists decides whether the folder can be created.
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        what = f"cannot be created: {existing} is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        what = f"is not writable: {existing} belongs to another user or is read-only"
    else:
        try:
            # Permissions are not enough: the disk may be full, and root may write anywhere except in /proc.
            # On most file systems this file has no name, so that a process killed here leaves nothing.
            with tempfile.TemporaryFile(prefix=PROBE, dir=existing):
                return
        except OSError as error:
            what = f"is not writable: {existing}: {error.strerror}"
    yield Problem(path=setting, what=what, expected="a writable folder", got=str(folder))


def _changed(before: TrainerConfig, after: TrainerConfig) -> Iterator[Problem]:
    was, now = settings_by_path(before), settings_by_path(after)
    # Settings of both sides: another component has other settings.
    for path in {**was, **now}:
        if was.get(path) != now.get(path) and path.startswith(_FIXED):
            what = "cannot change after the start of a run"
            hint = "a new run with `hp-train CONFIG`"
            yield Problem(path=path, what=what, expected=str(was.get(path)), got=str(now.get(path)), hint=hint)
