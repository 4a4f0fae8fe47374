"""The actions that an action waits for: the one statement of a pipeline's data flow."""

from __future__ import annotations

from hp_trainer.pipeline.actions import Action, Kind

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
