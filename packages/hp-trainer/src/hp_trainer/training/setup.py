"""Setup of a rank: its model, optimizer and data, built from the configuration.

Building of the model that a configuration names, on one rank and not laid out yet.

Initial weights of a model that is laid out: drawn from the run's seed, or read from a directory.

The whole model of a checkpoint on one rank, to be used and not trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import SilentWorld, current_world, use_world
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import init_empty_weights, init_parameters, materialize
from hp_fsdp import GradScaler
from hp_trainer.checkpoint import Checkpoint
from hp_trainer.config import TrainerConfig
from hp_trainer.config.settings import matches_any
from hp_trainer.data import BatchReader, Dataset, Samples
from hp_trainer.exceptions import CheckpointError, ConfigError, ParallelDimsError, Problem, ProblemsError, raise_if_any
from hp_trainer.models.hugging_face import ModelDirectory
from hp_trainer.models.plain_module import PlainModel
from hp_trainer.models.recomputation import BlockRecompute, saved_kinds
from hp_trainer.optimizers import build_grouped, build_on_host
from hp_trainer.parallel import ParallelDims, context_style
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, check_model
from hp_trainer.training.activation_budget import ESTIMATED, fuses_experts, measure_rates, plan_activations
from hp_trainer.training.optimizer import Optimizer, WeightAverage
from hp_trainer.training.pipelined import PipelinedModel, SequenceShares, StagePlan, exchange_over, plan_stages
from hp_trainer.training.state import box_of, load_weights, num_parameters


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Everything that one rank trains with.

    Attributes:
        config: the run's configuration.
        platform: the framework; its current world is the job.
        dims: degrees of parallelism.
        mesh: the mesh that `dims` built.
        dataset: samples to train on and to evaluate with.
        model: laid out over the mesh, with its initial weights; in a pipeline, the parts of it that this rank's
            stages have.
        pipeline: the stages, and what their ranks settle together; None: there is one stage.
        stage_mesh: the ranks that have the same parts of the model, one axis; None: all.
        optimizer: over the model's trainable parameters.
        scaler: loss scaling; disabled unless the model computes in float16.
        average: moving average of the trained weights; None: none is kept.
    """

    config: TrainerConfig
    platform: Platform
    dims: ParallelDims
    mesh: DeviceMesh
    dataset: Dataset
    model: Any
    optimizer: Optimizer
    scaler: GradScaler
    average: WeightAverage | None = None
    pipeline: PipelinedModel | None = None
    stage_mesh: DeviceMesh | None = None

    @classmethod
    def build(cls, run: RunFolder, config: TrainerConfig, platform: Platform, *, weights: bool = True) -> RankSetup:
        """Build a rank's setup; called by every rank of the platform's current world.

        Args:
            run: the run's folder; its data are prepared.
            weights: give the model its initial weights; False: a checkpoint will.
        """
        num_experts = getattr(config.model.options, "num_experts", None)
        dims = ParallelDims.from_config(config.parallel, current_world(platform).size, num_experts)
        mesh = dims.build_mesh(platform.device_types[0], platform=platform)
        dataset = open_dataset(run, config)
        plan = plan_stages(config, dims) if dims.pp_enabled else None
        model = build_model(config, platform, dims, mesh, plan, weights=weights)
        everyones = _everyones(plan, mesh)
        return cls(
            config=config,
            platform=platform,
            dims=dims,
            mesh=mesh,
            dataset=dataset,
            model=model,
            optimizer=build_optimizer(config, platform, model, everyones),
            scaler=build_scaler(config, platform),
            average=build_average(config, platform, model),
            pipeline=None if plan is None else _pipelined(config, platform, dims, mesh, model, plan),
            stage_mesh=None if plan is None else _stage_mesh(dims, mesh),
        )

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters of the whole model; in a pipeline every rank asks."""
        if self.pipeline is not None:
            return self.pipeline.num_parameters()
        return num_parameters(self.platform, self.model)

    def everyones(self, fact: Any) -> list[Any]:
        """Return a JSON value of every rank of this rank's pipeline, in order; without one, of this rank."""
        return [fact] if self.pipeline is None else exchange_over(self.pipeline.group)(fact)

    def module_names(self) -> dict[int, str]:
        """Return the names of the model's modules by `id`, for messages; the model itself is `""`."""
        return {id(module): name for name, module in self.platform.named_modules(self.model)}

    def batch_reader(self, samples: Samples, *, once: bool = False) -> BatchReader:
        """Return the reader of this rank's share of global batches of `samples`; `once` as in `BatchReader`."""
        training = self.config.training
        return BatchReader(
            samples,
            global_batch_size=training.global_batch_size,
            seed=training.seed,
            num_shares=self.dims.dp_size,
            share=self.dims.batch_rank(self.mesh.world.rank),
            once=once,
        )

    def sequence_shares(self) -> SequenceShares | None:
        """Return what cuts samples to this rank's tokens; None where each rank has whole samples."""
        return sequence_shares(self.config, self.dims, self.mesh)


def open_dataset(run: RunFolder, config: TrainerConfig) -> Dataset:
    """Open the run's prepared data.

    Raises:
        DataError: the data are missing, damaged, or too few for one sample.
    """
    source = registries().datasets.get(config.data.name).build(config.data.options)
    dataset: Dataset = source.open(run.data, config.training.sequence_length)
    return dataset


def build_model(
    config: TrainerConfig,
    platform: Platform,
    dims: ParallelDims,
    mesh: DeviceMesh,
    plan: StagePlan | None = None,
    *,
    weights: bool = True,
) -> Any:
    """Build the model and lay it out over the mesh.

    Args:
        plan: the stages of a pipeline, of which this rank builds its own; None: the whole model.
        weights: give it its initial weights; False: a checkpoint will.

    Raises:
        CheckpointError: `model.from` does not fit the model.
    """
    parts = () if plan is None else (plan.parts_of(mesh["pp"].get_local_rank()),)
    with without_data(config, platform):
        model = build_plain_model(config, platform, *parts, everyones=_everyones(plan, mesh))
    reshard = config.parallel.reshard_after_forward
    # None is fully_shard's own default: all modules but the outermost are resharded after forward.
    model.parallelize(dims, mesh, config.training, reshard_after_forward=False if reshard is False else None)
    if dims.dp_replicate > 1:
        problems = _replica_problems(config, platform, model, mesh)
        raise_everyones(problems, _everyones(plan, mesh), ParallelDimsError, "parallel")
    if config.training.activation_budget is not None:
        model.recompute = _within_budget(config, platform, dims, mesh)
    materialize(model, buffers=lambda name, shape, dtype: platform.zeros(shape, dtype), platform=platform)
    if weights:
        give_initial_weights(model, config, platform)
    return model


def _replica_problems(config: TrainerConfig, platform: Platform, model: Any, mesh: DeviceMesh) -> Iterator[Problem]:
    """Yield a problem where a user's model leaves weights apart from their replicas: gradients would not be summed."""
    replicas = set(mesh["dp_replicate"].ranks())
    apart = [
        name
        for name, parameter in platform.named_parameters(model)
        if isinstance(parameter, DTensor) and not replicas <= set(parameter.spec.mesh.ranks())
    ]
    if apart:
        yield Problem(
            path="parallel.dp_replicate",
            what=f"{config.model.name} lays out {', '.join(apart[:3])} on a mesh without dp_replicate",
            expected="a mesh of all ranks that have the same weights, whose gradients are summed",
            hint='mesh["dp_replicate", "fsdp"] in its parallelize, or parallel.dp_replicate=1',
        )


def _pipelined(
    config: TrainerConfig, platform: Platform, dims: ParallelDims, mesh: DeviceMesh, model: Any, plan: StagePlan
) -> PipelinedModel:
    return PipelinedModel(platform, model, plan, mesh, config.parallel, sequence_shares(config, dims, mesh))


def sequence_shares(config: TrainerConfig, dims: ParallelDims, mesh: DeviceMesh) -> SequenceShares | None:
    """Return what cuts samples to a rank's tokens; None where each rank has whole samples."""
    if not dims.cp_enabled:
        return None
    style = context_style(dims, config.model.options, config.training)
    return SequenceShares(style, dims.cp, mesh["cp"].get_local_rank())


def _within_budget(
    config: TrainerConfig, platform: Platform, dims: ParallelDims, mesh: DeviceMesh
) -> list[BlockRecompute]:
    """Choose what each block computes again; rank 0 tells what and why."""
    fused = fuses_experts(platform, config.training.dtype, on_host=platform.device_types[0] == "cpu")
    kinds, rates = saved_kinds(config.training.recompute_keep, platform), ESTIMATED
    if config.training.activation_costs == "measured":
        offloads = config.training.offload_activations
        rates = measure_rates(platform, config.training.dtype, mesh.world.all, offloads=offloads)
    plan = plan_activations(config, dims, kinds, fused_experts=fused, rates=rates)
    if mesh.world.rank == 0:
        if rates is not ESTIMATED:
            print(f"hp-train: activations: {rates.describe()}", file=sys.stderr, flush=True)
        for line in plan.describe():
            print(f"hp-train: activations: {line}", file=sys.stderr, flush=True)
    return plan.of_layers()


def _stage_mesh(dims: ParallelDims, mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks of this rank's place in the pipeline, as one axis."""
    axes = [name for name, size in dims.dense_sizes().items() if name != "pp" and size > 1]
    return mesh.flatten("stage", axes)


def _everyones(plan: StagePlan | None, mesh: DeviceMesh) -> Callable[[Any], list[Any]]:
    """Return what gives a JSON value of every rank of this rank's pipeline; without one, of this rank."""
    return (lambda fact: [fact]) if plan is None else exchange_over(mesh["pp"].group_along())


def raise_everyones(
    problems: Iterable[Problem], everyones: Callable[[Any], list[Any]], error: type[ProblemsError], title: str
) -> None:
    """Raise on all ranks of a pipeline what any of them has found: a fault of one stage is unknown to the others.

    Raises:
        ProblemsError: of class `error`, listing the problems of all, each once.
    """
    facts = everyones([dataclasses.asdict(problem) for problem in problems])
    found = [Problem(**fact) for part in facts for fact in part]
    raise_if_any(dict.fromkeys(found), error, title)


def build_optimizer(
    config: TrainerConfig, platform: Platform, model: Any, everyones: Callable[[Any], list[Any]] = lambda fact: [fact]
) -> Optimizer:
    """Build the optimizer over the model's trainable parameters.

    Args:
        everyones: as in `build_grouped`.

    Raises:
        TrainingError: a parameter group matches none of them.
    """
    entry = registries().optimizers.get(config.optimizer.name, platform.name)

    def build(some: Any, build_some: Callable[[Any], Any]) -> Any:
        return build_on_host(some, build_some, platform) if config.training.offload_optimizer else build_some(some)

    optimizer: Optimizer = build_grouped(
        _trained(platform, model),
        config.optimizer.options,
        config.parameter_groups,
        lambda some, options: build(some, lambda bucket: entry.build(bucket, options, platform)),
        everyones,
    )
    return optimizer


def build_average(config: TrainerConfig, platform: Platform, model: Any) -> WeightAverage | None:
    """Build the moving average of the model's trainable parameters, which begins with their values now."""
    decay = config.training.ema.decay
    return None if decay is None else WeightAverage(_trained(platform, model), decay, platform)


def _trained(platform: Platform, model: Any) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in platform.named_parameters(model) if platform.requires_grad(p)]


def build_scaler(config: TrainerConfig, platform: Platform) -> GradScaler:
    """Build the loss scaling of float16; it is disabled for other dtypes."""
    scaling = config.training.loss_scaling
    return GradScaler(
        scaling.init_scale,
        scaling.growth_factor,
        scaling.backoff_factor,
        scaling.growth_interval,
        enabled=scaling.enabled and config.training.dtype == "float16",
        platform=platform,
    )


@contextlib.contextmanager
def without_data(config: TrainerConfig, platform: Platform) -> Iterator[None]:
    """Make parameters without data in the block, where the platform can: a rank gets memory for its shards alone.

    Only for models whose options say `builds_without_data`: others may compute with parameters while they are built.
    """
    with contextlib.ExitStack() as stack:
        if getattr(config.model.options, "builds_without_data", False):
            # MindSpore has such tensors from 2.10 on.
            with contextlib.suppress(CapabilityError):
                stack.enter_context(init_empty_weights(platform))
        yield


def build_plain_model(
    config: TrainerConfig,
    platform: Platform,
    *parts: Any,
    everyones: Callable[[Any], list[Any]] = lambda fact: [fact],
) -> Any:
    """Return the model of a configuration, its parameters plain.

    A module without a `parallelize` of its own is wrapped as `PlainModel`. Its own initial values come from the run's
    seed.

    Args:
        parts: given on to what builds the model: the parts of a pipeline stage.
        everyones: returns a JSON value of every rank of a pipeline, whose stages together have all parameters; default:
            this rank has them all.

    Raises:
        ConfigError: a plan for a plain module, and a model that lays itself out.
    """
    platform.manual_seed(config.training.seed)
    with nn.building(platform):
        model = registries().models.get(config.model.name, platform.name).build(config.model.options, platform, *parts)
    _freeze(model, config, platform, everyones)
    parallel = config.parallel
    if not hasattr(model, "parallelize"):
        with nn.building(platform):
            return PlainModel(model, config.model.options, parallel.tp_plan, parallel.fsdp_units)
    if parallel.tp_plan or parallel.fsdp_units:
        path = "parallel.tp_plan" if parallel.tp_plan else "parallel.fsdp_units"
        what = f"model.name = {config.model.name} lays itself out"
        raise ConfigError([Problem(path=path, what=what, expected="null", hint="leave it out")], "parallel")
    return model


def _freeze(model: Any, config: TrainerConfig, platform: Platform, everyones: Callable[[Any], list[Any]]) -> None:
    """Take the gradients of what is not trained: all but adapters where there are any, and `training.freeze`.

    Raises:
        ConfigError: a pattern that no parameter matches, or nothing is left to train.
    """
    is_trainable = getattr(config.model.options, "is_trained", lambda name: True)
    named = dict(platform.named_parameters(model))
    for name, parameter in named.items():
        if not is_trainable(name) or matches_any(name, config.training.freeze):
            platform.set_requires_grad(parameter, False)
    # A stage of a pipeline has some of the parameters only.
    facts = everyones({name: bool(platform.requires_grad(parameter)) for name, parameter in named.items()})
    is_trained = {name: trained for part in facts for name, trained in part.items()}
    raise_if_any(_freeze_problems(is_trained, config.training.freeze), ConfigError, "training.freeze")


def _freeze_problems(is_trained: dict[str, bool], patterns: Iterable[str]) -> Iterator[Problem]:
    unused = [pattern for pattern in patterns if not any(matches_any(name, [pattern]) for name in is_trained)]
    if unused:
        some = ", ".join(list(is_trained)[:4])
        yield Problem(path="training.freeze", what=f"no parameter is called {', '.join(unused)}", expected=f"as {some}")
    if not any(is_trained.values()):
        yield Problem(path="training.freeze", what="nothing is left to train")


def give_initial_weights(model: Any, config: TrainerConfig, platform: Platform) -> None:
    """Give every parameter its first values: those of `model.from`, and for what it does not have those of the seed.

    Raises:
        CheckpointError: the directory does not fit the model; no parameter has been changed.
    """
    if config.model.source is None:
        # A module of the framework's own has drawn its values when it was built.
        if hasattr(model, "initializer"):
            init_parameters(model, model.initializer, seed=config.training.seed)
        return
    directory = ModelDirectory(Path(config.model.source), config.model.options)
    problems = list(directory.problems())
    if problems:
        raise CheckpointError("; ".join(map(str, problems)))
    init_parameters(model, model.initializer, seed=config.training.seed, skip=directory.tensors)
    read_weights(model, directory, platform)


def read_weights(model: Any, directory: ModelDirectory, platform: Platform) -> None:
    """Fill this rank's shards from a directory, reading no more of each tensor than the shard takes."""
    with platform.no_grad():
        for name, tensor in [*platform.named_parameters(model), *platform.named_buffers(model)]:
            if name in directory.tensors:
                local = local_of(platform, tensor)
                values = directory.read(name, box_of(tensor)).reshape(tuple(local.shape))
                platform.copy_(local, platform.from_numpy(values, platform.device_of(local)))


@contextlib.contextmanager
def whole_model(
    config: TrainerConfig, platform: Platform, checkpoint: Checkpoint, *, averaged: bool = False
) -> Iterator[Any]:
    """Give the model of a checkpoint, written by any layout on any platform, in a block that records no gradients.

    Args:
        averaged: with the moving average of its weights.

    Raises:
        CheckpointError: the checkpoint is of another model, damaged, or without averages.
    """
    check_model(checkpoint, config)
    with use_world(SilentWorld(0, 1, platform)), platform.no_grad():
        model = build_plain_model(config, platform)
        load_weights(platform, model, checkpoint, averaged=averaged)
        yield model
