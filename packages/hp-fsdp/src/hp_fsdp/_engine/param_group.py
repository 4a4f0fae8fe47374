"""A parameter group: what one `fully_shard` call gathers, uses and frees together; its settings and its state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.recording import located
from hp_dtensor.spec.rank_checks import is_checking
from hp_fsdp._engine.flat_buffer import FlatBuffer, Gathering
from hp_fsdp._engine.rank_checks import CallOrder, check_same_action, communicate
from hp_fsdp.exceptions import FSDPStateError
from hp_fsdp.storage import Gradients, ParameterStorage

Tensor = Any
Module = Any


@dataclass(slots=True)
class ReduceOptions:
    """Options of the reduction of a group's gradients.

    Attributes:
        all_reduce: reduce over the replicate axis too. False: the shards reduced over the shard axis stay pending until
            a later reduction.
        divide_factor: divisor of the sum over all ranks. None: the number of ranks for `op` "avg", 1 for "sum".
        op: "avg" or "sum".
        scaling_factor: the result is multiplied by this.
        hook: called with each reduced flat shard, in the dtype of the reduction. It may write the shard in place.
    """

    all_reduce: bool = True
    divide_factor: float | None = None
    op: str = "avg"
    scaling_factor: float = 1.0
    hook: Callable[[Any], None] | None = None

    def divisor(self, num_ranks: int) -> float:
        """Return the number by which the sum over all ranks is divided, with the scaling factor included."""
        divisor = self.divide_factor
        if divisor is None:
            divisor = float(num_ranks) if self.op == "avg" else 1.0
        return divisor / self.scaling_factor


@dataclass(slots=True)
class GroupSettings:
    """When a group's full parameters are freed, how its gradients are reduced, and how many buffers overlap may hold.

    Attributes:
        zero_stage: 3 shards the parameters and frees the full ones between uses. Below 3 the full parameters stay.
        reshard_after_forward: free the full parameters after forward. None: yes, except for the root's own group. A
            number above 1: shard them over that many ranks.
        unshard_in_backward: gather before backward. False: no operation of the module reads its parameters in backward
            (an embedding). Ignored where the platform does not refuse to read released memory.
        reshard_after_backward: free the full parameters once their gradients are complete.
        gradient_sync: reduce gradients after backward. False: accumulate them unsharded.
        reduce: how gradients are reduced.
        is_last_backward: of a root: gradients that autograd did not deliver count as zero at the end of backward.
        defers_reduction: of a root: `RootContext.finish_reductions` waits for the reductions, not the end of backward.
        prefetch_depth: number of groups to gather ahead in the recorded order.
        max_gradient_buffers: number of full gradient buffers that may be held at once.
        retains_full: the full parameters stay in memory between uses (ZeRO stages 0 to 2).
    """

    zero_stage: int = 3
    reshard_after_forward: bool | int | None = None
    unshard_in_backward: bool = True
    reshard_after_backward: bool = True
    gradient_sync: bool = True
    reduce: ReduceOptions = field(default_factory=ReduceOptions)
    is_last_backward: bool = True
    defers_reduction: bool = False
    prefetch_depth: int = 1
    max_gradient_buffers: int = 1
    retains_full: bool = field(init=False)

    def __post_init__(self) -> None:
        self.retains_full = self.zero_stage < 3

    @property
    def frees_after_backward(self) -> bool:
        """True if the full parameters are freed at the end of a backward."""
        # A backward that reduces is followed by an optimizer step, which changes the shards: the full parameters would
        # be out of date.
        return not self.retains_full and (self.reshard_after_backward or self.gradient_sync)

    @property
    def shards_every_gradient(self) -> bool:
        """True if each backward reduce-scatters its gradients, even one whose gradients accumulate (ZeRO-2)."""
        return self.zero_stage == 2


class GroupState(Enum):
    """Form in which a group's parameters are held. Error messages show the values."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    SHARDED_AFTER_FORWARD = "sharded over fewer ranks after forward"


class Event(NamedTuple):
    """The start of a group's first forward in a pass, or the end of its last one."""

    group: ParameterGroup
    is_end: bool


class ParameterUse:
    """One use of a group's parameters in a forward: its autograd nodes, and the values that it computed with.

    Attributes:
        forward_pass: the `ForwardPass` that it belongs to. None: a recomputation during backward.
        unsharded: the tensors that the modules compute with, one per parameter of the group.
        indices: the indices of the trainable parameters of each buffer that has some.
        pending: buffers whose autograd node has not run in the current backward.
        versions: version counters of the parameters that the forward computed with, for each buffer in `indices`.
    """

    def __init__(self, forward_pass: object | None) -> None:
        self.forward_pass = forward_pass
        self.unsharded: list[Tensor] = []
        self.indices: dict[FlatBuffer, list[int]] = {}
        self.pending: list[FlatBuffer] = []
        self.versions: dict[FlatBuffer, list[int]] = {}

    def changed_parameters(self, buffer: FlatBuffer, grads: Gradients) -> list[str]:
        """Return the parameters with gradients that have other values in backward than the forward computed with."""
        # Autograd compares the versions of the tensors that operations have saved. It cannot see that a full buffer was
        # filled again from shards that an optimizer has changed, because the fill does not count as a write.
        then, now = self.versions[buffer], buffer.full_versions
        if then == now:
            return []
        # Parameters without a gradient may have changed, because this backward does not use them.
        used = (index for index, grad in zip(self.indices[buffer], grads, strict=True) if grad is not None)
        return [buffer.parameters[index].name for index in used if then[index] != now[index]]


class ParameterGroup:
    """The parameters that one call of `fully_shard` manages.

    Attributes:
        name: the group's name in errors. From the first call of the model on, the dotted names of its modules.
        modules: the modules that have the parameters. Recorded collectives are attributed to the first one.
        settings: see `GroupSettings`.
        state: the form in which the buffers hold the parameters.
        uses_unsharded: the modules hold the unsharded parameters instead of the sharded ones.
        start_event, end_event: its events in a pass.
        in_gathered_step: a `GatheredStep` keeps the parameters unsharded. Calls of modules leave the group alone.
        in_forward: the forward of one of its modules has started, and not all of its modules have ended theirs.
        running: ids of those of its modules whose forward runs.
        unsharded_after_forward: the last forward has left full parameters (or parts of them) for a backward.
        use: the use of the parameters in the current forward pass, until its backward. None outside.
        summon_depth: number of `summon_full_params` blocks that are open.
        summoned_buffers: the flat full buffers that those blocks have gathered.
        owners: every (module, attribute) that holds one of its parameters.
        num_conversions: how often buffers have been converted to another dtype.
        forward_prefetch, backward_prefetch: groups to prefetch. None: the next ones in recorded order.
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
        self.start_event, self.end_event = Event(self, is_end=False), Event(self, is_end=True)
        self.in_gathered_step = False
        self.in_forward = False
        self.running: set[int] = set()
        self.unsharded_after_forward = False
        self.use: ParameterUse | None = None
        self.summon_depth = 0
        self.summoned_buffers: list[Tensor] = []
        self.forward_prefetch: list[ParameterGroup] | None = None
        self.backward_prefetch: list[ParameterGroup] | None = None
        self.num_conversions = 0
        self._may_be_uninitialized = True
        self._gatherings = [buffer.gathering for buffer in self.buffers]
        parameters = [parameter for buffer in self.buffers for parameter in buffer.parameters]
        # Tied parameters have several owners. `_owned` are the indices of the parameters that the owners hold.
        self.owners = [owner for each in parameters for owner in each.owners]
        self._owned = [index for index, each in enumerate(parameters) for _ in each.owners]
        self._sharded = [each.sharded for each in parameters for _ in each.owners]
        for buffer in self.buffers:
            buffer.gathering.retains_full = settings.retains_full
            names = [parameter.name for parameter in buffer.parameters]
            buffer.actions.join(self, names, buffer.shard_group, buffer.replicate_group)

    @property
    def where(self) -> str:
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
        """The numbers of shards of its sharded buffers."""
        return sorted({buffer.layout.num_shards for buffer in self.buffers if buffer.layout.num_shards > 1})

    @property
    def held_bytes(self) -> int:
        """Bytes that full parameters hold now."""
        return sum(buffer.gathering.held_bytes for buffer in self.buffers)

    # Unsharding and resharding ---------------------------------------------------------------------------

    def start_unshard(self) -> None:
        """Start to gather the parameters, unless they are unsharded or a gather is running. Raises while summoned."""
        if self.summon_depth:
            raise FSDPStateError(
                f"{self.where}: forward, backward and unshard() are refused inside summon_full_params, "
                "because autograd does not see its parameters; leave the block first"
            )
        if self.state is GroupState.SHARDED or self.state is GroupState.SHARDED_AFTER_FORWARD:
            if is_checking():
                self.check_same_action("gathers")
            self._gather(methodcaller("start"))
            self.state = GroupState.GATHERING

    def unshard(self) -> None:
        """Gather the parameters, and wait for them."""
        if self.state is not GroupState.GATHERING or self.summon_depth:
            self.start_unshard()
        self.wait_for_unshard()

    def wait_for_unshard(self) -> None:
        """Wait for a running gather."""
        if self.state is GroupState.GATHERING:
            self._gather(methodcaller("wait"))
            self.state = GroupState.UNSHARDED

    def _gather(self, step: Callable[[Gathering], None]) -> None:
        """Start the gathers of all buffers, or wait for them. If one fails, release all buffers."""
        try:
            for gathering in self._gatherings:
                communicate(self, "gather parameters", step, gathering)
        except BaseException:
            for gathering in self._gatherings:
                # Others may have a running collective, which writes memory that is freed next.
                with contextlib.suppress(RuntimeError):
                    gathering.wait()
                gathering.release()
            self.state = GroupState.SHARDED
            raise

    def reshard(self) -> None:
        """Free the full parameters. Raises `FSDPStateError` while the modules compute with them."""
        if self.uses_unsharded:
            raise self._in_use()
        if self.state is not GroupState.SHARDED:
            # A running gather, as one that was prefetched and is not used, ends first.
            if self.state is GroupState.GATHERING:
                self.wait_for_unshard()
            for gathering in self._gatherings:
                gathering.release()
            self.state = GroupState.SHARDED
            self.unsharded_after_forward = False

    def reshard_to(self, num_ranks: int) -> None:
        """Free the full parameters, but retain 1/`num_ranks` of them; see `Gathering.reshard_to`."""
        if self.uses_unsharded:
            raise self._in_use()
        if self.state is GroupState.UNSHARDED:
            for gathering in self._gatherings:
                gathering.reshard_to(num_ranks)
            self.state = GroupState.SHARDED_AFTER_FORWARD

    def reshard_outdated(self) -> None:
        """Free full parameters that were gathered before an operation has written the shards.

        Ranks do not communicate about it, so every rank must have written its shard.
        """
        for buffer in self.buffers if self.state is not GroupState.SHARDED else ():
            if buffer.is_outdated:
                self.use_sharded()
                self.reshard()
                return

    def regather(self, stale: Sequence[FlatBuffer]) -> None:
        """Fill full buffers of an unsharded group again, because their shards have changed."""
        # All gathers are started before the first one is waited for.
        for buffer in stale:
            communicate(self, "gather changed parameters", buffer.gathering.start)
        for buffer in stale:
            communicate(self, "gather changed parameters", buffer.gathering.wait)

    def _in_use(self) -> FSDPStateError:
        # Its modules would go on to compute with released memory.
        return FSDPStateError(
            f"{self.where}: reshard() in state {self.state.value!r} while its modules hold the "
            f"unsharded parameters; expected state {GroupState.SHARDED.value!r} or a group not in use"
        )

    # The parameters that the modules hold ----------------------------------------------------------------

    def use_unsharded(self, unsharded: Sequence[Tensor] | None = None) -> None:
        """Set the unsharded parameters as attributes of the modules: those given, or else the leaves."""
        if unsharded is None:
            unsharded = [leaf for buffer in self.buffers for leaf in buffer.leaves]
        if len(self.owners) > len(unsharded):
            unsharded = [unsharded[index] for index in self._owned]
        self.storage.set_parameters(self.owners, unsharded)
        # The fill of the buffer has counted as a write. It must not be reported as one of the forward.
        for buffer in self.buffers if self.storage.counts_filling else ():
            buffer.names_written_unsharded()
        self.uses_unsharded = True

    def use_sharded(self) -> None:
        """Set the sharded parameters as attributes of the modules again."""
        # Also the end of a forward that has raised.
        self.in_forward = False
        if self.uses_unsharded:
            self.storage.set_parameters(self.owners, self._sharded)
            self.uses_unsharded = False

    def make_use(
        self, token: Tensor, forward_pass: object | None, post_backward: PostBackward
    ) -> tuple[Tensor, ParameterUse | None]:
        """Make the autograd nodes of a forward, one per buffer with trainable parameters.

        Args:
            token: see `ForwardPass.token`.
            post_backward: called with the group, the use, the buffer and its gradients when a node runs.

        Returns:
            The next token, and the use. None where nothing is trainable.
        """
        use = ParameterUse(forward_pass)
        for buffer in self.buffers:
            indices = buffer.trainable()
            if indices:
                use.indices[buffer] = indices
                use.pending.append(buffer)
                # Of the gather, not of now: the forward computes with the gathered values.
                use.versions[buffer] = buffer.full_versions
                backward = located(partial(post_backward, self, use, buffer))
                token, unsharded = buffer.gather_node(token, indices, backward)
            else:
                unsharded = buffer.leaves
            use.unsharded += unsharded
        return token, use if use.pending else None

    # Checks ----------------------------------------------------------------------------------------------

    def sync_moved_parameters(self) -> None:
        """Copy into the shards what `Module.to`, `to_empty` and the like have given the parameters as new data.

        Raises:
            FSDPStateError: parameters are on another device now; some of a buffer have another dtype than the others;
                or modules hold other parameters.
        """
        if any(buffer.has_moved for buffer in self.buffers):
            self._copy_moved()
        replaced = []
        if not self.uses_unsharded:
            replaced = [name for buffer in self.buffers for name in buffer.replaced_parameters()]
        if replaced:
            raise FSDPStateError(
                f"{self.where}: {', '.join(replaced)} of the module is not the parameter that fully_shard has set "
                "there; change modules before fully_shard, write values into parameters in place, and give a sharded "
                "model to no other fully_shard"
            )

    def _copy_moved(self) -> None:
        if any(buffer.new_dtype is not None for buffer in self.buffers):
            # The full buffer has the old dtype.
            self.reshard()
            self.num_conversions += 1
        # Conversion first: data in a new dtype cannot be copied into the shard as it is.
        problems = [problem for buffer in self.buffers for problem in buffer.convert()]
        problems = problems or [problem for buffer in self.buffers for problem in buffer.copy_moved()]
        if problems:
            raise FSDPStateError(
                f"{self.where}: {'; '.join(problems)}. Convert all parameters of a group to the same dtype, between "
                "steps, and move modules before fully_shard; for another dtype of computation use "
                "MixedPrecisionPolicy(param_dtype=...)"
            )

    def check_initialized(self) -> None:
        """Raise `FSDPStateError` if parameters from the meta device have not been given values."""
        if not self._may_be_uninitialized:
            return
        from_meta = [buffer for buffer in self.buffers if buffer.from_meta]
        # Zeros prove nothing where writes are not counted (`bias.data.zero_()`). So the group counts as initialized if
        # any parameter has been written or is not zero, or if this rank holds only vectors of it.
        if (
            from_meta
            and any(each.meta_include_matrices for each in from_meta)
            and not any(each.meta_have_values for each in from_meta)
        ):
            names = ", ".join(parameter.name for each in from_meta for parameter in each.from_meta)
            raise FSDPStateError(
                f"{self.where}: {names} came from the meta device and have no values yet. After fully_shard load a "
                "state dict, or initialise them (to_empty() and reset_parameters, init_parameters)"
            )
        for each in from_meta:
            each.from_meta.clear()
        self._may_be_uninitialized = False

    def check_unwritten(self) -> None:
        """Raise `FSDPStateError` if the forward has written unsharded parameters, which are freed, not copied back."""
        written = [name for buffer in self.buffers for name in buffer.names_written_unsharded()]
        if written:
            raise FSDPStateError(
                f"{self.where}: {', '.join(written)}: written in place while gathered, as by a forward that normalizes "
                "its own parameters (Embedding(max_norm=...)); the shards would not be updated. Write into the "
                "sharded parameters between steps, or exclude these (ignored_params)"
            )

    def check_same_action(self, action: str) -> None:
        """Raise `CallOrderError` unless every rank of the shard groups now does `action`. Called in `check_mode`."""
        for shard_group in dict.fromkeys(buffer.shard_group for buffer in self.buffers):
            # The sizes too: modules of one class have the same name until a model around them has been called.
            elements = sum(buffer.layout.numel for buffer in self.buffers)
            check_same_action(shard_group, f"{action} {self.name} of {elements} elements")


PostBackward = Callable[[ParameterGroup, ParameterUse, FlatBuffer, Gradients], None]
