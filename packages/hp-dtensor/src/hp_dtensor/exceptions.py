"""The exceptions that hp_dtensor raises for mistakes of its user. Each also derives from a fitting builtin one."""

from typing import Any


class HPError(Exception):
    """Base of all errors that the hp packages raise on purpose.

    Attributes:
        needs_traceback: whether a traceback helps; False where the message alone is enough.
    """

    needs_traceback = True

    def __reduce__(self) -> tuple[Any, ...]:
        # Without calling `__init__`, whose arguments may be others than the message. Job systems such as Ray pickle
        # the exception of a rank, and lose the rank where they cannot read it again.
        return _recreate, (type(self), self.args), self.__dict__


def _recreate(kind: type[HPError], arguments: tuple[Any, ...]) -> HPError:
    return kind.__new__(kind, *arguments)


class PlatformError(HPError, RuntimeError):
    """No platform is installed, several are and none is selected, or a framework is missing or too old.

    Also: a rank cannot join its job.
    """

    needs_traceback = False


class PluginError(HPError, RuntimeError):
    """A plugin cannot be imported, implements a hook that does not exist, or failed in a hook. Names the plugin."""

    needs_traceback = False


class RegistryError(HPError, ValueError):
    """A name that no plugin has registered, a name that is taken, or an entry of the wrong kind for its registry."""


class CapabilityError(HPError, NotImplementedError):
    """An operation that the platform's framework does not support on this device."""


class MeshError(HPError, ValueError):
    """An invalid device mesh, or an axis, name or rank that the mesh does not have."""


class PlacementError(HPError, ValueError):
    """Placements that do not fit the mesh, the tensor or each other."""


class ShardShapeError(HPError, ValueError):
    """A local shard whose shape does not follow from the global shape and the placements."""


class MetaTensorError(HPError, ValueError):
    """A tensor on the meta device where data is needed. Names the tensor."""


class ShardingRuleError(HPError, NotImplementedError):
    """An operation without a sharding rule, or one that its rule refuses for these placements."""


class IndexOutOfRangeError(HPError, IndexError):
    """An index outside a dimension of the global shape. Raised before anything is communicated."""


class MixedOperandsError(HPError, ValueError):
    """Plain and distributed tensors, or tensors of different meshes, in one operation.

    Not a TypeError: tensor operators turn a TypeError into NotImplemented, which would lose the message.
    """


class GradientPathError(HPError, RuntimeError):
    """A gradient that autograd does not compute at this tensor. The message says where it can be read instead."""


class RankMismatchError(HPError, ValueError):
    """Ranks create different tensors, or hold different values, where they must be equal. Names the ranks."""


class ImplicitRedistributionError(HPError, RuntimeError):
    """An operation would have redistributed an input implicitly inside a block that forbids it."""


class PlanError(HPError, ValueError):
    """A sharding plan with one or more problems. The message lists all of them."""


class AttentionError(HPError, ValueError):
    """Queries, keys, values and mask that do not fit together, or cannot be sharded in the given way."""


class CollectiveError(HPError, ValueError):
    """A collective called with buffers or splits that do not fit the group."""


class LaunchError(HPError, RuntimeError):
    """A rank failed or could not be started. The message names the rank, and contains its traceback if that helps.

    A traceback that the message leaves out is that of `__cause__`.

    Attributes:
        rank: the first rank that failed; None if no single rank is the cause.
        kind: class name of that rank's exception; empty if it ended without one.
        signal: number of the signal that ended that rank; None if no signal did.
    """

    def __init__(self, message: str, rank: int | None = None, kind: str = "", signal: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.signal = signal


class RecordingError(HPError, ValueError):
    """Digests that cannot be recorded, read or compared, such as those that ranks recorded of different tensors."""

    needs_traceback = False
