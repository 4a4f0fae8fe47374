"""Every exception that hp_dtensor raises for a user's mistake; each is also the builtin one would expect."""


class HPError(Exception):
    """Base of all errors raised on purpose by the hp packages.

    Attributes:
        needs_traceback: whether a reader wants to know which line raised it; not where the message says it all.
    """

    needs_traceback = True


class PlatformError(HPError, RuntimeError):
    """There is no platform, there are several and none was chosen, or a framework is missing or too old."""


class PluginError(HPError, RuntimeError):
    """A plugin does not import, implements a hook that does not exist, or failed in a hook; the message names it."""


class RegistryError(HPError, ValueError):
    """A name that no plugin has registered, one that is taken, or an entry that its registry cannot take."""


class CapabilityError(HPError, NotImplementedError):
    """The platform's framework cannot do what was asked on this device."""


class MeshError(HPError, ValueError):
    """A device mesh that cannot exist, or an axis, name or rank that the mesh does not have."""


class PlacementError(HPError, ValueError):
    """Placements that do not fit the mesh, the tensor or each other."""


class ShardShapeError(HPError, ValueError):
    """A local shard whose shape is not the one its placements give."""


class MetaTensorError(HPError, ValueError):
    """A tensor without data where data is needed; names it."""


class ShardingRuleError(HPError, NotImplementedError):
    """An operation without a sharding rule, or one that its rule refuses for these placements."""


class IndexOutOfRangeError(HPError, IndexError):
    """A position that a dimension of the global shape does not have; raised before anything is communicated."""


class MixedOperandsError(HPError, ValueError):
    """Plain and distributed tensors, or tensors of different meshes, in one operation.

    Not a TypeError: operators of tensors turn those into NotImplemented, and the message is lost.
    """


class GradientPathError(HPError, RuntimeError):
    """A gradient is asked for where it does not pass; the message says where it does."""


class RankMismatchError(HPError, ValueError):
    """Ranks that should make the same tensor, or hold the same values, do not; the message names them."""


class ImplicitRedistributionError(HPError, RuntimeError):
    """An operation would have communicated to bring an input to a placement, where that was forbidden."""


class PlanError(HPError, ValueError):
    """A sharding plan with one or more problems; the message lists all of them."""


class AttentionError(HPError, ValueError):
    """Queries, keys, values or a mask that do not fit each other, or that ranks cannot share as asked."""


class CollectiveError(HPError, ValueError):
    """A collective called with buffers or splits that do not fit the group."""


class LaunchError(HPError, RuntimeError):
    """A rank failed or could not be started; the message names it and carries its traceback.

    Attributes:
        rank: the first rank that failed; None when it is no single rank's fault.
        kind: name of the class of that rank's exception; empty where it ended without one.
        signal: number of the signal that ended that rank; None where none did.
    """

    def __init__(self, message: str, rank: int | None = None, kind: str = "", signal: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.signal = signal
