"""One stage of a pipeline: a module, its micro-batches under way, and both parts of their backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.parallel.recompute import noticed
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import platform_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_trainer.exceptions import PipelineError
from hp_trainer.pipeline.messages import MessageLayout, as_distributed, layout_of

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
