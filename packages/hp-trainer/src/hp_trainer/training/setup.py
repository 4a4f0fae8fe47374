"""Setup of a rank: model, initial weights, optimizer and data, built from the configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import SilentWorld, current_world, use_world
from hp_dtensor.debug import perturb_weights
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import init_empty_weights, init_parameters, materialize
from hp_fsdp import GradScaler
from hp_trainer._coordination import Alone, Group, all_gather_object, all_ranks, report
from hp_trainer._files import strict_json
from hp_trainer.checkpoint import Checkpoint
from hp_trainer.config import TrainerConfig, matches_any
from hp_trainer.data import BatchReader, Dataset, Samples
from hp_trainer.exceptions import (
    CheckpointError,
    ConfigError,
    DataError,
    ParallelDimsError,
    Problem,
    raise_if_any,
)
from hp_trainer.models.hugging_face import ModelDirectory
from hp_trainer.models.plain_module import PlainModel
from hp_trainer.models.recomputation import BlockRecompute, saved_kinds
from hp_trainer.optimizers import build_grouped, build_on_host
from hp_trainer.parallel import ParallelDims, context_style
from hp_trainer.parallel.dims import dims_of
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, check_model
from hp_trainer.training.activation_budget import ESTIMATED, fuses_experts, measure_rates, plan_activations
from hp_trainer.training.optimizer import Optimizer, WeightAverage
from hp_trainer.training.pipelined_model import (
    PipelinedModel,
    SequenceSharder,
    StagePlan,
    plan_stages,
)
from hp_trainer.training.state import box_of, load_weights, num_parameters


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Model, optimizer and data of one rank.

    Attributes:
        config: the configuration of the run.
        platform: the platform; its current world is the job.
        dims: degrees of parallelism.
        mesh: the device mesh of `dims`.
        dataset: training and evaluation samples.
        model: the parallelized model with its initial weights; in a pipeline, only the stages of this rank.
        pipeline: the pipeline of this rank's stages; None: no pipeline.
        stage_mesh: the ranks with the same stages, as one axis; None: all ranks.
        optimizer: optimizer of the trainable parameters.
        scaler: loss scaling; disabled unless the model computes in float16.
        average: moving average of the trainable parameters; None: no average.
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
    def build(
        cls, run: RunFolder | None, config: TrainerConfig, platform: Platform, *, weights: bool = True
    ) -> RankSetup:
        """Build the setup. Every rank of the platform's current world calls this.

        Args:
            run: the run folder, with prepared data; None: the caller has batches of its own, and there is no dataset.
            weights: initialize the weights; False: a checkpoint will be loaded.
        """
        dims = dims_of(config, current_world(platform).size)
        mesh = dims.build_mesh(platform.device_types[0], platform=platform)
        dataset: Any = None
        if run is not None:
            dataset = open_dataset(run, config)
            refuse_other_data(dataset, config, current_world(platform).all)
        # Depends on the configuration only, so that all ranks have the same plan without communication.
        plan = plan_stages(config, dims) if dims.pp_enabled else None
        model = build_model(config, platform, dims, mesh, plan, weights=weights)
        pipeline, stage_mesh = None, None
        if plan is not None:
            # The ranks with the same stages as this one, as one axis.
            axes = [name for name, size in dims.dense_sizes().items() if name != "pp" and size > 1]
            stage_mesh = mesh.flatten("stage", axes)
            sharder = sequence_sharder(config, dims, mesh)
            pipeline = PipelinedModel(platform, model, plan, mesh, config.parallel, sharder)
        return cls(
            config=config,
            platform=platform,
            dims=dims,
            mesh=mesh,
            dataset=dataset,
            model=model,
            optimizer=build_optimizer(config, platform, model, _pipeline_group(plan, mesh)),
            scaler=build_scaler(config, platform),
            average=build_average(config, platform, model),
            pipeline=pipeline,
            stage_mesh=stage_mesh,
        )

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters of the model, unsharded. In a pipeline this is a collective."""
        if self.pipeline is not None:
            return self.pipeline.num_parameters()
        return num_parameters(self.platform, self.model)

    @property
    def pipeline_group(self) -> Group:
        """The ranks of this pipeline; without one, this rank alone."""
        return Alone() if self.pipeline is None else self.pipeline.group

    def ranks_by_stage(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks with the same stages of a pipeline, and so with equal work; without one, all ranks."""
        stages: dict[int, list[int]] = {}
        for rank in range(self.mesh.world.size):
            stages.setdefault(self.dims.coordinate(rank).get("pp", 0), []).append(rank)
        return tuple(map(tuple, stages.values()))

    def module_names(self) -> dict[int, str]:
        """Return the names of the model's modules by `id`, for messages; the model itself is `""`."""
        return {id(module): name for name, module in self.platform.named_modules(self.model)}

    def batch_reader(self, samples: Samples, *, once: bool = False) -> BatchReader:
        """Return the reader of this rank's part of each global batch of `samples`; `once` as in `BatchReader`."""
        training = self.config.training
        return BatchReader(
            samples,
            global_batch_size=training.global_batch_size,
            seed=training.seed,
            # Ranks that differ only in tp, cp or pp read the same samples.
            num_shares=self.dims.dp_size,
            share=self.dims.batch_rank(self.mesh.world.rank),
            once=once,
        )

    def sequence_sharder(self) -> SequenceSharder | None:
        """Return the sharder of samples over the cp ranks; None without context parallelism."""
        return sequence_sharder(self.config, self.dims, self.mesh)


def open_dataset(run: RunFolder, config: TrainerConfig) -> Dataset:
    """Open the prepared data of a run.

    Raises:
        DataError: the data are missing, damaged, or too few for one sample.
    """
    source = registries().datasets.get(config.data.name).build(config.data.options)
    dataset: Dataset = source.open(run.data, config.training.sequence_length)
    return dataset


def refuse_other_data(dataset: Dataset, config: TrainerConfig, group: Group) -> None:
    """Raise on every rank if ranks have opened data of other fingerprints or sizes. A collective call."""

    def describe() -> Any:
        sizes = {"len(train)": len(dataset.train), "len(evaluation)": len(dataset.evaluation)}
        return json.loads(strict_json({**dataset.fingerprint, **sizes}))

    first, *others = all_ranks(group, "comparing the data of the ranks", describe, DataError)
    for rank, other in enumerate(others, 1):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise DataError(
                    f"data.name={config.data.name}: {name} is {first.get(name)!r} on rank 0 and {other.get(name)!r} on "
                    f"rank {rank}; expected the same data on every rank: they must not depend on the rank, the process "
                    "or the time"
                )


def build_model(
    config: TrainerConfig,
    platform: Platform,
    dims: ParallelDims,
    mesh: DeviceMesh,
    plan: StagePlan | None = None,
    *,
    weights: bool = True,
) -> Any:
    """Build the model, or this rank's stages, and parallelize it, perhaps without weights. A collective call."""
    parts = () if plan is None else (plan.parts_of(mesh["pp"].get_local_rank()),)
    # The full parameters never exist: they are created without data, sharded, and only then allocated.
    with without_data(config, platform):
        model = build_plain_model(config, platform, *parts, group=_pipeline_group(plan, mesh))
    reshard = config.parallel.reshard_after_forward
    # None is the default of fully_shard: all modules except the root are resharded after forward.
    model.parallelize(dims, mesh, config.training, reshard_after_forward=False if reshard is False else None)
    if dims.dp_replicate > 1:
        problems = _replica_problems(config, platform, model, mesh)
        raise_on_all_ranks(problems, _pipeline_group(plan, mesh))
    if config.training.activation_budget is not None:
        model.recompute = _within_budget(config, platform, dims, mesh)
    # After `parallelize`, so that only the shards are allocated.
    materialize(model, buffers=lambda name, shape, dtype: platform.zeros(shape, dtype), platform=platform)
    if weights:
        give_initial_weights(model, config, platform)
        if config.training.perturb_weights:
            perturb_weights(model, config.training.perturb_weights, platform)
    return model


def _replica_problems(config: TrainerConfig, platform: Platform, model: Any, mesh: DeviceMesh) -> Iterator[Problem]:
    """Yield a problem if a user's model places weights on a mesh without the ranks that have replicas of them."""
    replicas = set(mesh["dp_replicate"].ranks())
    unreplicated = [
        name
        for name, parameter in platform.named_parameters(model)
        if isinstance(parameter, DTensor) and not replicas <= set(parameter.spec.mesh.ranks())
    ]
    if unreplicated:
        yield Problem(
            path="parallel.dp_replicate",
            what=f"{config.model.name} places {', '.join(unreplicated[:3])} on a mesh without dp_replicate",
            expected="a mesh of all ranks with the same weights, whose gradients are summed",
            hint='mesh["dp_replicate", "fsdp"] in its parallelize, or parallel.dp_replicate=1',
        )


def sequence_sharder(config: TrainerConfig, dims: ParallelDims, mesh: DeviceMesh) -> SequenceSharder | None:
    """Return the sharder of samples over the cp ranks; None without context parallelism."""
    if not dims.cp_enabled:
        return None
    style = context_style(dims, config.model.options, config.training)
    return SequenceSharder(style, dims.cp, mesh["cp"].get_local_rank())


def _within_budget(
    config: TrainerConfig, platform: Platform, dims: ParallelDims, mesh: DeviceMesh
) -> list[BlockRecompute]:
    """Choose the recomputation of each block within the activation budget; rank 0 prints the choice."""
    fused = fuses_experts(platform, config.training.dtype, on_host=platform.device_types[0] == "cpu")
    kinds, rates = saved_kinds(config.training.recompute_keep, platform), ESTIMATED
    if config.training.activation_costs == "measured":
        offloads = config.training.offload_activations
        rates = measure_rates(platform, config.training.dtype, mesh.world.all, offloads=offloads)
    plan = plan_activations(config, dims, kinds, fused_experts=fused, rates=rates)
    if mesh.world.rank == 0:
        if rates is not ESTIMATED:
            report(f"activations: {rates.describe()}")
        for line in plan.describe():
            report(f"activations: {line}")
    return plan.of_layers()


def _pipeline_group(plan: StagePlan | None, mesh: DeviceMesh) -> Group:
    """Return the ranks of this pipeline; without one, this rank alone."""
    return Alone() if plan is None else mesh["pp"].group_along()


def raise_on_all_ranks(problems: Iterable[Problem], group: Group) -> None:
    """Raise the problems of any rank of a pipeline on all of its ranks, which would otherwise wait for it."""
    # Also called without problems: every rank of the pipeline takes part in the collective.
    gathered = all_gather_object(group, [dataclasses.asdict(problem) for problem in problems])
    found = [Problem(**values) for of_rank in gathered for values in of_rank]
    raise_if_any(dict.fromkeys(found), ParallelDimsError, "parallel")


def build_optimizer(config: TrainerConfig, platform: Platform, model: Any, group: Group | None = None) -> Optimizer:
    """Build the optimizer of the model's trainable parameters."""
    entry = registries().optimizers.get(config.optimizer.name, platform.name)

    def build(parameters: Any, options: Any) -> Any:
        if config.training.offload_optimizer:
            return build_on_host(parameters, lambda bucket: entry.build(bucket, options, platform), platform)
        return entry.build(parameters, options, platform)

    optimizer: Optimizer = build_grouped(
        _trained(platform, model), config.optimizer.options, config.parameter_groups, build, group
    )
    return optimizer


def build_average(config: TrainerConfig, platform: Platform, model: Any) -> WeightAverage | None:
    """Build the moving average of the model's trainable parameters, which starts with their current values."""
    decay = config.training.ema.decay
    return None if decay is None else WeightAverage(_trained(platform, model), decay, platform)


def _trained(platform: Platform, model: Any) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in platform.named_parameters(model) if platform.requires_grad(p)]


def build_scaler(config: TrainerConfig, platform: Platform) -> GradScaler:
    """Build the loss scaling for float16; it is disabled for other dtypes."""
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
    """Create parameters without data inside the block, so that a rank allocates memory only for its shards.

    Only for models whose options say `builds_without_data`: others may compute with parameters while they are built.
    """
    with contextlib.ExitStack() as stack:
        if getattr(config.model.options, "builds_without_data", False):
            # MindSpore has tensors without data from 2.10 on. Before, parameters are allocated in full.
            with contextlib.suppress(CapabilityError):
                stack.enter_context(init_empty_weights(platform))
        yield


def build_plain_model(
    config: TrainerConfig,
    platform: Platform,
    *parts: Any,
    group: Group | None = None,
) -> Any:
    """Return the (parts of the) model with plain, unsharded parameters, wrapped if needed; `group`: of a pipeline."""
    # The same seed on all ranks, so that replicated parameters that a module draws are equal.
    platform.manual_seed(config.training.seed)
    with nn.building(platform):
        model = registries().models.get(config.model.name, platform.name).build(config.model.options, platform, *parts)
    _freeze(model, config, platform, group or Alone())
    parallel = config.parallel
    if not hasattr(model, "parallelize"):
        with nn.building(platform):
            return PlainModel(model, config.model.options, parallel.tp_plan, parallel.fsdp_units)
    if parallel.tp_plan or parallel.fsdp_units:
        path = "parallel.tp_plan" if parallel.tp_plan else "parallel.fsdp_units"
        what = f"model.name = {config.model.name} has its own parallelization"
        raise ConfigError([Problem(path=path, what=what, expected="null", hint="leave it out")], "parallel")
    return model


def _freeze(model: Any, config: TrainerConfig, platform: Platform, group: Group) -> None:
    """Freeze the parameters of `training.freeze`, and with LoRA all parameters except the adapters."""
    is_trainable = getattr(config.model.options, "is_trained", lambda name: True)
    named = dict(platform.named_parameters(model))
    for name, parameter in named.items():
        if not is_trainable(name) or matches_any(name, config.training.freeze):
            platform.set_requires_grad(parameter, False)
    # A pipeline stage has only some of the parameters, and a pattern may match those of another stage.
    own = {name: bool(platform.requires_grad(parameter)) for name, parameter in named.items()}
    is_trained = {name: trained for of_rank in all_gather_object(group, own) for name, trained in of_rank.items()}
    raise_if_any(_freeze_problems(is_trained, config.training.freeze), ConfigError, "training.freeze")


def _freeze_problems(is_trained: dict[str, bool], patterns: Iterable[str]) -> Iterator[Problem]:
    unused = [pattern for pattern in patterns if not any(matches_any(name, [pattern]) for name in is_trained)]
    if unused:
        some = ", ".join(list(is_trained)[:4])
        what = f"no parameter matches {', '.join(unused)}"
        yield Problem(path="training.freeze", what=what, expected=f"patterns of names such as {some}")
    if not any(is_trained.values()):
        yield Problem(path="training.freeze", what="no parameter is left to train")


def give_initial_weights(model: Any, config: TrainerConfig, platform: Platform) -> None:
    """Initialize the parameters from `model.from`; those that it does not have are drawn from the run's seed."""
    if config.model.source is None:
        # A plain module has no initializer: it has drawn its values when it was built.
        if hasattr(model, "initializer"):
            init_parameters(model, model.initializer, seed=config.training.seed)
        return
    directory = ModelDirectory(Path(config.model.source), config.model.options)
    problems = list(directory.problems())
    if problems:
        raise CheckpointError("; ".join(map(str, problems)))
    # All problems were found before: from here on the model changes.
    init_parameters(model, model.initializer, seed=config.training.seed, skip=directory.tensors)
    read_weights(model, directory, platform)


def read_weights(model: Any, directory: ModelDirectory, platform: Platform) -> None:
    """Fill this rank's shards of the tensors that a directory has, reading only the bytes of the shards."""
    with platform.no_grad():
        for name, tensor in [*platform.named_parameters(model), *platform.named_buffers(model)]:
            if name in directory.tensors:
                local = local_of(platform, tensor)
                values = directory.read(name, box_of(tensor)).reshape(tuple(local.shape))
                platform.copy_(local, platform.from_numpy(values, platform.device_of(local)))


@contextlib.contextmanager
def full_model(
    config: TrainerConfig, platform: Platform, checkpoint: Checkpoint, *, averaged: bool = False
) -> Iterator[Any]:
    """Yield the full (averaged) model of a checkpoint on one rank, for inference without gradients."""
    check_model(checkpoint, config)
    # In a world of one rank nothing communicates, even if other ranks run elsewhere.
    with use_world(SilentWorld(0, 1, platform)), platform.no_grad():
        model = build_plain_model(config, platform)
        load_weights(platform, model, checkpoint, averaged=averaged)
        yield model
