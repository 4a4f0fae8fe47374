"""The parallel layout of a run as a picture: every rank, and its coordinate along each axis."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hp_trainer.exceptions import ParallelDimsError
from hp_trainer.parallel import ParallelDims
from hp_trainer.report.html import table

# More ranks than this are shown by their first ones.
MOST_RANKS = 64


def draw_layout(config: dict[str, Any], world_size: int) -> str:
    """Return the HTML of a layout: a row for each axis, a column for each rank, a colour for each coordinate.

    Ranks of one colour in a row have the same coordinate there; an axis of one rank is left out.

    Args:
        config: the resolved configuration as plain mappings.
        world_size: ranks of the job.
    """
    parallel, model = config.get("parallel", {}), config.get("model", {})
    try:
        dims = ParallelDims.from_config(SimpleNamespace(**parallel), world_size, model.get("num_experts"))
    except (ParallelDimsError, AttributeError, TypeError) as error:
        return table([["layout", f"cannot be told: {error}"]])
    shown = range(min(world_size, MOST_RANKS))
    coordinates = [dims.coordinate(rank) for rank in shown]
    axes = {name: size for sizes in (dims.dense_sizes(), dims.sparse_sizes()) for name, size in sizes.items()}
    rows = [
        f"<tr><th>{name} ({size})</th>{''.join(_cell(each[name]) for each in coordinates)}</tr>"
        for name, size in axes.items()
        if size > 1 and all(name in each for each in coordinates)
    ]
    header = "".join(f"<th>{rank}</th>" for rank in shown)
    more = "" if world_size <= MOST_RANKS else f"<p>The first {MOST_RANKS} of {world_size:,} ranks.</p>"
    return f'<p>{dims.summary()}</p><table class="layout"><tr><th>rank</th>{header}</tr>{"".join(rows)}</table>{more}'


def _cell(coordinate: int) -> str:
    return f'<td style="background: hsl({coordinate * 67 % 360}, 60%, 82%)">{coordinate}</td>'
