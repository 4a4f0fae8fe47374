"""`register_sharding`: acceptable placements of an operation, listed by its user; the cheapest ones are taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hp_dtensor.dispatch.arguments import specs_of
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute import plan_between
from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.local_map import local_map

Sharding = tuple[Sequence[Placement], Sequence[Placement | None]]
"""Along one mesh axis: a placement per output, and one per positional argument, None for what is no tensor."""
ShardingFunction = Callable[..., Sequence[Sharding]]
Found = TypeVar("Found", bound=ShardingFunction)

_registered: dict[str, ShardingFunction] = {}


def register_sharding(op: Any) -> Callable[[Found], Found]:
    """Return a decorator that registers a function which lists the acceptable placements of an operation.

    Follows torch's `torch.distributed.tensor.experimental.register_sharding`. The function is called with the arguments
    of the operation, of which tensors are `TensorSpec`s (`ndim`, `shape`). It returns (outputs, arguments) pairs, along
    one mesh axis: a placement per output and one per positional argument, None for what is no tensor. Of all
    combinations over the mesh's axes the one is taken that sends the fewest bytes; the operation runs on local tensors,
    and gradients follow from the placements as in `local_map`.

    Args:
        op: an operation or several: an operator overload of torch (`torch.ops.mylib.op.default`), a function of the
            framework, or the name by which an error told that there is no rule. It comes before a rule that there is.

    Raises:
        ShardingRuleError: for an overload of torch's own operators (`torch.ops.aten`), which DTensors do not see; and
            from calls for which nothing acceptable fits.

    Example:
        >>> @register_sharding("mylib.scale.default")
        ... def shardings_of_scale(x, factor):
        ...     return [([Shard(dim)], [Shard(dim), None]) for dim in range(x.ndim)]
        >>> shardings_of_scale(TensorSpec(DeviceMesh("cpu", (1,)), [Replicate()], (4,), None), 2)
        [([Shard(0)], [Shard(0), None])]
    """
    names = [_name(each) for each in (op if isinstance(op, (list, tuple)) else [op])]

    def registered(function: Found) -> Found:
        for name in names:
            _registered[name] = function
        return function

    return registered


def registered_sharding(name: str) -> ShardingFunction | None:
    """Return the function that was registered for an operation, or None."""
    return _registered.get(name)


def _name(op: Any) -> str:
    if isinstance(op, str):
        return op
    if hasattr(op, "_overloadpacket"):
        if str(op).startswith("aten."):
            raise ShardingRuleError(
                f"register_sharding({op}): DTensors see the functions that a model calls, not the operators that these "
                f"become. Register the function instead, as torch.softmax, or write a rule with sharding_rule"
            )
        return str(op)
    return str(getattr(op, "__name__", op))


class ListedPlan:
    """Plan of a call by the placements that a registered function lists; one of the plans of `dispatch`."""

    def __init__(self, platform: Platform, name: str, listed: ShardingFunction) -> None:
        self.platform, self.name, self._listed = platform, name, listed
        self.direct: Any = None

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the operation on local tensors, its arguments placed as the cheapest acceptable sharding says."""
        specs = [x.spec if isinstance(x, DTensor) else None for x in args]
        mesh = next(spec.mesh for spec in specs if spec is not None)
        shardings = self._acceptable(args, kwargs)
        # O(shardings ** axes of the mesh): lists are short, and meshes have few axes.
        choices = [each for each in itertools.product(shardings, repeat=mesh.ndim) if _fits(each, specs)]
        if not choices:
            raise ShardingRuleError(f"{self.name}: none of the {len(shardings)} registered shardings fits {specs}")
        outputs, wanted = _placements(min(choices, key=lambda each: _wire_bytes(each, specs)), specs)
        return local_map(func, outputs, wanted, device_mesh=mesh, redistribute_inputs=True)(*args, **kwargs)

    def _acceptable(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Sharding]:
        shardings = list(self._listed(*map(specs_of, args), **{key: specs_of(x) for key, x in kwargs.items()}))
        for outputs, inputs in shardings:
            missing = [i for i, x in enumerate(args) if isinstance(x, DTensor) and (i >= len(inputs) or not inputs[i])]
            if missing or not outputs:
                raise ShardingRuleError(
                    f"{self.name}: a registered sharding ({list(outputs)}, {list(inputs)}) has no placement for "
                    f"{f'argument {missing[0]}' if missing else 'the output'}"
                )
        return shardings


def _fits(choice: Sequence[Sharding], specs: Sequence[TensorSpec | None]) -> bool:
    """Return whether every dimension that a choice cuts exists and has an element for each rank, as torch asks for."""
    for axis, (_, inputs) in enumerate(choice):
        for spec, placement in zip(specs, inputs, strict=False):
            dim = getattr(placement, "dim", None)
            if spec is None or dim is None:
                continue
            if not -spec.ndim <= dim < spec.ndim or spec.shape[dim] < spec.mesh.shape[axis]:
                return False
    return True


def _placements(choice: Sequence[Sharding], specs: Sequence[TensorSpec | None]) -> tuple[list[Any], list[Any]]:
    """Return the placements of the outputs, and of the arguments, over all mesh axes."""
    outputs = [tuple(each) for each in zip(*(outputs for outputs, _ in choice), strict=True)]
    wanted = [
        None if spec is None else tuple(inputs[index] for _, inputs in choice) for index, spec in enumerate(specs)
    ]
    return outputs, wanted


def _wire_bytes(choice: Sequence[Sharding], specs: Sequence[TensorSpec | None]) -> float:
    """Return the bytes that bringing the arguments to a choice sends per rank."""
    total = 0.0
    for spec, placements in zip(specs, _placements(choice, specs)[1], strict=True):
        if spec is not None:
            itemsize = spec.mesh.platform.itemsize(spec.dtype)
            total += plan_between(spec, spec.with_placements(placements), itemsize).wire_bytes
    return total
