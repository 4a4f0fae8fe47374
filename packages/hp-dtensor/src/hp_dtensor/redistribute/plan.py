"""Plans of redistributions: their steps, how they run, and their gradients.

A step acts on the local data of this rank and has no gradient of its own. The placements of a gradient follow from
those of its value (R -> R, S -> S, P -> R), so the backward of a redistribution is the redistribution of the gradient
from the target's gradient placements to the source's, whatever the steps are.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hp_dtensor.comm.collectives import grad_of_selected, saving_result
from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import ProcessGroup, Work, no_average_of
from hp_dtensor.comm.saved_tensors import SavedTensors
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.segments import Placements
from hp_dtensor.spec.placements import Partial, Placement, Replicate
from hp_dtensor.spec.tensor_spec import TensorSpec, describe

Tensor = Any

HINT_IF_RANKS_DIFFER = "If other ranks did not call it: hp_dtensor.check_mode() reports what they do instead."


class Step(ABC):
    """One collective, or one change of the local data alone.

    Attributes:
        name: `slice`, `scale`, `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all` (one axis from one
            dimension to another), `exchange` (each rank receives what it lacks) or `reduce_to_owners`.
        axes: the mesh axes whose ranks communicate, or whose placement changes.
        source, target: placements before and after, one per mesh axis.
        wire_bytes: bytes sent per rank, the mean over ranks.
        seconds: estimated time, by the plan's `Links`.
    """

    __slots__ = ("__dict__", "axes", "mesh", "name", "seconds", "source", "target", "wire_bytes")

    def __init__(
        self,
        name: str,
        mesh: DeviceMesh,
        axes: tuple[int, ...],
        source: Placements,
        target: Placements,
        wire_bytes: float,
        seconds: float,
    ) -> None:
        self.name, self.mesh, self.axes, self.source, self.target = name, mesh, axes, source, target
        self.wire_bytes, self.seconds = wire_bytes, seconds

    @abstractmethod
    def run(self, local: Tensor) -> Tensor:
        """Return this rank's local tensor after the step, outside autograd and in memory of its own."""

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        """Start the step and return a function that waits for its result. Until then `local` must not be written."""
        result = self.run(local)
        return lambda: result

    @property
    def selection(self) -> Callable[[Tensor], Tensor] | None:
        """Function that returns the result as a view of the local tensor; None if the step does more than select it."""
        return None

    @property
    def group(self) -> ProcessGroup:
        """Return the group of the ranks that communicate in this step."""
        return self.mesh.group_over(self.axes)

    @property
    def platform(self) -> Platform:
        return self.mesh.platform

    @property
    def coordinate(self) -> tuple[int, ...]:
        """Return the mesh coordinate of this rank, which is inside the mesh."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return coordinate


class Scale(Step):
    """Multiplication by `up` and division by `down`, which convert sums to averages or averages to sums."""

    up, down = 1, 1

    def run(self, local: Tensor) -> Tensor:
        platform = self.platform
        if not platform.is_floating(local.dtype):
            raise no_average_of(platform.dtype_name(local.dtype))
        return scaled(platform, local, self.up, self.down)


def scaled(platform: Platform, x: Tensor, up: int, down: int) -> Tensor:
    """Return `x * up / down`; factors of 1 cost nothing."""
    if up != 1:
        x = platform.ops.mul(x, up)
    return x if down == 1 else platform.ops.div(x, down)


def without_data(platform: Platform, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the result, of `shape`, of redistributing `local`, which has no data; its gradient has none either."""

    def forward(x: Tensor) -> Tensor:
        return platform.empty(shape, x.dtype, platform.device_of(x))

    def backward(grad: Tensor) -> Tensor:
        return platform.empty(before, grad.dtype, platform.device_of(grad))

    before = tuple(local.shape)
    return platform.linear_map(local, forward, backward)


def after(work: Work, finish: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function that waits for `work` and then returns `finish()`."""

    def wait() -> Tensor:
        work.wait()
        return finish()

    return wait


Result = TypeVar("Result")
Replan = Callable[[TensorSpec, TensorSpec, int], "RedistributePlan"]
"""Function of (source, target, bytes per element) that plans another redistribution, such as that of a gradient."""


@dataclass(frozen=True)
class Stage:
    """A sequence of steps with one gradient rule.

    Attributes:
        op: the reduction of partial results (`sum` for averages too).
        factors: (multiplier, divisor) that convert the sums computed by the steps to averages or back.
        replan: function that plans the redistribution of a gradient.
    """

    source: TensorSpec
    target: TensorSpec
    steps: tuple[Step, ...]
    op: str
    factors: tuple[int, int]
    itemsize: int
    replan: Replan = field(repr=False, compare=False)

    def run(self, local: Tensor) -> Tensor:
        platform = self.source.mesh.platform
        if self.selected_axes:
            return self._run_selecting(platform, local)
        if self._changes_nothing:
            return local
        return platform.linear_map(local, self._saving_data, self._gradient)

    def start_data(self, local: Tensor) -> Callable[[], Tensor]:
        """Start the steps and return a function that waits for the last one and returns the result of `run_data`."""
        if not self.steps:
            return lambda: local
        # Only the last step can run in the background: every other one is the input of the next.
        *first, last = self.steps
        for step in first:
            local = self._annotating(step, step.run, local)
        wait = self._annotating(last, last.start, local)
        return lambda: self._annotating(last, wait)

    def run_data(self, local: Tensor) -> Tensor:
        """Return this rank's data after the steps, without gradient."""
        for step in self.steps:
            try:
                local = step.run(local)
            except Exception as error:
                self._annotate(step, error)
                raise
        return local

    def _annotating(self, step: Step, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function of a step, and add rank and redistribution to its errors."""
        try:
            return function(*args)
        except Exception as error:
            self._annotate(step, error)
            raise

    def _annotate(self, step: Step, error: Exception) -> None:
        error.add_note(
            f"On rank {self.source.mesh.world.rank}, in {step.name} of the redistribution of {self.source!r} to "
            f"{self.target.describe_placements()}. {HINT_IF_RANKS_DIFFER}"
        )

    def run_backward(self, grad: Tensor) -> Tensor:
        """Return the gradient of the stage's input from that of its output."""
        # For example P -> S (reduce-scatter) has the backward S -> R (all-gather), and P -> R (all-reduce) has R -> R.
        grad = self._backward.run_data(grad)
        up, down = self.factors
        return scaled(self.source.mesh.platform, grad, up * self._num_copies, down)

    @functools.cached_property
    def _saving_data(self) -> Callable[[Tensor], Tensor]:
        """`run_data`, whose result recomputation may save if the steps communicate."""
        return saving_result(self.run_data) if any(step.axes for step in self.steps) else self.run_data

    @functools.cached_property
    def _gradient(self) -> Callable[[Tensor], Tensor]:
        """`run_backward`, or the identity where that changes nothing, as of a sum."""
        up, down = self.factors
        is_same = not self._backward.steps and up * self._num_copies == down == 1
        return (lambda grad: grad) if is_same else self.run_backward

    @functools.cached_property
    def _backward(self) -> RedistributePlan:
        return self.replan(*_grad_specs(self.source, self.target), self.itemsize)

    @functools.cached_property
    def _changes_nothing(self) -> bool:
        """True if neither value nor gradient changes, so that there is no autograd node either."""
        return not self.steps and not self._backward.steps and self._num_copies == 1

    @functools.cached_property
    def _num_copies(self) -> int:
        """Number of ranks that hold a copy of a value which became partial max or min. They share its gradient."""
        pairs = zip(self.source.mesh.shape, self.source.placements, self.target.placements, strict=True)
        return math.prod(n for n, s, t in pairs if s != t and t in (Partial("max"), Partial("min")))

    @functools.cached_property
    def selected_axes(self) -> tuple[int, ...]:
        """Axes that are reduced by max, min or product, whose gradient depends on the values."""
        if self.op == "sum":
            return ()
        pairs = enumerate(zip(self.source.mesh.shape, self.source.placements, self.target.placements, strict=True))
        return tuple(a for a, (n, s, t) in pairs if n > 1 and s.is_partial() and s != t)

    def _run_selecting(self, platform: Platform, local: Tensor) -> Tensor:
        saved: list[SavedTensors] = []

        def forward(x: Tensor) -> Tensor:
            result = saving_result(self.run_data)(x)
            # The gradient of a maximum goes to the ranks that had it, so input and result are saved, with their version
            # counters: a write to either between forward and backward would select other ranks.
            saved[:] = [SavedTensors(platform, x, result)]
            return result

        def backward(grad: Tensor) -> list[Tensor]:
            return [self._grad_of_selected(platform, grad, *saved[0].tensors)]

        return platform.custom_function(forward, backward, local)

    def _grad_of_selected(self, platform: Platform, grad: Tensor, x: Tensor, result: Tensor) -> Tensor:
        reduced = self.source.with_placements(
            [Replicate() if a in self.selected_axes else p for a, p in enumerate(self.source.placements)]
        )
        # Input and result are compared element by element, so the result and its gradient are first redistributed to
        # the source's placements on the axes that were not reduced.
        back = self.replan(self.target, reduced, self.itemsize)
        grad, result = scaled(platform, back.run_data(grad), self._num_copies, 1), back.run_data(result)
        return grad_of_selected(grad, x, result, self.source.mesh.group_over(self.selected_axes), self.op)


@dataclass(frozen=True)
class RedistributePlan:
    """The steps from one spec to another, ready to run. `print` explains them."""

    source: TensorSpec
    target: TensorSpec
    itemsize: int
    stages: tuple[Stage, ...] = field(repr=False)
    replan: Replan = field(repr=False, compare=False)

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        return tuple(step for stage in self.stages for step in stage.steps)

    @property
    def wire_bytes(self) -> float:
        """Bytes sent per rank, the mean over the ranks of the mesh."""
        return math.fsum(step.wire_bytes for step in self.steps)

    @property
    def seconds(self) -> float:
        """Estimated time of all steps."""
        return math.fsum(step.seconds for step in self.steps)

    def run(self, local: Tensor) -> Tensor:
        """Return this rank's `local` (plain) redistributed; differentiable."""
        if self.is_outside_mesh:
            return local
        platform = self.source.mesh.platform
        if platform.is_meta(local):
            return without_data(platform, local, self.target.local_shape)
        for stage in self.stages:
            local = stage.run(local)
        return local

    def start_data(self, local: Tensor) -> Callable[[], Tensor]:
        """Start `run_data` of a plan with steps; return a function that waits for the last one, in the background."""
        *first, last = self.stages
        for stage in first:
            local = stage.run_data(local)
        return last.start_data(local)

    def record(self, local: Tensor, result: Tensor) -> Tensor:
        """Return `run_data`'s result with the autograd node that `run` would create. Not for a plan that `selects`."""
        return self._record_with(local, result, self.run_backward)

    def _record_with(self, local: Tensor, result: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `result` with an autograd node that leads to `local` by `backward`."""
        platform = self.source.mesh.platform
        # The first call takes the result out: the node lives longer and must not hold it. A later call, for a second
        # derivative, runs the plan again.
        held = [platform.detach(result)]
        return platform.linear_map(local, lambda x: held.pop() if held else self.run_data(x), backward)

    def run_backward(self, grad: Tensor) -> Tensor:
        """Return the gradient of the input of `run_data` from that of its result. Not for a plan that `selects`."""
        if self.is_outside_mesh:
            return grad
        for stage in reversed(self.stages):
            grad = stage.run_backward(grad)
        return grad

    @functools.cached_property
    def selects(self) -> bool:
        """Return whether a stage reduces by max, min or product. The gradient then depends on the values."""
        return any(stage.selected_axes for stage in self.stages)

    def run_data(self, local: Tensor) -> Tensor:
        """Return this rank's `local` (plain) redistributed, without gradient."""
        if self.is_outside_mesh:
            return local
        for stage in self.stages:
            local = stage.run_data(local)
        return local

    @functools.cached_property
    def selection(self) -> Callable[[Tensor], Tensor] | None:
        """See `Step.selection`; None also for plans of several steps."""
        return None if self.is_outside_mesh or len(self.steps) != 1 else self.steps[0].selection

    @functools.cached_property
    def is_outside_mesh(self) -> bool:
        """Return whether this rank is outside the mesh, so that it holds no data."""
        return self.source.mesh.get_coordinate() is None

    def varies_cheaply(self, axes: tuple[int, ...]) -> bool:
        """Return whether `run_varying` sends fewer bytes in backward than a varying view of the gathered result.

        It does if the plan gathers over one of `axes` and has no partial results.
        """
        return (
            self.may_vary_cheaply
            and all(self.target.placements[a].is_replicate() for a in axes)
            and any(self.source.placements[a].is_shard() for a in axes)
        )

    @functools.cached_property
    def may_vary_cheaply(self) -> bool:
        """True if there are axes for which `varies_cheaply` is true."""
        pairs = list(zip(self.source.placements, self.target.placements, strict=True))
        gathers = any(s.is_shard() and t.is_replicate() for s, t in pairs)
        return gathers and not any(isinstance(p, Partial) for pair in pairs for p in pair)

    def run_varying(self, local: Tensor, result: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Return `result`, computed by this plan from `local`, for a use that differs between the ranks of `axes`.

        Forward communicates nothing. Backward redistributes the gradient straight to the source's placements, which for
        an all-gather is one reduce-scatter.
        """
        # The gradient of R -> V is partial, so that of S -> R -> V is P -> S: one reduce-scatter. Through the gathered
        # tensor it would be an all-reduce and a slice.
        comes = self.target.with_placements(
            [Partial() if a in axes else p for a, p in enumerate(self.target.placements)]
        )
        back = self.replan(comes, self.source, self.itemsize)
        return self._record_with(local, result, back.run_data)

    def __str__(self) -> str:
        names = self.source.mesh.mesh_dim_names
        lines = [
            f"{self.source.describe_placements()} -> {self.target.describe_placements()}: "
            f"{self.wire_bytes:.0f} bytes per rank, {self.seconds * 1e6:.0f} us"
        ]
        for step in self.steps:
            over = f" over {'+'.join(names[a] for a in step.axes)}" if step.axes else ""
            lines.append(f"  {step.name}{over}: {_changes(names, step)}, {step.wire_bytes:.0f} bytes")
        return "\n".join(lines if self.steps else [*lines, "  nothing to do"])


def _changes(names: tuple[str, ...], step: Step) -> str:
    if step.name == "reduce_to_owners" and step.source != step.target:
        return " ".join(f"{names[a]}:{describe(step.source[a])} summed" for a in step.axes)
    changes = [
        f"{name}:{describe(s)}->{describe(t)}"
        for name, s, t in zip(names, step.source, step.target, strict=True)
        if s != t
    ]
    return " ".join(changes) or "in place"


def _grad_specs(source: TensorSpec, target: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    """Return the specs of the target's and of the source's gradient."""

    def placed(spec: TensorSpec) -> TensorSpec:
        result: list[Placement] = []
        for s, t, p in zip(source.placements, target.placements, spec.placements, strict=True):
            # An axis that stays partial max or min passes its gradient through unchanged. Everywhere else a gradient
            # is placed as its value, but P -> R: every contribution to a sum has the gradient of the sum.
            unchanged = s == t and isinstance(s, Partial) and s.reduce_op not in ("sum", "avg")
            result.append(p if unchanged or not isinstance(p, Partial) else Replicate())
        return spec.with_placements(result)

    return placed(target), placed(source)
