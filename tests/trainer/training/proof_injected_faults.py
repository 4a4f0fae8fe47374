"""Recorded runs: 224 with a fault, and 200 of all layouts without one, on `nox -s proof`.

Faults are those of gradients of every kind, on parameters of every kind, in four layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from combinations import Combination, all_combinations, options_of, uneven_samples
from injected_faults import EP, RECORDED, REPLICAS, Fault, is_placed, on_gradient, record, reference, stale, to_bfloat16
from training_runs import Lab

from hp_dtensor.debug import Recording, compare, measure_growth
from hp_dtensor.testing.pytest_plugin import chosen

PARAMETERS = (
    "embed.weight",
    "layers.0.attention.o_proj.weight",
    "layers.0.attention.q_norm.weight",
    "layers.0.feed_forward.w1.weight",
    "layers.1.moe.experts.w3",
    "layers.1.moe.router.gate.weight",
    "head.weight",
)
Change = Callable[[np.ndarray, int], np.ndarray]
CHANGES: dict[str, tuple[Change, str]] = {
    "doubled": (lambda x, _: 2 * x, "factor"),
    "averaged": (lambda x, _: x / 2, "factor"),
    "wrong divisor": (lambda x, _: x / 1.0625, "factor"),
    "wrong sign": (lambda x, _: -x, "factor"),
    "lost": (lambda x, _: 0 * x, "lost"),
    "bfloat16": (lambda x, _: to_bfloat16(x), "dtype"),
    "not a number": (lambda x, _: x * np.nan, "not finite"),
}
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "experts": (EP, 2),
    "replicas": (REPLICAS, 2),
    "tensor parallel": ({"tp": 2, "etp": 1}, 2),
    "context parallel": ({"cp": 2}, 2),
}


def cases() -> Iterator[tuple[str, Fault]]:
    for name, (layout, (degrees, size)) in itertools.product(PARAMETERS, LAYOUTS.items()):
        for title, (change, kind) in CHANGES.items():
            fault = Fault(on_gradient(name, change), "gradient", (name,), (kind,), degrees, size, step=1)
            yield f"{title}, {name}, {layout}", fault
        yield f"stale, {name}, {layout}", Fault(stale(name), "gradient", (name,), ("stale",), degrees, size, step=2)


def test_faults_are_named_with_their_kinds(lab: Lab, hp_share: Any, count_cases: Callable[..., None]) -> None:
    expected = reference(lab, "reference")
    selected = chosen(list(cases()), share=hp_share)
    misplaced, other_kind = [], []
    for number, (name, fault) in enumerate(selected):
        found = compare(expected, record(lab, f"run-{number}", fault))
        if not is_placed(fault, found):
            misplaced.append(f"{name}: {found.first}")
        elif found.kind is None or found.kind.name not in fault.kinds:
            other_kind.append(f"{name}: {found.kind}")
    count_cases("injected faults", len(selected) - len(misplaced))
    assert len(misplaced) <= 0.05 * len(selected), misplaced
    assert len(misplaced) + len(other_kind) <= 0.2 * len(selected), other_kind


def test_a_draw_of_layouts_raises_no_alarm(lab: Lab, hp_share: Any, count_cases: Callable[..., None]) -> None:
    references: dict[tuple[bool, int], Recording] = {}
    alarms, selected = [], chosen(all_combinations(), 200, hp_share)
    for number, layout in enumerate(selected):
        key = (layout.experts, layout.num_layers)
        if key not in references:
            one = Combination(experts=layout.experts)
            runs = [recorded(lab, f"one {number} {unit}", one, layout.num_layers, unit) for unit in (0.0, 2.0**-24)]
            references[key] = measure_growth(*runs)
        found = compare(references[key], recorded(lab, f"layout {number}", layout, layout.num_layers))
        if found.first is not None:
            alarms.append(f"{layout}: {found}")
    count_cases("layouts without a false alarm", len(selected) - len(alarms))
    assert not alarms, "\n\n".join(alarms)


def recorded(lab: Lab, name: str, layout: Combination, num_layers: int, unit: float = 0.0) -> Recording:
    """Record two steps of a layout."""
    options = {**options_of(layout, num_layers), **RECORDED, "training__perturb_weights": unit}
    run = lab.start(name, layout.degrees(), **options)
    with uneven_samples(layout.experts):
        lab.train(run, layout.num_ranks)
    return Recording.load(run.digests_file)
