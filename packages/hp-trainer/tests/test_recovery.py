"""The choice of the state to go on from after a death, and settings of recovery that are refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hp_trainer.config import parse_config
from hp_trainer.launch import preflight
from hp_trainer.registries import Registries
from hp_trainer.training.recovery import Sources, choose_sources

Fact = dict[str, object]


def fact(own: Sequence[int] = (), held: dict[int, list[int]] | None = None, replicas: Sequence[int] = ()) -> Fact:
    # The keys of JSON are text.
    by_rank = {str(rank): numbers for rank, numbers in (held or {}).items()}
    return {"own": list(own), "held": by_rank, "replicas": list(replicas), "step": max(own, default=0)}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        # A new job: none has anything.
        ([fact(), fact()], None),
        # Rank 1 died while the second snapshot was sent: rank 2 has the first one of it.
        (
            [fact([1, 2], {2: [1]}), fact(), fact([1, 2], {1: [1]})],
            Sources(1, {1: (2, "held")}, 2),
        ),
        # It had been sent when the rank died.
        (
            [fact([1, 2], {2: [1]}), fact(), fact([1, 2], {1: [1, 2]})],
            Sources(2, {1: (2, "held")}, 2),
        ),
        # A survivor died on the way to its snapshot 2.
        ([fact([1], {1: [1, 2]}), fact([1, 2])], Sources(1, {}, 2)),
        # A rank and its partner have died.
        ([fact([1], {2: [1]}), fact(), fact()], None),
        # Their replicas are left.
        (
            [fact([3], replicas=[2]), fact([3], replicas=[3]), fact(replicas=[0]), fact(replicas=[1])],
            Sources(3, {2: (0, "own"), 3: (1, "own")}, 3),
        ),
        # Both replicas have died.
        ([fact([3], replicas=[2]), fact(replicas=[3]), fact([3], replicas=[0]), fact(replicas=[1])], None),
    ],
)
def test_sources(facts: list[Fact], expected: Sources | None) -> None:
    assert choose_sources(facts) == expected


RUN = """\
platform: torch
model: {name: decoder}
data: {path: corpus.txt}
training: {steps: 1, global_batch_size: 8}
"""


@pytest.mark.parametrize(
    ("settings", "world_size", "able", "messages"),
    [
        ([("copies", "1")], 2, True, []),
        ([("copies", "1")], 1, True, ["fault_tolerance.copies: a single rank has no partner"]),
        (
            [("copies", "0")],
            2,
            True,
            [
                "fault_tolerance.copies: without copies, the state of a dead rank is only in its replicas, and there "
                "are none; fault_tolerance.copies=1"
            ],
        ),
        (
            [("copies", "1")],
            2,
            False,
            [
                "fault_tolerance.copies: ranks of a running job cannot meet again on platform torch; "
                "fault_tolerance.copies=null with launch.max_restarts=3 and checkpoint.interval, to restart from a "
                "checkpoint"
            ],
        ),
    ],
)
def test_settings(
    installed: Registries,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[tuple[str, str]],
    world_size: int,
    able: bool,
    messages: list[str],
) -> None:
    monkeypatch.setattr(preflight, "replaces_ranks", lambda name: able)
    given = [(f"fault_tolerance.{name}", value) for name, value in settings]
    config = parse_config(RUN, given, registered=installed).config
    found = [
        f"{each.path}: {each.what}" + (f"; {each.hint}" if each.hint else "")
        for each in preflight.recovery_problems(config, world_size, "torch")
    ]
    assert found == messages
