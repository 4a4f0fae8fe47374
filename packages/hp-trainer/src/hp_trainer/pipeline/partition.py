"""Partition of a model into stages: its layers by cost or as listed, or a module by names of submodules.

`pipeline` splits a module without tracing it: it runs once, and every submodule must get values that the one before
returned, as stages do. A stage then calls its submodules one after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hp_dtensor.comm.mesh import as_group
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import platform_of
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.trees import fields_of, flattened
from hp_trainer._coordination import all_ranks
from hp_trainer.exceptions import PipelineError
from hp_trainer.pipeline.stage import PipelineStage
from hp_trainer.pipeline.transfers import MessageLayout

Tensor = Any
Module = Any


def balanced_stages(
    costs: Sequence[float], num_stages: int, *, first_cost: float = 0.0, last_cost: float = 0.0
) -> list[range]:
    """Split layers into consecutive stages such that the cost of the most expensive stage is minimal.

    Among such partitions the one with the least sum of squared costs is returned, and among those one with cheaper
    early stages, since the first ranks of a pipeline hold the activations of more micro-batches. The time is
    O(layers² * stages).

    Args:
        costs: cost of each layer in any unit, measured (seconds) or estimated (operations).
        num_stages: number of stages; each gets at least one layer.
        first_cost: cost of the first stage besides its layers (the embedding).
        last_cost: cost of the last stage besides its layers (norm, head and loss).

    Raises:
        PipelineError: there are more stages than layers, or a cost is negative or not finite.

    Examples:
        >>> from hp_trainer.pipeline import balanced_stages
        >>> balanced_stages([1.0] * 8, 4, last_cost=2.0)
        [range(0, 2), range(2, 4), range(4, 7), range(7, 8)]
    """
    num_layers = len(costs)
    if not hasattr(num_stages, "__index__") or not 1 <= num_stages <= num_layers:
        legal = f"1 to {num_layers} stages" if num_layers else "at least one layer"
        raise PipelineError(f"{num_layers} layers cannot be split into {num_stages} stages; expected {legal}")
    if any(not 0 <= cost < math.inf for cost in (*costs, first_cost, last_cost)):
        raise PipelineError(f"costs of layers: expected finite numbers >= 0, got {[*costs, first_cost, last_cost]}")
    # Prefix sums: the cost of any range of layers is one subtraction.
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    # Cost of each stage besides its layers.
    extra = [first_cost, *[0.0] * (num_stages - 1)]
    extra[-1] += last_cost
    # Dynamic programming in two passes over (stage, first layer): the minimal peak cost, then the least sum of squares
    # among the partitions that do not exceed it.
    # peak[stage][begin]: least peak cost of the stages from `stage` on, if they share the layers from `begin` on.
    peak = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    peak[num_stages][num_layers] = 0.0
    for stage in range(num_stages - 1, -1, -1):
        for begin in range(num_layers):
            for end in range(begin + 1, num_layers + 1):
                cost = total[end] - total[begin] + extra[stage]
                # Costs are not negative: with more layers this stage does not get cheaper.
                if cost >= peak[stage][begin]:
                    break
                peak[stage][begin] = min(peak[stage][begin], max(cost, peak[stage + 1][end]))
    limit = peak[0][0]
    # spread[stage][begin]: (sum of squares, end of this stage) of the best partition from there on.
    spread = [[(float("inf"), 0)] * (num_layers + 1) for _ in range(num_stages)]
    spread.append([(float("inf"), 0)] * num_layers + [(0.0, 0)])
    for stage in range(num_stages - 1, -1, -1):
        for begin in range(num_layers):
            for end in range(begin + 1, num_layers + 1):
                cost = total[end] - total[begin] + extra[stage]
                # Costs do not decrease with more layers, so the first one above the limit ends the search.
                if cost > limit:
                    break
                # Equal sums of squares: the smaller end wins, which gives early stages fewer layers.
                spread[stage][begin] = min(spread[stage][begin], (cost**2 + spread[stage + 1][end][0], end))
    begin, stages = 0, []
    for stage in range(num_stages):
        stages.append(range(begin, spread[stage][begin][1]))
        begin = stages[-1].stop
    return stages


def listed_stages(layers_per_stage: Sequence[int], num_layers: int, num_stages: int) -> list[range]:
    """Split layers into consecutive stages with the given numbers of layers.

    Raises:
        PipelineError: there is not one integer of at least 0 for each stage, or they do not add up to `num_layers`.

    Examples:
        >>> from hp_trainer.pipeline import listed_stages
        >>> listed_stages([1, 3], num_layers=4, num_stages=2)
        [range(0, 1), range(1, 4)]
    """
    listed = list(layers_per_stage)
    if any(not hasattr(count, "__index__") for count in listed):
        raise PipelineError(f"layers of {num_stages} stages: expected integers, got {listed}")
    if len(listed) != num_stages or sum(listed) != num_layers or any(count < 0 for count in listed):
        # A valid example for the message.
        even = [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]
        raise PipelineError(
            f"layers of {num_stages} stages: expected {num_stages} numbers >= 0 that add up to {num_layers}, such as "
            f"{even}, got {listed}, which add up to {sum(listed)}"
        )
    ends = [sum(listed[: stage + 1]) for stage in range(num_stages)]
    return [range(end - count, end) for end, count in zip(ends, listed, strict=True)]


def measured_costs(
    layers: Sequence[Module],
    *args: Any,
    group: ProcessGroup | None = None,
    rounds: int = 3,
    platform: Platform | str | None = None,
) -> list[float]:
    """Measure the seconds of forward and backward of each layer on this device, for `balanced_stages`.

    Layers are called in sequence, each with the output of the previous one, as stages are. Gradients are restored
    afterwards. Random numbers are consumed, and buffers that a forward updates are changed.

    Args:
        layers: layers in order; they return plain tensors in tuples, lists and dicts.
        args: arguments of the first layer: one micro-batch.
        group: ranks that measure together and get equal results, the times of the slowest rank. None for this rank.
        rounds: number of measurements after a warm-up; the minimum of each layer is returned.

    Raises:
        PipelineError: there are no layers or rounds, or an output cannot be sent between stages. On every rank of the
            group, if any rank failed.

    Examples:
        >>> with nn.building(platform):
        ...     layers = [nn.Linear(4, 4) for _ in range(3)]
        >>> costs = measured_costs(layers, platform.ops.ones((2, 4), platform.dtype("float32")))
        >>> len(balanced_stages(costs, 2))
        2
    """

    def measure() -> list[float]:
        if not layers or rounds < 1:
            raise PipelineError(f"expected layers and rounds, got {len(layers)} and {rounds}")
        chosen = platform_of(layers[0], platform)
        with chosen.enable_grad(), _restored_gradients(chosen, layers):
            # The first run is a warm-up (allocator, kernel selection) and is not used.
            runs = [_seconds(chosen, layers, args) for _ in range(rounds + 1)]
        return [min(times) for times in zip(*runs[1:], strict=True)]

    if group is None:
        return measure()
    gathered = all_ranks(as_group(group), "measuring layers", measure, PipelineError)
    numbers = [len(times) for times in gathered]
    if len(set(numbers)) > 1:
        raise PipelineError(f"ranks that measure together: expected the same layers, got {numbers} of them")
    # The slowest rank determines the time of a stage.
    return [max(times) for times in zip(*gathered, strict=True)]


def _seconds(platform: Platform, layers: Sequence[Module], args: tuple[Any, ...]) -> list[float]:
    """Return the seconds of forward and backward of each layer in one pass over all layers."""
    found: list[float] = []
    layout: MessageLayout | None = None
    tensors: list[Tensor] = []
    for index, layer in enumerate(layers):
        # One stage more than layers, so that no layer is the last stage, whose backward starts from a loss.
        stage = PipelineStage(layer, index, len(layers) + 1, platform=platform)
        platform.synchronize()
        # Devices run asynchronously: both times are read when all submitted work has ended.
        start = time.perf_counter()
        output = stage.forward_first(0, args, {}) if layout is None else stage.forward(0, layout, tensors, {}, None)
        layout, tensors = stage.outputs(0, output)
        gradients = [
            platform.ops.full(tuple(x.shape), 1.0, x.dtype)
            for meta, x in zip(layout.tensors, tensors, strict=True)
            if meta.requires_grad
        ]
        stage.backward(0, gradients)
        platform.synchronize()
        found.append(time.perf_counter() - start)
    return found


@contextlib.contextmanager
def _restored_gradients(platform: Platform, layers: Sequence[Module]) -> Iterator[None]:
    """Remove the gradients of all parameters within the context, and restore them afterwards."""
    # By identity: of a parameter that layers share, the second removal would find no gradient to restore.
    parameters = {id(each): each for layer in layers for _, each in platform.named_parameters(layer)}.values()
    before = [(parameter, platform.get_grad(parameter)) for parameter in parameters]
    for parameter in parameters:
        platform.set_grad(parameter, None)
    try:
        yield
    finally:
        for parameter, grad in before:
            platform.set_grad(parameter, grad)


class SplitPoint(Enum):
    """The side of a submodule at which to split: before it, or after it. Names follow torch."""

    BEGINNING = 1
    END = 2


@dataclass(frozen=True, slots=True)
class PipeInfo:
    """Facts about a `Pipe` that `build_stage` needs.

    Attributes:
        num_stages: number of stages.

    Examples:
        >>> PipeInfo(4).num_stages
        4
    """

    num_stages: int


class Pipe:
    """A module split into stages by `pipeline`.

    Attributes:
        num_stages: number of stages.

    Examples:
        >>> with nn.building(platform):
        ...     pipe = Pipe([nn.Linear(4, 4), nn.Linear(4, 4)], platform)
        >>> pipe.build_stage(1).is_last
        True
    """

    def __init__(self, stages: Sequence[Module], platform: Platform) -> None:
        self._stages, self._platform = list(stages), platform
        self.num_stages = len(self._stages)

    def get_stage_module(self, stage_idx: int) -> Module:
        """Return the module of a stage. It has the split module's own submodules, under their full names."""
        if not 0 <= stage_idx < self.num_stages:
            raise PipelineError(f"stage {stage_idx}: expected one from 0 to {self.num_stages - 1}")
        return self._stages[stage_idx]

    def build_stage(self, stage_index: int, device: Any = None, group: Any = None) -> PipelineStage:
        """Return the `PipelineStage` of a stage; `device` and `group` are those of `PipelineStage`."""
        return PipelineStage(
            self.get_stage_module(stage_index),
            stage_index,
            self.num_stages,
            device,
            group=group,
            platform=self._platform,
        )

    def info(self) -> PipeInfo:
        """Return the number of stages, for `build_stage`."""
        return PipeInfo(self.num_stages)


def build_stage(
    stage_module: Module, stage_index: int, pipe_info: PipeInfo, device: Any = None, group: Any = None
) -> PipelineStage:
    """Return the `PipelineStage` of a module of a `Pipe`, such as one that has been sharded since.

    Examples:
        >>> with nn.building(platform):
        ...     pipe = Pipe([nn.Linear(4, 4), nn.Linear(4, 4)], platform)
        >>> build_stage(pipe.get_stage_module(0), 0, pipe.info()).is_first
        True
    """
    return PipelineStage(stage_module, stage_index, pipe_info.num_stages, device, group=group)


def pipeline(
    module: Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: None = None,
    *,
    platform: Platform | str | None = None,
) -> Pipe:
    """Split a module into stages at submodules, without tracing it. Names and arguments follow torch.

    The module runs once on the example, without autograd. Its forward must call submodules in a chain: the first gets
    tensors of the arguments, every other one those that the one before returned (in any structure, with None, flags and
    strings beside them), and the result has those of the last. Submodules may be nested in lists and other modules.
    A stage refuses arguments and outputs of submodules that differ from the example in more than their tensors: in
    None, flags, strings or numbers. Random numbers are consumed, and buffers that a forward updates are changed.

    A split divides the modules that contain it. Of their forwards only the calls of submodules are kept: branches that
    depend on something else are those of the example, and contexts around submodules, such as autocast, are lost. Apply
    parallel styles, sharding and other hooks to the stages instead. After a split in eval mode, stages refuse to train.
    On torch, a function between submodules that returns its argument in the example, as a cast may, is refused;
    elsewhere it is lost.

    Args:
        module: the full module, equal on all ranks.
        mb_args: positional arguments of a micro-batch.
        mb_kwargs: keyword arguments of a micro-batch.
        split_spec: dotted names of submodules, and the side at which to split.
        split_policy: must be None; torch's takes a traced graph.

    Raises:
        PipelineError: the submodules are no chain (the message names the first that is not), or get a tensor that the
            example or an output has twice; a divided module has hooks, a name is unknown, a stage would be empty, or a
            parameter is in no stage or in several.

    Examples:
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        ...     def forward(self, x):
        ...         for layer in self.layers:
        ...             x = layer(x)
        ...         return x
        >>> with nn.building(platform):
        ...     model = Model()
        >>> x = platform.ops.ones((2, 4), platform.dtype("float32"))
        >>> pipe = pipeline(model, (x,), split_spec={"layers.1": SplitPoint.END})
        >>> [name for name, _ in platform.named_parameters(pipe.get_stage_module(1))]
        ['layers.2.weight', 'layers.3.weight']
    """
    if split_policy is not None:
        raise PipelineError("split_policy takes a traced graph, and nothing is traced here; give split_spec instead")
    if not split_spec:
        raise PipelineError(
            "split_spec: expected names of submodules, such as {'layers.4': SplitPoint.BEGINNING}; calls of pipe_split "
            "in a forward are not found without tracing"
        )
    chosen = platform_of(module, platform)
    modules = dict(chosen.named_modules(module))
    _check_split_spec(split_spec, modules)
    args, kwargs = tuple(mb_args), dict(mb_kwargs or {})
    divided = {""} | {name[:end] for name in split_spec for end, letter in enumerate(name) if letter == "."}
    _check_hooks(chosen, {path: modules[path] for path in sorted(divided)})
    chain, result = _chain_of(chosen, module, modules, divided, args, kwargs)
    paths = list(chain.calls)
    bounds = [0, *_splits(paths, split_spec), len(paths)]
    with nn.building(chosen):
        stages = [
            _ChainStage(
                {path: modules[path] for path in paths[start:stop]},
                [chain.calls[path] for path in paths[start:stop]],
                outputs=[chain.outputs[path] for path in paths[start:stop]],
                arguments=_Example(chosen, _named(args, kwargs)) if start == 0 else None,
                result=result if stop == len(paths) else None,
                training=module.training,
                trains=all(modules[path].training for path in divided),
            )
            for start, stop in itertools.pairwise(bounds)
        ]
    _check_parameters(chosen, module, stages)
    return Pipe(stages, chosen)


def _check_split_spec(split_spec: Mapping[str, Any], modules: Mapping[str, Module]) -> None:
    for name, point in split_spec.items():
        if name not in modules or not name:
            near = difflib.get_close_matches(name, modules, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PipelineError(f"split_spec: the module has no submodule {name!r}{hint}")
        # By name, so that torch's own are taken too.
        if getattr(point, "name", None) not in SplitPoint.__members__:
            raise PipelineError(f"split_spec[{name!r}]: expected SplitPoint.BEGINNING or SplitPoint.END, got {point!r}")


def _chain_of(
    platform: Platform,
    module: Module,
    modules: Mapping[str, Module],
    divided: Collection[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[_Chain, Any]:
    """Run a forward; return the chain of submodules that it calls, and its result, with `_Value`s for its tensors.

    The submodules are the outermost ones that no split divides.
    """
    chain, hooks = _Chain(platform, args, kwargs), []
    try:
        for path, each in modules.items():
            if path not in divided:
                hooks += chain.hook(path, each)
        with platform.no_grad(), platform.watch_functions(chain.note):
            output = module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return chain, chain.refer("the module", "returns", output)


@dataclass(frozen=True, slots=True)
class _Value:
    """Stands for a value that the previous submodule returned: its index among the leaves of that output."""

    index: int


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name; keyword arguments in the order of their names, which is that of every call."""
    positional = {f"argument {index}": value for index, value in enumerate(args)}
    return positional | {f"argument {name!r}": kwargs[name] for name in sorted(kwargs)}


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a tree, as `flattened` finds them, with its path."""
    if isinstance(tree, Mapping):
        children: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        children = enumerate(tree)
    else:
        yield path, tree
        return
    for key, child in children:
        yield from _leaves(child, f"{path}[{key!r}]")


class _Example:
    """Values of the example, such as the output of a submodule. In later calls only tensors may differ from them.

    Args:
        named: trees by name, such as `argument 0`.
    """

    def __init__(self, platform: Platform, named: Mapping[str, Any]) -> None:
        # Not the platform itself, which cannot be copied with a stage.
        self._tensor_type = platform.Tensor
        self._fixed = {path: self._without_tensors(leaf) for path, leaf in self._found(named)}

    def values(self, named: Mapping[str, Any], ordered: bool = False) -> list[Any]:
        """Return the leaves of trees like the example's, in its order.

        Args:
            ordered: refuse mappings in another order, since later stages get values by position.

        Raises:
            PipelineError: a leaf is missing or new, or one that is no tensor differs.
        """
        found = dict(self._found(named))
        fixed = {path: self._without_tensors(leaf) for path, leaf in found.items()}
        for path in [*self._fixed, *fixed]:
            old, new = self._fixed.get(path, _Mark.NOTHING), fixed.get(path, _Mark.NOTHING)
            if old is not new and (type(old) is not type(new) or old != new):
                raise PipelineError(
                    f"stage of pipeline(): {path}: expected {old!r}, as in the example, got {new!r}; forward may "
                    "depend on it, and is not called again. Split the module again with such an example, or write the "
                    "stages as modules and give them to PipelineStage"
                )
        if ordered and list(fixed) != list(self._fixed):
            raise PipelineError(f"stage of pipeline(): expected the order {list(self._fixed)}, got {list(fixed)}")
        return [found[path] for path in self._fixed]

    def _found(self, named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        return itertools.chain.from_iterable(_leaves(tree, name) for name, tree in named.items())

    def _without_tensors(self, tree: Any) -> Any:
        if isinstance(tree, self._tensor_type):
            return _Mark.TENSOR
        # A dataclass is a leaf, with any tree in it.
        if dataclasses.is_dataclass(tree):
            leaves = itertools.chain.from_iterable(_leaves(x, name) for name, x in (fields_of(tree) or {}).items())
            return type(tree).__qualname__, {path: self._without_tensors(leaf) for path, leaf in leaves}
        return tree


class _Mark(Enum):
    """Stands for a leaf that is not compared by value. An enum, so that a copy of a stage has the same members."""

    TENSOR = "a tensor"
    NOTHING = "nothing"

    def __repr__(self) -> str:
        return str(self.value)


def _filled(template: Any, values: Sequence[Any]) -> Any:
    """Return a tree with values in place of each `_Value`."""
    leaves, rebuild = flattened(template)
    return rebuild([values[x.index] if isinstance(x, _Value) else x for x in leaves])


class _Chain:
    """The submodules that a forward has called so far, with their arguments and outputs.

    Attributes:
        calls: (args, kwargs) of each submodule by path, in order, with `_Value`s for tensors of the output before.
        outputs: the output of each submodule by path.
    """

    def __init__(self, platform: Platform, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls: dict[str, Any] = {}
        self.outputs: dict[str, _Example] = {}
        self._platform = platform
        self._running: str | None = None
        self._last = "the arguments"
        self._hold(list(_named(args, kwargs).values()))

    def hook(self, path: str, module: Module) -> list[Any]:
        """Record the calls of a submodule by hooks; return their handles."""

        def before(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Submodules of a running one are part of it.
            if self._running is None:
                if path in self.calls:
                    raise PipelineError(f"pipeline: {path} is called twice; a stage calls each of its submodules once")
                self.calls[path] = self.refer(path, "gets", (args, kwargs))
                self._running = path

        def after(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._running == path:
                self._running, self._last = None, f"the output of {path}"
                self.outputs[path] = _Example(self._platform, {self._last: output})
                self._hold(output)

        return [
            # First, and the other last: the submodule's own hooks are part of it.
            self._platform.add_forward_pre_hook(module, before, prepend=True),
            self._platform.add_forward_hook(module, after),
        ]

    def note(self, name: str, result: Any) -> None:
        """Refuse a function between submodules that returns its argument, since its call leaves no other trace.

        If a function returns a new tensor, or writes in place, `refer` refuses its result.
        """
        if self._running is not None:
            return
        for x in flattened(result)[0]:
            if isinstance(x, self._platform.Tensor) and any(
                held is x and version == self._version(x)
                for held, version in zip(self._held, self._versions, strict=True)
            ):
                raise PipelineError(
                    f"pipeline: {name} is called on {self._last}, and returns its argument in the example. It may not "
                    "always do so, and stages do not call it; move the call into a submodule"
                )

    def refer(self, who: str, verb: str, tree: Any) -> Any:
        """Return a tree with `_Value`s in place of the tensors of the last output.

        Args:
            who, verb: start of an error message.

        Raises:
            PipelineError: a leaf is neither such a tensor, nor None, a flag or a string; or the tensor has been written
                in place, or occurs twice in the output.
        """
        leaves, rebuild = flattened(tree)
        return rebuild([self._reference(who, verb, x) for x in leaves])

    def _reference(self, who: str, verb: str, x: Any) -> Any:
        if x is None or isinstance(x, (bool, str)):
            return x
        # Numbers may depend on the example, as lengths do, and equal ones are the same object.
        is_number = isinstance(x, (int, float, complex))
        found = [] if is_number else [index for index, held in enumerate(self._held) if held is x]
        if len(found) > 1:
            raise PipelineError(
                f"pipeline: {who} {verb} a tensor that occurs {len(found)} times in {self._last}, and which one "
                "is meant is unknown; give different tensors as examples, and let a submodule return each tensor once"
            )
        index = found[0] if found else None
        if index is not None and self._versions[index] == self._version(x):
            return _Value(index)
        kind = "a tensor" if isinstance(x, self._platform.Tensor) else f"{type(x).__name__} {x!r}"
        problem = f"{kind} that is not of {self._last}" if not is_number else f"{kind}, which may depend on the example"
        if index is not None:
            problem = f"{self._last} after it was written in place"
        raise PipelineError(
            f"pipeline: {who} {verb} {problem}; submodules must be a chain. Move what is computed between them into a "
            "submodule, or write the stages as modules and give them to PipelineStage"
        )

    def _hold(self, tree: Any) -> None:
        """Store the leaves of the last output, with the version counters by which in-place writes are found."""
        self._held = flattened(tree)[0]
        self._versions = [self._version(x) for x in self._held]

    def _version(self, x: Any) -> int:
        return self._platform.version(local_of(self._platform, x)) if isinstance(x, self._platform.Tensor) else 0


def _check_hooks(platform: Platform, divided: Mapping[str, Module]) -> None:
    for path, module in divided.items():
        if platform.has_hooks(module):
            raise PipelineError(
                f"pipeline: {path or 'the module'} is divided into stages and has hooks, such as those of a parallel "
                "style or of sharding, which stages do not call; apply them to the stages after the split"
            )


def _splits(paths: Sequence[str], split_spec: Mapping[str, Any]) -> list[int]:
    """Return the positions in the chain at which the second and later stages start."""
    found = set()
    for name, point in split_spec.items():
        within = [index for index, path in enumerate(paths) if path == name or path.startswith(f"{name}.")]
        if not within:
            raise PipelineError(f"split_spec: forward does not call {name!r}, or only as a part of another submodule")
        split = within[0] if point.name == "BEGINNING" else within[-1] + 1
        if split in (0, len(paths)):
            raise PipelineError(f"split_spec[{name!r}]: there is no submodule {'before' if split == 0 else 'after'} it")
        found.add(split)
    return sorted(found)


def _check_parameters(platform: Platform, module: Module, stages: Sequence[Module]) -> None:
    counts = [{id(p) for _, p in platform.named_parameters(stage)} for stage in stages]
    for name, parameter in platform.named_parameters(module):
        number = sum(id(parameter) in each for each in counts)
        if number > 1:
            raise PipelineError(
                f"pipeline: {name} is in {number} stages; give each submodule a parameter of its own, and keep their "
                "values equal with TiedWeights"
            )
        if not number:
            raise PipelineError(f"pipeline: {name} is in no stage; move it into a submodule that forward calls")


class _ChainStage(nn.Module):
    """Submodules under their names in a full module, called one after the other.

    Args:
        modules: by dotted name.
        calls: (args, kwargs) of each, with `_Value`s for tensors of the output before.
        outputs: the output of each in the example.
        arguments: arguments of the example, for the first stage; None for others.
        result: the full module's result, with `_Value`s, for the last stage; None: return the last output.
        training: `training` of the full module.
        trains: the divided modules were in training mode in the example.
    """

    def __init__(
        self,
        modules: Mapping[str, Module],
        calls: Sequence[Any],
        outputs: Sequence[_Example],
        arguments: _Example | None,
        result: Any,
        training: bool,
        trains: bool,
    ) -> None:
        super().__init__()
        self.training, self._trains = training, trains
        self._calls, self._arguments, self._result = list(zip(modules, calls, outputs, strict=True)), arguments, result
        holders: dict[str, Any] = {"": self}
        for path, module in modules.items():
            holder = ""
            *outer, name = path.split(".")
            for each in outer:
                inner = f"{holder}.{each}" if holder else each
                if inner not in holders:
                    holders[inner] = nn.Module()
                    setattr(holders[holder], each, holders[inner])
                holder = inner
            setattr(holders[holder], name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and not self._trains:
            raise PipelineError(
                "stage of pipeline(): expected eval mode, in which the module was split, got training mode, in which "
                "its forward may differ; split it in training mode, and set the mode of the stages as you need"
            )
        # Later stages on the rank of the first one get its keyword arguments too.
        values = flattened(args)[0] if self._arguments is None else self._arguments.values(_named(args, kwargs))
        output = None
        for path, call, example in self._calls:
            own_args, own_kwargs = _filled(call, values)
            output = functools.reduce(getattr, path.split("."), self)(*own_args, **own_kwargs)
            values = example.values({f"the output of {path}": output}, ordered=True)
        return output if self._result is None else _filled(self._result, values)
