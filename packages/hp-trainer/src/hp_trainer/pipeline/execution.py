"""`Pipeline`: splits a batch into micro-batches and executes a rank's actions on its stages, in one loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, as_group
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import World, current_world
from hp_dtensor.platform.interface import Platform
from hp_dtensor.trees import flattened, map_tensors
from hp_trainer.exceptions import PipelineError, join_choices
from hp_trainer.parallel.axes import nearest_divisors
from hp_trainer.pipeline.actions import Action, Kind, Schedule, rank_actions
from hp_trainer.pipeline.schedules import build_schedule
from hp_trainer.pipeline.simulation import check_unsplit_backwards, validate
from hp_trainer.pipeline.stage import PipelineStage, StageParameters, TiedWeights, UnshardedForStep, UnshardedForUse
from hp_trainer.pipeline.transfers import MessageLayout, Transfers

Tensor = Any


@dataclass(frozen=True, slots=True)
class TensorChunkSpec:
    """The dimension along which a tensor is split into micro-batches. Name and attribute follow torch.

    Examples:
        >>> from hp_trainer.pipeline import TensorChunkSpec
        >>> TensorChunkSpec.from_dict({"ids": 0, "mask": 1})
        {'ids': TensorChunkSpec(split_dim=0), 'mask': TensorChunkSpec(split_dim=1)}
    """

    split_dim: int

    @staticmethod
    def from_tuple(chunk_dims: tuple[Any, ...]) -> Any:
        """Return a tree of `TensorChunkSpec` for a tree of dimensions."""
        dims, rebuild = flattened(chunk_dims)
        return rebuild([TensorChunkSpec(dim) for dim in dims])

    @staticmethod
    def from_dict(chunk_dims: dict[str, Any]) -> Any:
        """As `from_tuple`, for keyword arguments."""
        return TensorChunkSpec.from_tuple(chunk_dims)  # type: ignore[arg-type]


def split_inputs(
    platform: Platform, tree: Any, num_microbatches: int, specs: Any = None, what: str = "argument"
) -> list[Any]:
    """Split the tensors of a tree into micro-batches; other values are passed to every micro-batch.

    Args:
        specs: a tree of the same structure with a `TensorChunkSpec` for each tensor, or None for a tensor that every
            micro-batch gets unsplit. If `specs` itself is None, every tensor is split along dimension 0.

    Returns:
        One tree for each micro-batch.
    """
    leaves, rebuild = flattened(tree)
    dims: list[int | None] = [0] * len(leaves)
    if specs is not None:
        dims = _split_dims(specs, len(leaves), f"{what}s")
    chunks = [
        _split(platform, leaf, num_microbatches, dim, f"{what} {index}")
        for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True))
    ]
    return [rebuild([each[index] for each in chunks]) for index in range(num_microbatches)]


def _split_dims(specs: Any, number: int, what: str) -> list[int | None]:
    """Return the dimension of each `TensorChunkSpec` in a tree, None for None."""
    # By attribute, so that torch's own class is accepted too.
    listed = flattened(specs)[0]
    wrong = [repr(spec) for spec in listed if spec is not None and not hasattr(spec, "split_dim")]
    if wrong or len(listed) != number:
        got = f"{len(listed)} of them" if not wrong else ", ".join(wrong)
        raise PipelineError(f"{what}: expected one TensorChunkSpec(dim) or None for each of {number} values, got {got}")
    return [None if spec is None else spec.split_dim for spec in listed]


def _split(platform: Platform, leaf: Any, num_microbatches: int, dim: int | None, what: str) -> Sequence[Any]:
    # The same object for every micro-batch, without a copy.
    if dim is None or not isinstance(leaf, platform.Tensor) or num_microbatches == 1:
        return [leaf] * num_microbatches
    shape = tuple(leaf.shape)
    size = shape[dim] if -len(shape) <= dim < len(shape) else 0
    if not size or size % num_microbatches:
        legal = nearest_divisors(size, num_microbatches) if size else []
        raise PipelineError(
            f"{what} of shape {list(shape)} cannot be split along dimension {dim} into {num_microbatches} equal "
            "micro-batches, which transfers between stages require; "
            + (f"use {join_choices(legal)} micro-batches, or other batches" if legal else "it has no such dimension")
        )
    chunks: Sequence[Any] = platform.ops.split(leaf, [size // num_microbatches] * num_microbatches, dim)
    return chunks


def merge_outputs(platform: Platform, outputs: Sequence[Any], spec: Any = None) -> Any:
    """Merge the outputs of all micro-batches by concatenating their tensors.

    Args:
        spec: a tree like one output with a `TensorChunkSpec` for each tensor, or None for one that is equal for all
            micro-batches, of which that of the first is returned. If `spec` itself is None, tensors are concatenated
            along dimension 0.
    """
    rebuild = flattened(outputs[0])[1]
    columns = list(zip(*(flattened(output)[0] for output in outputs), strict=True))
    dims: Sequence[int | None] = [0] * len(columns)
    if spec is not None:
        dims = _split_dims(spec, len(columns), "output_merge_spec")
    return rebuild([_merged(platform, column, dim) for column, dim in zip(columns, dims, strict=True)])


def _merged(platform: Platform, column: Sequence[Any], dim: int | None) -> Any:
    if dim is None or not isinstance(column[0], platform.Tensor):
        return column[0]
    # Scalars have no dimension to concatenate along.
    if not column[0].shape:
        return platform.ops.stack(list(column), 0)
    return platform.ops.cat(list(column), dim)


def split_all(
    platform: Platform,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_microbatches: int,
    args_spec: Any = None,
    kwargs_spec: Any = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Return the positional and the keyword arguments of each micro-batch; see `split_inputs`."""
    positional = split_inputs(platform, tuple(args), num_microbatches, args_spec, "argument")
    if kwargs_spec is not None:
        if not isinstance(kwargs_spec, Mapping):
            raise PipelineError(f"kwargs_chunk_spec: expected a dict of argument names, got {kwargs_spec!r}")
        unknown, missing = sorted(kwargs_spec.keys() - kwargs), sorted(kwargs.keys() - kwargs_spec)
        # Specs may name arguments of other ranks, and leave out some of this one. Both at once means a misspelt name.
        if unknown and missing:
            raise PipelineError(
                f"kwargs_chunk_spec: names {unknown}, which this step does not get, and not {missing}, which it does; "
                "name these too: TensorChunkSpec(0) is the default"
            )
        # Keyword arguments that the specs do not mention are split along dimension 0.
        kwargs_spec = {name: kwargs_spec.get(name, TensorChunkSpec(0)) for name in kwargs}
    return positional, split_inputs(platform, dict(kwargs), num_microbatches, kwargs_spec, "keyword argument")


LossFunction = Callable[..., Tensor]


class Pipeline:
    """A model split into stages over the ranks of a mesh axis, and the schedule of their execution.

    Args:
        stages: this rank's stages, in any order.
        schedule: a `Schedule`, or the name of one for `num_microbatches`.
        mesh: ranks of the pipeline: `mesh["pp"]`, a process group, or None for all ranks.
        loss_fn: scalar loss `loss_fn(output, target, **loss_kwargs)` of the last stage; None for no backward.
        num_microbatches: number of micro-batches; required if `schedule` is a name.
        tied: weights with copies on several stages, whose gradients are summed at the end of a step.
        fixed_shapes: every `step` has the shapes of the first one, so that they are sent only once. `eval` may have
            other shapes.
        gathers_for_step: gather weights sharded by `fully_shard` once for all micro-batches, and hold their gradients
            unsharded until the end of the step. False: each forward and backward gathers what it needs, which holds
            the weights of one module at a time and requires a schedule without split backwards.
        defers_receives: post the receive of a message when a computation needs it, not before. Where a pending receive
            delays other communication, this is faster.
        reduces_once: with `gathers_for_step=False`, hold gradients unsharded until the last backward. False: each
            backward reduces them, and only shards are held.
        args_chunk_spec, kwargs_chunk_spec: trees of `TensorChunkSpec`, or None for an argument that every micro-batch
            gets unsplit; default: dimension 0.
        output_merge_spec: likewise, or None for an output that is equal for all micro-batches.

    Raises:
        PipelineError: the stages are not those that the schedule assigns to this rank, or the schedule splits backwards
            although weights are not gathered for the step.
        ScheduleError: the schedule is incomplete or deadlocks.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,), ("pp",))
        ...     with nn.building(platform):
        ...         stage = PipelineStage(nn.Linear(4, 4), mesh.get_rank(), 2)
        ...     pipeline = Pipeline([stage], "1f1b", mesh["pp"], lambda y, t: y.sum(), num_microbatches=2)
        ...     losses = []
        ...     batch = [platform.ops.ones((8, 4), platform.dtype("float32"))] if stage.is_first else []
        ...     pipeline.step(*batch, target=None, losses=losses)
        ...     return len(losses)
        >>> run_ranks(program, 2)
        [0, 2]
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        schedule: Schedule | str,
        mesh: DeviceMesh | ProcessGroup | None = None,
        loss_fn: LossFunction | None = None,
        *,
        num_microbatches: int | None = None,
        tied: TiedWeights | None = None,
        fixed_shapes: bool = False,
        gathers_for_step: bool = True,
        reduces_once: bool = True,
        defers_receives: bool = False,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
    ) -> None:
        _check_kinds(stages)
        self.platform: Platform = stages[0].platform
        self.loss_fn = loss_fn
        self.tied = tied
        self._specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        world, ranks, device_mesh = _resolve_mesh(mesh, self.platform)
        self.rank = ranks.index(world.rank)
        self.schedule = self._schedule_of(schedule, len(ranks), stages, num_microbatches)
        self.stages = _checked_stages(stages, self.schedule, self.rank)
        ahead = {"receives_ahead": 0} if defers_receives else {}
        self._transfers = Transfers(
            self.schedule, self.rank, ranks, world, self.platform, device_mesh, fixed_shapes=fixed_shapes, **ahead
        )
        if not gathers_for_step:
            check_unsplit_backwards(self.schedule)
        elif not reduces_once:
            raise PipelineError("reduces_once=False: expected gathers_for_step=False with it, got True")
        self._gathers_for_step = gathers_for_step
        self._parameters = self._parameters_by_stage(reduces_once)
        # A rank's actions of a step, by `forward_only`.
        self._programs: dict[bool, tuple[Action, ...]] = {}
        # Bound once: a step looks up the method of each action.
        self._actions = self._methods_by_kind()
        self._return_outputs = False
        self._args: Sequence[tuple[Any, ...]] = ()
        self._kwargs: Sequence[dict[str, Any]] = ()
        self._targets: Sequence[Any] = ()
        self._loss_kwargs: Mapping[str, Any] = {}
        self._outputs: dict[int, Any] = {}
        self._losses: dict[int, Tensor] = {}
        # Outputs, and gradients of inputs, until their consumer pops them, by (producing stage, micro-batch).
        self._pending_outputs: dict[tuple[int, int], tuple[MessageLayout, list[Tensor]]] = {}
        self._pending_gradients: dict[tuple[int, int], list[Tensor]] = {}

    def _parameters_by_stage(self, reduces_once: bool) -> dict[int, StageParameters]:
        def parameters_of(module: Any) -> StageParameters:
            if self._gathers_for_step:
                return UnshardedForStep(self.platform, module)
            return UnshardedForUse(self.platform, module, reduces_once=reduces_once)

        # Stages may share a module: its parameters are then gathered and reduced once for all of them.
        shared = {id(module): parameters_of(module) for module in (stage.submod for stage in self.stages.values())}
        return {index: shared[id(stage.submod)] for index, stage in self.stages.items()}

    def _methods_by_kind(self) -> dict[Kind, Callable[[Action], None]]:
        return {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRAD: self._backward,
            Kind.WEIGHT_GRAD: self._weight_grad,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECEIVE_FORWARD: self._transfers.start_receive,
            Kind.RECEIVE_BACKWARD: self._transfers.start_receive,
            Kind.UNSHARD: lambda action: self._parameters[action.stage].unshard(),
            Kind.RESHARD: lambda action: self._parameters[action.stage].reshard(),
            Kind.REDUCE_GRAD: lambda action: self._parameters[action.stage].reduce_grad(),
        }

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches of a step."""
        return self.schedule.num_microbatches

    @property
    def has_first_stage(self) -> bool:
        """True if this rank gets the batch."""
        return 0 in self.stages

    @property
    def has_last_stage(self) -> bool:
        """True if this rank gets the targets and returns outputs and losses."""
        return self.schedule.num_stages - 1 in self.stages

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of one batch. Every rank of the pipeline calls this.

        Gradients are accumulated in the parameters, summed over the micro-batches.

        Args:
            args: inputs of the first stage; ignored on ranks without it.
            target: second argument of the loss function, on the rank with the last stage.
            losses: a list, filled with the detached loss of each micro-batch on the rank with the last stage.
            return_outputs: return the outputs of the last stage.
            loss_kwargs: keyword arguments of the loss function, the same for every micro-batch.
            kwargs: keyword arguments of this rank's stages, split into micro-batches like `args`.

        Returns:
            The outputs of the full batch on the rank with the last stage, else None.

        Raises:
            PipelineError: the batch cannot be split evenly, a stage's output cannot be sent or has changed its shape,
                there is no loss function for `losses`, or another rank has failed.
        """
        self._check_losses(losses)
        options: dict[str, Any] = {"losses": losses, "return_outputs": return_outputs, "loss_kwargs": loss_kwargs}
        if self.loss_fn is not None and not self.platform.is_grad_enabled():
            raise PipelineError("step() runs a backward, and nothing is recorded here (no_grad); use eval()")
        if self.loss_fn is None:
            return self.eval(*args, target=target, **options, **kwargs)
        return self._run(*self._split(args, kwargs, target), **options, forward_only=False)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forward of one batch without autograd. Arguments and result are those of `step`."""
        self._check_losses(losses)
        options: dict[str, Any] = {"losses": losses, "return_outputs": return_outputs, "loss_kwargs": loss_kwargs}
        with self.platform.no_grad():
            return self._run(*self._split(args, kwargs, target), **options, forward_only=True)

    def run_microbatches(
        self,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[Mapping[str, Any]] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        losses: list[Tensor] | None = None,
        forward_only: bool = False,
        return_outputs: bool = False,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a step on given micro-batches.

        Args:
            args: arguments of the first stage for each micro-batch; ignored on ranks without it.
            kwargs: keyword arguments of this rank's stages for each micro-batch, or None.
            targets: target of each micro-batch, on the rank with the last stage.
            forward_only: run no backward, without autograd.
            losses, return_outputs, loss_kwargs: as for `step`.

        Raises:
            PipelineError: as for `step`, or there is no loss function for a backward.
        """
        self._check_losses(losses)
        if self.loss_fn is None and not forward_only:
            raise PipelineError("a backward needs a loss, and the pipeline has no loss_fn; give forward_only=True")
        number = self.num_microbatches
        named = [{} for _ in range(number)] if kwargs is None else [dict(each) for each in kwargs]
        targets = [None] * number if targets is None else list(targets)
        counts = {"targets": len(targets), "kwargs": len(named)} | ({"args": len(args)} if self.has_first_stage else {})
        wrong = [f"{count} {name}" for name, count in counts.items() if count != number]
        if wrong:
            raise PipelineError(f"the schedule has {number} micro-batches, got {', '.join(wrong)}")
        with self.platform.no_grad() if forward_only else self.platform.enable_grad():
            return self._run(args, named, targets, losses, return_outputs, loss_kwargs, forward_only=forward_only)

    def _check_losses(self, losses: list[Tensor] | None) -> None:
        # On every rank, before anything is sent: after an error on the last one alone, the others would wait for it.
        if losses is not None and self.loss_fn is None:
            raise PipelineError("losses were asked for, and the pipeline has no loss_fn; give it one")
        if losses is not None and not isinstance(losses, list):
            raise PipelineError(f"losses: expected a list, which is filled, got {type(losses).__name__}")

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]], list[Any]]:
        number, (args_spec, kwargs_spec, _) = self.num_microbatches, self._specs
        # Other ranks may be called with the same arguments, which are not split there.
        if not self.has_first_stage:
            args, args_spec = (), None
        positional, named = split_all(self.platform, args, kwargs, number, args_spec, kwargs_spec)
        return positional, named, split_inputs(self.platform, target, number, what="target")

    def _run(
        self,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        targets: Sequence[Any],
        losses: list[Tensor] | None,
        return_outputs: bool,
        loss_kwargs: Mapping[str, Any] | None,
        *,
        forward_only: bool,
    ) -> Any:
        self._loss_kwargs = loss_kwargs or {}
        self._args = args
        self._kwargs = kwargs
        self._targets = targets
        self._return_outputs = return_outputs
        self._transfers.start_step(forward_only=forward_only)
        try:
            for action in self._program(forward_only):
                self._actions[action.kind](action)
            self._transfers.end_step()
            if self.tied is not None and not forward_only:
                # Once per step, after the gradients of all micro-batches are accumulated.
                self.tied.sum_gradients()
        # BaseException, so also on Ctrl-C: the next step must not find state of an interrupted one.
        except BaseException:
            self._transfers.reset()
            for index, stage in self.stages.items():
                stage.reset()
                self._parameters[index].reset()
            self._reset()
            raise
        return self._results(losses)

    def _results(self, losses: list[Tensor] | None) -> Any:
        """Return the merged outputs, if there are any, and fill `losses` in the order of micro-batches."""
        outputs, found = self._outputs, self._losses
        self._reset()
        if losses is not None and self.has_last_stage:
            losses[:] = [found[index] for index in sorted(found)]
        if not outputs:
            return None
        return merge_outputs(self.platform, [outputs[index] for index in sorted(outputs)], self._specs[2])

    def _reset(self) -> None:
        """Discard the inputs, results and pending messages of the step."""
        self._args, self._kwargs, self._targets, self._loss_kwargs = (), (), (), {}
        self._outputs, self._losses, self._pending_outputs, self._pending_gradients = {}, {}, {}, {}

    def _program(self, forward_only: bool) -> tuple[Action, ...]:
        """Return the actions of a step on this rank, built at the first step."""
        found = self._programs.get(forward_only)
        if found is None:
            # Looked up at the first step: `fully_shard` may be called after the pipeline is created.
            sharded = {index: id(each) for index, each in self._parameters.items() if each.are_sharded}
            found = self._programs[forward_only] = rank_actions(
                self.schedule,
                self.rank,
                forward_only=forward_only,
                sharded_stages=sharded,
                gathers_for_step=self._gathers_for_step,
            )
        return found

    def _forward(self, action: Action) -> None:
        stage, microbatch = self.stages[action.stage], action.microbatch
        kwargs = self._kwargs[microbatch]
        self._parameters[action.stage].before_forward(action.stage)
        if stage.is_first:
            output = stage.forward_first(microbatch, self._args[microbatch], kwargs)
        else:
            source = action.stage - 1
            # Popped, so that the previous stage's output is freed as soon as nothing else needs it.
            layout, received = (
                self._pending_outputs.pop((source, microbatch))
                if self._is_local(source)
                else self._transfers.receive_forward(action)
            )
            output = stage.forward(microbatch, layout, received, kwargs, self._transfers.mesh)
        if stage.is_last:
            self._finish(stage, microbatch, output)
        else:
            self._pending_outputs[action.stage, microbatch] = stage.outputs(microbatch, output)

    def _finish(self, stage: PipelineStage, microbatch: int, output: Any) -> None:
        """Compute the loss of the last stage's output, and store the requested results."""
        if self.loss_fn is not None:
            loss = self.loss_fn(output, self._targets[microbatch], **self._loss_kwargs)
            if self.platform.is_grad_enabled():
                stage.save_loss(microbatch, loss)
            # Detached: the graph of a micro-batch is freed by its backward, not held until the end of the step.
            self._losses[microbatch] = self.platform.detach(loss)
        if self._return_outputs:
            self._outputs[microbatch] = map_tensors(output, self.platform.Tensor, self.platform.detach)

    def _backward(self, action: Action) -> None:
        stage, microbatch = self.stages[action.stage], action.microbatch
        # The last stage starts from its loss, the others from the gradients of their outputs.
        gradients = None
        if not stage.is_last and self._is_local(action.stage + 1):
            gradients = self._pending_gradients.pop((action.stage + 1, microbatch))
        elif not stage.is_last:
            gradients = self._transfers.receive_backward(action)
        run = stage.backward if action.kind is Kind.BACKWARD else stage.input_grad
        found = run(microbatch, gradients)
        # After an INPUT_GRAD the gradients of parameters are still missing; `_weight_grad` collects them.
        if action.kind is Kind.BACKWARD:
            self._parameters[action.stage].collect_gradients()
        # `_send_backward` or the previous stage on this rank takes them.
        if not stage.is_first:
            self._pending_gradients[action.stage, microbatch] = found

    def _weight_grad(self, action: Action) -> None:
        self.stages[action.stage].weight_grad(action.microbatch)
        self._parameters[action.stage].collect_gradients()

    def _send_forward(self, action: Action) -> None:
        self._transfers.send_forward(action, *self._pending_outputs.pop((action.stage, action.microbatch)))

    def _send_backward(self, action: Action) -> None:
        self._transfers.send_backward(action, self._pending_gradients.pop((action.stage, action.microbatch)))

    def _is_local(self, stage: int) -> bool:
        return self.schedule.rank_of_stage[stage] == self.rank

    def _schedule_of(
        self, schedule: Schedule | str, num_ranks: int, stages: Sequence[PipelineStage], num_microbatches: int | None
    ) -> Schedule:
        if isinstance(schedule, str):
            if num_microbatches is None:
                raise PipelineError(f"schedule {schedule!r} by name: expected num_microbatches too, got None")
            schedule = build_schedule(
                schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=len(stages)
            )
        elif not isinstance(schedule, Schedule):
            raise PipelineError(f"schedule: expected a Schedule or the name of one, got {schedule!r}")
        elif num_microbatches not in (None, schedule.num_microbatches):
            raise PipelineError(
                f"num_microbatches = {num_microbatches}, but the schedule is for {schedule.num_microbatches}"
            )
        if schedule.num_ranks != num_ranks:
            raise PipelineError(f"the schedule is for {schedule.num_ranks} ranks, got a mesh or group of {num_ranks}")
        # A schedule given by the user may deadlock; better an error here than ranks that wait forever.
        validate(schedule)
        return schedule


def _resolve_mesh(
    mesh: DeviceMesh | ProcessGroup | None, platform: Platform
) -> tuple[World, tuple[int, ...], DeviceMesh | None]:
    """Return the world, the pipeline's ranks in order, and the mesh if one was given."""
    if isinstance(mesh, DeviceMesh):
        return mesh.world, mesh.group_along().ranks, mesh
    world = current_world(platform)
    return world, tuple(range(world.size)) if mesh is None else as_group(mesh).ranks, None


def _check_kinds(stages: Sequence[Any]) -> None:
    if not stages:
        raise PipelineError("a pipeline needs at least one stage on every rank, got none")
    kinds = (type(each) for each in stages if not isinstance(each, PipelineStage))
    # With the module: torch has a class of the same name.
    wrong = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]
    if wrong:
        raise PipelineError(
            f"stages: expected hp_trainer.pipeline.PipelineStage(module, stage_index, num_stages) for each, got "
            f"{', '.join(wrong)}"
        )


def _checked_stages(stages: Sequence[PipelineStage], schedule: Schedule, rank: int) -> dict[int, PipelineStage]:
    expected = [stage for stage, owner in enumerate(schedule.rank_of_stage) if owner == rank]
    given = sorted(stage.stage_index for stage in stages)
    if given != expected or any(stage.num_stages != schedule.num_stages for stage in stages):
        raise PipelineError(
            f"rank {rank} of the pipeline: expected stages {expected} of {schedule.num_stages}, got "
            f"{', '.join(f'{stage.stage_index} of {stage.num_stages}' for stage in stages)}; the schedule places "
            f"stages 0 to {schedule.num_stages - 1} on ranks {list(schedule.rank_of_stage)}"
        )
    return {stage.stage_index: stage for stage in stages}
