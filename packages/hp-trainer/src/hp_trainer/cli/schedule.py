"""The command `hp-train schedule`: a pipeline's schedule as text and as a picture, without a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hp_trainer._files import read_plain_text
from hp_trainer.cli.arguments import Parser, UsageError, parse
from hp_trainer.cli.shared import check_file_to_write, refuse_settings
from hp_trainer.exceptions import ScheduleError
from hp_trainer.pipeline import (
    ActionSeconds,
    Schedule,
    build_schedule,
    describe_timeline,
    draw_timeline,
    rank_actions,
    schedule_names,
    simulate,
    validate,
)


def schedule_command(given: list[str]) -> int:
    """Print when each rank of a pipeline works on what: `hp-train schedule NAME --ranks=N --microbatches=N`."""
    options = _options(given)
    check_file_to_write("--to", options.to)
    if options.schedule is None:
        print("\n".join(schedule_names()))
        return 0
    schedule = _schedule(options)
    validate(schedule)
    timeline = simulate(
        schedule,
        ActionSeconds(
            forward=options.forward,
            input_grad=options.input_grad,
            weight_grad=options.weight_grad,
            transfer=options.transfer,
        ),
    )
    print(describe_timeline(timeline))
    if options.show == "actions":
        for rank in range(schedule.num_ranks):
            print(f"rank {rank} executes: {' '.join(map(str, rank_actions(schedule, rank)))}")
    if options.to is not None:
        draw_timeline(timeline, options.to)
        print(f"picture: {options.to}")
    return 0


def _options(given: list[str]) -> Any:
    parser = Parser(prog="hp-train schedule", add_help=False)
    parser.add_argument("schedule", metavar="NAME", nargs="?")
    parser.add_argument("--ranks", type=int, metavar="N")
    parser.add_argument("--microbatches", type=int, metavar="N")
    parser.add_argument("--stages-per-rank", type=int, metavar="N")
    for name in ("forward", "input-grad", "weight-grad"):
        parser.add_argument(f"--{name}", type=float, default=1.0, metavar="TIME")
    parser.add_argument("--transfer", type=float, default=0.0, metavar="TIME")
    parser.add_argument("--show", choices=("times", "actions"), default="times")
    parser.add_argument("--to", metavar="FILE")
    options, settings = parse(parser, given)
    refuse_settings("schedule", settings)
    return options


def _schedule(options: Any) -> Schedule:
    """Return the schedule called so, or the one that a file holds in the form in which this command prints `Schedule`.

    Raises:
        UsageError: a name without ranks or micro-batches, or a file with some.
        ScheduleError: there is no such schedule, or the file holds none.
    """
    numbers = options.ranks, options.microbatches, options.stages_per_rank
    is_known = options.schedule in schedule_names()
    if not is_known and Path(options.schedule).is_file():
        if any(each is not None for each in numbers):
            raise UsageError(
                f"schedule {options.schedule}: the file says ranks, stages and micro-batches; leave them out"
            )
        try:
            return Schedule.parse(read_plain_text(Path(options.schedule)))
        except (UnicodeDecodeError, ScheduleError) as error:
            raise ScheduleError(f"schedule file {options.schedule}: {error}") from None
    if is_known and None in numbers[:2]:
        raise UsageError(f"schedule {options.schedule} needs --ranks and --microbatches")
    # Of a name that nobody knows the numbers are not looked at.
    return build_schedule(
        options.schedule,
        num_ranks=options.ranks,
        num_microbatches=options.microbatches,
        stages_per_rank=options.stages_per_rank,
    )
