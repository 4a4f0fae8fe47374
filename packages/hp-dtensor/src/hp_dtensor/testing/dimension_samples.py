"""Calls that take a dimension apart, move along it, or run along it, whose rules work on cut dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.testing.rule_samples import Sample

MATRIX = (5, 4)
CUBE = (5, 4, 3)
LONG = (9, 3)
FLAT = (7,)


def _sample(name: str, call: Callable[..., Any], shape: tuple[int, ...] = MATRIX, **options: Any) -> Sample:
    return Sample(name, (shape,), call, **options)


_SLICES = (
    _sample("getitem rows", lambda ops, x: x[1:4]),
    _sample("getitem every second row", lambda ops, x: x[1::2], LONG),
    _sample("getitem from behind", lambda ops, x: x[-3:-1, ::3]),
    _sample("getitem no rows", lambda ops, x: x[3:3]),
    _sample("getitem a row", lambda ops, x: x[2]),
    _sample("getitem the last column", lambda ops, x: x[:, -1]),
    _sample("getitem an element", lambda ops, x: x[3, 1]),
    _sample("getitem of all kinds", lambda ops, x: x[1:, 2, None, ::2], CUBE),
    _sample("getitem of all kinds behind", lambda ops, x: x[..., None, 2, 1:], CUBE),
    _sample("getitem neighbours", lambda ops, x: ops.sub(x[1:], x[:-1])),
    _sample("getitem twice", lambda ops, x: ops.exp(x[1:][::2][1])),
    _sample("getitem summed", lambda ops, x: ops.sum(x[1:4][:, 2], 0)),
    _sample("narrow columns", lambda ops, x: ops.narrow(x, 1, 2, 2)),
    _sample("select a column", lambda ops, x: ops.select(x, 1, -2)),
)

_LISTS = (
    _sample("getitem by a list", lambda ops, x: x[[3, 0, -1]]),
    _sample("getitem columns by a list", lambda ops, x: x[:, [1, 0]]),
    _sample("getitem by lists", lambda ops, x: x[[0, 4], [1, 2]]),
    _sample("getitem by a list and a slice", lambda ops, x: x[1:, None, [2, 2], 1], CUBE),
    _sample("getitem by nested lists", lambda ops, x: x[..., [[0, 1], [2, 0]]], CUBE),
    _sample("getitem by truth values", lambda ops, x: x[[True, False, True, True, False]]),
)

_MOVES = (
    _sample("roll backward", lambda ops, x: ops.roll(x, -1, 1)),
    _sample("roll far", lambda ops, x: ops.roll(x, 13, 0), FLAT),
    _sample("roll a flat tensor", lambda ops, x: ops.roll(x, 3), FLAT),
    _sample("roll both ways", lambda ops, x: ops.roll(x, (1, 2), (0, 1))),
    _sample("roll of a slice", lambda ops, x: ops.roll(x[1:], 1, 0)),
    _sample("flip rows", lambda ops, x: ops.flip(x, (0,)), FLAT),
    _sample("flip both ways", lambda ops, x: ops.flip(x, (0, 1))),
    _sample("flip of a slice", lambda ops, x: ops.flip(x[1:4], (0, 1))),
)

_SCANS = (
    _sample("logcumsumexp rows", lambda ops, x: ops.logcumsumexp(x, 0)),
    _sample("logcumsumexp flat", lambda ops, x: ops.logcumsumexp(ops.mul(x, 20.0), -1), FLAT),
    _sample("logcumsumexp of a slice", lambda ops, x: ops.logcumsumexp(x[3:], 0), LONG),
    *(
        sample
        for name in ("cummax", "cummin")
        for sample in (
            _sample(f"{name} values", lambda ops, x, name=name: getattr(ops, name)(x, 0)[0], LONG),
            _sample(f"{name} positions", lambda ops, x, name=name: getattr(ops, name)(x, 0)[1], LONG, gradients=False),
            _sample(f"{name} of ties", lambda ops, x, name=name: getattr(ops, name)(ops.floor(x), 0)[1], LONG,
                    gradients=False),
            _sample(f"{name} of integers", lambda ops, x, name=name: getattr(ops, name)(x, -1), FLAT, integers={0: 3},
                    gradients=False),
            _sample(f"{name} of a slice", lambda ops, x, name=name: getattr(ops, name)(x[1:5], 0)[0], LONG),
        )
    ),
)  # fmt: skip

SAMPLES: tuple[Sample, ...] = (*_SLICES, *_LISTS, *_MOVES, *_SCANS)
