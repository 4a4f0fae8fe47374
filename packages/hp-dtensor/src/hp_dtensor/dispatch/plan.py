"""Operations in place that cannot work on the parts alone: what the one that makes a new tensor gives is written.

Plan of one call, and how it runs: redistribute the inputs, run locally, attach the specs of the results.

Plan of an operation on whole operands, for one that has no sharding rule or whose result's shape depends on data.

Plan of a call by the placements that a registered function lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.dispatch.arguments import Location, bind, locate_tensors, replace_at, replace_static, specs_of
from hp_dtensor.dispatch.implicit_replication import is_replicating, mesh_of, replicated_spec
from hp_dtensor.exceptions import HPError, MeshError, PlacementError, ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute import plan_between
from hp_dtensor.redistribute.explicit import check_explicit, gathered
from hp_dtensor.rules.factors import LocalCall, Span
from hp_dtensor.rules.registry import Registration
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor import redistribution
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.local_map import local_map


class KeptPlacementError(ShardingRuleError):
    """The first argument would have to be placed differently, and is not partial."""


def writes_result_of(name: str) -> bool:
    """Tell if an operation writes into its first argument the result of the one without the underscore."""
    registration = rule_registry().get(name.removesuffix("_")) if name.endswith("_") else None
    return registration is not None and not registration.view


def refusal_in_place(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The message for a partial first argument of an operation that has no rule of its own in place."""
    specs = ", ".join(repr(x.spec) for _, x in locate_tensors(args, kwargs))
    return f"{name}({specs}): in place it would have to change the placement of its first argument; redistribute that."


def check_reaches_original(operation: str, first: Any) -> None:
    """Refuse to write what is a view on one device and a copy here: the original would not change."""
    view = first._copied_by
    if view is not None:
        raise ShardingRuleError(
            f"{operation} on the result of {view}, which is a copy: the dimension that {view} takes apart was cut, and "
            f"writing does not reach the tensor itself. Write the part of the tensor (x[index] = value), clone the "
            f"result to write it alone, or redistribute the tensor before {view}."
        )


class WritingPlan:
    """Runs an operation in place as the one that makes a new tensor, and `copy_`; one of the plans of `dispatch`.
    Placements stay, so what the rule had to make whole is cut again."""

    def __init__(self, platform: Platform, name: str, refusal: str) -> None:
        self.platform, self.name, self.refusal = platform, name, refusal
        self.direct: Any = None

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The first argument, written. The arguments are those of the operation in place, a keyword `inplace` or not.

        A partial one can only be written where the other operation leaves it partial.
        """
        make, write = (self.platform.own_function(name) for name in (self.name.removesuffix("_"), "copy_"))
        kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
        x, *rest = args or (kwargs.pop(self._first_name(kwargs)),)
        check_reaches_original(self.name, x)
        if make is None or write is None:
            raise ShardingRuleError(self.refusal)
        # The result's backward may have saved the very values that are overwritten below: `x *= y` needs the old x. The
        # copy keeps them, and their version counter, out of the write's way.
        recorded = self.platform.is_grad_enabled() and self.platform.requires_grad(x)
        source = self.platform.ops.clone(x) if recorded else x  # backward may need it as it was
        result = make(source, *rest, **kwargs)
        if result is source:
            return x  # nothing to write, as of dropout in evaluation
        if result.spec.placements != x.spec.placements and x.spec.is_partial:
            raise ShardingRuleError(self.refusal)
        if tuple(result.shape) != x.spec.shape:
            raise ShardingRuleError(f"{self.refusal} Its result {list(result.shape)} does not fit.")
        write(x, result)
        return x

    def _first_name(self, kwargs: Mapping[str, Any]) -> str:
        registration = rule_registry().get(self.name.removesuffix("_"))
        assert registration is not None, self.name
        return registration.first_among(kwargs)


Tensor = Any


@dataclass(frozen=True, slots=True)
class Move:
    """Redistribution, or varying view, of one tensor argument before the local operation.

    Attributes:
        operation: named in errors.
        location: the argument's position or keyword, and its index where it is in a list.
        target: the spec that it is redistributed to; None: it stays.
        vary: mesh axes over which its gradient is summed, since ranks use the replicated value differently.
    """

    operation: str
    location: Location
    target: TensorSpec | None
    vary: tuple[int, ...]

    def apply(self, x: Any) -> Any:
        """Return the argument as the local operation needs it."""
        if self.target is not None:
            check_explicit(self.operation, self.location, x.spec, self.target)
            try:
                x = redistribution.redistribute_to(x, self.target)
            except PlacementError as error:
                raise PlacementError(f"{self.operation}: {error}") from None
        return redistribution.vary(x, self.vary) if self.vary else x


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Changes to the arguments of a call before the local operation.

    Attributes:
        moves: one per tensor argument that is redistributed or enters through a varying view.
        replaced: static arguments by parameter name -> the value to use on this rank, such as a local shape.
    """

    moves: tuple[Move, ...]
    replaced: Mapping[str, Any]

    @property
    def stay(self) -> bool:
        """True if the local operation gets the arguments as they are."""
        return not self.moves and not self.replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Results of a call.

    Attributes:
        placed: (placements, global shape) of each.
        view: they share the storage of the first argument.
        copies: on one device they would share it, but the rule's own local function makes copies.
    """

    placed: tuple[tuple[tuple[Placement, ...], tuple[int, ...]], ...]
    view: bool
    copies: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorCuts:
    """Factors of a call, and how those that are cut lie on the ranks.

    Attributes:
        sizes: factor -> its global number of elements.
        axes: cut factor -> the mesh axes that cut it, outermost first.
        spans: cut factor -> (start, length) of this rank's part.
        lengths: cut factor -> per axis, the lengths of the parts of its ranks; nothing outside the mesh.
        parts: cut factor of which a rule needs every part (`Factorization.known`) -> (start, length) per rank.
    """

    sizes: Mapping[str, int]
    axes: Mapping[str, tuple[int, ...]]
    spans: Mapping[str, Span]
    lengths: Mapping[str, tuple[tuple[int, ...], ...]]
    parts: Mapping[str, tuple[Span, ...]]


@dataclass(slots=True, kw_only=True)
class OpPlan:
    """The way in which a call of one operation, with given specs and static arguments, runs on this rank.

    Attributes:
        operation: the operation's name.
        local: the rule's own function to run in place of the operation, or None.
        direct: a platform's note of how to run the call without `run`, kept from the first time; None at first.
    """

    operation: str
    platform: Platform
    mesh: DeviceMesh
    registration: Registration
    inputs: Inputs
    outputs: Outputs
    cuts: FactorCuts
    local: Callable[[LocalCall], Any] | None
    direct: Any = None
    _specs: list[TensorSpec | None] = field(default_factory=list)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the call on `args` and `kwargs`, which have the structure the plan was made for."""
        if self.registration.in_place:
            check_reaches_original(self.operation, self._first(args, kwargs))
        try:
            # The common case, nothing to move, calls the function with its own arguments: no list, no dictionary.
            if self.local is not None or not self.inputs.stay:
                return self._run_changed(func, args, dict(kwargs))
            with self.platform.local_op():
                result = func(*args, **kwargs)
        except Exception as error:
            self._check_inside(error)
            raise
        if self.registration.in_place:
            return self._first(args, kwargs)
        # What writes returns its first argument, the object itself, as on one device.
        wrapped = self._wrap(result)
        if self.outputs.view and self._first(args, kwargs)._copied_by is not None:
            self._mark_copies(wrapped, self._first(args, kwargs)._copied_by)
        return wrapped

    def _check_inside(self, error: Exception) -> None:
        """Raise a MeshError for an error of the framework that comes of working on nothing, outside the mesh."""
        if isinstance(error, HPError) or self.mesh.get_coordinate() is not None:
            return
        raise MeshError(
            f"{self.operation}: rank {self.mesh.world.rank} is outside mesh {self.mesh.describe()} and holds nothing, "
            f"which {self.platform.name} cannot do this on ({error}). Call it where mesh.get_coordinate() is not None."
        ) from error

    def _first(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[0] if args else kwargs[self.registration.first_among(kwargs)]

    def _run_changed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first, new_args = self._first(args, kwargs), list(args)
        for move in self.inputs.moves:
            replace_at(new_args, kwargs, move.location, move.apply)
        result = self._run_local(func, new_args, kwargs)
        if self.registration.in_place:
            return first
        wrapped = self._wrap(result)
        # A view of what was redistributed is one of the copy that came of that: to write it would not reach the
        # argument, and is refused later (`check_reaches_original`).
        if self.outputs.copies or (self.outputs.view and any(move.target is not None for move in self.inputs.moves)):
            self._mark_copies(wrapped, self.operation)
        elif self.outputs.view and first._copied_by is not None:
            self._mark_copies(wrapped, first._copied_by)
        return wrapped

    def _run_local(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self.local is not None:
            return self.local(self._local_call(func, args, kwargs))
        if self.inputs.replaced:
            args = replace_static(self.registration, args, kwargs, self.inputs.replaced)
        with self.platform.local_op():
            return func(*args, **kwargs)

    @staticmethod
    def _mark_copies(wrapped: Any, made_by: str) -> None:
        for x in wrapped if isinstance(wrapped, (tuple, list)) else (wrapped,):
            x._copied_by = made_by

    def _local_call(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> LocalCall:
        unwrap = self.platform.unwrap
        bound = {
            name: unwrap(value) if isinstance(value, DTensor) else value
            for name, value in bind(self.registration, tuple(args), kwargs).items()
        }
        inside = self.mesh.get_coordinate() is not None  # a rank outside the mesh works on nothing, alone
        groups = {
            factor: tuple(self.mesh.group_along(axis) for axis in axes if inside)
            for factor, axes in self.cuts.axes.items()
        }
        parts = {
            factor: (self.mesh.group_over(self.cuts.axes[factor]), held)
            for factor, held in self.cuts.parts.items()
            if inside
        }
        placements, shape = self.outputs.placed[0]
        output = TensorSpec(self.mesh, placements, shape, None)
        rest = [unwrap(x) if isinstance(x, DTensor) else x for x in args[1:]]
        named = {name: unwrap(x) if isinstance(x, DTensor) else x for name, x in kwargs.items()}

        def on(x: Tensor, **static: Any) -> Any:
            given, by_name = [x, *rest] if args else [], dict(named)
            if not args:
                by_name[self.registration.first_among(named)] = x
            if static:
                given = replace_static(self.registration, given, by_name, static)
            return func(*given, **by_name)

        return LocalCall(
            platform=self.platform,
            name=self.operation,
            arguments=bound,
            spans=self.cuts.spans,
            lengths=self.cuts.lengths,
            groups=groups,
            all_spans=parts,
            sizes=self.cuts.sizes,
            output=output,
            on=on,
        )

    def _wrap(self, result: Any) -> Any:
        if result is NotImplemented:  # an operator and an operand of a foreign type: Python asks that one
            return result
        if isinstance(result, (tuple, list)):
            wrapped = [self._adopt(x, index) for index, x in enumerate(result)]
            return tuple(wrapped) if type(result) is tuple else type(result)(wrapped)
        return self._adopt(result, 0)

    def _adopt(self, local: Any, index: int) -> Any:
        if not self._specs:
            self._specs = [None] * len(self.outputs.placed)
        spec = self._specs[index]
        # Made at the first result, whose dtype only the framework knows; under autocast the same call may give another
        # one.
        if spec is None or spec.dtype != local.dtype:
            placements, shape = self.outputs.placed[index]
            spec = TensorSpec(self.mesh, placements, shape, local.dtype)
            self._check_shape(local, spec)
            self._specs[index] = spec
        elif self.registration.own:  # another function of this name may have come here
            self._check_shape(local, spec)
        if not self.registration.own:
            return self.platform.adopt(local, spec)
        # A function of the user's may return what it keeps elsewhere, or an argument as it is. To adopt changes the
        # object, so these get a tensor of their own.
        if self.platform.is_grad_enabled() and self.platform.requires_grad(local):
            return self.platform.wrap(local, spec)
        return self.platform.adopt(self.platform.detach(local), spec)

    def _check_shape(self, local: Any, spec: TensorSpec) -> None:
        got = self.platform.local_shape(local)
        if got != spec.local_shape:
            raise ShardingRuleError(
                f"{self.operation}: the sharding rule expects a result {list(spec.local_shape)} on this rank, the "
                f"operation gave {list(got)}; the rule does not cover this form of the call. Write it in another "
                "way, or run it on local tensors (to_local, local_map)."
            )


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


Sharding = tuple[Sequence[Placement], Sequence[Placement | None]]
"""Along one mesh axis: a placement per output, and one per positional argument, None for what is no tensor."""
ShardingFunction = Callable[..., Sequence[Sharding]]


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
