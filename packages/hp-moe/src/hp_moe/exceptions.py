"""Every exception that hp_moe raises for a user's mistake; each is also the builtin one would expect."""

from __future__ import annotations

from hp_dtensor.exceptions import HPError


class MoEConfigError(HPError, ValueError):
    """Sizes or options of a mixture of experts that do not fit each other; the message lists all problems."""


class ExpertParallelError(HPError, ValueError):
    """Experts laid out on a mesh, or fed with inputs, that do not fit the parallel style.

    Attributes:
        only_nonfinite: whether scores that are no finite numbers are all that is wrong, as when training diverges.
    """

    def __init__(self, message: str, *, only_nonfinite: bool = False) -> None:
        super().__init__(message)
        self.only_nonfinite = only_nonfinite
