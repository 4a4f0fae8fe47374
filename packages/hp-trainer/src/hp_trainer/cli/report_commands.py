"""Commands that show what runs have done; they load no framework."""

from __future__ import annotations

from pathlib import Path

from hp_trainer.cli.arguments import Parser, UsageError, parse
from hp_trainer.cli.shared import refuse_settings
from hp_trainer.report import compare_runs, report_run


def report_command(given: list[str]) -> int:
    """Write the report of a run: `hp-train report RUN [--to FILE]`."""
    parser = Parser(prog="hp-train report", add_help=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--to", metavar="FILE", type=Path)
    options, overrides = parse(parser, given)
    refuse_settings("report", overrides)
    print(report_run(Path(options.run), options.to))
    return 0


def compare_command(given: list[str]) -> int:
    """Print and draw the differences of runs: `hp-train compare RUN RUN ... [--to FILE]`."""
    parser = Parser(prog="hp-train compare", add_help=False)
    parser.add_argument("runs", metavar="RUN", nargs="+")
    parser.add_argument("--to", metavar="FILE", type=Path, default=Path("comparison.html"))
    options, overrides = parse(parser, given)
    refuse_settings("compare", overrides)
    if len(options.runs) < 2:
        raise UsageError("compare needs two runs or more")
    print(compare_runs([Path(run) for run in options.runs], options.to))
    print(f"\ncurves: {options.to}")
    return 0
