"""Actions of a pipeline, and a schedule: one list of them for each rank.

The text form follows torch.distributed.pipelining: stage, kind, micro-batch, as in `2F0`.

The actions that an action waits for: the one statement of a pipeline's data flow.

The stages of each rank, and the order in which a rank goes through them.

From a schedule to the list of actions that one rank executes: transfers and gathers put in.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hp_trainer.exceptions import ScheduleError

# Longer numbers are no stages: a list of all below them would not end.
_TEXT = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
WHOLE_STAGE = -1
"""The micro-batch of an action that concerns no micro-batch."""


class Kind(enum.Enum):
    """Work on one micro-batch of one stage.

    Attributes:
        FORWARD: the stage's outputs.
        BACKWARD: both parts of the backward at once.
        INPUT_GRAD: the gradient of the stage's input, for which the stage before waits.
        WEIGHT_GRAD: the gradients of the stage's parameters, for which nobody waits before the optimizer.
        SEND_FORWARD, RECEIVE_FORWARD: the stage's outputs leave for the next stage, its inputs come.
        SEND_BACKWARD, RECEIVE_BACKWARD: the gradients of its inputs leave, those of its outputs come.
        UNSHARD: the stage's parameters, sharded by `fully_shard`, are gathered for the step.
        RESHARD: they are sharded again, after a step without a backward.
        REDUCE_GRAD: their gradients, accumulated over all micro-batches, are reduced; they are sharded again.

    A schedule has the first four; the others follow from it (`hp_trainer.pipeline.actions`).
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"

    # Members are single, and a step looks actions up for each message: an enum's own hash is that of its name.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work; its text is `2F0`: stage 2, forward, micro-batch 0.

    Example:
        >>> from hp_trainer.pipeline import Action
        >>> Action.parse("2F0").stage
        2
    """

    stage: int
    kind: Kind
    microbatch: int = WHOLE_STAGE

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.microbatch == WHOLE_STAGE else self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Return the action that `text` names.

        Raises:
            ScheduleError: it is not stage, kind and micro-batch, the kind one of F, B, I and W, the numbers below 10^9.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"expected an action such as 2F0 (stage, one of F B I W, micro-batch), got {text!r}")
        return Action(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order in which each rank works.

    Attributes:
        rank_of_stage: the rank of each stage; as many entries as there are stages.
        num_microbatches: micro-batches of one step.
        actions: one list for each rank.

    Example:
        >>> from hp_trainer.pipeline import build_schedule
        >>> print(build_schedule("1f1b", num_ranks=2, num_microbatches=2))
        rank 0: 0F0 0F1 0B0 0B1
        rank 1: 1F0 1B0 1F1 1B1
    """

    rank_of_stage: tuple[int, ...]
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, each))}" for rank, each in enumerate(self.actions))

    @staticmethod
    def parse(text: str) -> Schedule:
        """Return the schedule that `str` of it gives, or that a user has written in that form.

        Raises:
            ScheduleError: a line is not `rank N: ACTION ...`, ranks are missing, or a stage has no rank or several.
        """
        lines = [line for line in text.splitlines() if line.strip()]
        actions: list[tuple[Action, ...]] = []
        rank_of_stage: dict[int, int] = {}
        for rank, line in enumerate(lines):
            head, _, rest = line.partition(":")
            if head.split() != ["rank", str(rank)]:
                raise ScheduleError(f"expected a line that begins with 'rank {rank}:', got {line!r}")
            actions.append(tuple(map(Action.parse, rest.split())))
            for action in actions[-1]:
                if rank_of_stage.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        f"stage {action.stage} is on rank {rank_of_stage[action.stage]} and on rank {rank}"
                    )
        last = max(rank_of_stage, default=-1)
        # Of a last stage of many digits the first ones that are missing, not all.
        missing = [*itertools.islice((stage for stage in range(last) if stage not in rank_of_stage), 9)]
        if missing:
            more = " and more" if len(missing) == 9 else ""
            raise ScheduleError(f"no rank works on stages {missing[:8]}{more}, but one on stage {last}")
        num_microbatches = 1 + max((action.microbatch for each in actions for action in each), default=-1)
        return Schedule(
            tuple(rank_of_stage[stage] for stage in sorted(rank_of_stage)), num_microbatches, tuple(actions)
        )


GIVES_INPUT_GRAD = (Kind.BACKWARD, Kind.INPUT_GRAD)


def alternatives(action: Action, num_stages: int) -> list[tuple[Action, ...]]:
    """Return what must be over before `action` may begin: one action of each tuple.

    The gradient that a stage gives to the one before it comes of a whole backward or of its first part, whichever the
    schedule has, so such a dependency has two forms.
    """
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is Kind.FORWARD:
        return [(Action(stage - 1, Kind.FORWARD, microbatch),)] if stage else []
    if kind is Kind.WEIGHT_GRAD:
        return [(Action(stage, Kind.INPUT_GRAD, microbatch),)]
    needed: list[tuple[Action, ...]] = [(Action(stage, Kind.FORWARD, microbatch),)]
    if stage + 1 < num_stages:
        needed.append(tuple(Action(stage + 1, each, microbatch) for each in GIVES_INPUT_GRAD))
    return needed


def loop_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage where stages go round: stage s is on rank s % num_ranks."""
    return tuple(stage % num_ranks for stage in range(num_ranks * stages_per_rank))


def v_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage where every second round goes back, so that the first and the last stage meet."""
    there = [*range(num_ranks)]
    return tuple(rank for turn in range(stages_per_rank) for rank in (there if turn % 2 == 0 else there[::-1]))


def in_rounds(stages: Sequence[int], kind: Kind, num_microbatches: int, round_size: int) -> list[tuple[int, Kind, int]]:
    """Return (stage, kind, micro-batch): rounds of micro-batches, each round through all stages in their order."""
    return [
        (stage, kind, microbatch)
        for first in range(0, num_microbatches, round_size)
        for stage in stages
        for microbatch in range(first, min(first + round_size, num_microbatches))
    ]


COMPLETES_WEIGHT_GRAD = (Kind.BACKWARD, Kind.WEIGHT_GRAD)


def rank_actions(
    schedule: Schedule,
    rank: int,
    *,
    forward_only: bool = False,
    sharded_stages: Mapping[int, object] | None = None,
    gathers_for_step: bool = True,
) -> tuple[Action, ...]:
    """Return everything that a rank does in a step, in order.

    A receive stands before the computation that precedes the one which needs it, so that the message travels during
    that computation; it only announces the buffer, and the computation that needs it waits. A send follows the
    computation at once and waits for nobody. So neighbours that send to each other at the same time do not wait for
    each other, and a list runs to its end if and only if `simulate` does.

    Args:
        forward_only: leave out everything that belongs to the backward.
        sharded_stages: stages whose parameters are gathered before their first use and reduced after the last, each
            with a key: stages of one key share their parameters.
        gathers_for_step: False: forwards and backwards gather by themselves, and the last backward reduces; it must
            know that it is the last, so the reduction is announced before it.

    Example:
        >>> from hp_trainer.pipeline import build_schedule, rank_actions
        >>> schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=1)
        >>> [str(action) for action in rank_actions(schedule, 0)]
        ['0RECV_B0', '0F0', '0SEND_F0', '0B0']
    """
    compute = [a for a in schedule.actions[rank] if not forward_only or a.kind is Kind.FORWARD]
    # Without a backward, forwards that gather by themselves need nothing else.
    keys = (sharded_stages if gathers_for_step or not forward_only else None) or {}
    uses = [a for a in compute if a.stage in keys and a.kind in (Kind.FORWARD, *COMPLETES_WEIGHT_GRAD)]
    last_use = {keys[action.stage]: action for action in uses}
    # Of equal keys the later entry stays: in reverse, that is the first use.
    first_use = {keys[action.stage]: action for action in reversed(uses)}
    actions: list[Action] = list(_receive(schedule, rank, compute[0])) if compute else []
    end = Kind.RESHARD if forward_only else Kind.REDUCE_GRAD
    for position, action in enumerate(compute):
        if action in first_use.values():
            actions.append(Action(action.stage, Kind.UNSHARD))
        for following in compute[position + 1 : position + 2]:
            actions += _receive(schedule, rank, following)
        done = [action, *_send(schedule, rank, action)]
        if action in last_use.values():
            done.insert(len(done) if gathers_for_step else 0, Action(action.stage, end))
        actions += done
    return tuple(actions)


def _receive(schedule: Schedule, rank: int, action: Action) -> Iterator[Action]:
    if action.kind is Kind.FORWARD and _is_remote(schedule, rank, action.stage - 1):
        yield Action(action.stage, Kind.RECEIVE_FORWARD, action.microbatch)
    if action.kind in GIVES_INPUT_GRAD and _is_remote(schedule, rank, action.stage + 1):
        yield Action(action.stage, Kind.RECEIVE_BACKWARD, action.microbatch)


def _send(schedule: Schedule, rank: int, action: Action) -> Iterator[Action]:
    if action.kind is Kind.FORWARD and _is_remote(schedule, rank, action.stage + 1):
        yield Action(action.stage, Kind.SEND_FORWARD, action.microbatch)
    if action.kind in GIVES_INPUT_GRAD and _is_remote(schedule, rank, action.stage - 1):
        yield Action(action.stage, Kind.SEND_BACKWARD, action.microbatch)


def _is_remote(schedule: Schedule, rank: int, stage: int) -> bool:
    """Return True if there is such a stage, and another rank has it."""
    return 0 <= stage < schedule.num_stages and schedule.rank_of_stage[stage] != rank
