"""Exceptions reach other processes whole: job systems such as Ray pickle those of their workers."""

import pickle
import signal

import pytest

from hp_dtensor.exceptions import LaunchError
from hp_trainer.exceptions import ConfigError, Problem, StoppedError


@pytest.mark.parametrize(
    "error",
    [
        ConfigError([Problem(path="training.stepz", what="unknown key")], "run.yaml"),
        StoppedError("stopped by SIGTERM", signal.SIGTERM),
        LaunchError("rank 1 failed", 1, "ValueError", 9),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_pickled_error_is_the_same(error) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
