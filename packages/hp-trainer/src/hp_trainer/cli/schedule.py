"""The command that draws pipeline schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hp_trainer._files import read_plain_text
from hp_trainer.cli.commands import Command
from hp_trainer.cli.shared import check_file_to_write
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


@click.command("schedule", cls=Command)
@click.argument(
    "name",
    metavar="[NAME | FILE]",
    required=False,
    shell_complete=lambda ctx, parameter, text: [each for each in schedule_names() if each.startswith(text)],
)
@click.option("--ranks", type=int, metavar="N", help="Number of ranks of the pipeline.")
@click.option("--microbatches", type=int, metavar="N", help="Micro-batches per step.")
@click.option("--stages-per-rank", type=int, metavar="N", help="Default: 2 for schedules that need several, else 1.")
@click.option("--forward", type=float, default=1.0, metavar="TIME", help="Time of the forward of a stage; default 1.")
@click.option("--input-grad", type=float, default=1.0, metavar="TIME", help="Of its gradients of inputs; default 1.")
@click.option("--weight-grad", type=float, default=1.0, metavar="TIME", help="Of its gradients of weights; default 1.")
@click.option("--transfer", type=float, default=0.0, metavar="TIME", help="Of a transfer between stages; default 0.")
@click.option("--show", type=click.Choice(("times", "actions")), help="actions: print the actions of each rank too.")
@click.option(
    "--to", type=click.Path(), callback=check_file_to_write, metavar="FILE", help="Draw the timeline into a file."
)
def schedule_command(
    name: str | None,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    show: str | None,
    to: Path | None,
    **seconds: float,
) -> int:
    """Print timeline, idle time and peak activations of a pipeline schedule; without a NAME, list the schedules.

    A FILE has the actions of each rank.
    """
    if name is None:
        print("\n".join(schedule_names()))
        return 0
    schedule = _schedule(name, ranks, microbatches, stages_per_rank)
    # Before the simulation, which needs a schedule that ends.
    validate(schedule)
    timeline = simulate(schedule, ActionSeconds(**seconds))
    print(describe_timeline(timeline))
    if show == "actions":
        for rank in range(schedule.num_ranks):
            print(f"rank {rank} executes: {' '.join(map(str, rank_actions(schedule, rank)))}")
    if to is not None:
        draw_timeline(timeline, to)
        print(f"picture: {to}")
    return 0


def _schedule(name: str, ranks: Any, microbatches: Any, stages_per_rank: Any) -> Schedule:
    """Return the schedule of a name, or of a file that `Schedule.parse` reads.

    Raises:
        click.UsageError: a name is given without ranks and micro-batches, or a file with them.
        ScheduleError: there is no such schedule, or the file has no valid one.
    """
    is_known = name in schedule_names()
    if not is_known and Path(name).is_file():
        if (ranks, microbatches, stages_per_rank) != (None, None, None):
            raise click.UsageError(
                f"schedule {name}: the file has its own ranks, stages and micro-batches; leave them out"
            )
        try:
            return Schedule.parse(read_plain_text(Path(name)))
        except (UnicodeDecodeError, ScheduleError) as error:
            raise ScheduleError(f"schedule file {name}: {error}") from None
    if is_known and (ranks is None or microbatches is None):
        raise click.UsageError(f"schedule {name} needs --ranks and --microbatches")
    # An unknown name raises before the numbers, which may be None, are used.
    return build_schedule(name, num_ranks=ranks, num_microbatches=microbatches, stages_per_rank=stages_per_rank)
