"""A group: the modules and flat buffers that are gathered, computed with and freed together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from typing import Any

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import HPError
from hp_dtensor.platform.recording import inside, located
from hp_dtensor.spec.rank_checks import is_checking
from hp_fsdp._engine.call_order import CallOrder, check_same_action
from hp_fsdp._engine.flat_buffer import FlatBuffer
from hp_fsdp._engine.reduction import ReduceOptions
from hp_fsdp.exceptions import CommunicationError, FSDPStateError
from hp_fsdp.storage import Gradients, ParameterStorage

Tensor = Any
Module = Any
Complete = Callable[["GatherRecord", FlatBuffer, Gradients], None]


class GroupState(Enum):
    """Where a group's full parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    SHARDED_AFTER_FORWARD = "sharded over fewer ranks after forward"


class GatherRecord:
    """One use of a group's parameters in a forward pass.

    Attributes:
        group: whose.
        forward_pass: of the context, or None for a recomputation during backward.
        unsharded: the tensors that the modules compute with, per buffer.
        indices: of the trainable parameters, per buffer that has some.
        waiting: buffers whose autograd node has not run yet.
        versions: of the parameters that the forward computed with, per buffer in `indices`.
    """

    def __init__(self, group: ParameterGroup, forward_pass: object | None) -> None:
        self.group = group
        self.forward_pass = forward_pass
        self.unsharded: list[list[Tensor]] = []
        self.indices: dict[FlatBuffer, list[int]] = {}
        self.waiting: list[FlatBuffer] = []
        self.versions: dict[FlatBuffer, list[int]] = {}

    def check_unchanged(self, buffer: FlatBuffer, grads: Gradients) -> None:
        """Raise if backward has come to other values than the forward computed with, as far as writes are counted.

        Parameters without a gradient may have changed: this backward does not use them.
        """
        then, now = self.versions[buffer], buffer.held_versions
        if then == now:
            return
        used = (index for index, grad in zip(self.indices[buffer], grads, strict=True) if grad is not None)
        changed = [buffer.parameters[index].name for index in used if then[index] != now[index]]
        if changed:
            raise FSDPStateError(
                f"{self.group.place}: {', '.join(changed)}: changed between a forward and its backward, by "
                "optimizer.step() or otherwise: gradients would be those of other values. Run the backward of every "
                "loss before the step, or the forward again after it"
            )


class ParameterGroup:
    """What one call of `fully_shard` manages.

    Attributes:
        name: how errors call it.
        modules: whose parameters it has; collectives are told by the first.
        state: where the full parameters are.
        exposed: whether the modules hold the unsharded parameters instead of the sharded ones.
        entered: whether the forward of one of its modules has begun, and not that of all ended.
        running: forwards of its modules that run, one inside of another, by the module's id.
        kept_after_forward: whether the last forward left the full parameters for a backward.
        record: the current forward pass's use, until its backward; None outside.
        is_last_backward: of a root: whether gradients that autograd did not deliver count as zero at the end of
            backward.
        defers_reduction: of a root: whether `Context.finish_reductions` waits for reductions, not the end of backward.
        gradient_sync: reduce gradients after backward; else accumulate them unsharded.
        zero_stage: 3 shards parameters, and frees them between uses; below that full parameters are kept.
        reshard_after_forward: None: unless it is the root's; a number above 1: to so many ranks.
        reshard_after_backward: free the full parameters once the gradients are complete.
        reduce_options: how gradients are reduced.
        summoned: how many `summon_full_params` show whole parameters now.
        summoned_buffers: what they show views of, per buffer.
        prefetch_depth: groups to gather ahead in recorded order.
        max_gradient_buffers: full gradient buffers that may be held at once.
        forward_prefetch, backward_prefetch: groups to gather ahead, instead of the next in recorded order.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[Module],
        storage: ParameterStorage,
        buffers: Sequence[FlatBuffer],
        reshard_after_forward: bool | int | None,
        zero_stage: int,
    ) -> None:
        self.name = name
        self.modules = list(modules)
        self.storage = storage
        self.buffers = list(buffers)
        self.state = GroupState.SHARDED
        self.exposed = False
        self.entered = False
        self.running: dict[int, int] = {}
        self.kept_after_forward = False
        self.record: GatherRecord | None = None
        self.gradient_sync = True
        self.is_last_backward = True
        self.defers_reduction = False
        for buffer in self.buffers:
            buffer.keeps_full = zero_stage < 3
        self.zero_stage = zero_stage
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.reduce_options = ReduceOptions()
        self.prefetch_depth = 1
        self.max_gradient_buffers = 1
        self.forward_prefetch: list[ParameterGroup] | None = None
        self.backward_prefetch: list[ParameterGroup] | None = None
        self.summoned = 0
        self.summoned_buffers: list[Tensor] = []
        self._set_parameter = storage.platform.set_parameter
        for buffer in self.buffers:
            buffer.join_orders(self)

    @property
    def place(self) -> str:
        """Which group, and where, for errors."""
        return f"group {self.name} on rank {current_world(self.storage.platform).rank}"

    @property
    def orders(self) -> list[CallOrder]:
        """Those in which its buffers take part."""
        return list(dict.fromkeys(order for buffer in self.buffers for order in buffer.orders))

    def attach(self) -> None:
        """See `FlatBuffer.attach`.

        Raises:
            FSDPStateError: listing the parameters whose dtype or device has been changed, or that have been replaced.
        """
        problems = [problem for buffer in self.buffers for problem in buffer.attach()]
        if problems:
            raise FSDPStateError(
                f"{self.place}: {'; '.join(problems)}. Convert or move a module before fully_shard; for another "
                "dtype of computation use MixedPrecisionPolicy(param_dtype=...)"
            )

        replaced = [] if self.exposed else [name for buffer in self.buffers for name in buffer.replaced()]
        if replaced:
            raise FSDPStateError(
                f"{self.place}: {', '.join(replaced)} of the module is not what fully_shard has put there; change "
                "modules before fully_shard, and write values into parameters in place"
            )

    def check_filled(self) -> None:
        """Raise `FSDPStateError` if parameters came from the meta device and nobody has given them values.

        Of zeros nobody can tell where writes are not counted (`bias.data.zero_()`): a group counts as filled where
        anything in it has been written or is not zero, or where this rank has nothing but vectors of it.
        """
        waiting = [buffer for buffer in self.buffers if buffer.from_meta]
        if waiting and any(buffer.holds_matrices for buffer in waiting) and not any(b.has_values for b in waiting):
            names = ", ".join(parameter.name for buffer in waiting for parameter in buffer.from_meta)
            raise FSDPStateError(
                f"{self.place}: {names} came from the meta device and have no values yet. After fully_shard load a "
                "state dict, or initialise them (to_empty() and reset_parameters, init_parameters)"
            )
        for buffer in waiting:
            buffer.from_meta.clear()

    def check_unwritten(self) -> None:
        """Raise `FSDPStateError` if full parameters have been written, of which the shards learn nothing."""
        written = [name for buffer in self.buffers for name in buffer.written_while_full()]
        if written:
            raise FSDPStateError(
                f"{self.place}: {', '.join(written)}: written in place while gathered, as by a forward that normalizes "
                "its own parameters (Embedding(max_norm=...)); the shards would not learn of it. Write into the "
                "sharded parameters between steps, or leave these out (ignored_params)"
            )

    # States ----------------------------------------------------------------------------------------------

    def start_unshard(self) -> None:
        """Begin to gather, unless that has been done.

        Raises:
            FSDPStateError: inside `summon_full_params`.
        """
        if self.summoned:
            raise FSDPStateError(
                f"{self.place}: forward, backward and unshard() are refused inside summon_full_params, "
                "whose parameters autograd does not see; leave the block first"
            )
        if self.state in (GroupState.SHARDED, GroupState.SHARDED_AFTER_FORWARD):
            self.check_order("gathers")
            self._gather(FlatBuffer.start_gather)
            self.state = GroupState.GATHERING

    def _gather(self, step: Callable[[FlatBuffer], None]) -> None:
        """A step of gathering for each buffer; where one fails, nothing is gathered."""
        try:
            with self.communicating("gather parameters"):
                for buffer in self.buffers:
                    step(buffer)
        except BaseException:
            for buffer in self.buffers:
                with contextlib.suppress(RuntimeError):
                    buffer.wait_gather()
                buffer.release()
            self.state = GroupState.SHARDED
            raise

    def unshard(self) -> None:
        """Gather, and wait for it."""
        self.start_unshard()
        self.finish_gathering()

    def finish_gathering(self) -> None:
        """Wait for a gather that has begun."""
        if self.state is GroupState.GATHERING:
            self._gather(FlatBuffer.wait_gather)
            self.state = GroupState.UNSHARDED

    def communicating(self, action: str, in_backward: bool = False) -> AbstractContextManager[None]:
        """Say of the collectives in the block whose they are: to those who record them, and where one fails, by a
        timeout or otherwise.

        Args:
            in_backward: they reduce gradients; else they are forward or backward by when they are started.

        Raises:
            CommunicationError: in place of the backend's error.
        """
        return _Communicating(self, action, inside(self.modules, in_backward))

    def explain_failure(self, action: str, error: RuntimeError) -> None:
        """Raise what says more of a failed collective than the backend's error, if that is what it is."""
        # torch's OutOfMemoryError is one too: buffers are allocated here.
        if isinstance(error, HPError) or "OutOfMemory" in type(error).__name__:
            return
        for mixed in (order.new_error() for order in self.orders):
            if mixed is not None:
                raise mixed from error
        ranks = sorted({rank for buffer in self.buffers for rank in buffer.ranks})
        before = " ".join(f"{order.last_actions()}." for order in self.orders)
        raise CommunicationError(
            f"{self.place}, state {self.state.value!r}: could not {action} with ranks {ranks}: {error}. {before} "
            "Either one of them has ended, or ranks call modules in different orders, or not all of them; in "
            "hp_dtensor.check_mode() (or with HP_CHECK=1) an error names who calls what"
        ) from error

    def check_order(self, action: str) -> None:
        """In `check_mode`: every rank that shares the shards now does this with this group.

        Raises:
            CallOrderError: on all of them, naming what each does.
        """
        if is_checking():
            for ranks in dict.fromkeys(buffer.shard_group for buffer in self.buffers):
                # The sizes too: modules of one class have one name until a model around them has been called.
                elements = sum(buffer.layout.numel for buffer in self.buffers)
                check_same_action(ranks, f"{action} {self.name} of {elements} elements")

    def reshard(self) -> None:
        """Free the full parameters.

        Raises:
            FSDPStateError: the modules are computing with them.
        """
        self._check_unused()
        self.finish_gathering()
        if self.state is not GroupState.SHARDED:
            for buffer in self.buffers:
                buffer.release()
            self.state = GroupState.SHARDED
            self.kept_after_forward = False

    def drop_outdated(self) -> None:
        """Free what has been gathered before its parameters were written, as by a forward around this one.

        Every rank must have written: nothing is exchanged.
        """
        if self.state is not GroupState.SHARDED and any(buffer.is_outdated for buffer in self.buffers):
            self.conceal()
            self.reshard()

    def reshard_to(self, num_ranks: int) -> None:
        """Free the full parameters, but keep them among each `num_ranks` consecutive ranks for the backward."""
        self._check_unused()
        if self.state is GroupState.UNSHARDED:
            for buffer in self.buffers:
                buffer.release_but_part(num_ranks)
            self.state = GroupState.SHARDED_AFTER_FORWARD

    def _check_unused(self) -> None:
        if self.exposed:
            raise FSDPStateError(
                f"{self.place}: reshard() in state {self.state.value!r} while its modules hold the "
                f"unsharded parameters; expected state {GroupState.SHARDED.value!r} or a group not in use"
            )

    def refresh(self, stale: Sequence[FlatBuffer]) -> None:
        """Gather again, of a group that is unsharded, what its shards have changed under."""
        with self.communicating("gather changed parameters"):
            for buffer in stale:
                buffer.start_gather()
            for buffer in stale:
                buffer.wait_gather()

    @property
    def shards_every_gradient(self) -> bool:
        """Whether gradients are reduce-scattered in each backward, also in one that does not complete them."""
        return self.zero_stage == 2

    @property
    def shard_counts(self) -> list[int]:
        """Into how many shards its buffers are cut that are cut at all."""
        return sorted({buffer.layout.num_shards for buffer in self.buffers if buffer.layout.num_shards > 1})

    @property
    def keeps_full(self) -> bool:
        """Whether full parameters stay when nobody computes with them."""
        return self.zero_stage < 3

    @property
    def held_bytes(self) -> int:
        """Bytes of full parameters held now."""
        return sum(buffer.held_bytes for buffer in self.buffers)

    # What the modules hold -------------------------------------------------------------------------------

    def expose(self, unsharded: Sequence[Sequence[Tensor]] | None = None) -> None:
        """Put unsharded parameters into the modules: those given per buffer, or the leaves."""
        for position, buffer in enumerate(self.buffers):
            tensors = [p.leaf for p in buffer.parameters] if unsharded is None else unsharded[position]
            self._put(buffer, tensors)
            if self.storage.counts_filling:
                buffer.written_while_full()
        self.exposed = True

    def conceal(self) -> None:
        """Put the sharded parameters back into the modules."""
        self.entered = False
        if self.exposed:
            for buffer in self.buffers:
                self._put(buffer, [parameter.sharded for parameter in buffer.parameters])
            self.exposed = False

    def _put(self, buffer: FlatBuffer, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(buffer.parameters, tensors, strict=True):
            for module, attribute in parameter.owners:
                self._set_parameter(module, attribute, tensor)

    # Autograd --------------------------------------------------------------------------------------------

    def record_use(
        self, token: Tensor, forward_pass: object | None, complete: Complete
    ) -> tuple[Tensor, GatherRecord | None]:
        """Make autograd nodes, one per buffer with trainable parameters: (next token, record if there are any).

        Args:
            complete: called with the record, the buffer and its gradients when a node runs.
        """
        record = GatherRecord(self, forward_pass)
        for buffer in self.buffers:
            indices = buffer.trainable()
            if indices:
                record.indices[buffer] = indices
                record.waiting.append(buffer)
                record.versions[buffer] = buffer.held_versions
                token, unsharded = buffer.gather_node(token, indices, located(partial(complete, record, buffer)))
            else:
                unsharded = [parameter.leaf for parameter in buffer.parameters]
            record.unsharded.append(unsharded)
        return token, record if record.waiting else None


class _Communicating:
    """See `ParameterGroup.communicating`. A class: it is entered several times a group and step."""

    __slots__ = ("_action", "_group", "_inside")

    def __init__(self, group: ParameterGroup, action: str, inside: AbstractContextManager[None]) -> None:
        self._group, self._action, self._inside = group, action, inside

    def __enter__(self) -> None:
        self._inside.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._inside.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError):
            self._group.explain_failure(self._action, error)
