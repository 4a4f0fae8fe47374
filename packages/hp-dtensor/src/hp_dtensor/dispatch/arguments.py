"""Arguments of an operation: binding to parameter names, locating DTensors, checks of mixed operands."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy

from hp_dtensor.exceptions import HPError, MixedOperandsError, ShardingRuleError
from hp_dtensor.platform.interface import DTYPE_NAMES, Platform
from hp_dtensor.rules.factors import Factorization
from hp_dtensor.rules.registry import HARMLESS_KEYWORDS, REQUIRED, OpCall, Registration
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import like_sequence

Tensor = Any
Location = tuple[int | str, ...]


def bind(registration: Registration, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by parameter name, with the signature's defaults; unknown keywords keep their names."""
    parameters, bound = registration.parameters, {}
    for keyword, value in kwargs.items():
        # Frameworks spell some keywords in two ways (`dim` and `axis`). The rule knows the parameter's own name.
        position = registration.position(keyword)
        bound[parameters[position].name if position < len(parameters) else keyword] = value
    for index, parameter in enumerate(parameters):
        if index < len(args):
            # `view(2, 3)` and `view((2, 3))` are the same call.
            collapse = parameter.variadic and not isinstance(args[index], (tuple, list))
            bound[parameter.name] = tuple(args[index:]) if collapse else args[index]
        elif parameter.name not in bound and parameter.default is not REQUIRED:
            bound[parameter.name] = parameter.default
    return bound


def check_known(registration: Registration, call: OpCall, args: tuple[Any, ...]) -> None:
    """Raise for arguments that the sharding rule does not know, because they could make it wrong."""
    if registration.open:
        return
    parameters = registration.parameters
    positional = [parameter for parameter in parameters if not parameter.keyword]
    unknown = [repr(name) for name in call.arguments if name not in {p.name for p in parameters} | HARMLESS_KEYWORDS]
    if len(args) > len(positional) and not any(parameter.variadic for parameter in positional):
        unknown.append(f"{len(args)} positional ones where it knows {len(positional)}")
    if unknown:
        known = ", ".join(parameter.name for parameter in parameters)
        raise call.refuse(f"its rule does not know the arguments {', '.join(unknown)} (only {known})")


def rule_of(registration: Registration, call: OpCall) -> Factorization:
    """Return the factors of a call by its sharding rule.

    Raises:
        ShardingRuleError: the rule refuses the call, or got a DTensor where it expects a number.
    """
    try:
        rule = registration.rule(call)
    except HPError:
        raise
    except (TypeError, ValueError, AttributeError) as error:  # the rule may have computed with a spec as a number
        numbers = _numbers_among(call)
        if not numbers:
            raise
        raise _no_number(call, numbers) from error
    if len(rule.inputs) != len(call.tensors):
        numbers = _numbers_among(call)
        if numbers:
            raise _no_number(call, numbers)
        raise call.refuse(f"its rule takes {len(rule.inputs)} tensors, got {len(call.tensors)}")
    return rule


def _numbers_among(call: OpCall) -> list[str]:
    """Return the names of arguments, other than the first tensor, that are or contain 0-d DTensors."""
    found = []
    for name, value in call.arguments.items():
        items = value if isinstance(value, (tuple, list)) else (value,)
        if value is not call.tensors[0] and any(isinstance(x, TensorSpec) and not x.shape for x in items):
            found.append(name)
    return found


def _no_number(call: OpCall, names: list[str]) -> ShardingRuleError:
    specs = ", ".join(map(repr, call.tensors))
    values = ", ".join(f"float({name}) or int({name})" for name in names)
    return ShardingRuleError(
        f"{call.name}({specs}): its sharding rule takes a number, not a DTensor, as {' and '.join(names)}. Pass "
        f"the value: {values}; that communicates unless it is replicated, so every rank must call it."
    )


def replace_static(
    registration: Registration, args: list[Any], kwargs: dict[str, Any], replaced: Mapping[str, Any]
) -> list[Any]:
    """Return `args` with static arguments replaced by parameter name; keywords are replaced in `kwargs` itself."""
    for index, parameter in enumerate(registration.parameters):
        if parameter.name not in replaced:
            continue
        if index < len(args):
            # A variadic parameter stands for all positional arguments from here on.
            args = [*args[:index], replaced[parameter.name], *([] if parameter.variadic else args[index + 1 :])]
        else:
            given = [keyword for keyword in kwargs if registration.position(keyword) == index]
            kwargs[given[0] if given else parameter.name] = replaced[parameter.name]
    return args


def replace_at(args: list[Any], kwargs: dict[str, Any], location: Location, change: Callable[[Any], Any]) -> None:
    """Replace the argument at a location by `change` of it."""
    where: Any = args if isinstance(location[0], int) else kwargs
    if len(location) == 2:
        # The list belongs to the caller, who may use it again: change a copy.
        items: Any = list(where[location[0]])
        items[location[1]] = change(items[location[1]])
        where[location[0]] = like_sequence(where[location[0]], items)
    else:
        where[location[0]] = change(where[location[0]])


def locate_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Location, Any]]:
    """Return (location, DTensor) of each DTensor among the arguments and in lists among them."""
    located: list[tuple[Location, Any]] = []
    places: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
    # One level deep: operations take lists of tensors, as `cat` does, and no lists of lists.
    for place, value in places:
        if isinstance(value, DTensor):
            located.append(((place,), value))
        elif isinstance(value, (tuple, list)):
            located += [((place, i), item) for i, item in enumerate(value) if isinstance(item, DTensor)]
    return located


def specs_of(value: Any) -> Any:
    """Return an argument as rules get it: DTensors become their specs, NumPy's numbers Python's."""
    if isinstance(value, DTensor):
        return value.spec
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, (tuple, list)):
        items = [specs_of(item) for item in value]
        return items if type(value) is list else tuple(items)
    return value


@functools.cache
def dtype_classes(platform: Platform) -> frozenset[type]:
    """Return the classes of a platform's dtypes, without those that other values have too (`str`, `int`, `type`)."""
    classes = set()
    for name in DTYPE_NAMES:
        # Not every framework has every dtype.
        with contextlib.suppress(ValueError, HPError):
            classes.add(type(platform.dtype(name)))
    return frozenset(classes - {str, int, type})


def check_lists(platform: Platform, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise for plain tensors, even 0-d ones, in a list of DTensors: elements of lists are operands, not scalars."""
    for listed in (*args, *kwargs.values()):
        if isinstance(listed, (tuple, list)) and any(isinstance(x, DTensor) for x in listed):
            plain = [x for x in listed if isinstance(x, platform.Tensor) and not isinstance(x, DTensor)]
            if plain:
                raise mixed(name, plain[0])


def mixed(name: str, value: Tensor, kind: str = "tensor") -> MixedOperandsError:
    """Return the error for a plain tensor or array with dimensions as an operand of `name`."""
    more = ""
    # Guessed from the operation: norms of gradients are stacked by hand-written clipping, and `load_state_dict` copies.
    if name == "stack" and not value.shape:
        more = " hp_dtensor.clip_grad_norm_ takes plain and distributed parameters together."
    if name == "copy_":
        more = " A state dict of full tensors goes into a module by hp_fsdp.set_model_state_dict(module, state_dict)."
    return MixedOperandsError(
        f"{name}: a plain {kind} of shape {list(value.shape)} among DTensors. Say how it is placed: "
        "distribute_tensor, DTensor.from_local, or replicate_like for a constant that is equal on all ranks. A "
        "parameter that no plan has placed is replicated by distribute_module; one that fully_shard has sharded is "
        "plain in its module's forward, and in methods named to register_fsdp_forward_method; the output of a "
        f"module with a parallel style is plain unless the style has use_local_output=False.{more}"
    )


def check_one_mesh(name: str, specs: tuple[TensorSpec, ...]) -> None:
    """Raise unless all operands are on one mesh."""
    meshes = dict.fromkeys(spec.mesh for spec in specs)
    if len(meshes) > 1:
        listed = []
        for mesh in meshes:
            # Meshes may differ in nothing but their world's platform, or in where in the world they are.
            platform = "" if mesh.world.platform is None else f"{mesh.world.platform.name}, "
            first = mesh.rank_at([0] * mesh.ndim)
            listed.append(f"{mesh.describe()} ({platform}rank {mesh.world.rank}, ranks from {first})")
        raise MixedOperandsError(
            f"{name}: operands on different meshes: {' and '.join(listed)}. Redistribute one of them."
        )


def no_rule(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the message of the error for an operation without a sharding rule."""
    specs = ", ".join(repr(x.spec) for _, x in locate_tensors(args, kwargs))
    return (
        f"operation {name!r} has no sharding rule; called with {specs}. Redistribute and use to_local(), "
        "wrap the region with local_map, or give it a rule (sharding_rule; in a plugin, the hook hp_sharding_rules)."
    )
