"""Plans: how a call of an operation runs on this rank. Four forms, all with `run(func, args, kwargs)`.

- `LocalPlan`: redistribute the inputs, run the operation on local tensors, wrap the results; made from a sharding rule.
- `ListedPlan`: the same by placements that `register_sharding` lists.
- `InPlacePlan`: compute out of place, then `copy_` into the first argument.
- `ReplicatedPlan`: gather all operands and run the operation on full tensors.

A `LocalPlan` may also have a `DirectCall`, which a platform runs without the steps that change nothing.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from hp_dtensor.trees import like_sequence


class Plan(ABC):
    """A way to run the calls of one operation with one key on this rank.

    Attributes:
        operation: the operation's name.
        direct: shortcut for calls that need none of the plan's steps; see `DirectCall`.
    """

    # Thousands of plans may be cached for one operation.
    __slots__ = ("direct", "operation", "platform")

    def __init__(self, platform: Platform, operation: str) -> None:
        self.platform, self.operation = platform, operation
        self.direct: DirectCall | None = None

    @abstractmethod
    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the call. `args` and `kwargs` have the structure that the plan was made for."""


class PlacementChangeError(ShardingRuleError):
    """An operation in place would have to redistribute its first argument, which is not partial."""


def has_out_of_place_form(name: str) -> bool:
    """Return True if `name` ends in an underscore and the operation without it has a rule and makes no view."""
    registration = rule_registry().get(name.removesuffix("_")) if name.endswith("_") else None
    return registration is not None and not registration.view


def in_place_refusal(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the message for an in-place operation without a rule whose first argument is partial."""
    specs = ", ".join(repr(x.spec) for _, x in locate_tensors(args, kwargs))
    return f"{name}({specs}): in place it would have to change the placement of its first argument; redistribute that."


def check_reaches_original(operation: str, first: Any) -> None:
    """Raise a ShardingRuleError if `first` is a copy here and a view on one device: no write reaches the original."""
    view = first._copied_by
    if view is not None:
        raise ShardingRuleError(
            f"{operation} on the result of {view}, which is a copy: the dimension that {view} splits was sharded, and "
            f"a write does not reach the tensor itself. Write to the tensor (x[index] = value), clone the "
            f"result to write to it alone, or redistribute the tensor before {view}."
        )


class InPlacePlan(Plan):
    """Runs an in-place operation as its out-of-place form followed by `copy_`.

    The first argument keeps its placements, so a result that the rule needed replicated is sharded again.
    """

    __slots__ = ("refusal",)

    def __init__(self, platform: Platform, operation: str, refusal: str) -> None:
        super().__init__(platform, operation)
        self.refusal = refusal

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Write the result into the first argument and return that. A keyword `inplace` is dropped.

        A partial argument can only be written where the out-of-place form leaves it partial.
        """
        make, write = (self.platform.own_function(name) for name in (self.operation.removesuffix("_"), "copy_"))
        # Otherwise the out-of-place form would write to its argument itself.
        kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
        if not args:
            registration = rule_registry().get(self.operation.removesuffix("_"))
            assert registration is not None, self.operation
            args = (kwargs.pop(registration.first_among(kwargs)),)
        x, *rest = args
        check_reaches_original(self.operation, x)
        if make is None or write is None:
            raise ShardingRuleError(self.refusal)
        # The result's backward may save the values that are overwritten below: the gradient of `x *= y` needs the old
        # x. It saves those of the clone instead, whose version counter the write does not change.
        recorded = self.platform.is_grad_enabled() and self.platform.requires_grad(x)
        source = self.platform.ops.clone(x) if recorded else x
        result = make(source, *rest, **kwargs)
        if result is source:
            return x  # for example dropout in evaluation: nothing to write
        if result.spec.placements != x.spec.placements and x.spec.is_partial:
            raise ShardingRuleError(self.refusal)
        if tuple(result.shape) != x.spec.shape:
            raise ShardingRuleError(f"{self.refusal} Its result {list(result.shape)} does not fit.")
        write(x, result)
        return x


Tensor = Any


@dataclass(frozen=True, slots=True)
class Redistribution:
    """Redistribution, or varying view, of one tensor argument before the local operation.

    Attributes:
        operation: its name, for errors.
        location: the argument's position or keyword, and its index if it is in a list.
        target: spec to redistribute to; None: the argument keeps its placements.
        vary: mesh axes over which the gradient is summed, because ranks use the replicated value differently.
    """

    operation: str
    location: Location
    target: TensorSpec | None
    vary: tuple[int, ...]

    def apply(self, x: Any) -> Any:
        """Return the redistributed argument, as a varying view where `vary` has axes.

        It is plain where autograd does not record it.
        """
        if self.target is not None:
            check_explicit(self.operation, self.location, x._spec, self.target)
            try:
                x = redistribution.redistribute_operand(x, self.target)
            except PlacementError as error:
                # The planner does not know the operation.
                raise PlacementError(f"{self.operation}: {error}") from None
        return redistribution.vary(x, self.vary) if self.vary and isinstance(x, DTensor) else x


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorShardings:
    """Sizes of the factors of a call, and how the sharded ones are divided among ranks.

    Attributes:
        sizes: factor -> its global number of elements.
        axes: sharded factor -> the mesh axes that shard it, outermost first.
        spans: sharded factor -> (start, length) of this rank's shard; without factors in strided shards.
        lengths: factor of `spans` -> per axis, the lengths of its ranks' shards; empty on a rank outside the mesh.
    """

    sizes: Mapping[str, int]
    axes: Mapping[str, tuple[int, ...]]
    spans: Mapping[str, Span]
    lengths: Mapping[str, tuple[tuple[int, ...], ...]]


class DirectCall:
    """Shortcut for calls whose first run showed that a plan changes nothing, or little, around the operation.

    A platform calls the operation on local data and gives the result `spec`, without the plan's own steps.

    Attributes:
        spec: spec of the result.
        static: (positional, keyword) arguments after the first tensor, if the plan replaces any of them; else None.
        views: (position, axes) of arguments that become varying views where autograd records them.
        is_number: the result is a 0-d partial tensor, which the platform reduces first where it reads its value.
        is_unchanged: none of the three; the operation runs on the local data of the given arguments.
    """

    __slots__ = ("is_number", "is_unchanged", "spec", "static", "views")

    def __init__(
        self,
        spec: TensorSpec,
        static: tuple[tuple[Any, ...], dict[str, Any]] | None,
        views: tuple[tuple[int, tuple[int, ...]], ...],
        is_number: bool,
    ) -> None:
        self.spec, self.static, self.views, self.is_number = spec, static, views, is_number
        self.is_unchanged = not views and static is None and not is_number


class LocalPlan(Plan):
    """Plan of a sharding rule: redistribute inputs, run on local tensors, give the results their specs.

    Attributes:
        redistributions: one per tensor argument that is redistributed or enters through a varying view.
        replaced: static arguments by parameter name -> the value to use on this rank, such as a local shape.
        placed: (placements, global shape) of each result.
        view: results share the storage of the first argument.
        copies: results would share it on one device, but the rule's own local function makes copies.
        factors: the factors of the call, and how they are sharded.
        local: the rule's own function to run instead of the operation, or None.
    """

    __slots__ = (
        *("_is_changed", "_specs", "copies", "factors", "local", "mesh"),
        *("placed", "redistributions", "registration", "replaced", "view"),
    )

    def __init__(
        self,
        platform: Platform,
        operation: str,
        *,
        mesh: DeviceMesh,
        registration: Registration,
        redistributions: tuple[Redistribution, ...],
        replaced: Mapping[str, Any],
        placed: tuple[tuple[tuple[Placement, ...], tuple[int, ...]], ...],
        view: bool,
        copies: bool,
        factors: FactorShardings,
        local: Callable[[LocalCall], Any] | None,
    ) -> None:
        super().__init__(platform, operation)
        self.mesh, self.registration = mesh, registration
        self.redistributions, self.replaced, self.factors, self.local = redistributions, replaced, factors, local
        self.placed, self.view, self.copies = placed, view, copies
        self._is_changed = bool(redistributions or replaced or local is not None)
        self._specs: list[TensorSpec | None] = [None] * len(placed)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the call; an in-place operation returns its first argument, the same object, as on one device."""
        if self.registration.in_place:
            check_reaches_original(self.operation, self._first(args, kwargs))
        # A `try` in which nothing is raised costs nothing.
        try:
            # In the common case, no redistribution, the function gets the arguments as they came: no list or
            # dictionary.
            if self._is_changed:
                return self._run_changed(func, args, dict(kwargs))
            with self.platform.local_op():
                result = func(*args, **kwargs)
        except Exception as error:
            self._check_inside(error)
            raise
        if self.registration.in_place:
            return self._first(args, kwargs)
        wrapped = self._wrap(result)
        if self.view and self._first(args, kwargs)._copied_by is not None:
            self._mark_copies(wrapped, self._first(args, kwargs)._copied_by)
        return wrapped

    def _check_inside(self, error: Exception) -> None:
        """Raise a MeshError if the framework failed on a rank outside the mesh, which has empty shards only."""
        if isinstance(error, HPError) or self.mesh.get_coordinate() is not None:
            return
        raise MeshError(
            f"{self.operation}: rank {self.mesh.world.rank} is outside mesh {self.mesh.describe()} and holds nothing, "
            f"which {self.platform.name} cannot do this on ({error}). Call it where mesh.get_coordinate() is not None."
        ) from error

    def _first(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # The first argument may be passed by keyword, under any of its names.
        return args[0] if args else kwargs[self.registration.first_among(kwargs)]

    def _run_changed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call whose arguments or function the plan replaces. Writes to `kwargs`."""
        first, new_args = self._first(args, kwargs), list(args)
        for each in self.redistributions:
            replace_at(new_args, kwargs, each.location, each.apply)
        if self.local is not None:
            result = self.local(self._local_call(func, new_args, kwargs))
        else:
            if self.replaced:
                new_args = replace_static(self.registration, new_args, kwargs, self.replaced)
            with self.platform.local_op():
                result = func(*new_args, **kwargs)
        if self.registration.in_place:
            return first
        wrapped = self._wrap(result)
        # A view of a redistributed argument shares the storage of the redistribution's copy, not of the argument.
        # Writes to it would be lost, so `check_reaches_original` refuses them later.
        is_redistributed = any(each.target is not None for each in self.redistributions)
        if self.copies or (self.view and is_redistributed):
            self._mark_copies(wrapped, self.operation)
        elif self.view and first._copied_by is not None:
            self._mark_copies(wrapped, first._copied_by)
        return wrapped

    @staticmethod
    def _mark_copies(wrapped: Any, made_by: str) -> None:
        """Mark results of which `check_reaches_original` refuses writes, with the operation that made the copy."""
        for x in wrapped if isinstance(wrapped, (tuple, list)) else (wrapped,):
            x._copied_by = made_by

    def _local_call(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> LocalCall:
        """Return the call as the rule's own local function gets it. `args` and `kwargs` are redistributed."""

        def local_of(x: Any) -> Any:
            return self.platform.unwrap(x) if isinstance(x, DTensor) else x

        bound = {name: local_of(x) for name, x in bind(self.registration, tuple(args), kwargs).items()}
        inside = self.mesh.get_coordinate() is not None  # a rank outside the mesh has empty shards and no groups
        groups = {
            factor: tuple(self.mesh.group_along(axis) for axis in axes if inside)
            for factor, axes in self.factors.axes.items()
        }
        placements, shape = self.placed[0]
        output = TensorSpec(self.mesh, placements, shape, None)
        rest, named = [local_of(x) for x in args[1:]], {name: local_of(x) for name, x in kwargs.items()}

        # For rules that run the operation itself on other data, such as a shard with a border from its neighbours.
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
            spans=self.factors.spans,
            lengths=self.factors.lengths,
            groups=groups,
            sizes=self.factors.sizes,
            output=output,
            on=on,
        )

    def _wrap(self, result: Any) -> Any:
        if result is NotImplemented:  # an operator with an operand of a foreign type: Python tries that type's operator
            return result
        if isinstance(result, (tuple, list)):
            return like_sequence(result, [self._as_dtensor(x, index) for index, x in enumerate(result)])
        return self._as_dtensor(result, 0)

    def _as_dtensor(self, local: Any, index: int) -> Any:
        spec = self._specs[index]
        # Created for the first result, whose dtype only the framework knows. Under autocast the same call may return
        # another dtype.
        if spec is None or spec.dtype != local.dtype:
            placements, shape = self.placed[index]
            spec = TensorSpec(self.mesh, placements, shape, local.dtype)
            # Checked once per plan: calls with the same key have results of the same shape.
            self._check_shape(local, spec)
            self._specs[index] = spec
        elif self.registration.own:  # a user's function of the same name may return another shape
            self._check_shape(local, spec)
        if not self.registration.own:
            return self.platform.wrap_fresh(local, spec)
        # A user's function may return an argument itself, or a tensor that it also stores elsewhere. `wrap_fresh`
        # changes the object, so these results get a tensor object of their own.
        if self.platform.is_grad_enabled() and self.platform.requires_grad(local):
            return self.platform.wrap(local, spec)
        return self.platform.wrap_fresh(self.platform.detach(local), spec)

    def _check_shape(self, local: Any, spec: TensorSpec) -> None:
        got = self.platform.local_shape(local)
        if got != spec.local_shape:
            # For authors of platforms, who meet this before anything works.
            is_global = got == spec.shape
            hint = " If every call does so, the platform's function ignores `local_op`." if is_global else ""
            raise ShardingRuleError(
                f"{self.operation}: the sharding rule expects a result {list(spec.local_shape)} on this rank, the "
                f"operation gave {list(got)}; the rule does not cover this form of the call. Write it in another "
                f"way, or run it on local tensors (to_local, local_map).{hint}"
            )


class ReplicatedPlan(Plan):
    """Runs an operation on full operands, for operations without a rule or with a data-dependent result shape.

    Args:
        refusal: the error's message where the operation may not run.
        always: also outside `implicit_replication`, for operands that are replicated already.
    """

    __slots__ = ("always", "refusal")

    def __init__(self, platform: Platform, operation: str, refusal: str, always: bool = False) -> None:
        super().__init__(platform, operation)
        self.refusal, self.always = refusal, always

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Gather the operands, run the operation, and return its tensors as replicated DTensors."""
        mesh = mesh_of((args, tuple(kwargs.values())))
        if not (self.always or is_replicating()) or mesh is None:
            raise ShardingRuleError(self.refusal)
        if self.operation.endswith("_"):
            raise ShardingRuleError(
                f"{self.refusal} It works in place, which implicit_replication cannot do on gathered operands."
            )
        if mesh.get_coordinate() is None:
            raise MeshError(
                f"{self.operation}: it runs on full operands, and rank {mesh.world.rank} is outside mesh "
                f"{mesh.describe()} and holds nothing. Call it where mesh.get_coordinate() is not None."
            )
        full_args, full_kwargs = self._full(args), {key: self._full(value) for key, value in kwargs.items()}
        with self.platform.local_op():
            result = func(*full_args, **full_kwargs)
        return self._wrapped(result, mesh)

    def _full(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            return gathered(self.operation, value)
        return type(value)(self._full(item) for item in value) if type(value) in (tuple, list) else value

    def _wrapped(self, value: Any, mesh: DeviceMesh) -> Any:
        if isinstance(value, (tuple, list)):
            wrapped = [self._wrapped(item, mesh) for item in value]
            return wrapped if type(value) is list else tuple(wrapped)
        if isinstance(value, self.platform.Tensor):
            return self.platform.wrap(value, replicated_spec(mesh, value))
        return value


Sharding = tuple[Sequence[Placement], Sequence[Placement | None]]
"""Along one mesh axis: a placement per output, and one per positional argument (None for one that is no tensor)."""
ShardingFunction = Callable[..., Sequence[Sharding]]


class ListedPlan(Plan):
    """Runs an operation with the cheapest of the shardings that a function given to `register_sharding` lists."""

    __slots__ = ("_listed",)

    def __init__(self, platform: Platform, operation: str, listed: ShardingFunction) -> None:
        super().__init__(platform, operation)
        self._listed = listed

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Redistribute the arguments to the cheapest acceptable sharding, and run the operation on local tensors."""
        specs = [x.spec if isinstance(x, DTensor) else None for x in args]
        mesh = next(spec.mesh for spec in specs if spec is not None)
        shardings = self._acceptable(args, kwargs)
        # O(shardings ** axes of the mesh): lists are short, and meshes have few axes.
        choices = [each for each in itertools.product(shardings, repeat=mesh.ndim) if _fits(each, specs)]
        if not choices:
            raise ShardingRuleError(f"{self.operation}: none of the {len(shardings)} registered shardings fits {specs}")
        # Bytes of the forward; those of the backward are not compared.
        outputs, wanted = _placements(min(choices, key=lambda each: _wire_bytes(each, specs)), specs)
        return local_map(func, outputs, wanted, device_mesh=mesh, redistribute_inputs=True)(*args, **kwargs)

    def _acceptable(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Sharding]:
        shardings = list(self._listed(*map(specs_of, args), **{key: specs_of(x) for key, x in kwargs.items()}))
        for outputs, inputs in shardings:
            missing = [i for i, x in enumerate(args) if isinstance(x, DTensor) and (i >= len(inputs) or not inputs[i])]
            if missing or not outputs:
                raise ShardingRuleError(
                    f"{self.operation}: a registered sharding ({list(outputs)}, {list(inputs)}) has no placement for "
                    f"{f'argument {missing[0]}' if missing else 'the output'}"
                )
        return shardings


def _fits(choice: Sequence[Sharding], specs: Sequence[TensorSpec | None]) -> bool:
    """Return whether each dimension that a choice shards exists and has an element per rank, as torch requires."""
    for axis, (_, inputs) in enumerate(choice):
        for spec, placement in zip(specs, inputs, strict=False):
            dim = getattr(placement, "dim", None)
            if spec is None or dim is None:
                continue
            if not -spec.ndim <= dim < spec.ndim or spec.shape[dim] < spec.mesh.shape[axis]:
                return False
    return True


def _placements(choice: Sequence[Sharding], specs: Sequence[TensorSpec | None]) -> tuple[list[Any], list[Any]]:
    """Return the placements of the outputs and of the arguments over all mesh axes."""
    outputs = [tuple(each) for each in zip(*(outputs for outputs, _ in choice), strict=True)]
    wanted = [None if spec is None else tuple(inputs[i] for _, inputs in choice) for i, spec in enumerate(specs)]
    return outputs, wanted


def _wire_bytes(choice: Sequence[Sharding], specs: Sequence[TensorSpec | None]) -> float:
    """Return the bytes that each rank sends to redistribute the arguments to a choice."""
    total = 0.0
    for spec, placements in zip(specs, _placements(choice, specs)[1], strict=True):
        if spec is not None:
            itemsize = spec.mesh.platform.itemsize(spec.dtype)
            total += plan_between(spec, spec.with_placements(placements), itemsize).wire_bytes
    return total
