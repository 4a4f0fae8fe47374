"""All exceptions that hp_fsdp raises for a user's mistake; each has the builtin parent that one would expect."""

from __future__ import annotations

from hp_dtensor.exceptions import HPError


class FullyShardError(HPError, ValueError):
    """`fully_shard` called with modules, a mesh or options that do not fit; the message lists all problems."""


class HSDPError(FullyShardError):
    """`hsdp` or a method of `HSDPCell` called with what does not fit, or before `hsdp`; lists all problems."""


class FSDPStateError(HPError, RuntimeError):
    """An operation on a group in a state that does not allow it; names the group and both states."""


class CallOrderError(HPError, RuntimeError):
    """Ranks gather or reduce different groups at the same time; names ranks, groups, parameters and states."""


class CommunicationError(HPError, RuntimeError):
    """A gather or reduction that failed or timed out; names the group, the rank and the state, and carries why."""


class StateDictError(HPError, RuntimeError, ValueError):
    """A state dict that does not fit the model or optimizer; lists all keys and problems, and nothing has changed."""


class LossScalingError(HPError, RuntimeError, ValueError):
    """A `GradScaler` with factors that make no sense, used out of order, or with no scale that helps."""
