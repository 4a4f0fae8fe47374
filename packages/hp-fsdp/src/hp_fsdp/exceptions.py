"""Exceptions that hp_fsdp raises for user errors. Each also derives from the builtin exception of its kind."""

from __future__ import annotations

from hp_dtensor.exceptions import HPError


class FullyShardError(HPError, ValueError):
    """Invalid modules, mesh or options of `fully_shard`. The message lists all problems."""


class HSDPError(FullyShardError):
    """Invalid arguments of `hsdp` or a method of `HSDPCell`, or a method called before `hsdp`. Lists all problems."""


class FSDPStateError(HPError, RuntimeError):
    """An operation that the state of a group does not allow. Names the group and the states."""


class CallOrderError(HPError, RuntimeError):
    """Ranks gather or reduce different groups at the same time. Names ranks, groups, parameters and states."""


class CommunicationError(HPError, RuntimeError):
    """A gather or reduction that failed or timed out. Names the group, the rank, the state and the cause."""


class StateDictError(HPError, RuntimeError, ValueError):
    """A state dict that does not match the model or optimizer. Lists all keys and problems. Nothing has changed."""


class LossScalingError(HPError, RuntimeError, ValueError):
    """A `GradScaler` with invalid factors, wrong order of calls, or no usable scale."""
