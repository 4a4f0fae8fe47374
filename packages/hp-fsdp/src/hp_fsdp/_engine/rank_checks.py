"""The parameters that a backward has used on any rank: only they have gradients, as on a single device.

On one device a parameter that a loss does not use keeps `grad` None, and optimizers leave it alone; with a gradient of
zeros AdamW would decay and move it. Ranks may use different parameters, so that this is decided over all of them: each
sends one bit per parameter and reduction with the message by which call orders are compared. A few elements at the end
of the reduction would do too, but would have to be read from the device.

The order in which ranks gather and reduce the modules of a model, compared between them.

Collectives of two ranks meet by their order alone: where one rank calls modules of equal size in another order, data
of different modules mix, and no backend objects. So each rank records what it begins with a process group, and a digest
of that goes to the others at the end of each forward and each backward. The same message tells of each reduction which
parameters have gradients on this rank (`used_parameters.py`).

The call orders in which the flat buffers of a model take part: those of their shards and of their replicas.

Collectives of a group under its name: for those who record them, and in errors where one fails.

Comparison of the replicas of shards, which every rank updates by itself, in `check_mode`.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
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

# Bits in one message; of more parameters, neighbours share a bit.
FLAG_BYTES = 1024


class UsedParameters:
    """The parameters of one reduction that have gradients.

    Attributes:
        indices: of those with gradients on this rank; once ranks have compared, of those with gradients on any.
        count: of all parameters in the buffer.
    """

    def __init__(self, indices: frozenset[int], count: int) -> None:
        self.indices = indices
        self.count = count


def pack_flags(reductions: Sequence[UsedParameters]) -> bytes:
    """Pack one bit per parameter of these reductions, in order, into `FLAG_BYTES` bytes."""
    total = sum(each.count for each in reductions)
    flags, begin = 0, 0
    for each in reductions:
        for index in each.indices:
            flags |= 1 << _bit(begin + index, total)
        begin += each.count
    return flags.to_bytes(FLAG_BYTES, "little")


def unpack_flags(messages: Sequence[bytes], reductions: Sequence[UsedParameters]) -> None:
    """Set the indices of these reductions to those that some rank's message has a bit of."""
    if not reductions:
        return
    flags = 0
    for message in messages:
        flags |= int.from_bytes(message, "little")
    total, begin = sum(each.count for each in reductions), 0
    for each in reductions:
        each.indices = frozenset(i for i in range(each.count) if flags >> _bit(begin + i, total) & 1)
        begin += each.count


def _bit(position: int, total: int) -> int:
    """Return the bit of a parameter; neighbours share one where there are more parameters than bits."""
    bits = FLAG_BYTES * 8
    return position if total <= bits else position * bits // total


ACTIONS = ("gathers", "gathers what was kept of", "reduces the gradients of")
GATHERS, GATHERS_KEPT, REDUCES = range(len(ACTIONS))

NOTE = "hp_fsdp call order"
# A fixed beginning, digests of all actions and of their kinds, how many, the codes of the first ones, for errors, and
# flags of used parameters. Every message is as long: the exchange asks that of its ranks.
DIGEST_BYTES = 16
NUM_CODES_SENT = 240
MESSAGE = Struct(f"8s{DIGEST_BYTES}s{DIGEST_BYTES}sI{NUM_CODES_SENT}I{FLAG_BYTES}s")
BEGINNING = b"hp order"
START_ANEW = "Their collectives do not meet as they should any more: start the ranks anew"
# The parameters of a group, and the last actions, that an error names.
NUM_PARAMETERS = 3
NUM_ACTIONS = 3
# Ranks that differ may wait for each other: one for this, the other for a collective. Then it goes on, and looks later.
PATIENCE_SECONDS = 10.0

SAME_CALLS = (
    "Every rank must shard the same models and run the same forwards and backwards; a module that some ranks do not "
    "need must be called there all the same, and its output left out"
)


class Group(Protocol):
    """The attributes of a parameter group that errors name."""

    name: str
    state: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison under way, of the first `count` actions recorded, at the end of `phase` (forward or backward).

    Attributes:
        used: of the reductions among these actions, in their order.
    """

    messages: PendingBytes
    count: int
    phase: str
    used: list[UsedParameters]


class CallOrder:
    """Actions that this rank has begun with a process group, and their comparison with those of the other ranks.

    An action is coded as `buffer number * len(ACTIONS) + kind`.

    Attributes:
        actions: codes of those since ranks last agreed.
        error: the last disagreement. Raised as a copy: a process group keeps its call order, and an exception that has
            been raised keeps, by its traceback, models and activations.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.actions = array("I")
        self.error: CallOrderError | None = None
        self._process_group = group
        self._rank = group.ranks[group.rank]
        # By number. Numbers are never used again: groups are freed at other moments on other ranks.
        self._described: dict[int, tuple[weakref.ref[Group], list[str]]] = {}
        self._num_joined = 0
        self._freed: deque[weakref.KeyedRef[int, Group]] = deque()
        self._agreed = bytes(DIGEST_BYTES)
        self._is_connected = False
        self._comparison: Comparison | None = None
        # Those to be told at once, and those whose shards must have compared before.
        self._used_first: list[UsedParameters] = []
        self._used_second: list[UsedParameters] = []

    def join(self, group: Group, parameters: Sequence[str]) -> int:
        """Give the next buffer its number, the same on every rank; it belongs to `group` and holds `parameters`."""
        self._forget_freed()
        number = self._num_joined
        self._described[number] = weakref.KeyedRef(group, self._freed.append, number), list(parameters)
        self._num_joined += 1
        return number

    def _forget_freed(self) -> None:
        """Drop the descriptions of freed groups, but for those that an error about recorded actions would name."""
        named = {code // len(ACTIONS) for code in self.actions} if self._freed else ()
        for _ in range(len(self._freed)):
            freed = self._freed.popleft()
            if freed.key in named:
                self._freed.append(freed)
            else:
                del self._described[freed.key]

    def record(self, code: int, used: UsedParameters | None = None, is_second: bool = False) -> None:
        """Record an action that this rank has begun.

        Args:
            used: of a reduction, the parameters that it has gradients of.
            is_second: these are told to the others in a second comparison, when the shards have compared theirs.
        """
        self.actions.append(code)
        if used is not None:
            (self._used_second if is_second else self._used_first).append(used)
        if not self._is_connected:
            # Connections are made now, where every rank of the group comes to its first action.
            self._is_connected = True
            self._process_group.barrier()

    def start_comparing(self, phase: str, is_second: bool = False) -> None:
        """Begin to compare what has been recorded since the last comparison, if there is anything.

        Args:
            is_second: tell the parameters recorded so, whose shards have compared theirs; False: the other ones.
        """
        self.check()
        waiting = self._used_second if is_second else self._used_first
        if self.actions or waiting:
            digest = _digest(self._agreed + self.actions.tobytes())
            codes = [*self.actions[:NUM_CODES_SENT], *[0] * (NUM_CODES_SENT - len(self.actions))]
            used = waiting.copy()
            waiting.clear()
            kinds, flags = _digest(_kinds(self.actions)), pack_flags(used)
            message = MESSAGE.pack(BEGINNING, digest, kinds, len(self.actions), *codes, flags)
            with self._naming_failures(phase):
                messages = self._process_group.start_all_gather_bytes(message)
            self._comparison = Comparison(messages, len(self.actions), phase, used)

    def check(self, timeout_seconds: float | None = None) -> None:
        """Wait for the comparison under way; every rank then finds the same `error`.

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
        heads = {message[: len(BEGINNING) + DIGEST_BYTES] for message in messages}
        if len(heads) == 1:
            self._agree(heads.pop()[len(BEGINNING) :], comparison)
            unpack_flags([message[-FLAG_BYTES:] for message in messages], comparison.used)
        else:
            self.error = self._disagree(messages, comparison)

    def new_error(self) -> CallOrderError | None:
        """Return a disagreement that the comparison under way, if it is over by now, has found."""
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

    def _agree(self, digest: bytes, comparison: Comparison) -> None:
        self._agreed = digest
        del self.actions[: comparison.count]

    def _disagree(self, messages: Sequence[bytes], comparison: Comparison) -> CallOrderError:
        beginnings, _, kinds, counts, *codes, _ = zip(*map(MESSAGE.unpack, messages), strict=True)
        if set(beginnings) != {BEGINNING}:
            return self._other_collective(beginnings, comparison)
        same_kinds = len(set(kinds)) == 1
        error = self._disagreement(_first_difference(counts, codes), comparison, same_kinds)
        if same_kinds:
            # Every collective has met another one: the next ones will meet as they should.
            self._agree(bytes(DIGEST_BYTES), comparison)
        return error

    # Error messages --------------------------------------------------------------------------------------

    def _disagreement(self, codes: Sequence[int | None], comparison: Comparison, can_go_on: bool) -> CallOrderError:
        """Make the error for ranks that do `codes` where they differ first; None: a rank does nothing more."""
        actions = [f"{self._describe(code)} in {comparison.phase}" for code in codes]
        if len(set(actions)) < len(set(codes)):
            # Two models have groups of this name, or one model has another number on each rank.
            numbers = ["no" if code is None else code // len(ACTIONS) for code in codes]
            actions = [f"{action}, buffer {number}" for action, number in zip(actions, numbers, strict=True)]
        ranks = self._process_group.ranks
        each = who_does_what(ranks, actions) if codes else f"ranks {list(ranks)} after {NUM_CODES_SENT} actions alike"
        what_next = self._how_to_go_on() if can_go_on else START_ANEW
        return CallOrderError(
            f"ranks call modules in different orders: {each}. {self._states(codes)}Their data have mixed, or would. "
            f"{what_next}. {SAME_CALLS}"
        )

    def _how_to_go_on(self) -> str:
        world = current_world(self._process_group.platform)
        if world.size == len(self._process_group.ranks):
            return "Nothing of it reaches the gradients; the next step can go on"
        others = name_ranks([rank for rank in range(world.size) if rank not in self._process_group.ranks])
        return (
            f"Nothing of it reaches the gradients here; the next step can go on if {others} gave up this one as well, "
            "of which this group knows nothing: otherwise start the ranks anew"
        )

    def _other_collective(self, beginnings: Sequence[bytes], comparison: Comparison) -> CallOrderError:
        """Make the error for ranks whose message is not one of a comparison: they are in another collective."""
        by_rank = zip(self._process_group.ranks, beginnings, strict=True)
        others = [rank for rank, beginning in by_rank if beginning != BEGINNING]
        return CallOrderError(
            f"ranks call modules in different orders: rank {self._rank} is through with its {comparison.phase} when "
            f"{name_ranks(others)} still gathers or reduces. {self.last_actions()}. {START_ANEW}. {SAME_CALLS}"
        )

    def _describe(self, code: int | None) -> str:
        if code is None:
            return "does nothing more"
        number, kind = divmod(code, len(ACTIONS))
        if number >= self._num_joined:
            return f"{ACTIONS[kind]} a group that rank {self._rank} does not have"
        if number not in self._described:
            return f"{ACTIONS[kind]} a group that is gone"
        reference, parameters = self._described[number]
        group = reference()
        more = len(parameters) - NUM_PARAMETERS
        named = ", ".join(parameters[:NUM_PARAMETERS]) + (f" and {more} more" if more > 0 else "")
        return f"{ACTIONS[kind]} {group.name if group is not None else 'a group that is gone'} (parameters {named})"

    def _states(self, codes: Iterable[int | None]) -> str:
        numbers = dict.fromkeys(code // len(ACTIONS) for code in codes if code is not None)
        groups = [self._described[number][0]() for number in numbers if number in self._described]
        states = [f"{group.name} is in state {group.state.value!r}" for group in groups if group is not None]
        return f"On rank {self._rank} {', '.join(states)}. " if states else ""

    def last_actions(self) -> str:
        """Describe what this rank has begun last, for errors."""
        last = "; ".join(map(self._describe, self.actions[-NUM_ACTIONS:]))
        return f"This rank's last actions: {last or 'none'}"


def copy_of(error: CallOrderError) -> CallOrderError:
    """Return another exception with the same message, one without a traceback; see `CallOrder.error`."""
    return CallOrderError(*error.args)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _kinds(codes: Sequence[int]) -> bytes:
    return bytes(code % len(ACTIONS) for code in codes)


def _first_difference(counts: Sequence[int], sent: Sequence[Sequence[int]]) -> list[int | None]:
    """Return the code of each rank's action where ranks differ first; `sent[i]` holds every rank's code of action i.

    The list is empty where they differ beyond the actions sent.
    """
    for index, codes in enumerate(sent):
        different = [code if index < count else None for code, count in zip(codes, counts, strict=True)]
        if len(set(different)) > 1:
            return list(different)
    return []


def order_of(group: ProcessGroup | None) -> CallOrder | None:
    """Return the call order of a process group; None where there is no other rank to compare with."""
    if group is None or group.size == 1:
        return None
    if NOTE not in group.notes:
        group.notes[NOTE] = CallOrder(group)
    found: CallOrder = group.notes[NOTE]
    return found


def check_same_action(group: ProcessGroup, action: str) -> None:
    """Raise `CallOrderError` on every rank of `group` unless all of them give the same `action`."""
    actions = [answer.decode() for answer in group.all_gather_bytes(action.encode())]
    if len(set(actions)) > 1:
        each = who_does_what(group.ranks, actions)
        raise CallOrderError(f"ranks call modules in different orders: {each}. {SAME_CALLS}")


def who_does_what(ranks: Sequence[int], actions: Sequence[str]) -> str:
    """Join ranks with the same action: `ranks 0, 2 <action>; rank 1 <action>`."""
    alike = ranks_by_fact(dict(zip(ranks, actions, strict=True)))
    return "; ".join(f"{name_ranks(same)} {action}" for action, same in alike.items())


class BufferActions:
    """Records what this rank begins with one flat buffer, in the call orders of its process groups."""

    def __init__(self) -> None:
        self._among_shards: tuple[CallOrder, int] | None = None
        self._among_replicas: tuple[CallOrder, int] | None = None

    def join(
        self, group: Group, parameters: Sequence[str], shard_group: ProcessGroup, replicate_group: ProcessGroup | None
    ) -> None:
        """Take the next number in each of the two call orders; every rank's buffers join in the same order."""
        shards, replicas = order_of(shard_group), order_of(replicate_group)
        self._among_shards = (shards, shards.join(group, parameters)) if shards is not None else None
        self._among_replicas = (replicas, replicas.join(group, parameters)) if replicas is not None else None

    def record(self, action: int) -> None:
        """Record an action among the shards that begins now."""
        if self._among_shards is not None:
            order, number = self._among_shards
            order.record(number * len(ACTIONS) + action)

    def record_reduction(self, used: UsedParameters | None, among_replicas: bool) -> None:
        """Record a reduction that begins now.

        Args:
            used: to be completed when ranks have compared; None: the gradients are not stored yet.
            among_replicas: it communicates over the replicate axis, too.
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
        """The call order among the shards; among the replicas, where nothing is sharded."""
        first = self._among_shards or self._among_replicas
        return [first[0]] if first is not None else []

    @property
    def second_orders(self) -> list[CallOrder]:
        """The call order among the replicas of shards, to be compared when that among the shards has been."""
        both = self._among_shards is not None and self._among_replicas is not None
        return [self._among_replicas[0]] if both and self._among_replicas is not None else []


class CallOrders:
    """The call orders in which the buffers of one model take part.

    Those among replicas of shards come second: which parameters some rank of a shard group has used is known when its
    comparison is over, and goes to the replicas with theirs. So the parameters that any rank has used are known on all.
    One that is both, of parameters with different meshes, is compared both times.
    """

    def __init__(self, buffers: Iterable[BufferActions]) -> None:
        actions = list(buffers)
        self._first = list(dict.fromkeys(order for each in actions for order in each.first_orders))
        self._second = list(dict.fromkeys(order for each in actions for order in each.second_orders))
        self._errors_raised = {order: order.error for order in (*self._first, *self._second)}
        self._second_phase = ""

    def start_comparing(self, phase: str) -> None:
        """Begin to compare the call orders, at the end of a `phase`: forward or backward."""
        for order in self._first:
            order.start_comparing(phase)
        self._second_phase = phase

    def check(self, timeout_seconds: float | None = None) -> None:
        """Wait for the comparisons under way; without a limit of time, also for those among replicas of shards.

        Raises:
            CallOrderError: ranks have begun different things, with this model or another one that has the same ranks.
            CommunicationError: a comparison failed.
        """
        for order in self._first:
            order.check(timeout_seconds)
        # Also where ranks of this shard group have parted: its replicas know nothing of it, and wait for these.
        if timeout_seconds is None and self._second_phase:
            phase, self._second_phase = self._second_phase, ""
            for order in self._second:
                order.start_comparing(phase, is_second=True)
        for order in self._second:
            order.check(timeout_seconds)
        for order, raised in self._errors_raised.items():
            if order.error is not None and order.error is not raised:
                self._errors_raised[order] = order.error
                raise copy_of(order.error)


Module = Any


class CommunicatingGroup(Protocol):
    """The attributes of a parameter group that errors of its collectives name."""

    modules: list[Module]
    state: Any

    @property
    def place(self) -> str: ...

    @property
    def orders(self) -> list[CallOrder]: ...

    @property
    def ranks(self) -> Iterable[int]: ...


class Communicating:
    """Context manager around collectives of a group.

    They are recorded as those of the group's module, and a failed one raises `CommunicationError`, or `CallOrderError`
    where ranks have called different modules. It is a class, not a generator, because it is entered several times per
    group and step.

    Args:
        action: for errors, such as "gather parameters".
        in_backward: they reduce gradients; else they are forward or backward by when they are started.
    """

    __slots__ = ("_action", "_group", "_inside")

    def __init__(self, group: CommunicatingGroup, action: str, in_backward: bool = False) -> None:
        self._group, self._action = group, action
        self._inside: AbstractContextManager[None] | None = None
        if is_recording():
            self._inside = inside(group.modules, in_backward)

    def __enter__(self) -> None:
        if self._inside is not None:
            self._inside.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._inside is not None:
            self._inside.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError):
            _explain(self._group, self._action, error)


def _explain(group: CommunicatingGroup, action: str, error: RuntimeError) -> None:
    """Raise an error that says more than the backend's, if `error` is one of a failed collective."""
    # torch's OutOfMemoryError is a RuntimeError too: buffers are allocated inside of the block.
    if isinstance(error, HPError) or "OutOfMemory" in type(error).__name__:
        return
    for different_order in (order.new_error() for order in group.orders):
        if different_order is not None:
            raise different_order from error
    before = " ".join(f"{order.last_actions()}." for order in group.orders)
    raise CommunicationError(
        f"{group.place}, state {group.state.value!r}: could not {action} with ranks {sorted(group.ranks)}: {error}. "
        f"{before} Either one of them has ended, or ranks call modules in different orders, or not all of them; in "
        "hp_dtensor.check_mode() (or with HP_CHECK=1) an error names who calls what"
    ) from error


def check_replicas(groups: Iterable[Any]) -> None:
    """In `check_mode`: check that ranks that hold the same shards of these groups hold the same values.

    Two exchanges for each buffer with replicas; reads the shards on the host.

    Raises:
        RankMismatchError: on all ranks of the group, naming the parameters and which ranks agree.
    """
    for group in groups if is_checking() else ():
        for buffer in group.buffers:
            if buffer.replicate_group is not None:
                problem = _problem(buffer, buffer.replicate_group).encode()
                found = [each.decode() for each in buffer.shard_group.all_gather_bytes(problem) if each]
                if found:
                    raise RankMismatchError(
                        f"group {group.name}: replicas differ: {'; '.join(found)}. What writes parameters must write "
                        "the same on every rank; load a state dict, or broadcast them, to make them equal again"
                    )


def _problem(buffer: Any, replicas: ProcessGroup) -> str:
    """Name the parameters whose replicas differ, and the ranks that agree; empty if all are equal."""
    platform, shard = buffer.platform, buffer.shard
    mine = json.dumps({each.name: digest(platform, buffer.part_of(each, shard)) for each in buffer.parameters})
    everybody = [json.loads(answer) for answer in replicas.all_gather_bytes(mine.encode())]
    differing = sorted(name for name, value in everybody[0].items() if any(each[name] != value for each in everybody))
    if not differing:
        return ""
    values = [json.dumps([each[name] for name in differing]) for each in everybody]
    alike = ranks_by_fact(dict(zip(replicas.ranks, values, strict=True)))
    return f"{', '.join(differing)} on {' than on '.join(map(name_ranks, alike.values()))}"
