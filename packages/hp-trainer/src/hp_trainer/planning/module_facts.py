"""A user's own module as plans need it: parameters, bytes of its activations, operations of a forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hp_dtensor.platform.counted_step import CountedParameter, CountedPart, CountedStep
from hp_fsdp import PlannedParameter
from hp_trainer.memory import BlockActivations, KeptTensor


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """A user's own module, whose parts are those that are gathered one by one.

    Attributes:
        names: of the parts, in the order of forward.
        root: parameters outside of all parts.
        parameters: of each part, in the order of forward.
        buffers: bytes of tensors that are no parameters; every rank has them whole.
        blocks: activations of each part, of one micro-batch.
        head: those of all that comes after the last part, the loss included.
        unreached: first parts that backward does not come to.
        flops: operations of a micro-batch, forward and backward.
    """

    names: tuple[str, ...]
    root: tuple[PlannedParameter, ...]
    parameters: tuple[tuple[PlannedParameter, ...], ...]
    buffers: int
    blocks: tuple[BlockActivations, ...]
    head: BlockActivations
    unreached: tuple[int, ...]
    flops: float

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every parameter, by name."""
        return {each.name: each.shape for group in (self.root, *self.parameters) for each in group}


# Counts a module for so many samples of a forward.
CountModule = Callable[[int], ModuleFacts]


def module_facts(step: CountedStep) -> ModuleFacts:
    """Return what plans need of a counted step."""
    groups = [[each for each in step.parameters if each.part == index] for index in range(len(step.parts))]
    blocks, in_front = [], 0
    alike: dict[BlockActivations, BlockActivations] = {}
    for part in step.parts:
        activations = _activations(part, in_front)
        # Parts of one kind share an object, as a decoder's blocks do.
        blocks.append(alike.setdefault(activations, activations))
        in_front = part.after
    unreached = next((index for index, part in enumerate(step.parts) if part.is_reached), len(step.parts))
    kept = step.after_forward - in_front
    head = BlockActivations(
        tensors=(KeptTensor(name="outside of the parts", kind="rest", saved=kept),),
        working=step.outside - step.after_forward,
    )
    return ModuleFacts(
        names=tuple(part.name for part in step.parts),
        root=_planned([each for each in step.parameters if each.part is None]),
        parameters=tuple(map(_planned, groups)),
        buffers=step.buffers,
        blocks=tuple(blocks),
        head=head,
        unreached=tuple(range(unreached)),
        flops=float(step.flops),
    )


def _activations(part: CountedPart, in_front: int) -> BlockActivations:
    """Return a part's activations, such that plans hold at its backward what was counted.

    Args:
        in_front: bytes that are alive when the parts before have computed.
    """
    kept = part.after - in_front
    # What stays when its backward has ended is called its input.
    left = part.end - in_front if part.is_reached else 0
    tensors = (
        KeptTensor(name="input", kind="input", saved=left, result=left),
        KeptTensor(name="everything else", kind="rest", saved=kept - left),
    )
    return BlockActivations(tensors=tensors, working=part.peak - part.after if part.is_reached else 0)


def _planned(parameters: list[CountedParameter]) -> tuple[PlannedParameter, ...]:
    return tuple(
        PlannedParameter(each.name, each.shape, itemsize=each.itemsize, trainable=each.trainable) for each in parameters
    )
