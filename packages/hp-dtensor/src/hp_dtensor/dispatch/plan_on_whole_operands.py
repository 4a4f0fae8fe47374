"""Plan of an operation on whole operands, for one that has no sharding rule or whose result's shape depends on data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.dispatch.implicit_regions import is_replicating, mesh_of, replicated_spec
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.explicit import gathered
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any


class GatheringPlan:
    """Runs an operation that has no rule on whole operands; one of the plans of `dispatch`.

    Args:
        always: outside `implicit_replication` too, for operands that are whole.
    """

    def __init__(self, platform: Platform, name: str, refusal: str, always: bool = False) -> None:
        self.platform, self.name, self.refusal, self.always = platform, name, refusal, always
        self.direct: Any = None

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The operation on whole operands, its tensor results as replicated DTensors."""
        mesh = mesh_of((args, tuple(kwargs.values())))
        if not (self.always or is_replicating()) or mesh is None:
            raise ShardingRuleError(self.refusal)
        if self.name.endswith("_"):
            raise ShardingRuleError(
                f"{self.refusal} It works in place, which implicit_replication cannot do on gathered operands."
            )
        whole_args, whole_kwargs = self._whole(args), {key: self._whole(value) for key, value in kwargs.items()}
        with self.platform.local_op():
            result = func(*whole_args, **whole_kwargs)
        return self._wrapped(result, mesh)

    def _whole(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            return gathered(self.name, value)
        return type(value)(self._whole(item) for item in value) if type(value) in (tuple, list) else value

    def _wrapped(self, value: Any, mesh: DeviceMesh) -> Any:
        if isinstance(value, (tuple, list)):
            wrapped = [self._wrapped(item, mesh) for item in value]
            return wrapped if type(value) is list else tuple(wrapped)
        if isinstance(value, self.platform.Tensor):
            return self.platform.wrap(value, replicated_spec(mesh, value))
        return value
