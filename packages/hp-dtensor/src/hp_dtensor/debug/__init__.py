"""Record digests of a model's steps, and compare two recordings: the first tensor in which two runs differ."""

from hp_dtensor.debug.comparison import (
    Comparison,
    Difference,
    compare,
    draw,
    located,
    measure_growth,
    modules_around,
    narrowed,
)
from hp_dtensor.debug.digest import Digest
from hp_dtensor.debug.kinds import Kind
from hp_dtensor.debug.recording import Event, Recorder, Recording, Rows, perturb_weights

__all__ = [
    "Comparison",
    "Difference",
    "Digest",
    "Event",
    "Kind",
    "Recorder",
    "Recording",
    "Rows",
    "compare",
    "draw",
    "located",
    "measure_growth",
    "modules_around",
    "narrowed",
    "perturb_weights",
]
