"""Pictures of a run, drawn without a display."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of a size in inches, with a canvas for PNG."""
    # By hand: pyplot would choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_picture(figure: Any, picture: Path) -> None:
    """Write a figure as PNG in one step: the file holds the picture before or this one."""
    temporary = picture.with_name(f"{picture.name}.incomplete")
    try:
        figure.savefig(temporary, format="png", dpi=120)
        temporary.replace(picture)
    finally:
        temporary.unlink(missing_ok=True)
