"""The schedule classes of torch.distributed.pipelining on top of `Pipeline`, with the same names and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hp_dtensor.tensor.conversions import local_of
from hp_trainer.exceptions import PipelineError, ScheduleError
from hp_trainer.pipeline.execution import LossFunction, Pipeline
from hp_trainer.pipeline.stage import PipelineStage

Tensor = Any


class PipelineSchedule:
    """Base of the schedule classes. As with torch's classes, all steps must have equal shapes."""

    schedule_name: ClassVar[str]

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFunction | None,
        scale_grads: bool,
        **options: Any,
    ) -> None:
        self._stages = list(stages) if isinstance(stages, Sequence) else [stages]
        self._scale_grads = scale_grads
        self.pipeline = Pipeline(
            self._stages,
            self.schedule_name,
            # Anything else than stages is refused by `Pipeline`.
            getattr(self._stages[0], "group", None) if self._stages else None,
            loss_fn,
            num_microbatches=n_microbatches,
            fixed_shapes=True,
            **options,
        )

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of one batch; see `Pipeline.step`."""
        options: dict[str, Any] = {"losses": losses, "return_outputs": return_outputs, "loss_kwargs": loss_kwargs}
        output = self.pipeline.step(*args, target=target, **options, **kwargs)
        if self._scale_grads and self.pipeline.loss_fn is not None:
            self._divide_gradients()
        return output

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Run the forward of one batch; see `Pipeline.eval`, whose further arguments are taken too."""
        return self.pipeline.eval(*args, target=target, losses=losses, **kwargs)

    def _divide_gradients(self) -> None:
        """Divide all gradients by the number of micro-batches, those of earlier steps too, as torch does."""
        platform, number = self.pipeline.platform, self.pipeline.num_microbatches
        # By identity, so that a parameter that stages share is divided once.
        modules = {id(stage.submod): stage.submod for stage in self._stages}.values()
        parameters = {id(p): p for module in modules for _, p in platform.named_parameters(module)}.values()
        grads = [grad for p in parameters if (grad := platform.get_grad(p)) is not None]
        with platform.no_grad():
            for grad in (local_of(platform, each) for each in grads):
                # In place: gradients of FSDP are views of the buffer that the optimizer reads.
                platform.copy_(grad, platform.ops.div(grad, number))


class PipelineScheduleSingle(PipelineSchedule):
    """Base of the schedules with one stage per rank.

    Args:
        stage: this rank's stage. Its `group` defines the ranks of the pipeline.
        n_microbatches: number of micro-batches of a step.
        loss_fn: loss of (output, target) of a micro-batch; None if `step` runs no backward.
        args_chunk_spec, kwargs_chunk_spec, output_merge_spec: as for `Pipeline`.
        scale_grads: divide gradients by `n_microbatches` after a step, for a `loss_fn` that computes a mean.

    Raises:
        PipelineError: the stage is not the one that the schedule assigns to this rank.
        ScheduleError: `n_microbatches` is below one.

    Examples:
        >>> issubclass(get_schedule_class("1f1b"), PipelineScheduleSingle)
        True
    """

    def __init__(
        self,
        stage: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
    ) -> None:
        super().__init__(
            stage,
            n_microbatches,
            loss_fn,
            scale_grads,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
        )


class PipelineScheduleMulti(PipelineSchedule):
    """Base of the schedules with several stages per rank.

    Args:
        stages: this rank's stages.
        n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads: as for
            `PipelineScheduleSingle`.
        backward_requires_autograd: must be True.
        defer_pp_recv: post the receive of a message when a computation needs it, not before.

    Raises:
        PipelineError: the stages are not those that the schedule assigns to this rank.
        ScheduleError: the schedule does not support this number of stages.

    Examples:
        >>> issubclass(get_schedule_class("DualPipeV"), PipelineScheduleMulti)
        True
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        if not backward_requires_autograd:
            raise PipelineError(
                f"{type(self).__name__}: backward_requires_autograd=False is for backwards that are registered "
                "functions, which are not taken; leave it out, and give PipelineStage a dw_builder, or the module an "
                "autograd function, for gradients of your own"
            )
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            scale_grads,
            defers_receives=defer_pp_recv,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
        )


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards (arXiv 1811.06965).

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,), ("pp",))
        ...     with nn.building(platform):
        ...         stage = PipelineStage(nn.Linear(4, 4), mesh.get_rank(), 2, group=mesh["pp"])
        ...     schedule, losses = ScheduleGPipe(stage, 2, lambda y, target: y.mean()), []
        ...     x = platform.ops.ones((4, 4), platform.dtype("float32"))
        ...     schedule.step(*([x] if stage.is_first else []), losses=losses)
        ...     return len(losses)
        >>> run_ranks(program, 2)
        [0, 2]
    """

    schedule_name = "gpipe"


class Schedule1F1B(PipelineScheduleSingle):
    """Alternating forward and backward after a warm-up.

    Examples:
        >>> get_schedule_class("1F1B") is Schedule1F1B
        True
    """

    schedule_name = "1f1b"


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    """1F1B with several stages per rank (arXiv 2104.04473).

    Examples:
        >>> get_schedule_class("interleaved1f1b") is ScheduleInterleaved1F1B
        True
    """

    schedule_name = "interleaved_1f1b"


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """GPipe with several stages per rank (arXiv 2211.05953).

    Examples:
        >>> get_schedule_class("LoopedBFS") is ScheduleLoopedBFS
        True
    """

    schedule_name = "gpipe"

    # Torch's class alone lacks the two arguments before `output_merge_spec`.
    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
    ) -> None:
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            backward_requires_autograd,
            defer_pp_recv,
        )


class ScheduleInterleavedZeroBubble(PipelineScheduleMulti):
    """Several stages per rank, with split backwards (arXiv 2401.10241).

    Examples:
        >>> get_schedule_class("InterleavedZeroBubble") is ScheduleInterleavedZeroBubble
        True
    """

    schedule_name = "interleaved_zero_bubble"


class ScheduleZBVZeroBubble(PipelineScheduleMulti):
    """Two stages per rank in a V, with split backwards (arXiv 2401.10241, section 6).

    Examples:
        >>> get_schedule_class("ZBVZeroBubble") is ScheduleZBVZeroBubble
        True
    """

    schedule_name = "zero_bubble_v"


class ScheduleDualPipeV(PipelineScheduleMulti):
    """Two stages per rank in a V, alternating forwards and backwards (arXiv 2412.19437).

    Examples:
        >>> get_schedule_class("DualPipeV") is ScheduleDualPipeV
        True
    """

    schedule_name = "dualpipe_v"


# Complete: all subclasses are defined above.
_BASES = (PipelineScheduleSingle, PipelineScheduleMulti)
_BY_NAME = {cls.__name__.removeprefix("Schedule"): cls for base in _BASES for cls in base.__subclasses__()}


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """Return the schedule class for torch's name of a schedule, ignoring case.

    Raises:
        ScheduleError: there is no such class; the message lists the names.

    Examples:
        >>> get_schedule_class("gpipe").__name__
        'ScheduleGPipe'
    """
    # torch ignores case too.
    found = {name.lower(): each for name, each in _BY_NAME.items()}.get(schedule_name.lower())
    if found is None:
        raise ScheduleError(f"unknown schedule name {schedule_name!r}; expected one of {', '.join(_BY_NAME)}")
    return found
