"""One use of a group's parameters in a forward: the autograd nodes made for it, and what backward has to check.

A group: the modules and flat buffers that are gathered, computed with and freed together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.recording import located
from hp_dtensor.spec.rank_checks import is_checking
from hp_fsdp._engine.flat_buffer import FlatBuffer, Gathering
from hp_fsdp._engine.rank_checks import CallOrder, Communicating, check_same_action
from hp_fsdp._engine.settings import GroupSettings
from hp_fsdp.exceptions import FSDPStateError
from hp_fsdp.storage import Gradients, ParameterStorage

Tensor = Any


class ParameterUse:
    """One use of a group's parameters in a forward pass.

    Attributes:
        forward_pass: the `ForwardPass` that it belongs to, or None for a recomputation during backward.
        unsharded: the tensors that the modules compute with, per buffer.
        indices: of the trainable parameters, per buffer that has some.
        waiting: buffers whose autograd node has not run yet in the current backward.
        versions: of the parameters that the forward computed with, per buffer in `indices`.
    """

    def __init__(self, forward_pass: object | None) -> None:
        self.forward_pass = forward_pass
        self.unsharded: list[list[Tensor]] = []
        self.indices: dict[FlatBuffer, list[int]] = {}
        self.waiting: list[FlatBuffer] = []
        self.versions: dict[FlatBuffer, list[int]] = {}

    def changed_parameters(self, buffer: FlatBuffer, grads: Gradients) -> list[str]:
        """Return the names of parameters that have, in backward, other values than the forward computed with.

        Autograd compares the versions of what operations have saved; it cannot see that a buffer was filled again from
        shards that an optimizer has changed. Parameters without a gradient may have changed: this backward does not
        use them.
        """
        then, now = self.versions[buffer], buffer.versions.of_full
        if then == now:
            return []
        used = (index for index, grad in zip(self.indices[buffer], grads, strict=True) if grad is not None)
        return [buffer.parameters[index].name for index in used if then[index] != now[index]]


Module = Any


class GroupState(Enum):
    """The form in which a group's parameters are held; the values are what errors say."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    SHARDED_AFTER_FORWARD = "sharded over fewer ranks after forward"


class ParameterGroup:
    """The parameters that one call of `fully_shard` manages.

    Attributes:
        name: how errors call it.
        modules: whose parameters it has; collectives are recorded under the first.
        settings: see `GroupSettings`.
        state: the form in which the buffers hold the parameters.
        uses_unsharded: the modules hold the unsharded parameters instead of the sharded ones.
        is_held: a `GatheredStep` keeps the parameters unsharded; hooks leave them alone.
        in_forward: the forward of one of its modules has begun, and not that of all ended.
        forward_depth: forwards of its modules that run now, one inside of another, by the module's id.
        kept_after_forward: the last forward left the full parameters for a backward.
        use: the current forward pass's use of the parameters, until its backward; None outside.
        summon_depth: `summon_full_params` blocks around the present moment.
        summoned_buffers: the whole parameters that those show, one flat tensor per buffer.
        forward_prefetch, backward_prefetch: groups to gather ahead, instead of the next in recorded order.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[Module],
        storage: ParameterStorage,
        buffers: Sequence[FlatBuffer],
        settings: GroupSettings,
    ) -> None:
        self.name = name
        self.modules = list(modules)
        self.storage = storage
        self.buffers = list(buffers)
        self.settings = settings
        self.state = GroupState.SHARDED
        self.uses_unsharded = False
        self.is_held = False
        self.in_forward = False
        self.forward_depth: dict[int, int] = {}
        self.kept_after_forward = False
        self.use: ParameterUse | None = None
        self.summon_depth = 0
        self.summoned_buffers: list[Tensor] = []
        self.forward_prefetch: list[ParameterGroup] | None = None
        self.backward_prefetch: list[ParameterGroup] | None = None
        self._set_parameter = storage.platform.set_parameter
        for buffer in self.buffers:
            buffer.gathering.keeps_full = settings.keeps_full
            buffer.join_call_orders(self)

    @property
    def place(self) -> str:
        """The group and this rank, for errors."""
        return f"group {self.name} on rank {current_world(self.storage.platform).rank}"

    @property
    def orders(self) -> list[CallOrder]:
        """The call orders in which its buffers take part."""
        return list(dict.fromkeys(order for buffer in self.buffers for order in buffer.actions.orders))

    @property
    def ranks(self) -> set[int]:
        """Global ranks with which this rank communicates for the group."""
        return {rank for buffer in self.buffers for rank in buffer.ranks}

    @property
    def shard_counts(self) -> list[int]:
        """Numbers of shards of those buffers that are cut at all."""
        return sorted({buffer.layout.num_shards for buffer in self.buffers if buffer.layout.num_shards > 1})

    @property
    def held_bytes(self) -> int:
        """Bytes of full parameters held now."""
        return sum(buffer.gathering.held_bytes for buffer in self.buffers)

    # Checks ----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Take over into the shards what `Module.to`, `to_empty` and the like have put in the parameters' place.

        Raises:
            FSDPStateError: listing the parameters whose device has been changed, of which some of a buffer have another
                dtype than the others, or that have been replaced.
        """
        if any(buffer.is_detached for buffer in self.buffers):
            self._take_over()
        replaced = [] if self.uses_unsharded else [name for buffer in self.buffers for name in buffer.replaced()]
        if replaced:
            raise FSDPStateError(
                f"{self.place}: {', '.join(replaced)} of the module is not what fully_shard has put there; change "
                "modules before fully_shard, and write values into parameters in place"
            )

    def _take_over(self) -> None:
        if any(buffer.new_dtype is not None for buffer in self.buffers):
            self.reshard()
        problems = [problem for buffer in self.buffers for problem in buffer.follow_conversion()]
        problems = problems or [problem for buffer in self.buffers for problem in buffer.attach()]
        if problems:
            raise FSDPStateError(
                f"{self.place}: {'; '.join(problems)}. Convert all parameters of a group alike, between steps, and "
                "move modules before fully_shard; for another dtype of computation use "
                "MixedPrecisionPolicy(param_dtype=...)"
            )

    def check_filled(self) -> None:
        """Check that parameters from the meta device have been given values.

        Zeros prove nothing where writes are not counted (`bias.data.zero_()`): a group counts as filled where
        anything in it has been written or is not zero, or where this rank has nothing but vectors of it.

        Raises:
            FSDPStateError: naming the parameters.
        """
        empty = [buffer.from_meta for buffer in self.buffers if buffer.from_meta.parameters]
        if empty and any(each.include_matrices for each in empty) and not any(each.have_values for each in empty):
            names = ", ".join(parameter.name for each in empty for parameter in each.parameters)
            raise FSDPStateError(
                f"{self.place}: {names} came from the meta device and have no values yet. After fully_shard load a "
                "state dict, or initialise them (to_empty() and reset_parameters, init_parameters)"
            )
        for each in empty:
            each.parameters.clear()

    def check_unwritten(self) -> None:
        """Check that nobody has written the unsharded parameters, of which the shards learn nothing.

        Raises:
            FSDPStateError: naming the parameters.
        """
        written = [name for buffer in self.buffers for name in buffer.versions.names_written_unsharded()]
        if written:
            raise FSDPStateError(
                f"{self.place}: {', '.join(written)}: written in place while gathered, as by a forward that normalizes "
                "its own parameters (Embedding(max_norm=...)); the shards would not learn of it. Write into the "
                "sharded parameters between steps, or leave these out (ignored_params)"
            )

    def check_order(self, action: str) -> None:
        """In `check_mode`: check that every rank that shares the shards now does `action` with this group.

        Raises:
            CallOrderError: on all of them, naming what each does.
        """
        if is_checking():
            for ranks in dict.fromkeys(buffer.shard_group for buffer in self.buffers):
                # The sizes too: modules of one class have one name until a model around them has been called.
                elements = sum(buffer.layout.numel for buffer in self.buffers)
                check_same_action(ranks, f"{action} {self.name} of {elements} elements")

    def _check_unused(self) -> None:
        if self.uses_unsharded:
            raise FSDPStateError(
                f"{self.place}: reshard() in state {self.state.value!r} while its modules hold the "
                f"unsharded parameters; expected state {GroupState.SHARDED.value!r} or a group not in use"
            )

    # Unsharding and resharding ---------------------------------------------------------------------------

    def start_unshard(self) -> None:
        """Begin to gather, unless that has been done.

        Raises:
            FSDPStateError: inside `summon_full_params`.
        """
        if self.summon_depth:
            raise FSDPStateError(
                f"{self.place}: forward, backward and unshard() are refused inside summon_full_params, "
                "whose parameters autograd does not see; leave the block first"
            )
        if self.state in (GroupState.SHARDED, GroupState.SHARDED_AFTER_FORWARD):
            self.check_order("gathers")
            self._gather(lambda gathering: gathering.start())
            self.state = GroupState.GATHERING

    def wait_for_unshard(self) -> None:
        """Wait for a gather that has begun."""
        if self.state is GroupState.GATHERING:
            self._gather(lambda gathering: gathering.wait())
            self.state = GroupState.UNSHARDED

    def unshard(self) -> None:
        """Gather, and wait for it."""
        self.start_unshard()
        self.wait_for_unshard()

    def _gather(self, step: Callable[[Gathering], None]) -> None:
        """Take a step of gathering for each buffer; where one fails, nothing is gathered."""
        try:
            with Communicating(self, "gather parameters"):
                for buffer in self.buffers:
                    step(buffer.gathering)
        except BaseException:
            for buffer in self.buffers:
                with contextlib.suppress(RuntimeError):
                    buffer.gathering.wait()
                buffer.gathering.release()
            self.state = GroupState.SHARDED
            raise

    def reshard(self) -> None:
        """Free the full parameters.

        Raises:
            FSDPStateError: the modules are computing with them.
        """
        self._check_unused()
        self.wait_for_unshard()
        if self.state is not GroupState.SHARDED:
            for buffer in self.buffers:
                buffer.gathering.release()
            self.state = GroupState.SHARDED
            self.kept_after_forward = False

    def reshard_to(self, num_ranks: int) -> None:
        """Free the full parameters, but keep them among each `num_ranks` consecutive ranks for the backward."""
        self._check_unused()
        if self.state is GroupState.UNSHARDED:
            for buffer in self.buffers:
                buffer.gathering.release_but_part(num_ranks)
            self.state = GroupState.SHARDED_AFTER_FORWARD

    def reshard_outdated(self) -> None:
        """Free what was gathered before its parameters were written, as by a forward around this one.

        Every rank must have written: nothing is exchanged.
        """
        if self.state is not GroupState.SHARDED and any(buffer.is_outdated for buffer in self.buffers):
            self.use_sharded()
            self.reshard()

    def gather_again(self, stale: Sequence[FlatBuffer]) -> None:
        """Fill full buffers of an unsharded group again, whose shards have changed."""
        with Communicating(self, "gather changed parameters"):
            for buffer in stale:
                buffer.gathering.start()
            for buffer in stale:
                buffer.gathering.wait()

    # The parameters that the modules hold ----------------------------------------------------------------

    def use_unsharded(self, unsharded: Sequence[Sequence[Tensor]] | None = None) -> None:
        """Put unsharded parameters into the modules: those given per buffer, or the leaves."""
        for position, buffer in enumerate(self.buffers):
            tensors = [p.leaf for p in buffer.parameters] if unsharded is None else unsharded[position]
            self._put(buffer, tensors)
            if self.storage.counts_filling:
                buffer.versions.names_written_unsharded()
        self.uses_unsharded = True

    def use_sharded(self) -> None:
        """Put the sharded parameters back into the modules."""
        self.in_forward = False
        if self.uses_unsharded:
            for buffer in self.buffers:
                self._put(buffer, [parameter.sharded for parameter in buffer.parameters])
            self.uses_unsharded = False

    def _put(self, buffer: FlatBuffer, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(buffer.parameters, tensors, strict=True):
            for module, attribute in parameter.owners:
                self._set_parameter(module, attribute, tensor)

    # Autograd --------------------------------------------------------------------------------------------

    def make_use(
        self, token: Tensor, forward_pass: object | None, post_backward: PostBackward
    ) -> tuple[Tensor, ParameterUse | None]:
        """Make autograd nodes, one per buffer with trainable parameters.

        Args:
            token: see `ForwardPass.token`.
            post_backward: called with the group, the use, the buffer and its gradients when a node runs.

        Returns:
            The next token, and the use, or None where nothing is trainable.
        """
        use = ParameterUse(forward_pass)
        for buffer in self.buffers:
            indices = buffer.trainable()
            if indices:
                use.indices[buffer] = indices
                use.waiting.append(buffer)
                use.versions[buffer] = buffer.versions.of_full
                backward = located(partial(post_backward, self, use, buffer))
                token, unsharded = buffer.gather_node(token, indices, backward)
            else:
                unsharded = [parameter.leaf for parameter in buffer.parameters]
            use.unsharded.append(unsharded)
        return token, use if use.waiting else None


PostBackward = Callable[[ParameterGroup, ParameterUse, FlatBuffer, Gradients], None]
