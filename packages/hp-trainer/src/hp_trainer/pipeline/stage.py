"""One stage of a pipeline: a module, its micro-batches under way, and both parts of their backward.

Parameters of stages that `fully_shard` has cut: when they are gathered, and when their gradients are reduced.

Weights that several stages of a pipeline use: a copy on each, kept equal by the sum of their gradients.
"""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, as_group
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel.recompute import noticed
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import platform_of
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp import FSDPModule, GatheredStep
from hp_trainer.exceptions import PipelineError
from hp_trainer.pipeline.transfers import MessageLayout, as_distributed, layout_of

Tensor = Any
Module = Any


class PipelineStage:
    """A module that computes one stage of a pipeline; torch's name and first parameters.

    Args:
        submodule: called with what the stage before returns (of a tuple or list, its items), and with the named
            arguments that this rank gives to `step`. That of the first stage gets the positional ones of `step`.
        stage_index: from 0.
        num_stages: of the whole pipeline.
        device: taken for torch's sake; tensors are made on the platform's own.
        group: the ranks of the pipeline, as a mesh (`mesh["pp"]`) or a process group; None: all ranks.

    Raises:
        PipelineError: there is no such stage.

    Example:
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
        *,
        group: Any = None,
        platform: Platform | str | None = None,
    ) -> None:
        if not 0 <= stage_index < num_stages:
            raise PipelineError(f"stage_index {stage_index}: expected a number from 0, below num_stages = {num_stages}")
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.group = group
        self.platform = platform_of(submodule, platform)
        self._under_way: dict[int, _MicroBatch] = {}

    @property
    def is_first(self) -> bool:
        """Return True for the stage that gets the batch."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Return True for the stage whose output the loss is computed from."""
        return self.stage_index == self.num_stages - 1

    @property
    def num_under_way(self) -> int:
        """Return the number of micro-batches whose activations are kept now."""
        return len(self._under_way)

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
        """Run the forward on what the stage before has made (local data) and return the output."""
        platform, leaves, inputs = self.platform, [], []
        for meta, tensor in zip(layout.tensors, received, strict=True):
            # A leaf of its own: the stage before may be on this rank, and its graph ends where its output was handed
            # over.
            leaf = platform.detach(tensor)
            if meta.requires_grad and platform.is_grad_enabled():
                platform.set_requires_grad(leaf, True)
                leaves.append(leaf)
            inputs.append(as_distributed(leaf, meta, mesh, f"stage {self.stage_index}"))
        tree = layout.rebuild(inputs)
        args = tuple(tree) if isinstance(tree, (tuple, list)) else (tree,)
        return self._run(microbatch, leaves, args, kwargs)

    def _run(self, microbatch: int, leaves: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with noticed() as is_repeated:
            output = self.call(args, kwargs)
        if self.platform.is_grad_enabled():
            self._under_way[microbatch] = _MicroBatch(leaves, is_repeated())
        return output

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the module; a stage that is called otherwise overrides this."""
        return self.submod(*args, **kwargs)

    def outputs(self, microbatch: int, output: Any) -> tuple[MessageLayout, list[Tensor]]:
        """Return the layout of an output for the next stage and its local tensors; keep what backward begins with."""
        layout, tensors = layout_of(self.platform, output, f"stage {self.stage_index}")
        # Backward begins at the local data that was sent, because the gradient that comes back has their form.
        locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        if microbatch in self._under_way:
            pairs = zip(layout.tensors, locals_, strict=True)
            self._under_way[microbatch].roots = [tensor for meta, tensor in pairs if meta.requires_grad]
        return layout, locals_

    def keep_loss(self, microbatch: int, loss: Tensor) -> None:
        """Keep the loss that the last stage's backward begins with."""
        self._under_way[microbatch].roots = [loss]

    def backward(self, microbatch: int, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        """Accumulate the gradients of the parameters and return those of the received inputs.

        Args:
            gradients: of the outputs that require one; None: the root is a loss.
        """
        return self._whole_backward(self._under_way.pop(microbatch), gradients)

    def input_grad(self, microbatch: int, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the gradients of the received inputs; those of the parameters follow in `weight_grad`.

        Where the backward cannot be split, `weight_grad` has nothing left to do: on a platform that cannot do it, and
        in a stage of which something is computed again in backward.
        """
        run = self._under_way[microbatch]
        # No output of this stage requires a gradient.
        if not run.roots:
            return self._whole_backward(run, gradients)
        if not run.leaves:
            # Nobody waits for gradients of inputs: the whole backward is the weights' part, which is due later. It
            # holds the roots, not `run`, which holds it: a cycle would keep outputs until Python looks for cycles.
            run.finish = functools.partial(run_backward, self.platform, run.roots, gradients)
            run.roots = []
            return []
        # Between its two parts a repetition would hold what it has made, which recomputation is there to avoid.
        if run.is_repeated or not self.platform.splits_backward:
            return self._whole_backward(run, gradients)
        given = [None] if gradients is None else list(gradients)
        found, run.finish = self.platform.split_backward(run.roots, given, run.leaves)
        leaves, run.roots, run.leaves = run.leaves, [], []
        return [self._or_zeros(leaf, grad) for leaf, grad in zip(leaves, found, strict=True)]

    def weight_grad(self, microbatch: int) -> None:
        """Accumulate the gradients of the parameters that `input_grad` has left."""
        run = self._under_way.pop(microbatch)
        run.finish()

    def _whole_backward(self, run: _MicroBatch, gradients: Sequence[Tensor] | None) -> list[Tensor]:
        """Run both parts at once."""
        run_backward(self.platform, run.roots, gradients)
        run.roots = []
        return [self._gradient_of(leaf) for leaf in run.leaves]

    def _gradient_of(self, leaf: Tensor) -> Tensor:
        return self._or_zeros(leaf, self.platform.get_grad(leaf))

    def _or_zeros(self, leaf: Tensor, grad: Tensor | None) -> Tensor:
        """Return the gradient of an input; zeros where the stage has not used it."""
        return self.platform.zeros(tuple(leaf.shape), leaf.dtype) if grad is None else grad

    def forget(self) -> None:
        """Drop the micro-batches under way, after an error."""
        self._under_way.clear()


class _MicroBatch:
    """A micro-batch between its forward and its backward.

    Attributes:
        is_repeated: something in it is computed again in backward.
        leaves: the received inputs that require a gradient.
        roots: the tensors that its backward begins with: local outputs that require a gradient, or the loss.
        finish: accumulates the gradients of the parameters, once those of the leaves are known.
    """

    __slots__ = ("finish", "is_repeated", "leaves", "roots")

    def __init__(self, leaves: list[Tensor], is_repeated: bool) -> None:
        self.leaves, self.is_repeated = leaves, is_repeated
        self.roots: list[Tensor] = []
        self.finish: Callable[[], None] = lambda: None


def run_backward(platform: Platform, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> None:
    """Run one backward from several tensors with their gradients; None: from a scalar loss.

    Several roots are joined by a node whose backward hands each its gradient, so that autograd goes through what they
    share once.
    """
    if not roots:
        return
    if gradients is None or len(roots) == 1:
        platform.backward(roots[0], None if gradients is None else gradients[0])
        return
    # The node's own gradient is not looked at: those of the roots are given.
    joined = platform.custom_function(
        lambda *_: platform.zeros((), platform.dtype("float32")), lambda _: list(gradients), *roots
    )
    platform.backward(joined)


class StageParameters(ABC):
    """The sharded parameters of one module, which several stages of a rank may share.

    Args:
        module: any; what `fully_shard` has not been called on is left alone.
    """

    def __init__(self, platform: Platform, module: Module) -> None:
        self._platform, self._module = platform, module

    @property
    def are_sharded(self) -> bool:
        """Return True if `fully_shard` has cut parameters of the module."""
        return bool(self._roots)

    @abstractmethod
    def unshard(self) -> None:
        """Prepare the first micro-batch of a step."""

    def begin_forward(self, stage: int) -> None:
        """Prepare a forward of a stage."""

    def collect_gradients(self) -> None:
        """Take the gradients of a backward that is over."""

    @abstractmethod
    def reduce_grad(self) -> None:
        """Have the gradients of all micro-batches reduced."""

    def reshard(self) -> None:
        """End a step without a backward."""

    @abstractmethod
    def forget(self) -> None:
        """Drop gathered parameters and gradients, after an error."""

    @functools.cached_property
    def _roots(self) -> list[FSDPModule]:
        """The outermost modules that `fully_shard` has been called on by the first step."""
        names: list[str] = []
        found: list[FSDPModule] = []
        for name, module in self._platform.named_modules(self._module):
            inside = any(not outer or name.startswith(f"{outer}.") for outer in names)
            if isinstance(module, FSDPModule) and not inside:
                names.append(name)
                found.append(module)
        return found


class GatheredForStep(StageParameters):
    """Gathered once for all micro-batches of a step, gradients reduced once: the fewest bytes, the most memory."""

    def __init__(self, platform: Platform, module: Module) -> None:
        super().__init__(platform, module)
        self._gathered: list[GatheredStep] = []

    def unshard(self) -> None:
        """Gather the parameters for all micro-batches of the step."""
        self._gathered = [module.gather_for_step() for module in self._roots]

    def collect_gradients(self) -> None:
        """Add the gradients of a backward to those before."""
        for each in self._gathered:
            each.collect_gradients()

    def reduce_grad(self) -> None:
        """Reduce the gradients of all micro-batches, and shard the parameters again."""
        gathered, self._gathered = self._gathered, []
        for each in gathered:
            each.reduce()

    def reshard(self) -> None:
        """Shard the parameters again, after a step without a backward."""
        gathered, self._gathered = self._gathered, []
        for each in gathered:
            each.release()

    def forget(self) -> None:
        """Drop gathered parameters and gradients, after an error."""
        gathered, self._gathered = self._gathered, []
        for each in gathered:
            each.drop()


class GatheredForUse(StageParameters):
    """Gathered by each forward and each backward that uses them, as `fully_shard` does without a pipeline.

    Args:
        reduces_once: gradients stay whole until the last backward of the step; False: every backward reduces them, and
            the last one over replicas too.
    """

    def __init__(self, platform: Platform, module: Module, *, reduces_once: bool) -> None:
        super().__init__(platform, module)
        self._reduces_once = reduces_once

    def unshard(self) -> None:
        """Let the backwards of the step leave gradients that are not yet those of all micro-batches."""
        self._completes_gradients(False)

    def begin_forward(self, stage: int) -> None:
        """Gather ahead what this stage has used in its last forward, not what another one has."""
        for module in self._roots:
            module.set_prefetch_order(stage)

    def reduce_grad(self) -> None:
        """Let the next backward, the last of the step, complete the gradients."""
        self._completes_gradients(True)

    def forget(self) -> None:
        """Drop gathered parameters and gradients, after an error."""
        self._completes_gradients(True)
        for module in self._roots:
            module.reset()

    def _completes_gradients(self, completes: bool) -> None:
        for module in self._roots:
            module.set_requires_gradient_sync(completes or not self._reduces_once)
            module.set_requires_all_reduce(completes)


class TiedWeights:
    """Parameters that are one weight, such as an embedding on the first stage and a head on the last.

    Every copy gets the sum of all copies' gradients, once per step, so equal copies stay equal under any optimizer.
    Every rank of the pipeline makes one, without parameters too.

    Args:
        parameters: (name, parameter) of this rank's stages; those that have a name on several stages are one weight,
            others are left alone.
        mesh: the ranks of the pipeline: `mesh["pp"]`, or a process group.

    Attributes:
        copies: this rank's parameters that another stage counts, in a norm or a number of parameters.

    Raises:
        PipelineError: copies of other shapes, or that are cut otherwise.

    Example:
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
            if all(parameter is not known for known in mine.get(name, [])):
                mine.setdefault(name, []).append(parameter)
        self._owners = self._exchange(mine, group)
        # Sorted: ranks that share several weights reduce them in one order.
        self._mine = {name: copies for name, copies in sorted(mine.items()) if name in self._owners}
        world = current_world(self._platform)
        self.copies: list[Tensor] = [
            copy
            for name, copies in self._mine.items()
            for index, copy in enumerate(copies)
            if index or self._owners[name][0] != world.rank
        ]

    def is_copy(self, parameter: Tensor) -> bool:
        """Return True if this parameter is among `copies`."""
        return any(parameter is copy for copy in self.copies)

    def _exchange(self, mine: dict[str, list[Tensor]], group: ProcessGroup) -> dict[str, tuple[int, ...]]:
        """Return the global ranks that have each tied weight; those with a single copy are left out."""
        told = {name: [_form(self._platform, copy) for copy in copies] for name, copies in mine.items()}
        everyones = [json.loads(part) for part in group.all_gather_bytes(json.dumps(told).encode())]
        owners: dict[str, list[int]] = {}
        forms: dict[str, list[str]] = {}
        for rank, part in zip(group.ranks, everyones, strict=True):
            for name, found in part.items():
                owners.setdefault(name, []).append(rank)
                forms.setdefault(name, []).extend(found)
        wrong = [f"{name}: {' and '.join(dict.fromkeys(found))}" for name, found in forms.items() if len({*found}) > 1]
        if wrong:
            raise PipelineError(
                f"tied weights need equal shapes, dtypes and shards on their stages; got {'; '.join(wrong)}. Call "
                "fully_shard on the module of a tied weight alone, so that it is cut alike wherever it is"
            )
        return {name: tuple(owners[name]) for name, found in forms.items() if len(found) > 1}

    def broadcast(self) -> None:
        """Give every copy the values of the first."""
        with self._platform.no_grad():
            for name, copies in self._mine.items():
                first = local_of(self._platform, copies[0])
                if len(self._owners[name]) > 1:
                    values = self._platform.contiguous(self._platform.detach(first))
                    self._group(name).broadcast(values, 0)
                    self._platform.copy_(first, values)
                for copy in copies[1:]:
                    self._platform.copy_(local_of(self._platform, copy), first)

    def sum_gradients(self) -> None:
        """Replace the gradient of every copy by the sum over all copies; one all-reduce for each weight."""
        platform = self._platform
        with platform.no_grad():
            for name, copies in self._mine.items():
                grads = [grad for copy in copies if (grad := platform.get_grad(copy)) is not None]
                total = self._sum_here(copies[0], grads)
                if len(self._owners[name]) > 1:
                    self._group(name).all_reduce(total)
                for copy in copies:
                    self._set_gradient(copy, total)

    def _sum_here(self, like: Tensor, grads: list[Tensor]) -> Tensor:
        platform, local = self._platform, local_of(self._platform, like)
        # Zeros where no copy here has a gradient: the other stages wait for this rank in the all-reduce all the same.
        total = platform.zeros(tuple(local.shape), (grads[0] if grads else local).dtype)
        for grad in grads:
            total = platform.ops.add(total, local_of(platform, grad))
        return platform.contiguous(total)

    def _set_gradient(self, copy: Tensor, total: Tensor) -> None:
        grad = self._platform.get_grad(copy)
        if grad is not None:
            # In place: a gradient of FSDP is a view of the buffer that the optimizer's step reads.
            self._platform.copy_(local_of(self._platform, grad), total)
        elif isinstance(copy, DTensor):
            self._platform.set_grad(copy, self._platform.wrap(self._platform.ops.clone(total), copy.spec))
        else:
            self._platform.set_grad(copy, self._platform.ops.clone(total))

    def _group(self, name: str) -> ProcessGroup:
        return current_world(self._platform).group(self._owners[name])


def _form(platform: Platform, x: Tensor) -> str:
    local = platform.local_shape(x)
    placements = f" {[str(each) for each in x.placements]}" if isinstance(x, DTensor) else ""
    return f"{platform.dtype_name(x.dtype)}{list(local)}{placements}"
