"""Actions of a pipeline, and a schedule: one list of them for each rank.

The text form follows torch.distributed.pipelining: stage, kind, micro-batch, as in `2F0`.
"""

from __future__ import annotations

import enum
import itertools
import re
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

    A schedule has the first four; the others follow from it (`hp_trainer.pipeline.lowering`).
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
