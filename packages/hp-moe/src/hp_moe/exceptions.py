"""Exceptions that hp_moe raises for user errors; each also derives from the matching builtin exception."""

from __future__ import annotations

from hp_dtensor.exceptions import HPError


class MoEConfigError(HPError, ValueError):
    """Invalid or contradicting sizes or options of a mixture of experts; the message lists all problems."""


class ExpertParallelError(HPError, ValueError):
    """A mesh, a layout or inputs that do not fit the experts or their parallel style.

    Attributes:
        only_nonfinite: whether non-finite scores are the only problem, as when training diverges.
    """

    def __init__(self, message: str, *, only_nonfinite: bool = False) -> None:
        super().__init__(message)
        self.only_nonfinite = only_nonfinite
