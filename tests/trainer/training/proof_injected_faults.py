"""Gradient faults of every kind, on parameters of every kind, in four layouts: 224 runs, on `nox -s proof`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from injected_faults import EP, REPLICAS, Fault, is_placed, on_gradient, record, reference, stale, to_bfloat16
from training_runs import Lab

from hp_dtensor.debug import compare
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
