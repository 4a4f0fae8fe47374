"""The arguments of an operation: by parameter name, their DTensors, and the key of the call's plan."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.exceptions import HPError, MixedOperandsError, ShardingRuleError
from hp_dtensor.platform.interface import DTYPE_NAMES, Platform
from hp_dtensor.rules.factors import Factorization
from hp_dtensor.rules.registry import HARMLESS_KEYWORDS, REQUIRED, OpCall, Registration
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any
Location = tuple[int | str, ...]


def bind(registration: Registration, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by parameter name, with the signature's defaults; further keyword arguments as they are."""
    bound = {_parameter_name(registration, keyword): value for keyword, value in kwargs.items()}
    for index, parameter in enumerate(registration.parameters):
        if index < len(args):
            collapse = parameter.variadic and not isinstance(args[index], (tuple, list))
            bound[parameter.name] = tuple(args[index:]) if collapse else args[index]
        elif parameter.name not in bound and parameter.default is not REQUIRED:
            bound[parameter.name] = parameter.default
    return bound


def check_known(registration: Registration, call: OpCall, args: tuple[Any, ...]) -> None:
    """Refuse arguments that the rule does not know, as they may change what it says."""
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
    """Return the factors of a call as its rule says; DTensors where a rule expects no tensor are refused."""
    try:
        rule = registration.rule(call)
    except HPError:
        raise
    except (TypeError, ValueError, AttributeError) as error:  # a spec where the rule computes with a number
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
    """Names of the arguments, but the first tensor, that are DTensors without dimensions or hold such."""
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
        f"{call.name}({specs}): a DTensor as {' and '.join(names)} is no number to its sharding rule. Give the value: "
        f"{values}; it communicates unless replicated, so every rank calls it."
    )


def replace_static(
    registration: Registration, args: list[Any], kwargs: dict[str, Any], replaced: Mapping[str, Any]
) -> list[Any]:
    for index, parameter in enumerate(registration.parameters):
        if parameter.name not in replaced:
            continue
        if index < len(args):
            args = [
                *args[:index],
                replaced[parameter.name],
                *([] if parameter.variadic else args[index + 1 :]),
            ]
        else:
            given = [keyword for keyword in kwargs if registration.position(keyword) == index]
            kwargs[given[0] if given else parameter.name] = replaced[parameter.name]
    return args


def _parameter_name(registration: Registration, keyword: str) -> str:
    position = registration.position(keyword)
    return registration.parameters[position].name if position < len(registration.parameters) else keyword


def replace_at(args: list[Any], kwargs: dict[str, Any], location: Location, change: Callable[[Any], Any]) -> None:
    where: Any = args if isinstance(location[0], int) else kwargs
    if len(location) == 2:
        # A list among the arguments belongs to the caller, who may use it again: a copy is changed.
        items: Any = list(where[location[0]])
        items[location[1]] = change(items[location[1]])
        where[location[0]] = tuple(items) if isinstance(where[location[0]], tuple) else items
    else:
        where[location[0]] = change(where[location[0]])


def locate_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Location, Any]]:
    located: list[tuple[Location, Any]] = []
    places: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
    for place, value in places:
        if isinstance(value, DTensor):
            located.append(((place,), value))
        elif isinstance(value, (tuple, list)):
            located += [((place, i), item) for i, item in enumerate(value) if isinstance(item, DTensor)]
    return located


def specs_of(value: Any) -> Any:
    """An argument as rules see it: specs for DTensors, Python's numbers for NumPy's."""
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
    """The classes of a platform's dtypes, less those of ordinary values."""
    classes = set()
    for name in DTYPE_NAMES:
        with contextlib.suppress(ValueError, HPError):
            classes.add(type(platform.dtype(name)))
    return frozenset(classes - {str, int, type})


def check_lists(platform: Platform, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse plain scalars in a list of DTensors: there they are operands as the others, not factors."""
    for listed in (*args, *kwargs.values()):
        if isinstance(listed, (tuple, list)) and any(isinstance(x, DTensor) for x in listed):
            plain = [x for x in listed if isinstance(x, platform.Tensor) and not isinstance(x, DTensor)]
            if plain:
                raise mixed(name, plain[0])


def mixed(name: str, value: Tensor, kind: str = "tensor") -> MixedOperandsError:
    """Return the error of a plain tensor or array with dimensions as an operand of `name`."""
    return MixedOperandsError(
        f"{name}: a plain {kind} of shape {list(value.shape)} among DTensors. Say how it is placed: "
        "distribute_tensor, DTensor.from_local, or replicate_like for a constant that is equal on all ranks. A "
        "parameter that no plan has placed is replicated by distribute_module; one that fully_shard has cut is plain "
        "in its module's forward, and in methods named to register_fsdp_forward_method; the output of a "
        f"module with a parallel style is plain unless the style has use_local_output=False.{_more_about(name, value)}"
    )


def _more_about(name: str, value: Tensor) -> str:
    """Advice to users who gave this operation a plain tensor: the likely meanings of it."""
    if name == "stack" and not value.shape:
        return " hp_dtensor.clip_grad_norm_ takes plain and distributed parameters together."
    if name == "copy_":
        return " A state dict of full tensors goes into a module by hp_fsdp.set_model_state_dict(module, state_dict)."
    return ""


def check_one_mesh(name: str, specs: tuple[TensorSpec, ...]) -> None:
    meshes = dict.fromkeys(spec.mesh for spec in specs)
    if len(meshes) > 1:
        listed = " and ".join(map(_where, meshes))
        raise MixedOperandsError(f"{name}: operands on different meshes: {listed}. Redistribute one of them.")


def _where(mesh: DeviceMesh) -> str:
    platform = "" if mesh.world.platform is None else f"{mesh.world.platform.name}, "
    return f"{mesh.describe()} ({platform}rank {mesh.world.rank}, ranks from {mesh.rank_at([0] * mesh.ndim)})"


def no_rule(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    specs = ", ".join(repr(x.spec) for _, x in locate_tensors(args, kwargs))
    return (
        f"operation {name!r} has no sharding rule; called with {specs}. Redistribute and use to_local(), "
        "wrap the region with local_map, or give it a rule (sharding_rule; in a plugin, the hook hp_sharding_rules)."
    )
