"""The framework's own functions, methods and operators on DTensors: each gives the result of one device, or raises.

Users call these, and not `platform.ops`. A platform that intercepts too little is not noticed by the other modules:
`x.sum()` of a DTensor would be the sum of a shard, or of nothing, and training would go on with it.

A failure names the call. Let it reach `dispatch` (`docs/writing_a_platform.md`), or let it raise. If it describes the
shard on purpose, as a pointer does, add its name to `Platform.shard_names`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.platform.interface import OP_NAMES, Platform
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.spec.placements import Partial, Placement, Shard
from hp_dtensor.tensor import conversions
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing.rule_proof import ATOL, RTOL, local_values
from hp_dtensor.testing.simulated import run_ranks

Tensor = Any

OPERATORS_OF_TWO = tuple(
    f"__{name}__"
    for name in (
        *("add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod".split()),
        *("radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rand ror rxor".split()),
        *("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split()),
        *("eq ne lt le gt ge contains getitem".split()),
    )
)
OPERATORS = (
    *OPERATORS_OF_TWO,
    *(
        f"__{name}__"
        for name in "neg pos abs invert round len iter bool int float index complex array reversed".split()
    ),
)
"""Special methods of Python and NumPy that have the values of a tensor, or its shape, in their result."""

# Square, so that products are defined; uneven on two ranks, so that no two shards have one shape.
VALUES = np.array([[2.0, 7.0, 5.0], [3.0, 1.0, 8.0], [9.0, 4.0, 6.0]], np.float32)
RANKS = 2

# Functions with such names return uninitialised memory, which is equal in two calls only by chance.
UNINITIALISED = ("empty", "resize")

# A function is called with the first of these that it takes on plain tensors; `x()` makes a tensor, so none is aliased.
ARGUMENTS: tuple[Callable[[Callable[[], Tensor]], tuple[Any, ...]], ...] = (
    lambda x: (x(),),
    lambda x: (x(), x()),
    lambda x: (x(), 1),
    lambda x: ([x(), x()],),
    lambda x: (x(), 0, 1),
    lambda x: (x(), (3, 3)),
    lambda x: (x(), x(), x()),
)

# Each that a function takes is tried as well, as users write it. The names are torch's, and NumPy's.
KEYWORDS: tuple[dict[str, Any], ...] = (
    {"dim": 0, "keepdim": True},
    {"axis": 0, "keepdim": True},
    {"axis": 0, "keepdims": True},
    {"axis": 0, "keep_dims": True},
)


@dataclass(frozen=True)
class OwnCall:
    """One name that users write: a method, an operator or a property of tensors, or a function of the framework.

    Attributes:
        placements: those of the operands, each tried in turn.
    """

    name: str
    run: Callable[..., Any]
    placements: tuple[Placement, ...]


def own_calls(platform: Platform) -> list[OwnCall]:
    """Return all calls of a platform that this module tries."""
    tensor = platform.Tensor
    methods = {name for name in dir(tensor) if not name.startswith("_")}
    there = sorted(
        name for name in (*methods, *OPERATORS) if hasattr(tensor, name) and name not in platform.shard_names
    )
    # Shapes show a shard, but not a summand.
    calls = [OwnCall(f"{tensor.__name__}.{name}", _caller(name), (Shard(0), Partial())) for name in there]
    # Only functions that share their name with a method or a rule: others need not be functions of tensors.
    names = sorted({*methods, *OP_NAMES, *rule_registry().names()} - platform.shard_names)
    for path in platform.function_modules or (tensor.__module__.partition(".")[0],):
        module = importlib.import_module(path)
        found = ((name, getattr(module, name, None)) for name in names)
        calls += [OwnCall(f"{path}.{name}", each, (Shard(0),)) for name, each in found if _is_function(each)]
    return calls


def _is_function(value: Any) -> bool:
    return callable(value) and not inspect.isclass(value) and not inspect.ismodule(value)


def _caller(name: str) -> Callable[..., Any]:
    """Return a function that calls a method, or reads a property, of its first argument."""

    def call(x: Tensor, *args: Any, **keywords: Any) -> Any:
        found = getattr(x, name)
        # A property is read once, by the call without further arguments.
        return found(*args, **keywords) if callable(found) or keywords else (found, *args)

    return call


def problems(platform: Platform, call: OwnCall) -> list[str]:
    """Return the placements in which a call on DTensors neither raises nor gives the values of one device."""
    try:
        return _problems(platform, call)
    finally:
        # A framework may stop recording at an error of its own, as MindSpore does. Later tests need gradients.
        with platform.enable_grad():
            pass


def _problems(platform: Platform, call: OwnCall) -> list[str]:
    found = []
    for arguments, keywords, values in _expected(platform, call):
        for placement in call.placements:
            results = run_ranks(_on_this_rank, RANKS, platform, platform, call, arguments, keywords, placement)
            wrong = next((each for each in results if each is not None and not _equal(each, values)), None)
            if wrong is not None:
                shown = ", ".join(f"{list(x.shape)} {x.ravel()[:3].tolist()}" for x in wrong[:2]) or "nothing"
                wanted = ", ".join(f"{list(x.shape)} {x.ravel()[:3].tolist()}" for x in values[:2])
                written = f"{call.name}{f' with {keywords}' if keywords else ''}"
                found.append(f"{written} of {placement} gives {shown}; on one device it gives {wanted}")
    return found


def _expected(platform: Platform, call: OwnCall) -> Iterator[tuple[Any, dict[str, Any], list[np.ndarray]]]:
    """Yield arguments and keywords that the function takes, and its values, unless it has none or is random."""

    def plain() -> Tensor:
        return platform.from_numpy(VALUES.copy())

    # Python itself passes both operands and no keywords, and a framework may crash where an operand is missing.
    name = call.name.rpartition(".")[2]
    positional = ARGUMENTS[1:] if name in OPERATORS_OF_TWO else ARGUMENTS
    forms: list[tuple[Any, dict[str, Any]]] = [(each, {}) for each in positional]
    if name not in OPERATORS:
        forms += [(ARGUMENTS[0], each) for each in KEYWORDS]
    taken = False
    for arguments, keywords in forms:
        # The framework may refuse arguments by any exception.
        with contextlib.suppress(Exception):
            if keywords or not taken:
                # Five times: two random masks of three rows are often equal.
                values, *again = (_values(platform, call, arguments(plain), keywords) for _ in range(5))
                taken = True
                if values and all(_equal(values, each) for each in again):
                    yield arguments, keywords, values


def _on_this_rank(
    platform: Platform,
    call: OwnCall,
    arguments: Callable[..., tuple[Any, ...]],
    keywords: dict[str, Any],
    placement: Placement,
) -> list[np.ndarray] | None:
    """Return the values of a call on DTensors, gathered; None if it raises."""
    mesh = init_device_mesh("cpu", (RANKS,), platform=platform)
    local = local_values(VALUES, mesh, (placement,))

    def sharded() -> Tensor:
        return conversions.from_local(platform.from_numpy(local.copy()), mesh, (placement,), shape=VALUES.shape)

    operands = arguments(sharded)
    # Any exception is a refusal. The platform's own suite has the texts.
    try:
        return _values(platform, call, operands, keywords)
    except Exception:
        return None


def _values(
    platform: Platform, call: OwnCall, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> list[np.ndarray]:
    """Return the tensors, arrays and numbers in the result, DTensors gathered, as arrays; zeros if uninitialised."""
    result = call.run(*arguments, **keywords)
    with platform.no_grad():
        full = (conversions.full_tensor(x) if isinstance(x, DTensor) else x for x in _listed(result))
        values = [np.array(platform.to_numpy(x) if isinstance(x, platform.Tensor) else x) for x in full]
    uninitialised = any(part in call.name for part in UNINITIALISED)
    return [np.zeros_like(x) for x in values] if uninitialised else values


def _listed(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, Iterator)):
        for each in value:
            yield from _listed(each)
    elif isinstance(value, (bool, int, float, complex, np.ndarray, np.generic)) or hasattr(value, "dtype"):
        yield value


def _equal(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    pairs = list(zip(found, expected, strict=False))
    return len(found) == len(expected) and all(
        x.shape == y.shape and np.allclose(x, y, rtol=RTOL, atol=ATOL, equal_nan=True) for x, y in pairs
    )


def test_own_function_is_right_or_raises(hp_platform: Platform, own_call: OwnCall) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # frameworks warn of deprecated names
        assert problems(hp_platform, own_call) == []


def test_operations_of_the_namespace_are_found(hp_platform: Platform) -> None:
    """Names without any call would make this module pass on a platform whose functions it does not find."""
    modules = hp_platform.function_modules
    found = {call.name.rpartition(".")[2] for call in own_calls(hp_platform)}
    assert not modules or {"add", "matmul", "sum", "exp"} <= found, f"none of these are functions of {modules}"
