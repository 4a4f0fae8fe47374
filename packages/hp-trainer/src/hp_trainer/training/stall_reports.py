"""Reports of ranks that have come to a halt, and what they say together."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hp_trainer._files import read_plain_text

# Where a rank waits says less than the line of the model or of the user that led there.
_MACHINERY = re.compile(r"/(hp_dtensor|hp_fsdp|hp_platform_\w+|torch|mindspore|threading)[/.]")
_SHOWN_RANKS = 8
# The phase before the first step.
SET_UP = "set-up"


@dataclass(frozen=True, kw_only=True)
class StallReport:
    """The state of one rank.

    Attributes:
        phase, step, seconds: what it has been doing, at which step, for how long.
        calls: by group of ranks, how many collectives it has started there, and the name of the last.
        module: the part of the model, and the action of a pipeline, that it is at work for; empty outside of both.
        stack: the main thread's, `file:line in function`, innermost last.
    """

    rank: int
    phase: str
    step: int
    seconds: float
    calls: Mapping[str, tuple[int, str]]
    stack: Sequence[str]
    module: str = ""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def place(self) -> str:
        """Return the module, and the innermost line of the stack that is no machinery of communication."""
        outside = [line for line in self.stack if not _MACHINERY.search(line)]
        line = (outside or list(self.stack) or ["an unknown place"])[-1]
        return f"in {self.module}, at {line}" if self.module else f"at {line}"


def report_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's report."""
    return folder / f"rank-{rank:05}.json"


def read_reports(folder: Path) -> dict[int, StallReport]:
    """Read the reports of all ranks; damaged ones are left out."""
    found: dict[int, StallReport] = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            values = json.loads(read_plain_text(path))
            calls = {name: (int(count), str(call)) for name, (count, call) in values["calls"].items()}
            report = StallReport(**values | {"calls": calls})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        found[report.rank] = report
    return found


def describe_stall(reports: Mapping[int, StallReport], size: int) -> str:
    """Return which ranks keep the others waiting, and where those wait.

    Ranks without a report are stopped, dead, or cut off. Of the others those are behind that have started fewer
    collectives in a group than its other ranks.
    """
    silent = [rank for rank in range(size) if rank not in reports]
    if not reports:
        return f"no rank of {size} tells where it is"
    latest = max(reports.values(), key=lambda report: (report.step, report.seconds))
    known = {"step": f"step {latest.step}: ", SET_UP: "set-up: "}
    head = known.get(latest.phase, f"{latest.phase} at step {latest.step}: ")
    behind = _behind(reports)
    if silent:
        told = f"{_ranks(silent)} of {size} has not answered: stopped, killed, or not to be reached"
    elif behind:
        rank = min(behind)
        told = f"{_ranks(sorted(behind))} of {size} has not answered: {behind[rank]}, {reports[rank].place}"
    else:
        told = f"all {size} ranks wait for each other"
    return head + told + _where_they_wait([report for rank, report in reports.items() if rank not in behind])


def _behind(reports: Mapping[int, StallReport]) -> dict[int, str]:
    """Return the ranks that have started fewer collectives in a group than others, and how many."""
    most: dict[str, tuple[int, str]] = {}
    for report in reports.values():
        for group, call in report.calls.items():
            most[group] = max(most.get(group, (0, "")), call)
    behind: dict[int, str] = {}
    missing: dict[int, int] = defaultdict(int)
    for rank, report in reports.items():
        # A rank may not even have made a group in which others wait for it.
        for group in (group for group in most if group in report.calls or rank in _members(group)):
            count, _ = report.calls.get(group, (0, ""))
            if count < most[group][0]:
                behind[rank] = f"it has not come to {most[group][1]} (call {most[group][0]} among ranks {group})"
                missing[rank] += most[group][0] - count
    # Who waits in one group is behind in another; the one that has stepped out of line is behind by the most.
    furthest = max(missing.values(), default=0)
    return {rank: why for rank, why in behind.items() if missing[rank] == furthest}


def _members(group: str) -> Collection[int]:
    """Return the ranks of a group by its name; none of a name that is shortened."""
    if span := re.fullmatch(r"(\d+)-(\d+)", group):
        return range(int(span[1]), int(span[2]) + 1)
    return [int(rank) for rank in group.split(",")] if re.fullmatch(r"\d+(,\d+)*", group) else []


def _where_they_wait(waiting: Sequence[StallReport]) -> str:
    if not waiting:
        return ""
    first = waiting[0]
    last = max(first.calls.values(), default=(0, ""))[1] or "no collective"
    return f"; {_ranks([report.rank for report in waiting])} waits after starting {last}, {first.place}"


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank {', '.join(str(rank) for rank in ranks[:_SHOWN_RANKS])}{more}"
