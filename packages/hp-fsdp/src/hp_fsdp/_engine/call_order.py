"""The order in which ranks gather and reduce the modules of a model, compared between them.

Collectives of two ranks meet by their order alone: where one rank calls modules of equal size in another order, data
of different modules mix, and no backend objects. So each rank records what it begins with a process group, and a digest
of that goes to the others at the end of each forward and each backward. The same message tells of each reduction which
parameters have gradients on this rank (`used_parameters.py`).
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

from hp_dtensor.comm.process_group import PendingBytes, ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_dtensor.spec.rank_checks import name_ranks, ranks_by_fact
from hp_fsdp._engine.used_parameters import FLAG_BYTES, UsedParameters, pack_flags, unpack_flags
from hp_fsdp.exceptions import CallOrderError, CommunicationError

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
