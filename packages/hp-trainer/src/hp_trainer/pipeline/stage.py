"""Pipeline stages, their sharded parameters, and weights that are tied between stages.

`PipelineStage` runs forwards and (split) backwards of a module and holds its micro-batches in flight. `StageParameters`
decides when parameters sharded by `fully_shard` are gathered and their gradients reduced. `TiedWeights` keeps copies of
a weight on several stages equal by summing their gradients.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, as_group, require_mesh
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel.recompute import detect_checkpoint
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import platform_of
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import tensors_in
from hp_fsdp import FSDPModule, GatheredStep
from hp_trainer._coordination import all_gather_object
from hp_trainer.exceptions import PipelineError
from hp_trainer.pipeline.transfers import MessageLayout, TensorMeta, as_distributed, layout_of

Tensor = Any
Module = Any


class PipelineStage:
    """A module that computes one stage of a pipeline. Name and first parameters follow torch's `PipelineStage`.

    Args:
        submodule: called with the output of the previous stage (with its items, if it is a tuple or list) and the
            keyword arguments that this rank passes to `step`. The first stage gets the positional arguments of `step`.
        stage_index: index of the stage, from 0.
        num_stages: number of stages of the pipeline.
        device: accepted for compatibility with torch; tensors are created on the platform's device.
        input_args, output_args: example tensors of a micro-batch: one, or a tuple. Shapes and dtypes of inputs and
            outputs are checked against them; without them the first message has them.
        output_grads, input_grads: example gradients, or None for an output or input without one; checked likewise. A
            gradient has the shape and dtype of its tensor.
        group: ranks of the pipeline, as a mesh (`mesh["pp"]`) or a process group; None for all ranks.
        dw_builder: for a module that defers its weight gradients itself: called after each backward, returns the
            function that computes them. A split backward calls that function later, an unsplit one at once.
        get_mesh: called with the names of the mesh axes of a received DTensor, and None; returns its mesh. Without it,
            it is found from `group`, which then is a mesh.

    Raises:
        PipelineError: `stage_index` is out of range, an example is no tensor, or a micro-batch differs from the
            examples.

    Examples:
        >>> with nn.building(platform):
        ...     stage = PipelineStage(nn.Linear(4, 4), 0, 2)
        >>> stage.is_first, stage.is_last
        (True, False)
    """

    def __init__(
        self,
        submodule: Module,
        stage_index: int,
        num_stages: int,
        device: Any = None,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: Any = None,
        dw_builder: Callable[[], Callable[[], Any]] | None = None,
        get_mesh: Callable[[tuple[str, ...], None], Any] | None = None,
        *,
        platform: Platform | str | None = None,
    ) -> None:
        if not 0 <= stage_index < num_stages:
            raise PipelineError(f"stage_index {stage_index}: expected a number from 0, below num_stages = {num_stages}")
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.group = group
        self.platform = platform_of(submodule, platform)
        self._dw_builder, self._get_mesh = dw_builder, get_mesh
        self._inputs = self._examples(input_args=input_args, input_grads=input_grads)
        self._outputs = self._examples(output_args=output_args, output_grads=output_grads)
        self._in_flight: dict[int, _MicroBatch] = {}

    @property
    def is_first(self) -> bool:
        """True if this stage gets the batch."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """True if the loss is computed from this stage's output."""
        return self.stage_index == self.num_stages - 1

    @property
    def num_in_flight(self) -> int:
        """Number of micro-batches whose activations are held now."""
        return len(self._in_flight)

    def forward_first(self, microbatch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of the first stage on the user's arguments and return its output."""
        return self._run(microbatch, [], args, kwargs)

    def forward(
        self,
        microbatch: int,
        layout: MessageLayout,
        received: Sequence[Tensor],
        kwargs: dict[str, Any],
        mesh: DeviceMesh | None,
    ) -> Any:
        """Run the forward on the outputs of the previous stage (local tensors) and return the output."""
        platform, leaves, inputs = self.platform, [], []
        for meta, tensor in zip(layout.tensors, received, strict=True):
            # A new leaf, also if the previous stage is on this rank: its backward is an action of its own, so its graph
            # must end here.
            leaf = platform.detach(tensor)
            if meta.requires_grad and platform.is_grad_enabled():
                platform.set_requires_grad(leaf, True)
                leaves.append(leaf)
            inputs.append(as_distributed(leaf, meta, self._mesh_of(meta, mesh), f"stage {self.stage_index}"))
        tree = layout.rebuild(inputs)
        # As torch does: a tuple or list of outputs becomes the positional arguments.
        args = tuple(tree) if isinstance(tree, (tuple, list)) else (tree,)
        return self._run(microbatch, leaves, args, kwargs)

    def _run(self, microbatch: int, leaves: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check(self._inputs, args)
        # Whether a part of the module is checkpointed is known only after its forward has run.
        with detect_checkpoint() as is_recomputed:
            output = self.call(args, kwargs)
        self._check(self._outputs, output)
        # Evaluation runs no backward, so nothing is held.
        if self.platform.is_grad_enabled():
            self._in_flight[microbatch] = _MicroBatch(leaves, is_recomputed())
        return output

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the module. Override this if the module is called differently."""
        return self.submod(*args, **kwargs)

    def outputs(self, microbatch: int, output: Any) -> tuple[MessageLayout, list[Tensor]]:
        """Return the layout and local tensors of an output, and save the roots of its backward."""
        layout, tensors = layout_of(self.platform, output, f"stage {self.stage_index}")
        # Backward starts at the local tensors that are sent, since the gradients that come back have their shapes.
        locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        if microbatch in self._in_flight:
            pairs = zip(layout.tensors, locals_, strict=True)
            self._in_flight[microbatch].roots = [tensor for meta, tensor in pairs if meta.requires_grad]
        return layout, locals_

    def save_loss(self, microbatch: int, loss: Tensor) -> None:
        """Save the loss as the root of the last stage's backward."""
        self._in_flight[microbatch].roots = [loss]

    def backward(self, microbatch: int, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        """Accumulate the gradients of the parameters and return those of the received inputs.

        Args:
            gradients: gradients of the outputs that require one; None if the root is a loss.
        """
        found = self._unsplit_backward(self._in_flight.pop(microbatch), gradients)
        if self._dw_builder is not None:
            self._dw_builder()()
        return found

    def input_grad(self, microbatch: int, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the gradients of the received inputs; `weight_grad` computes those of the parameters later.

        If the backward cannot be split, this runs all of it and `weight_grad` does nothing: on platforms without
        support, and in stages with recomputation. With a `dw_builder` the module itself defers its weight gradients.
        """
        run = self._in_flight[microbatch]
        if self._dw_builder is not None:
            found = self._unsplit_backward(run, gradients)
            run.finish = self._dw_builder()
            return found
        # No output of this stage requires a gradient.
        if not run.roots:
            return self._unsplit_backward(run, gradients)
        if not run.leaves:
            # No input requires a gradient, so the whole backward is weight gradients and is deferred. The closure holds
            # the roots instead of `run`, which holds the closure: a reference cycle would keep the outputs alive until
            # Python's cycle collector runs.
            run.finish = functools.partial(run_backward, self.platform, run.roots, gradients)
            run.roots = []
            return []
        # Between both parts the recomputed activations would have to be held, which recomputation is meant to avoid.
        if run.is_recomputed or not self.platform.splits_backward:
            return self._unsplit_backward(run, gradients)
        given = [None] if gradients is None else list(gradients)
        found, run.finish = self.platform.split_backward(run.roots, given, run.leaves)
        # Dropped now, so that the outputs and inputs are freed before the weight gradient runs.
        leaves, run.roots, run.leaves = run.leaves, [], []
        return [self._or_zeros(leaf, grad) for leaf, grad in zip(leaves, found, strict=True)]

    def weight_grad(self, microbatch: int) -> None:
        """Accumulate the gradients of the parameters that `input_grad` deferred."""
        run = self._in_flight.pop(microbatch)
        run.finish()

    def _unsplit_backward(self, run: _MicroBatch, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        """Run all of a backward, and return the gradients of the received inputs."""
        run_backward(self.platform, run.roots, gradients)
        # Frees outputs and inputs: `run` may remain until its `weight_grad`.
        leaves, run.roots, run.leaves = run.leaves, [], []
        return [self._or_zeros(leaf, self.platform.get_grad(leaf)) for leaf in leaves]

    def _or_zeros(self, leaf: Tensor, grad: Tensor | None) -> Tensor:
        """Return the gradient of an input; zeros if the stage did not use it, since the previous stage expects one."""
        return self.platform.zeros(tuple(leaf.shape), leaf.dtype) if grad is None else grad

    def reset(self) -> None:
        """Discard the micro-batches in flight after an error."""
        self._in_flight.clear()

    def _mesh_of(self, meta: TensorMeta, mesh: DeviceMesh | None) -> DeviceMesh | None:
        """Return a mesh with the axes of a received DTensor: that of `get_mesh`, or else that of the pipeline."""
        if not meta.axes or self._get_mesh is None:
            return mesh
        return require_mesh("get_mesh", self._get_mesh(tuple(axis[0] for axis in meta.axes), None))

    def _examples(self, **given: Any) -> dict[str, list[str | None]]:
        """Return dtype and shape of each example tensor, by the argument that has them."""
        found = {}
        for name, examples in given.items():
            if examples is None:
                continue
            listed = examples if isinstance(examples, (tuple, list)) else (examples,)
            allowed = (self.platform.Tensor, type(None)) if name.endswith("grads") else (self.platform.Tensor,)
            if wrong := [type(x).__name__ for x in listed if not isinstance(x, allowed)]:
                raise PipelineError(
                    f"PipelineStage {self.stage_index}: expected a tensor or a tuple of tensors as {name}, got "
                    f"{', '.join(wrong)}"
                )
            found[name] = [None if x is None else _form(self.platform, x) for x in listed]
        return found

    def _check(self, examples: dict[str, list[str | None]], tree: Any) -> None:
        """Compare the tensors of an input or output with the examples."""
        for name, expected in examples.items():
            found = [_form(self.platform, x) for x in tensors_in(tree, self.platform.Tensor)]
            if len(found) != len(expected) or any(a not in (None, b) for a, b in zip(expected, found, strict=True)):
                raise PipelineError(
                    f"stage {self.stage_index}: expected {', '.join(map(str, expected))} of each micro-batch, as in "
                    f"{name}, got {', '.join(found)}; change {name}, or leave it out"
                )


class _MicroBatch:
    """A micro-batch between its forward and its backward.

    Attributes:
        is_recomputed: whether its backward recomputes activations.
        leaves: received inputs that require a gradient.
        roots: tensors from which its backward starts: local outputs that require a gradient, or the loss.
        finish: computes the deferred gradients of the parameters.
    """

    __slots__ = ("finish", "is_recomputed", "leaves", "roots")

    def __init__(self, leaves: list[Tensor], is_recomputed: bool) -> None:
        self.leaves, self.is_recomputed = leaves, is_recomputed
        self.roots: list[Tensor] = []
        self.finish: Callable[[], None] = lambda: None


def _form(platform: Platform, x: Tensor) -> str:
    return f"{platform.dtype_name(x.dtype)}{list(x.shape)}"


def run_backward(platform: Platform, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> None:
    """Run one backward from `roots` with their gradients, or from one scalar loss if `gradients` is None.

    Several roots are joined by one autograd node that passes each its gradient, so that nodes they share run once.
    """
    if not roots:
        return
    if gradients is None or len(roots) == 1:
        platform.backward(roots[0], None if gradients is None else gradients[0])
        return
    # The gradient of the joining node itself is ignored; the closure returns those of the roots.
    joined = platform.custom_function(
        lambda *_: platform.zeros((), platform.dtype("float32")), lambda _: list(gradients), *roots
    )
    platform.backward(joined)


class StageParameters(ABC):
    """The sharded parameters of one module, which several stages of a rank may share.

    Args:
        module: any module; parameters that `fully_shard` has not sharded are ignored.
    """

    def __init__(self, platform: Platform, module: Module) -> None:
        self._platform, self._module = platform, module

    @property
    def are_sharded(self) -> bool:
        """True if `fully_shard` was called on the module or on one below it."""
        return bool(self._roots)

    @abstractmethod
    def unshard(self) -> None:
        """Prepare the parameters for the first micro-batch of a step."""

    def before_forward(self, stage: int) -> None:
        """Prepare the parameters for a forward of a stage."""

    def collect_gradients(self) -> None:
        """Accumulate the gradients of a backward that has finished."""

    @abstractmethod
    def reduce_grad(self) -> None:
        """Reduce the gradients of all micro-batches, or let the next backward do so."""

    def reshard(self) -> None:
        """Finish a step without a backward."""

    @abstractmethod
    def reset(self) -> None:
        """Discard gathered parameters and gradients after an error."""

    @functools.cached_property
    def _roots(self) -> list[FSDPModule]:
        """The outermost modules on which `fully_shard` was called. Looked up at the first step, then cached."""
        names: list[str] = []
        found: list[FSDPModule] = []
        for name, module in self._platform.named_modules(self._module):
            is_nested = any(not outer or name.startswith(f"{outer}.") for outer in names)
            if isinstance(module, FSDPModule) and not is_nested:
                names.append(name)
                found.append(module)
        return found


class UnshardedForStep(StageParameters):
    """Parameters are gathered and gradients reduced once per step: least communication, most memory."""

    def __init__(self, platform: Platform, module: Module) -> None:
        super().__init__(platform, module)
        self._gathered: list[GatheredStep] = []

    def unshard(self) -> None:
        """Gather the parameters for all micro-batches of the step."""
        self._gathered = [module.gather_for_step() for module in self._roots]

    def collect_gradients(self) -> None:
        """Add the gradients of a backward to those of earlier ones."""
        for each in self._gathered:
            each.collect_gradients()

    def reduce_grad(self) -> None:
        """Reduce the gradients of all micro-batches and reshard the parameters."""
        gathered, self._gathered = self._gathered, []
        for each in gathered:
            each.reduce()

    def reshard(self) -> None:
        """Reshard the parameters after a step without a backward."""
        gathered, self._gathered = self._gathered, []
        for each in gathered:
            each.release()

    def reset(self) -> None:
        """Discard gathered parameters and gradients after an error."""
        gathered, self._gathered = self._gathered, []
        for each in gathered:
            each.drop()


class UnshardedForUse(StageParameters):
    """Parameters are gathered by each forward and backward that uses them, as by `fully_shard` without a pipeline.

    Args:
        reduces_once: gradients stay unsharded until the last backward of the step. False: every backward reduces them
            over the shards, and the last one also over replicas.
    """

    def __init__(self, platform: Platform, module: Module, *, reduces_once: bool) -> None:
        super().__init__(platform, module)
        self._reduces_once = reduces_once

    def unshard(self) -> None:
        """Let the backwards of the step accumulate gradients without the final reduction."""
        self._set_final_reduction(False)

    def before_forward(self, stage: int) -> None:
        """Prefetch the groups that this stage used in its last forward."""
        # Stages that share the module may use its groups in different orders.
        for module in self._roots:
            module.set_prefetch_order(stage)

    def reduce_grad(self) -> None:
        """Let the next backward, the last one of the step, do the final reduction."""
        self._set_final_reduction(True)

    def reset(self) -> None:
        """Discard gathered parameters and gradients after an error."""
        self._set_final_reduction(True)
        for module in self._roots:
            module.reset()

    def _set_final_reduction(self, enabled: bool) -> None:
        for module in self._roots:
            # Two flags: whether a backward reduces over the shards at all, and whether it reduces over the replicas
            # too.
            module.set_requires_gradient_sync(enabled or not self._reduces_once)
            module.set_requires_all_reduce(enabled)


class TiedWeights:
    """Weights with a copy on several stages, such as an embedding on the first and an output head on the last one.

    Once per step every copy gets the sum of all copies' gradients, so that equal copies stay equal under any optimizer.
    Every rank of the pipeline creates this object, also without parameters.

    Args:
        parameters: (name, parameter) pairs of this rank's stages. Parameters with the same name on several stages are
            one weight; others are ignored.
        mesh: ranks of the pipeline: `mesh["pp"]`, or a process group.

    Attributes:
        copies: this rank's parameters that another stage already counts in a norm or number of parameters.

    Raises:
        PipelineError: copies have different shapes, dtypes or placements, or only some of them are frozen.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,), ("pp",))
        ...     weight = platform.Parameter(platform.ops.ones((2,), platform.dtype("float32")))
        ...     tied = TiedWeights([("embedding", weight)], mesh["pp"])
        ...     platform.backward(platform.ops.sum(platform.ops.mul(weight, 1.0 + mesh.get_rank())))
        ...     tied.sum_gradients()
        ...     return platform.to_numpy(platform.get_grad(weight)).tolist(), tied.is_copy(weight)
        >>> run_ranks(program, 2)
        [([3.0, 3.0], False), ([3.0, 3.0], True)]
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], mesh: DeviceMesh | ProcessGroup) -> None:
        group = mesh.group_along() if isinstance(mesh, DeviceMesh) else as_group(mesh)
        assert group.platform is not None
        self._platform: Platform = group.platform
        mine: dict[str, list[Tensor]] = {}
        for name, parameter in parameters:
            # By identity: stages on this rank that share a module report the same parameter twice.
            if all(parameter is not known for known in mine.get(name, [])):
                mine.setdefault(name, []).append(parameter)
        self._ranks = self._gather_ranks(mine, group)
        # Sorted, so that ranks that share several weights reduce them in the same order.
        self._mine = {name: copies for name, copies in sorted(mine.items()) if name in self._ranks}
        world = current_world(self._platform)
        self.copies: list[Tensor] = [
            copy
            for name, copies in self._mine.items()
            for index, copy in enumerate(copies)
            # The first copy on the first rank counts as the weight itself.
            if index or self._ranks[name][0] != world.rank
        ]

    def is_copy(self, parameter: Tensor) -> bool:
        """Return whether this parameter is among `copies`."""
        return any(parameter is copy for copy in self.copies)

    def _gather_ranks(self, mine: dict[str, list[Tensor]], group: ProcessGroup) -> dict[str, tuple[int, ...]]:
        """Return the global ranks that have each weight, of weights with more than one copy."""
        described = {name: [_describe(self._platform, copy) for copy in copies] for name, copies in mine.items()}
        gathered = all_gather_object(group, described)
        ranks: dict[str, list[int]] = {}
        forms: dict[str, list[str]] = {}
        for rank, theirs in zip(group.ranks, gathered, strict=True):
            for name, found in theirs.items():
                ranks.setdefault(name, []).append(rank)
                forms.setdefault(name, []).extend(found)
        wrong = [f"{name}: {' and '.join(dict.fromkeys(found))}" for name, found in forms.items() if len({*found}) > 1]
        if wrong:
            raise PipelineError(
                f"tied weights need equal shapes, dtypes and shards on their stages, all trained or all frozen; got "
                f"{'; '.join(wrong)}. Call fully_shard on the module of a tied weight by itself, so that it is sharded "
                "alike on every stage"
            )
        return {name: tuple(ranks[name]) for name, found in forms.items() if len(found) > 1}

    def sum_gradients(self) -> None:
        """Replace the gradient of every copy by the sum over all copies, with one all-reduce for each weight.

        Frozen weights get no gradient.
        """
        platform = self._platform
        with platform.no_grad():
            for name, copies in self._mine.items():
                if not platform.requires_grad(copies[0]):
                    continue
                grads = [grad for copy in copies if (grad := platform.get_grad(copy)) is not None]
                local = local_of(platform, copies[0])
                # New memory, with zeros if no copy on this rank has a gradient: the rank must take part in the
                # all-reduce all the same. Copies on this rank are added first, so that one per weight is enough.
                total = platform.zeros(tuple(local.shape), (grads[0] if grads else local).dtype)
                for grad in grads:
                    total = platform.ops.add(total, local_of(platform, grad))
                total = platform.contiguous(total)
                if len(self._ranks[name]) > 1:
                    self._group(name).all_reduce(total)
                for copy in copies:
                    self._set_gradient(copy, total)

    def _set_gradient(self, copy: Tensor, total: Tensor) -> None:
        grad = self._platform.get_grad(copy)
        if grad is not None:
            # In place, since a gradient of FSDP is a view into the buffer that the optimizer reads.
            self._platform.copy_(local_of(self._platform, grad), total)
        elif isinstance(copy, DTensor):
            # A clone for each copy: optimizers and clipping write gradients in place.
            self._platform.set_grad(copy, self._platform.wrap(self._platform.ops.clone(total), copy.spec))
        else:
            self._platform.set_grad(copy, self._platform.ops.clone(total))

    def _group(self, name: str) -> ProcessGroup:
        """Return the process group of the ranks that have a weight."""
        return current_world(self._platform).group(self._ranks[name])


def _describe(platform: Platform, x: Tensor) -> str:
    """Describe what must be equal for all copies of a weight."""
    local = platform.local_shape(x)
    placements = f" {[str(each) for each in x.placements]}" if isinstance(x, DTensor) else ""
    return f"{platform.dtype_name(x.dtype)}{list(local)}{placements}{'' if platform.requires_grad(x) else ' frozen'}"
