"""The history of a run, as its folder tells it; read while the run trains, too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from hp_trainer._files import read_plain_text
from hp_trainer.exceptions import RunFolderError
from hp_trainer.metrics import read_metrics
from hp_trainer.run import RunFolder

Point = tuple[int, float]  # step, value

# Fields of an event that are no measurement.
_NO_CURVE = ("event", "step", "tokens", "samples")


@dataclass(frozen=True)
class RunHistory:
    """The log of a run, and its configuration as plain mappings.

    The configuration is not read against the schema: a report needs no plugin and no framework.

    Attributes:
        path: the run folder.
        events: those of `metrics.jsonl`, in order.
        config: the resolved configuration.
    """

    path: Path
    events: tuple[dict[str, Any], ...]
    config: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> RunHistory:
        """Read a run folder.

        Raises:
            RunFolderError: it holds no run, or its configuration is damaged.
        """
        run = RunFolder.open(path)
        try:
            config = yaml.safe_load(read_plain_text(run.config_file))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RunFolderError(f"{run.config_file} is damaged: {error}") from error
        if not isinstance(config, dict):
            raise RunFolderError(f"{run.config_file} is damaged: it holds no settings")
        return cls(path, tuple(read_metrics(run.metrics_file)), config)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind: `start`, `step`, `evaluation` or `checkpoint`."""
        return [event for event in self.events if event.get("event") == kind]

    @cached_property
    def curves(self) -> dict[str, list[Point]]:
        """Finite values of each number over the steps, by name; those of evaluations begin with `evaluation_`."""
        found: dict[str, list[Point]] = {}
        for kind, prefix in (("step", ""), ("evaluation", "evaluation_")):
            for event in self.of(kind):
                for name, value in _numbers(event):
                    found.setdefault(prefix + name, []).append((event["step"], value))
        return found

    def last(self, curve: str, count: int = 1) -> float | None:
        """Return the mean of the last `count` values of a curve; None where it has none."""
        points = self.curves.get(curve, [])
        return fmean(value for _, value in points[-count:]) if points else None

    def summary(self) -> dict[str, str]:
        """Return the numbers that stand above everything else, in words."""
        starts, steps = self.of("start"), self.of("step")
        start = starts[-1] if starts else {}
        evaluation = self.curves.get("evaluation_loss", [])
        speeds = [value for _, value in self.curves.get("tokens_per_second", [])]
        best = min(evaluation, key=lambda point: point[1], default=None)
        entries = {
            "parameters": _count(start.get("num_parameters")),
            "ranks": f"{start['world_size']} on {start['platform']}" if start else "",
            "starts": str(len(starts)) if len(starts) > 1 else "",
            "steps": f"{steps[-1]['step']:,} of {self.config.get('training', {}).get('steps', '?')}" if steps else "",
            "tokens": _count(sum(event.get("tokens", 0) for event in steps)),
            "training loss, mean of the last 10 steps": _loss(self.last("loss", 10)),
            "last evaluation loss": _loss(self.last("evaluation_loss")),
            "best evaluation loss": f"{best[1]:.4f} at step {best[0]}" if best else "",
            "tokens/s, median": f"{median(speeds):,.0f}" if speeds else "",
            "checkpoints written": str(len(self.of("checkpoint"))),
        }
        return {name: text for name, text in entries.items() if text}


def _numbers(event: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the finite numbers of an event by name, those of the model included."""
    values = {name: value for name, value in event.items() if name not in (*_NO_CURVE, "metrics")}
    inner = event.get("metrics")
    values |= inner if isinstance(inner, dict) else {}
    return [
        (name, float(value))
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    ]


def _count(number: Any) -> str:
    """Return a number as people say it: 3.1 million."""
    if not isinstance(number, (int, float)) or not number:
        return ""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.2f} {word}"
    return f"{number:,}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
