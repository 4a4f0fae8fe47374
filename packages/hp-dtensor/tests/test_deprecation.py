"""Deprecated functions and classes warn at the caller's line, and behave as before."""

import warnings

import pytest

from hp_dtensor.deprecation import deprecated


@deprecated(since="0.2.0", removal="0.3.0", instead="`new`")
def old(x, *, scale=2):
    """Return x times scale."""
    return x * scale


@deprecated(since="0.2.0", removal="0.3.0", instead="`New`")
class Old:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(("call", "name"), [(lambda: old(3, scale=3), "old"), (lambda: Old(9).x, "Old")])
def test_a_call_warns_once_at_its_line(call, name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert call() == 9
    (warning,) = caught
    assert warning.category is FutureWarning
    assert warning.filename == __file__
    assert str(warning.message).startswith(f"{name} is deprecated since 0.2.0 and will be removed in 0.3.0: use `")


def test_names_and_types_are_unchanged():
    assert (old.__name__, old.__doc__) == ("old", "Return x times scale.")
    assert isinstance(Old, type)
