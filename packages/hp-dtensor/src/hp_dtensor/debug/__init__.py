"""Record digests of a model's steps, and compare two recordings: the first tensor in which two runs differ."""

from hp_dtensor.debug.comparison import (
    Comparison,
    Difference,
    compare,
    draw,
    measure_growth,
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
    "measure_growth",
    "perturb_weights",
]
