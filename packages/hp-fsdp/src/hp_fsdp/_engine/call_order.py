"""Whether ranks gather and reduce the same modules in the same order.

Collectives of two ranks meet by their order alone: where one rank calls modules of equal size in another order, data
of different modules mix, and no backend objects. So each rank notes what it begins with a process group, and a digest
of that goes to the others at the end of each forward and each backward.
"""

from __future__ import annotations

import contextlib
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct
from typing import Any, Protocol

from hp_dtensor.comm.world import PendingBytes, ProcessGroup, current_world
from hp_dtensor.spec.rank_checks import name_ranks, ranks_by_fact
from hp_fsdp.exceptions import CallOrderError, CommunicationError

ACTIONS = ("gathers", "gathers what was kept of", "reduces the gradients of")
GATHERS, GATHERS_KEPT, REDUCES = range(len(ACTIONS))

NOTE = "hp_fsdp call order"
# A fixed beginning, digests of all actions and of their kinds, how many, and the codes of the first ones, for errors.
DIGEST_BYTES = 16
NUM_TOLD = 240
MESSAGE = Struct(f"8s{DIGEST_BYTES}s{DIGEST_BYTES}sI{NUM_TOLD}I")
BEGINNING = b"hp order"
START_ANEW = "Their collectives do not meet as they should any more: start the ranks anew"
# How much of a group, and of what went before, an error tells.
NUM_PARAMETERS = 3
NUM_ACTIONS = 3
# Ranks that differ may wait for each other: one for this, the other for a collective. Then it goes on, and looks later.
PATIENCE_SECONDS = 10.0

SAME_CALLS = (
    "Every rank must shard the same models and run the same forwards and backwards; a module that some ranks do not "
    "need must be called there all the same, and its output left out"
)


class Group(Protocol):
    """What is told of a parameter group."""

    name: str
    state: Any


class Participant:
    """One buffer's place in the order of a process group."""

    def __init__(self, order: CallOrder, number: int) -> None:
        self.order = order
        self._code = number * len(ACTIONS)

    def note(self, action: int) -> None:
        """This rank has begun to do this with the buffer."""
        self.order.note(self._code + action)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One under way: of the first `count` actions noted, which end in `when`."""

    messages: PendingBytes
    count: int
    when: str


class CallOrder:
    """What this rank has begun with the others of a process group, and whether they have begun the same.

    Attributes:
        noted: the actions since ranks last agreed, a code for each kind and buffer.
        error: the last disagreement. Raised as a copy: the note of a process group would keep alive what a traceback
            refers to, models and activations.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.noted = array("I")
        self.error: CallOrderError | None = None
        self._process_group = group
        self._rank = group.ranks[group.rank]
        # By number. Numbers are never used again: groups are freed at other moments on other ranks.
        self._described: dict[int, tuple[weakref.ref[Group], list[str]]] = {}
        self._num_joined = 0
        self._freed: deque[weakref.KeyedRef[int, Group]] = deque()
        self._agreed = bytes(DIGEST_BYTES)
        self._has_met = False
        self._under_way: Comparison | None = None

    def join(self, group: Group, parameters: Sequence[str]) -> Participant:
        """The next buffer, the same on every rank: of `group`, with `parameters`."""
        self._forget_freed()
        number = self._num_joined
        self._described[number] = weakref.KeyedRef(group, self._freed.append, number), list(parameters)
        self._num_joined += 1
        return Participant(self, number)

    def _forget_freed(self) -> None:
        """Drop the descriptions of freed groups, but for those of which the actions noted tell."""
        noted = {code // len(ACTIONS) for code in self.noted} if self._freed else ()
        for _ in range(len(self._freed)):
            freed = self._freed.popleft()
            if freed.key in noted:
                self._freed.append(freed)
            else:
                del self._described[freed.key]

    def note(self, code: int) -> None:
        """This rank has begun something."""
        self.noted.append(code)
        if not self._has_met:
            # Connections are made now, where every rank of the group comes to its first action.
            self._has_met = True
            self._process_group.barrier()

    def start_comparing(self, when: str) -> None:
        """Begin to compare what has been noted since the last time, if anything has."""
        self.check()
        if self.noted:
            digest = _digest(self._agreed + self.noted.tobytes())
            told = [*self.noted[:NUM_TOLD], *[0] * (NUM_TOLD - len(self.noted))]
            message = MESSAGE.pack(BEGINNING, digest, _digest(_kinds(self.noted)), len(self.noted), *told)
            with self._naming_failures(when):
                messages = self._process_group.start_all_gather_bytes(message)
            self._under_way = Comparison(messages, len(self.noted), when)

    def check(self, timeout_seconds: float | None = None) -> None:
        """Wait for the comparison under way; every rank then finds the same `error`.

        Raises:
            CommunicationError: the comparison itself failed.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        with self._naming_failures(under_way.when):
            messages = under_way.messages.wait(timeout_seconds)
        if messages is None:
            self._under_way = under_way
            return
        heads = {message[: len(BEGINNING) + DIGEST_BYTES] for message in messages}
        if len(heads) == 1:
            self._agree(heads.pop()[len(BEGINNING) :], under_way)
        else:
            self.error = self._disagree(messages, under_way)

    @contextlib.contextmanager
    def _naming_failures(self, when: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._rank}, in {when}: could not compare with ranks {list(self._process_group.ranks)} which "
                f"modules have been called: {error}. {self.last_actions()}. {SAME_CALLS}"
            ) from error

    def new_error(self) -> CallOrderError | None:
        """A disagreement that the comparison under way, if it is over by now, has found."""
        before = self.error
        with contextlib.suppress(CommunicationError):
            self.check(0)
        return _copy(self.error) if self.error is not None and self.error is not before else None

    def _agree(self, digest: bytes, under_way: Comparison) -> None:
        self._agreed = digest
        del self.noted[: under_way.count]

    def _disagree(self, messages: Sequence[bytes], under_way: Comparison) -> CallOrderError:
        beginnings, _, kinds, counts, *told = zip(*map(MESSAGE.unpack, messages), strict=True)
        if set(beginnings) != {BEGINNING}:
            return self._no_answer(beginnings, under_way)
        in_step = len(set(kinds)) == 1
        error = self._disagreement(_first_difference(counts, told), under_way, in_step)
        if in_step:
            # Every collective has met another one: the next ones will meet as they should.
            self._agree(bytes(DIGEST_BYTES), under_way)
        return error

    def _disagreement(self, codes: Sequence[int | None], under_way: Comparison, in_step: bool) -> CallOrderError:
        actions = [f"{self._describe(code)} in {under_way.when}" for code in codes]
        if len(set(actions)) < len(set(codes)):
            # Two models have groups of this name, or one model has another number on each rank.
            numbers = ["no" if code is None else code // len(ACTIONS) for code in codes]
            actions = [f"{action}, buffer {number}" for action, number in zip(actions, numbers, strict=True)]
        ranks = self._process_group.ranks
        each = who_does_what(ranks, actions) if codes else f"ranks {list(ranks)} after {NUM_TOLD} actions alike"
        go_on = self._going_on() if in_step else START_ANEW
        return CallOrderError(
            f"ranks call modules in different orders: {each}. {self._states(codes)}Their data have mixed, or would. "
            f"{go_on}. {SAME_CALLS}"
        )

    def _going_on(self) -> str:
        world = current_world(self._process_group.platform)
        if world.size == len(self._process_group.ranks):
            return "Nothing of it reaches the gradients; the next step can go on"
        others = name_ranks([rank for rank in range(world.size) if rank not in self._process_group.ranks])
        return (
            f"Nothing of it reaches the gradients here; the next step can go on if {others} gave up this one as well, "
            "of which this group knows nothing: otherwise start the ranks anew"
        )

    def _no_answer(self, beginnings: Sequence[bytes], under_way: Comparison) -> CallOrderError:
        said = zip(self._process_group.ranks, beginnings, strict=True)
        others = [rank for rank, beginning in said if beginning != BEGINNING]
        return CallOrderError(
            f"ranks call modules in different orders: rank {self._rank} is through with its {under_way.when} when "
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
        """What this rank has begun last, for errors."""
        last = "; ".join(map(self._describe, self.noted[-NUM_ACTIONS:]))
        return f"This rank's last actions: {last or 'none'}"


def _copy(error: CallOrderError) -> CallOrderError:
    return CallOrderError(*error.args)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _kinds(codes: Sequence[int]) -> bytes:
    return bytes(code % len(ACTIONS) for code in codes)


def _first_difference(counts: Sequence[int], told: Sequence[Sequence[int]]) -> list[int | None]:
    """What each rank does where they part, as far as they tell; `told[i]`: every rank's code of action i."""
    for index, codes in enumerate(told):
        different = [code if index < count else None for code, count in zip(codes, counts, strict=True)]
        if len(set(different)) > 1:
            return list(different)
    return []


class CallOrders:
    """The orders in which one model takes part."""

    def __init__(self, orders: Iterable[CallOrder]) -> None:
        self._heard = {order: order.error for order in orders}

    def start_comparing(self, when: str) -> None:
        """See `CallOrder.start_comparing`."""
        for order in self._heard:
            order.start_comparing(when)

    def check(self, timeout_seconds: float | None = None) -> None:
        """Wait for the comparisons under way.

        Raises:
            CallOrderError: ranks have begun different things, with this model or another one, for which they meet.
            CommunicationError: a comparison failed.
        """
        for order in self._heard:
            order.check(timeout_seconds)
        for order, heard in self._heard.items():
            if order.error is not None and order.error is not heard:
                self._heard[order] = order.error
                raise _copy(order.error)


def order_of(group: ProcessGroup | None) -> CallOrder | None:
    """That of a process group; None where there is nobody to meet."""
    if group is None or group.size == 1:
        return None
    if NOTE not in group.notes:
        group.notes[NOTE] = CallOrder(group)
    found: CallOrder = group.notes[NOTE]
    return found


def check_same_action(group: ProcessGroup, action: str) -> None:
    """Raise `CallOrderError` on every rank of `group` unless all of them give the same `action`."""
    actions = [said.decode() for said in group.all_gather_bytes(action.encode())]
    if len(set(actions)) > 1:
        each = who_does_what(group.ranks, actions)
        raise CallOrderError(f"ranks call modules in different orders: {each}. {SAME_CALLS}")


def who_does_what(ranks: Sequence[int], actions: Sequence[str]) -> str:
    """`ranks 0, 2 <action>; rank 1 <action>`."""
    alike = ranks_by_fact(dict(zip(ranks, actions, strict=True)))
    return "; ".join(f"{name_ranks(same)} {action}" for action, same in alike.items())
