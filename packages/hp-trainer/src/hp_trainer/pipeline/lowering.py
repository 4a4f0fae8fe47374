"""From a schedule to the list of actions that one rank executes: transfers and gathers put in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hp_trainer.pipeline.actions import Action, Kind, Schedule
from hp_trainer.pipeline.dependencies import GIVES_INPUT_GRAD

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
