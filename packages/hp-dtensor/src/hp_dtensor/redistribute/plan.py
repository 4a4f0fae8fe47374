"""Base of a plan's steps: each acts on this rank's local data; the plan has the gradient.

A redistribution ready to run, with its gradient.

The gradient of a value has the placements that follow from the value's (R -> R, S -> S, P -> R), so the
backward of a redistribution is the redistribution of the gradient from the target's to the source's: one
rule for every plan, whatever its steps.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hp_dtensor.comm.collectives import grad_of_selected, staying
from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import ProcessGroup, Work, no_average_of
from hp_dtensor.comm.saved_tensors import Kept
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.segments import Placements
from hp_dtensor.spec.placements import Partial, Placement, Replicate
from hp_dtensor.spec.tensor_spec import TensorSpec, describe

Tensor = Any

IF_OTHERS_DIFFER = "If other ranks did not come to it: hp_dtensor.check_mode() tells what they do instead."


class Step(ABC):
    """One collective, or one change of the local data alone.

    Attributes:
        name: `slice`, `scale`, `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all` (one axis from one
            dimension to another), `exchange` (each rank receives what it lacks), `reduce_to_owners`.
        axes: the mesh axes whose ranks communicate, or whose placement changes.
        source, target: placements before and after, one per mesh axis.
        wire_bytes: sent per rank, the mean over ranks.
        seconds: by the cost model.
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
        """Return this rank's local tensor after the step, as data; the result is a tensor of its own."""

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        """Begin the step; return a function that waits and gives the result. `local` must not change before."""
        result = self.run(local)
        return lambda: result

    @property
    def group(self) -> ProcessGroup:
        return self.mesh.group_over(self.axes)

    @property
    def platform(self) -> Platform:
        return self.mesh.platform

    @property
    def coordinate(self) -> tuple[int, ...]:
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return coordinate


class Scale(Step):
    """Scaling of averages to sums, or of sums to averages: times `up`, divided by `down`."""

    up, down = 1, 1

    def run(self, local: Tensor) -> Tensor:
        platform = self.platform
        if not platform.is_floating(local.dtype):
            raise no_average_of(platform.dtype_name(local.dtype))
        return scaled(platform, local, self.up, self.down)


def scaled(platform: Platform, x: Tensor, up: int, down: int) -> Tensor:
    if up != 1:
        x = platform.ops.mul(x, up)
    return x if down == 1 else platform.ops.div(x, down)


def after(work: Work, finish: Callable[[], Tensor]) -> Callable[[], Tensor]:
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
        op: how partial results are reduced (`sum` also for averages).
        factors: (times, divided by): how averages differ from the sums that the steps compute.
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
        # Not even a node of autograd, where the gradient stays as it is, too.
        if not self.steps and not self._backward.steps and self._repeated == 1:
            return local
        return platform.linear_map(local, staying(self.run_data), self.run_backward)

    def start_data(self, local: Tensor) -> Callable[[], Tensor]:
        """Begin the steps and return a function that waits for the last one and gives `run_data`'s result."""
        if not self.steps:
            return lambda: local
        # Only the last step can go on by itself: each of the others waits for the one before it.
        *first, last = self.steps
        for step in first:
            local = self._noting(step, step.run, local)
        under_way = self._noting(last, last.start, local)
        return lambda: self._noting(last, under_way)

    def run_data(self, local: Tensor) -> Tensor:
        """Return this rank's data after the steps, without gradient."""
        for step in self.steps:
            local = self._noting(step, step.run, local)
        return local

    def _noting(self, step: Step, part: Callable[..., Result], *args: Any) -> Result:
        """Return the result of a part of the step; add to its errors where they happened."""
        try:
            return part(*args)
        except Exception as error:
            error.add_note(
                f"On rank {self.source.mesh.world.rank}, in {step.name} of the redistribution of {self.source!r} to "
                f"{self.target.describe_placements()}. {IF_OTHERS_DIFFER}"
            )
            raise

    def run_backward(self, grad: Tensor) -> Tensor:
        """Return the gradient of the stage's input from that of its output."""
        # The dual: P -> S (reduce-scatter) has S -> R (all-gather) as its backward, P -> R (all-reduce) has R -> R.
        grad = self._backward.run_data(grad)
        up, down = self.factors
        return scaled(self.source.mesh.platform, grad, up * self._repeated, down)

    @functools.cached_property
    def _backward(self) -> RedistributePlan:
        return self.replan(*_grad_specs(self.source, self.target), self.itemsize)

    @functools.cached_property
    def _repeated(self) -> int:
        """Number of ranks over which a value was repeated as partial max or min; each of them gets its share of the
        gradient.
        """
        pairs = zip(self.source.mesh.shape, self.source.placements, self.target.placements, strict=True)
        return math.prod(n for n, s, t in pairs if s != t and t in (Partial("max"), Partial("min")))

    # Reductions that select -------------------------------------------------------------------------------

    @functools.cached_property
    def selected_axes(self) -> tuple[int, ...]:
        """Axes that are reduced by max, min or product."""
        if self.op == "sum":
            return ()
        pairs = enumerate(zip(self.source.mesh.shape, self.source.placements, self.target.placements, strict=True))
        return tuple(a for a, (n, s, t) in pairs if n > 1 and s.is_partial() and s != t)

    def _run_selecting(self, platform: Platform, local: Tensor) -> Tensor:
        kept: list[Kept] = []

        def forward(x: Tensor) -> Tensor:
            result = staying(self.run_data)(x)
            # A maximum's gradient goes to the ranks whose value it was, so both sides are kept, with their version
            # counters: a write to either between forward and backward would pick other winners.
            kept[:] = [Kept(platform, x, result)]
            return result

        def backward(grad: Tensor) -> list[Tensor]:
            return [self._grad_of_selected(platform, grad, *kept[0].tensors)]

        return platform.custom_function(forward, backward, local)

    def _grad_of_selected(self, platform: Platform, grad: Tensor, x: Tensor, result: Tensor) -> Tensor:
        whole = self.source.with_placements(
            [Replicate() if a in self.selected_axes else p for a, p in enumerate(self.source.placements)]
        )
        # Values are compared where they were before the reduction: the result is brought back to the source's other
        # placements, with the gradient, which goes the same way.
        back = self.replan(self.target, whole, self.itemsize)
        grad, result = scaled(platform, back.run_data(grad), self._repeated, 1), back.run_data(result)
        return grad_of_selected(grad, x, result, self.source.mesh.group_over(self.selected_axes), self.op)


@dataclass(frozen=True)
class RedistributePlan:
    """The steps from one spec to another; `print` explains them."""

    source: TensorSpec
    target: TensorSpec
    itemsize: int
    stages: tuple[Stage, ...] = field(repr=False)
    replan: Replan = field(repr=False, compare=False)

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(step for stage in self.stages for step in stage.steps)

    @property
    def wire_bytes(self) -> float:
        """Bytes sent per rank, the mean over the mesh's ranks."""
        return math.fsum(step.wire_bytes for step in self.steps)

    @property
    def seconds(self) -> float:
        """Time of the steps by the cost model."""
        return math.fsum(step.seconds for step in self.steps)

    def run(self, local: Tensor) -> Tensor:
        """Return this rank's `local` (plain) redistributed; differentiable."""
        if self.is_elsewhere:
            return local
        platform = self.source.mesh.platform
        if platform.is_meta(local):
            return platform.empty(self.target.local_shape, local.dtype, platform.device_of(local))
        for stage in self.stages:
            local = stage.run(local)
        return local

    def start_data(self, local: Tensor) -> Callable[[], Tensor]:
        """Begin what `run_data` does and return a function that waits and gives its result.

        The last step goes on by itself; what comes before is done first.
        """
        *first, last = self.stages
        for stage in first:
            local = stage.run_data(local)
        return last.start_data(local)

    def record(self, local: Tensor, result: Tensor) -> Tensor:
        """Return `result`, which `run_data` has given for `local`, recorded as `run` would record it.

        Not for a plan with a stage that `selects`.
        """
        return self._at_hand(local, result, self.run_backward)

    def _at_hand(self, local: Tensor, result: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `result` recorded as computed from `local`, with this `backward`."""
        platform = self.source.mesh.platform
        # Taken by the first call and not kept: the node outlives it, and a second derivative runs the plan anew.
        held = [platform.detach(result)]
        return platform.linear_map(local, lambda x: held.pop() if held else self.run_data(x), backward)

    def run_backward(self, grad: Tensor) -> Tensor:
        """Return the gradient of `run_data`'s input from that of its result; not for a plan that `selects`."""
        if self.is_elsewhere:
            return grad
        for stage in reversed(self.stages):
            grad = stage.run_backward(grad)
        return grad

    @property
    def selects(self) -> bool:
        """Return whether a stage reduces by max, min or product, so that its gradient depends on the values."""
        return any(stage.selected_axes for stage in self.stages)

    def run_data(self, local: Tensor) -> Tensor:
        """Return this rank's `local` (plain) redistributed, without gradient."""
        if self.is_elsewhere:
            return local
        for stage in self.stages:
            local = stage.run_data(local)
        return local

    @property
    def is_elsewhere(self) -> bool:
        """Return whether this rank is outside the mesh and holds nothing."""
        return self.source.mesh.get_coordinate() is None

    # A use of the result that differs per rank --------------------------------------------------------------

    def varies_cheaply(self, axes: tuple[int, ...]) -> bool:
        """Return whether `run_varying` saves bytes: on one of `axes` the source is sharded and the target is not."""
        return (
            self.may_vary_cheaply
            and all(self.target.placements[a].is_replicate() for a in axes)
            and any(self.source.placements[a].is_shard() for a in axes)
        )

    @functools.cached_property
    def may_vary_cheaply(self) -> bool:
        """True if there are axes for which `varies_cheaply`."""
        pairs = list(zip(self.source.placements, self.target.placements, strict=True))
        gathers = any(s.is_shard() and t.is_replicate() for s, t in pairs)
        return gathers and not any(isinstance(p, Partial) for pair in pairs for p in pair)

    def run_varying(self, local: Tensor, result: Tensor, axes: tuple[int, ...]) -> Tensor:
        """Return `result`, which the plan has given for `local`, for a use that differs between the ranks of `axes`.

        Nothing is communicated forward; the gradient goes straight to the source's placements, which for an
        all-gather is one reduce-scatter.
        """
        # R -> V has P as its gradient, so S -> R -> V goes back as P -> S: a reduce-scatter, where the views one by one
        # would cost an all-reduce and a slice.
        comes = self.target.with_placements(
            [Partial() if a in axes else p for a, p in enumerate(self.target.placements)]
        )
        back = self.replan(comes, self.source, self.itemsize)
        return self._at_hand(local, result, back.run_data)

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
    """Return the specs of the gradient as it comes and as it is wanted. An axis that stays partial max or min keeps its
    placement.
    """

    def placed(spec: TensorSpec) -> TensorSpec:
        result: list[Placement] = []
        for s, t, p in zip(source.placements, target.placements, spec.placements, strict=True):
            stands_still = s == t and isinstance(s, Partial) and s.reduce_op not in ("sum", "avg")
            # The type of a gradient follows from the value's (P -> R): every contribution to a sum has the gradient of
            # the sum itself. An axis that no step touches hands on what it got.
            result.append(p if stands_still or not isinstance(p, Partial) else Replicate())
        return spec.with_placements(result)

    return placed(target), placed(source)
