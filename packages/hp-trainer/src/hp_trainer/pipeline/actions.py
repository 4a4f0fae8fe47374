"""Actions of a pipeline, schedules, and their lowering to the list of actions that one rank executes.

A `Schedule` holds only computations, one list of actions for each rank. `rank_actions` adds transfers and the gathers
of sharded parameters. `simulation.flow_of` states the data flow between actions, for all users of schedules.

The text form follows torch.distributed.pipelining: stage, kind, micro-batch, as in `2F0`.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hp_trainer.exceptions import ScheduleError

# Nine digits at most: a mistyped stage of more digits would make lists of all stages below it exhaust the memory.
_TEXT = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
NO_MICROBATCH = -1
"""`Action.microbatch` of actions that belong to a stage, not to one micro-batch."""


class Kind(enum.Enum):
    """Kind of an action of a pipeline stage.

    Attributes:
        FORWARD: compute the stage's outputs.
        BACKWARD: compute the gradients of inputs and parameters.
        INPUT_GRAD: compute only the gradients of the inputs, which the previous stage needs.
        WEIGHT_GRAD: compute only the gradients of the parameters, which are needed by the optimizer.
        SEND_FORWARD: send the stage's outputs to the next stage.
        RECEIVE_FORWARD: start to receive the stage's inputs.
        SEND_BACKWARD: send the gradients of the stage's inputs to the previous stage.
        RECEIVE_BACKWARD: start to receive the gradients of the stage's outputs.
        UNSHARD: gather the stage's parameters, sharded by `fully_shard`, for the step.
        RESHARD: reshard them after a step without a backward.
        REDUCE_GRAD: reduce their gradients, accumulated over all micro-batches, and reshard them.

    A schedule contains the first four kinds; `rank_actions` adds the others.
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

    # A step hashes actions for every message. Members are singletons, so their identity is a valid and faster hash than
    # the enum's default, the hash of the name.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank's program, such as `2F0`: stage 2, forward, micro-batch 0.

    Examples:
        >>> from hp_trainer.pipeline import Action
        >>> Action.parse("2F0").stage
        2
    """

    stage: int
    kind: Kind
    microbatch: int = NO_MICROBATCH

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.microbatch == NO_MICROBATCH else self.microbatch}"

    def of_kind(self, kind: Kind) -> Action:
        """Return the action of another kind for this stage and micro-batch."""
        return Action(self.stage, kind, self.microbatch)

    @staticmethod
    def parse(text: str) -> Action:
        """Return the action that `text` names.

        Raises:
            ScheduleError: `text` is not a stage, one of F, B, I and W, and a micro-batch, with numbers below 10^9.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"expected an action such as 2F0 (stage, one of F B I W, micro-batch), got {text!r}")
        return Action(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The computations of each rank, in the order of execution.

    Attributes:
        rank_of_stage: the rank of each stage.
        num_microbatches: number of micro-batches in a step.
        actions: the actions of each rank.

    Examples:
        >>> from hp_trainer.pipeline import build_schedule
        >>> print(build_schedule("1f1b", num_ranks=2, num_microbatches=2))
        rank 0: 0F0 0F1 0B0 0B1
        rank 1: 1F0 1B0 1F1 1B1
    """

    rank_of_stage: tuple[int, ...]
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    def __hash__(self) -> int:
        # Without the actions, of which a schedule of many ranks has a hundred thousand.
        return hash((self.rank_of_stage, self.num_microbatches, *map(len, self.actions)))

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
        """Parse the text form of a schedule, as returned by `str(schedule)`.

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
            # A stage must be on one rank alone: its parameters are there.
            for action in actions[-1]:
                if rank_of_stage.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        f"stage {action.stage} is on rank {rank_of_stage[action.stage]} and on rank {rank}"
                    )
        last = max(rank_of_stage, default=-1)
        # Only the first nine: a mistyped stage number may leave millions missing.
        missing = [*itertools.islice((stage for stage in range(last) if stage not in rank_of_stage), 9)]
        if missing:
            more = " and more" if len(missing) == 9 else ""
            raise ScheduleError(f"no rank has stages {missing[:8]}{more}, but one has stage {last}")
        num_microbatches = 1 + max((action.microbatch for each in actions for action in each), default=-1)
        return Schedule(
            tuple(rank_of_stage[stage] for stage in sorted(rank_of_stage)), num_microbatches, tuple(actions)
        )


PRODUCES_INPUT_GRAD = (Kind.BACKWARD, Kind.INPUT_GRAD)
"""Kinds of action that compute the gradients of a stage's inputs."""


def loop_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage for cyclic placement: stage s is on rank s % num_ranks."""
    return tuple(stage % num_ranks for stage in range(num_ranks * stages_per_rank))


def v_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage for V-shaped placement, in which every second pass over the ranks is reversed.

    With two stages per rank, rank 0 has the first and the last stage.
    """
    ranks = [*range(num_ranks)]
    return tuple(rank for turn in range(stages_per_rank) for rank in (ranks if turn % 2 == 0 else ranks[::-1]))


def interleave_rounds(stages: Sequence[int], kind: Kind, sizes: Sequence[int]) -> list[Action]:
    """Return the actions of one kind in rounds: the micro-batches of a round pass all stages before the next round.

    Args:
        sizes: number of micro-batches of each round.
    """
    ends = [0, *itertools.accumulate(sizes)]
    return [
        Action(stage, kind, microbatch)
        for first, end in itertools.pairwise(ends)
        for stage in stages
        for microbatch in range(first, end)
    ]


COMPLETES_WEIGHT_GRAD = (Kind.BACKWARD, Kind.WEIGHT_GRAD)
"""Kinds of action after which a micro-batch's gradients of the parameters are complete."""


def rank_actions(
    schedule: Schedule,
    rank: int,
    *,
    forward_only: bool = False,
    sharded_stages: Mapping[int, object] | None = None,
    gathers_for_step: bool = True,
) -> tuple[Action, ...]:
    """Return all actions that a rank executes in a step, in order.

    A receive is placed one computation before the one that needs the message, so that the transfer overlaps with a
    computation. The action only posts the receive; the computation that needs the message waits for it. A send directly
    follows its computation and does not block. Neighbours that send to each other at the same time therefore cannot
    deadlock, and the actions of all ranks complete if and only if `simulate` does.

    Args:
        forward_only: leave out all backward actions.
        sharded_stages: maps stages with sharded parameters, which are gathered before their first use and reduced after
            the last one, to keys. Stages with the same key share their parameters.
        gathers_for_step: False if each forward and backward gathers by itself and the last backward reduces. That
            backward must know that it is the last, so the reduction is then announced before it.

    Examples:
        >>> from hp_trainer.pipeline import build_schedule, rank_actions
        >>> schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=1)
        >>> [str(action) for action in rank_actions(schedule, 0)]
        ['0RECV_B0', '0F0', '0SEND_F0', '0B0']
    """
    compute = [a for a in schedule.actions[rank] if not forward_only or a.kind is Kind.FORWARD]
    # Forwards that gather by themselves also reshard, so without a backward there is nothing to add.
    keys = (sharded_stages if gathers_for_step or not forward_only else None) or {}
    # Input gradients alone neither start nor end the use of parameters: a forward comes before, a weight gradient
    # after.
    uses = [a for a in compute if a.stage in keys and a.kind in (Kind.FORWARD, *COMPLETES_WEIGHT_GRAD)]
    last_use = {keys[action.stage]: action for action in uses}
    # A dict keeps the last of equal keys: the last use, or the first one in reversed order.
    first_use = {keys[action.stage]: action for action in reversed(uses)}
    # The first computation has none before it, under which its receive could be posted.
    actions: list[Action] = list(_receive(schedule, rank, compute[0])) if compute else []
    end = Kind.RESHARD if forward_only else Kind.REDUCE_GRAD
    for position, action in enumerate(compute):
        if action in first_use.values():
            actions.append(Action(action.stage, Kind.UNSHARD))
        # The receive of the next computation, posted before this one starts.
        for following in compute[position + 1 : position + 2]:
            actions += _receive(schedule, rank, following)
        lowered = [action, *_send(schedule, rank, action)]
        if action in last_use.values():
            # After the last use; or before it, if that backward itself reduces and has to know that it is the last.
            lowered.insert(len(lowered) if gathers_for_step else 0, Action(action.stage, end))
        actions += lowered
    return tuple(actions)


def _receive(schedule: Schedule, rank: int, action: Action) -> Iterator[Action]:
    """Yield the receive of the message from another rank that a computation needs, if it needs one."""
    if action.kind is Kind.FORWARD and _is_remote(schedule, rank, action.stage - 1):
        yield Action(action.stage, Kind.RECEIVE_FORWARD, action.microbatch)
    if action.kind in PRODUCES_INPUT_GRAD and _is_remote(schedule, rank, action.stage + 1):
        yield Action(action.stage, Kind.RECEIVE_BACKWARD, action.microbatch)


def _send(schedule: Schedule, rank: int, action: Action) -> Iterator[Action]:
    """Yield the send of the result of a computation, if another rank needs it."""
    if action.kind is Kind.FORWARD and _is_remote(schedule, rank, action.stage + 1):
        yield Action(action.stage, Kind.SEND_FORWARD, action.microbatch)
    if action.kind in PRODUCES_INPUT_GRAD and _is_remote(schedule, rank, action.stage - 1):
        yield Action(action.stage, Kind.SEND_BACKWARD, action.microbatch)


def _is_remote(schedule: Schedule, rank: int, stage: int) -> bool:
    """Return whether `stage` exists and is on another rank."""
    return 0 <= stage < schedule.num_stages and schedule.rank_of_stage[stage] != rank
