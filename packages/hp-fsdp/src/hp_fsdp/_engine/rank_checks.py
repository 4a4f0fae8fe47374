"""Checks between ranks: the order of collectives, which parameters are used, failed collectives, equal replicas.

Collectives of two ranks are matched by their order alone. If one rank calls modules of equal size in another order,
the data of different modules mix, and no backend reports it. So each rank records the collectives that it starts with
a process group, and sends a digest of them to the other ranks at the end of each forward and each backward.

The same message carries one bit per parameter and reduction: whether the parameter has a gradient on this rank. On a
single device a parameter that the loss does not use keeps `grad` None, and optimizers leave it alone; with a gradient
of zeros AdamW would decay it. Ranks may use different parameters, so that this depends on all of them. A few elements
at the end of the reduction could carry the bits too, but the host would have to read them from the device.

The arguments of `fully_shard` are compared between ranks in `_fully_shard.py`.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct
from typing import Any, Protocol

from hp_dtensor.comm.process_group import PendingBytes, ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import HPError, RankMismatchError
from hp_dtensor.platform.recording import inside, is_recording
from hp_dtensor.spec.rank_checks import digest, is_checking, name_ranks, ranks_by_fact
from hp_fsdp.exceptions import CallOrderError, CommunicationError

Module = Any

ACTIONS = ("gathers", "gathers the retained parts of", "reduces the gradients of")
GATHERS, GATHERS_RETAINED, REDUCES = range(len(ACTIONS))

NOTE = "hp_fsdp call order"
# Bits of used parameters in one message. If there are more parameters, neighbours share a bit.
FLAG_BYTES = 1024
DIGEST_BYTES = 16
# The first action codes are sent for error messages.
NUM_CODES_SENT = 240
# Header, digest of all actions, digest of their kinds, number of actions, the first action codes, and flags of used
# parameters. Every message has the same length, which the exchange requires.
MESSAGE = Struct(f"8s{DIGEST_BYTES}s{DIGEST_BYTES}sI{NUM_CODES_SENT}I{FLAG_BYTES}s")
HEADER = b"hp order"
RESTART = "Their collectives can no longer be matched: restart the ranks"
# Numbers of parameters of a group, and of last actions, that an error names.
NUM_PARAMETERS = 3
NUM_ACTIONS = 3
# Ranks whose orders differ may wait for each other, one here and the other in a collective. After this time the rank
# continues, and looks for the answer later.
PATIENCE_SECONDS = 10.0

SAME_CALLS = (
    "Every rank must shard the same models and run the same forwards and backwards; a module that some ranks do not "
    "need must be called there too, and its output ignored"
)


class Group(Protocol):
    """The attributes of a parameter group that this module uses."""

    name: str
    state: Any
    modules: list[Module]

    @property
    def where(self) -> str: ...

    @property
    def orders(self) -> list[CallOrder]: ...

    @property
    def ranks(self) -> Iterable[int]: ...


# Used parameters -----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class UsedParameters:
    """The parameters of one reduction that have gradients.

    Attributes:
        indices: indices of the parameters with a gradient on this rank; once ranks have compared, on any rank.
        count: number of parameters in the buffer.
    """

    indices: frozenset[int]
    count: int


def pack_flags(reductions: Sequence[UsedParameters]) -> bytes:
    """Pack one bit per parameter of these reductions, in order, into `FLAG_BYTES` bytes."""
    total = sum(each.count for each in reductions)
    flags, start = 0, 0
    for each in reductions:
        if len(each.indices) == each.count and total <= FLAG_BYTES * 8:  # all of them, the usual case
            flags |= ((1 << each.count) - 1) << start
        else:
            for index in each.indices:
                flags |= 1 << _bit(start + index, total)
        start += each.count
    return flags.to_bytes(FLAG_BYTES, "little")


def unpack_flags(messages: Sequence[bytes], reductions: Sequence[UsedParameters]) -> None:
    """Set the indices of these reductions to the parameters that any rank's message flags as used."""
    if not reductions:
        return
    flags = 0
    for message in messages:
        flags |= int.from_bytes(message, "little")
    total, start = sum(each.count for each in reductions), 0
    for each in reductions:
        # Ranks can only add to the indices of this one.
        if len(each.indices) < each.count:
            each.indices = frozenset([i for i in range(each.count) if flags >> _bit(start + i, total) & 1])
        start += each.count


def _bit(position: int, total: int) -> int:
    """Return the bit of a parameter. Neighbours share one if there are more parameters than bits."""
    bits = FLAG_BYTES * 8
    # A parameter that shares the bit of a used one then counts as used, and gets a gradient of zeros.
    return position if total <= bits else position * bits // total


# The call order of one process group ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """A running comparison of the first `count` recorded actions, started at the end of `phase` (forward or backward).

    Attributes:
        used: the used parameters of the reductions among these actions, in their order.
    """

    messages: PendingBytes
    count: int
    phase: str
    used: list[UsedParameters]


class CallOrder:
    """The collectives that this rank has started with a process group, and their comparison with the other ranks'.

    An action is coded as `buffer number * len(ACTIONS) + kind`.

    Attributes:
        actions: codes of the actions since ranks last agreed.
        error: the last disagreement.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        self.actions = array("I")
        # Only copies of it are raised: a raised exception refers to models and activations through its traceback, and
        # the process group holds its call order for ever.
        self.error: CallOrderError | None = None
        self._process_group = process_group
        self._rank = process_group.ranks[process_group.rank]
        # Group and parameter names of each buffer number. Numbers are not used again, because ranks free groups at
        # different moments.
        self._described: dict[int, tuple[weakref.ref[Group], list[str]]] = {}
        self._num_joined = 0
        self._freed: deque[weakref.KeyedRef[int, Group]] = deque()
        self._agreed = bytes(DIGEST_BYTES)
        self._is_connected = False
        self._comparison: Comparison | None = None
        # Used parameters that go with the first comparison, and those that go with the second, see `CallOrders`.
        self._used_first: list[UsedParameters] = []
        self._used_second: list[UsedParameters] = []

    def join(self, group: Group, parameters: Sequence[str]) -> int:
        """Register a buffer of `group` with these `parameters`; return its number, which is the same on every rank."""
        self._forget_freed()
        number = self._num_joined
        # Weak: process groups outlive models.
        self._described[number] = weakref.KeyedRef(group, self._freed.append, number), list(parameters)
        self._num_joined += 1
        return number

    def _forget_freed(self) -> None:
        """Delete the descriptions of freed groups, except for those that an error on recorded actions would name."""
        named = {code // len(ACTIONS) for code in self.actions} if self._freed else ()
        for _ in range(len(self._freed)):
            freed = self._freed.popleft()
            if freed.key in named:
                self._freed.append(freed)
            else:
                del self._described[freed.key]

    def record(self, code: int, used: UsedParameters | None = None, is_second: bool = False) -> None:
        """Record an action that this rank has started.

        Args:
            used: of a reduction, the parameters that it has gradients of.
            is_second: send them with the second comparison, see `CallOrders`.
        """
        self.actions.append(code)
        if used is not None:
            (self._used_second if is_second else self._used_first).append(used)
        if not self._is_connected:
            # Connect here, where every rank of the process group reaches its first action.
            self._is_connected = True
            self._process_group.barrier()

    def start_comparing(self, phase: str, is_second: bool = False) -> None:
        """Start to compare what has been recorded since the last comparison, if there is anything.

        Args:
            is_second: it is the second comparison, see `CallOrders`.
        """
        # There is one comparison at a time, so the previous one ends first.
        self.check()
        pending = self._used_second if is_second else self._used_first
        if self.actions or pending:
            # The digest covers everything since the start: the agreed digest is part of its input.
            order_digest = _digest(self._agreed + self.actions.tobytes())
            codes = [*self.actions[:NUM_CODES_SENT], *[0] * (NUM_CODES_SENT - len(self.actions))]
            used = pending.copy()
            pending.clear()
            kinds, flags = _digest(bytes([code % len(ACTIONS) for code in self.actions])), pack_flags(used)
            message = MESSAGE.pack(HEADER, order_digest, kinds, len(self.actions), *codes, flags)
            with self._naming_failures(phase):
                messages = self._process_group.start_all_gather_bytes(message)
            self._comparison = Comparison(messages, len(self.actions), phase, used)

    @property
    def is_comparing(self) -> bool:
        """True if a comparison is running."""
        return self._comparison is not None

    def check(self, timeout_seconds: float | None = None) -> None:
        """Wait for the running comparison. Every rank then finds the same `error`.

        Args:
            timeout_seconds: return after this time if there is no answer. None: wait without a limit.

        Raises:
            CommunicationError: the comparison itself failed.
        """
        comparison, self._comparison = self._comparison, None
        if comparison is None:
            return
        with self._naming_failures(comparison.phase):
            messages = comparison.messages.wait(timeout_seconds)
        if messages is None:
            self._comparison = comparison
            return
        # Header and digest of all actions. Other fields differ even if ranks agree (flags), or matter only for errors.
        starts = {message[: len(HEADER) + DIGEST_BYTES] for message in messages}
        if len(starts) == 1:
            self._agree(starts.pop()[len(HEADER) :], comparison)
            unpack_flags([message[-FLAG_BYTES:] for message in messages], comparison.used)
        else:
            self.error = self._disagree(messages, comparison)

    def new_error(self) -> CallOrderError | None:
        """Return the disagreement that the running comparison has found, if it has ended and found one."""
        before = self.error
        with contextlib.suppress(CommunicationError):
            self.check(0)
        return copy_of(self.error) if self.error is not None and self.error is not before else None

    @contextlib.contextmanager
    def _naming_failures(self, phase: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._rank}, in {phase}: could not compare with ranks {list(self._process_group.ranks)} which "
                f"modules have been called: {error}. {self.last_actions()}. {SAME_CALLS}"
            ) from error

    def _agree(self, agreed: bytes, comparison: Comparison) -> None:
        self._agreed = agreed
        # Actions recorded since the comparison started belong to the next one.
        del self.actions[: comparison.count]

    def _disagree(self, messages: Sequence[bytes], comparison: Comparison) -> CallOrderError:
        headers, _, kinds, counts, *codes, _ = zip(*map(MESSAGE.unpack, messages), strict=True)
        if set(headers) != {HEADER}:
            # A message without the header belongs to another collective, in which those ranks still are.
            by_rank = zip(self._process_group.ranks, headers, strict=True)
            others = name_ranks([rank for rank, header in by_rank if header != HEADER])
            return CallOrderError(
                f"ranks call modules in different orders: rank {self._rank} has ended its {comparison.phase} while "
                f"{others} still gathers or reduces. {self.last_actions()}. {RESTART}. {SAME_CALLS}"
            )
        same_kinds = len(set(kinds)) == 1
        error = self._disagreement(_first_difference(counts, codes), comparison, same_kinds)
        if same_kinds:
            # Every collective has been matched by another one, so that the next ones will be matched correctly.
            self._agree(bytes(DIGEST_BYTES), comparison)
        return error

    # Error messages --------------------------------------------------------------------------------------

    def _disagreement(self, codes: Sequence[int | None], comparison: Comparison, can_continue: bool) -> CallOrderError:
        """Make the error for ranks whose first different actions are `codes`. None: the rank has no further action."""
        actions = [f"{self._describe(code)} in {comparison.phase}" for code in codes]
        if len(set(actions)) < len(set(codes)):
            # Two models have groups of the same name, or ranks number the groups of one model differently.
            buffers = ["no" if code is None else code // len(ACTIONS) for code in codes]
            actions = [f"{action}, buffer {number}" for action, number in zip(actions, buffers, strict=True)]
        ranks = self._process_group.ranks
        each = who_does_what(ranks, actions) if codes else f"ranks {list(ranks)} after {NUM_CODES_SENT} equal actions"
        what_next = self._how_to_continue() if can_continue else RESTART
        numbers = dict.fromkeys(code // len(ACTIONS) for code in codes if code is not None)
        groups = [self._described[number][0]() for number in numbers if number in self._described]
        states = [f"{group.name} is in state {group.state.value!r}" for group in groups if group is not None]
        on_this_rank = f"On rank {self._rank} {', '.join(states)}. " if states else ""
        return CallOrderError(
            f"ranks call modules in different orders: {each}. {on_this_rank}Their data have mixed, or would. "
            f"{what_next}. {SAME_CALLS}"
        )

    def _how_to_continue(self) -> str:
        world = current_world(self._process_group.platform)
        if world.size == len(self._process_group.ranks):
            return "No gradient is affected; the next step can continue"
        others = name_ranks([rank for rank in range(world.size) if rank not in self._process_group.ranks])
        return (
            f"No gradient is affected here; the next step can continue if {others}, which this group cannot see, "
            "abandoned this step too: otherwise restart the ranks"
        )

    def _describe(self, code: int | None) -> str:
        if code is None:
            return "does nothing more"
        number, kind = divmod(code, len(ACTIONS))
        if number >= self._num_joined:
            return f"{ACTIONS[kind]} a group that rank {self._rank} does not have"
        if number not in self._described:
            return f"{ACTIONS[kind]} a group that has been freed"
        reference, parameters = self._described[number]
        group = reference()
        more = len(parameters) - NUM_PARAMETERS
        named = ", ".join(parameters[:NUM_PARAMETERS]) + (f" and {more} more" if more > 0 else "")
        name = group.name if group is not None else "a group that has been freed"
        return f"{ACTIONS[kind]} {name} (parameters {named})"

    def last_actions(self) -> str:
        """Describe the last actions of this rank, for errors."""
        last = "; ".join(map(self._describe, self.actions[-NUM_ACTIONS:]))
        return f"This rank's last actions: {last or 'none'}"


def copy_of(error: CallOrderError) -> CallOrderError:
    """Return a new exception with the same message and no traceback, see `CallOrder.error`."""
    return CallOrderError(*error.args)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _first_difference(counts: Sequence[int], sent: Sequence[Sequence[int]]) -> list[int | None]:
    """Return each rank's first action code that differs; `sent[i]` holds the codes of action i of all ranks.

    The list is empty if the first difference is beyond the codes sent.
    """
    for index, codes in enumerate(sent):
        different = [code if index < count else None for code, count in zip(codes, counts, strict=True)]
        if len(set(different)) > 1:
            return list(different)
    return []


def order_of(process_group: ProcessGroup | None) -> CallOrder | None:
    """Return the call order of a process group. None if there is no other rank to compare with."""
    if process_group is None or process_group.size == 1:
        return None
    if NOTE not in process_group.notes:
        process_group.notes[NOTE] = CallOrder(process_group)
    found: CallOrder = process_group.notes[NOTE]
    return found


def check_same_action(process_group: ProcessGroup, action: str) -> None:
    """Raise `CallOrderError` on every rank of `process_group` unless all of them pass the same `action`."""
    actions = [answer.decode() for answer in process_group.all_gather_bytes(action.encode())]
    if len(set(actions)) > 1:
        each = who_does_what(process_group.ranks, actions)
        raise CallOrderError(f"ranks call modules in different orders: {each}. {SAME_CALLS}")


def who_does_what(ranks: Sequence[int], actions: Sequence[str]) -> str:
    """Join ranks with the same action: `ranks 0, 2 <action>; rank 1 <action>`."""
    by_action = ranks_by_fact(dict(zip(ranks, actions, strict=True)))
    return "; ".join(f"{name_ranks(same)} {action}" for action, same in by_action.items())


# The call orders of one model ----------------------------------------------------------------------------


class ActionRecorder:
    """Records the collectives that this rank starts for one flat buffer, in the call orders of its process groups."""

    def __init__(self) -> None:
        self._among_shards: tuple[CallOrder, int] | None = None
        self._among_replicas: tuple[CallOrder, int] | None = None

    def join(
        self, group: Group, parameters: Sequence[str], shard_group: ProcessGroup, replicate_group: ProcessGroup | None
    ) -> None:
        """Take the next number in both call orders. The buffers of every rank join in the same order."""
        shards, replicas = order_of(shard_group), order_of(replicate_group)
        self._among_shards = (shards, shards.join(group, parameters)) if shards is not None else None
        self._among_replicas = (replicas, replicas.join(group, parameters)) if replicas is not None else None

    def record(self, action: int) -> None:
        """Record an action among the shards that starts now."""
        if self._among_shards is not None:
            order, number = self._among_shards
            order.record(number * len(ACTIONS) + action)

    def record_reduction(self, used: UsedParameters | None, among_replicas: bool) -> None:
        """Record a reduction that starts now.

        Args:
            used: completed when ranks have compared. None: this reduction does not store gradients.
            among_replicas: it includes an all-reduce over the replicate axis.
        """
        if self._among_shards is not None:
            order, number = self._among_shards
            order.record(number * len(ACTIONS) + REDUCES, used)
        if among_replicas and self._among_replicas is not None:
            order, number = self._among_replicas
            order.record(number * len(ACTIONS) + REDUCES, used, is_second=self._among_shards is not None)

    @property
    def orders(self) -> list[CallOrder]:
        """The call orders in which the buffer takes part."""
        return [*self.first_orders, *self.second_orders]

    @property
    def first_orders(self) -> list[CallOrder]:
        """The call order among the shards. Where nothing is sharded: that among the replicas."""
        first = self._among_shards or self._among_replicas
        return [first[0]] if first is not None else []

    @property
    def second_orders(self) -> list[CallOrder]:
        """The call order among the replicas of shards, compared after that among the shards."""
        both = self._among_shards is not None and self._among_replicas is not None
        return [self._among_replicas[0]] if both and self._among_replicas is not None else []


class CallOrders:
    """The call orders in which the buffers of one model take part.

    There are two comparisons, so that the used parameters of all ranks become known on all of them. The first is among
    the ranks of each shard group, and collects the parameters used in that group. The second is among the replicas of
    each shard, and sends what the first has collected. With parameters on different meshes, a process group may take
    part in both.

    Attributes:
        is_comparing: a comparison has been started, and `check` has not found its result. The second one is started by
            the `check` without a time limit.
    """

    def __init__(self, recorders: Iterable[ActionRecorder]) -> None:
        recorders = list(recorders)
        self._first = list(dict.fromkeys(order for each in recorders for order in each.first_orders))
        self._second = list(dict.fromkeys(order for each in recorders for order in each.second_orders))
        self._errors_raised = {order: order.error for order in (*self._first, *self._second)}
        self._second_phase = ""
        self.is_comparing = False

    def start_comparing(self, phase: str) -> None:
        """Start to compare the call orders at the end of a `phase`: forward or backward."""
        for order in self._first:
            order.start_comparing(phase)
        self._second_phase = phase
        self.is_comparing = True

    def check(self, timeout_seconds: float | None = None) -> None:
        """Wait for the running comparisons. With a time limit, only for those among the shards.

        Raises:
            CallOrderError: ranks have started different collectives, with this model or another one on the same ranks.
            CommunicationError: a comparison failed.
        """
        for order in self._first:
            order.check(timeout_seconds)
        # Also if the ranks of this shard group disagree: their replicas do not know of it, and wait for this exchange.
        if timeout_seconds is None and self._second_phase:
            phase, self._second_phase = self._second_phase, ""
            for order in self._second:
                order.start_comparing(phase, is_second=True)
        for order in self._second:
            order.check(timeout_seconds)
        self.is_comparing = any(order.is_comparing for order in self._errors_raised)
        for order, raised in self._errors_raised.items():
            if order.error is not None and order.error is not raised:
                self._errors_raised[order] = order.error
                raise copy_of(order.error)


# Failed collectives --------------------------------------------------------------------------------------


def communicate(
    group: Group, action: str, function: Callable[..., Any], *arguments: Any, in_backward: bool = False
) -> Any:
    """Call a function that starts collectives of a group, or waits for them.

    They are recorded as collectives of the group's module. A failed one raises `CommunicationError`, or
    `CallOrderError` if ranks have called different modules.

    Args:
        action: what they do, for errors, such as "gather parameters".
        in_backward: they reduce gradients. False: they count as forward or backward by when they are started.
    """
    try:
        if not is_recording():
            return function(*arguments)
        with inside(group.modules, in_backward):
            return function(*arguments)
    except RuntimeError as error:
        _explain(group, action, error)
        raise


def _explain(group: Group, action: str, error: RuntimeError) -> None:
    """Raise an error with more context than the backend's, if `error` comes from a failed collective."""
    # Buffers are allocated inside of the block, and torch's OutOfMemoryError is a RuntimeError too.
    if isinstance(error, HPError) or "OutOfMemory" in type(error).__name__:
        return
    for different_order in (order.new_error() for order in group.orders):
        if different_order is not None:
            raise different_order from error
    before = " ".join(f"{order.last_actions()}." for order in group.orders)
    raise CommunicationError(
        f"{group.where}, state {group.state.value!r}: could not {action} with ranks {sorted(group.ranks)}: {error}. "
        f"{before} Either one of them has ended, or ranks call modules in different orders, or not all of them; in "
        "hp_dtensor.check_mode() (or with HP_CHECK=1) an error names who calls what"
    ) from error


# Replicas ------------------------------------------------------------------------------------------------


def check_replicas(groups: Iterable[Any]) -> None:
    """In `check_mode`: check that ranks with the same shards of these groups hold the same values.

    It takes two exchanges for each buffer with replicas, and copies the shards to the host.

    Raises:
        RankMismatchError: on all ranks of the group, naming the parameters and which ranks agree.
    """
    for group in groups if is_checking() else ():
        for buffer in group.buffers:
            if buffer.replicate_group is not None:
                # Exchanged over the shards too, since only some shards may differ and all ranks have to raise.
                problem = _replica_problem(buffer, buffer.replicate_group).encode()
                found = [each.decode() for each in buffer.shard_group.all_gather_bytes(problem) if each]
                if found:
                    raise RankMismatchError(
                        f"group {group.name}: replicas differ: {'; '.join(found)}. Code that writes parameters must "
                        "write the same on every rank; load a state dict, or broadcast them, to make them equal again"
                    )


def _replica_problem(buffer: Any, replicate_group: ProcessGroup) -> str:
    """Return the parameters whose replicas differ, and the ranks that agree. Empty if all are equal."""
    platform, shard = buffer.platform, buffer.shard
    # Digests instead of values: one short message for each buffer.
    own = json.dumps({each.name: digest(platform, buffer.view_in_shard(each, shard)) for each in buffer.parameters})
    digests = [json.loads(answer) for answer in replicate_group.all_gather_bytes(own.encode())]
    differing = sorted(name for name, value in digests[0].items() if any(each[name] != value for each in digests))
    if not differing:
        return ""
    values = [json.dumps([each[name] for name in differing]) for each in digests]
    agreeing = ranks_by_fact(dict(zip(replicate_group.ranks, values, strict=True)))
    return f"{', '.join(differing)} on {' than on '.join(map(name_ranks, agreeing.values()))}"
