"""Replacements of MindSpore's own differentiation and graph compilation.

`value_and_grad`, `grad` and `GradOperation` of functions of DTensors run the platform's backward. So do sharded Cells
with a `bprop` or after `recompute()`. `vjp`, a `bprop` of DTensors, `mindspore.jit` and GRAPH_MODE are refused: they
work in C++ on this rank's shards and would miss collectives. `mindspore.jit` has three ways to a graph, and GRAPH_MODE
compiles every Cell. Each is checked where it starts: its arguments, and the tensors that the compiled function or Cell
holds. In the forward of a sharded Cell plain tensors replace its parameters; they would be constants of the graph, and
are refused too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

from mindspore import Tensor, nn, ops
from mindspore.common.recompute import _RecomputeCell
from mindspore.graph.api import _pynative_executor as executor

from hp_dtensor.exceptions import CapabilityError, GradientPathError
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.conversions import zeros_placed_like
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.gradients import check_autograd_reaches
from hp_dtensor.trees import tensors_in
from hp_platform_mindspore.patches.functions_without_fallback import first_dtensor, held_tensors
from hp_platform_mindspore.tensor import autograd
from hp_platform_mindspore.tensor.dtensor import MindSporeDTensor, is_local
from hp_platform_mindspore.tensor.modules import is_substitute


def differentiating_dtensors(own: Callable[..., Any]) -> Callable[..., Any]:
    """Make `value_and_grad`, `grad` and `GradOperation` differentiate functions of DTensors by the platform's backward.

    MindSpore's own records the function in C++, without the nodes of collectives and of sharded modules. Arguments and
    results are MindSpore's: zeros for weights that the function does not use, and no `.grad` is written. Weights
    sharded by `fully_shard` get their gradients in a complete backward, after which the `.grad` of all parameters that
    the function holds is restored.
    """

    @functools.wraps(own)
    def differentiate(self: Any, fn: Any, weights: Any = None, *position: Any) -> Any:
        # MindSpore's own derivative is made first, for calls without DTensors.
        plain = own(self, fn, weights, *position)
        if self.pynative_:  # MindSpore makes two of these per call; this is the inner one
            return plain

        @functools.wraps(plain)
        def after_grad(*args: Any, **kwargs: Any) -> Any:
            # Asked at each call: arguments decide, and modules may be distributed after this was made.
            found = first_dtensor(fn, weights, args, kwargs)
            # Weights that are DTensors are those of a call outside of forward, whose backward gathers and reduces.
            in_forward = not is_local() and first_dtensor(weights) is None
            if in_forward and any(is_substitute(x) for x in held_tensors(fn, weights)):
                raise CapabilityError(
                    "mindspore.grad or value_and_grad in the forward of a sharded Cell, of what uses its parameters: "
                    "the result would be a constant, and a loss with it would miss terms. Write the derivative as "
                    "operations, or train this model without sharding"
                )
            if found is None or is_local():
                # MindSpore turns its grad flag on itself. If it is on already, the first call records nothing.
                executor.set_grad_flag(False)
                return plain(*args, **kwargs)
            return _Derivative(self, fn, weights, *position).call(found._spec.mesh.platform, args, kwargs)

        return after_grad

    return differentiate


class _Derivative:
    """A function with the settings of its derivative.

    Args:
        settings: the `GradOperation` or `_Grad`, whose attributes say what is differentiated and returned.
        position: indices of the inputs to differentiate; not given for `GradOperation`.
    """

    def __init__(self, settings: Any, fn: Any, weights: Any, position: Any = (0,)) -> None:
        self._fn = fn
        self._sens_param = settings.sens_param
        self._has_aux = getattr(settings, "has_aux", False)
        self._get_value = getattr(settings, "get_value", False)
        self._return_ids = getattr(settings, "return_ids", False)
        self._is_one_weight = isinstance(weights, Tensor)
        self._all_inputs = settings.get_all
        self._with_weights = settings.get_by_list
        by_position = getattr(settings, "get_by_position", not settings.get_by_list)
        self._positions = position if by_position and not settings.get_all else ()
        if self._with_weights and weights is None:
            weights = list(fn.trainable_params())
        self._weights = ([weights] if self._is_one_weight else list(weights)) if self._with_weights else []

    def call(self, platform: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function and its backward, and return what MindSpore's derivative returns."""
        seeds = None
        if self._sens_param:
            # With sens_param the gradient of the output is the keyword `sens`, or the last argument.
            args, seeds = (args, kwargs.pop("sens")) if "sens" in kwargs else (args[:-1], args[-1])
        with platform.enable_grad():
            given = [self._leaf(platform, i, x) for i, x in enumerate(args)]
            value = self._fn(*given, **kwargs)
        if self._has_aux and not (isinstance(value, tuple) and len(value) > 1):
            raise ValueError("When has_aux is True, origin fn requires more than one outputs.")
        outputs = value[:1] if self._has_aux else value if isinstance(value, (tuple, list)) else (value,)
        inputs = [given[i] for i in self._input_indices(args)]
        found = self._gradients(platform, list(outputs), [*inputs, *self._weights], seeds)
        result = self._result(args, found)
        if self._get_value:
            return value, result
        return (result, value[1:]) if self._has_aux else result

    def _input_indices(self, args: tuple[Any, ...]) -> list[int]:
        return [i for i, x in enumerate(args) if isinstance(x, Tensor)] if self._all_inputs else list(self._positions)

    def _leaf(self, platform: Any, index: int, x: Any) -> Any:
        """Return an input to differentiate as a new leaf, because the user's tensor must not change."""
        if not isinstance(x, Tensor) or not (self._all_inputs or index in self._positions):
            return x
        # Shares the data; the function is recorded from this leaf on.
        leaf = platform.detach(x)
        platform.set_requires_grad(leaf, True)
        return leaf

    def _gradients(self, platform: Any, outputs: list[Any], targets: list[Any], seeds: Any) -> list[Any]:
        """Return the gradients of inputs and weights; zeros where the function does not depend on one."""
        given = list(seeds) if isinstance(seeds, (tuple, list)) else [seeds] * len(outputs)
        given = [_ones_like(platform, y) if g is None else g for y, g in zip(outputs, given, strict=True)]
        try:
            # Parameters of `fully_shard` are not in the graph: the unsharded views are. Their gradients exist only
            # after a complete backward, in `.grad`.
            check_autograd_reaches("mindspore.value_and_grad", targets)
        except GradientPathError:
            found = self._in_a_complete_backward(platform, outputs, targets, given)
        else:
            found = platform.grad(outputs, targets, given)
        return [zeros_placed_like(platform, x) if g is None else g for x, g in zip(targets, found, strict=True)]

    def _in_a_complete_backward(
        self, platform: Any, outputs: list[Any], targets: list[Any], seeds: list[Any]
    ) -> list[Any]:
        if len(outputs) != 1:
            raise CapabilityError(
                f"mindspore.value_and_grad of parameters sharded by fully_shard: expected one output, got "
                f"{len(outputs)}; add them up, or return the others with has_aux=True"
            )
        # By identity: targets may be held by the function too.
        leaves = {id(x): x for x in (*targets, *held_tensors(self._fn)) if platform.requires_grad(x) and x._is_leaf}
        before = {key: platform.get_grad(x) for key, x in leaves.items()}
        # Cloned, because the backward may write into the memory of the old gradient.
        before = {key: grad if grad is None else platform.ops.clone(grad) for key, grad in before.items()}
        for x in leaves.values():
            platform.set_grad(x, None)
        try:
            platform.backward(outputs[0], seeds[0])
            return [platform.get_grad(x) for x in targets]
        finally:
            for key, x in leaves.items():
                platform.set_grad(x, before[key])

    def _result(self, args: tuple[Any, ...], found: list[Any]) -> Any:
        indices = self._input_indices(args)
        ids = [*indices, *(weight.name for weight in self._weights)]
        shown = list(zip(ids, found, strict=True)) if self._return_ids else found
        of_inputs, of_weights = tuple(shown[: len(indices)]), tuple(shown[len(indices) :])
        selected = []
        if self._all_inputs or self._positions:
            selected.append(of_inputs if self._all_inputs or len(of_inputs) > 1 else of_inputs[0])
        if self._with_weights:
            selected.append(of_weights[0] if self._is_one_weight else of_weights)
        # A single result is not wrapped in a tuple, as MindSpore's own.
        return selected[0] if len(selected) == 1 else tuple(selected)


def _ones_like(platform: Any, x: Any) -> Any:
    with platform.no_grad():
        return platform.ops.ones_like(x)


def refusing_dtensors(own: Callable[..., Any]) -> Callable[..., Any]:
    """Make functions that record in C++ (`mindspore.vjp`, `jvp` and the like) refuse DTensors."""

    @functools.wraps(own)
    def grad(self: Any, obj: Any, grad: Any, weights: Any, *args: Any) -> Any:
        if not is_local() and first_dtensor(obj, weights, args) is not None:
            self.clear_res()  # drops what the forward has recorded
            raise CapabilityError(
                "mindspore.vjp of DTensors would miss the gradients of collectives and sharded modules: use "
                "mindspore.value_and_grad or mindspore.grad (sens_param=True takes the gradient of the output)"
            )
        return own(self, obj, grad, weights, *args)

    return grad


def recording_custom_bprop(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Make a Cell with its own `bprop` a node of the platform's autograd where MindSpore's own is not recording.

    The gradient of the Cell is what its `bprop` returns for its inputs; as in MindSpore's own, parameters inside get
    none. A `bprop` of DTensors is refused.
    """

    @functools.wraps(plain)
    def call_custom_bprop(self: Any, obj: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if any(isinstance(x, DTensor) for x in given):
            raise CapabilityError(
                f"{type(obj).__name__} has a bprop of its own, which would see this rank's shards of DTensors, without "
                "their placements. Run it on local tensors (local_map), or write it without a bprop"
            )
        try:
            return plain(self, obj, output, *args, **kwargs)
        except RuntimeError as error:
            if "top_cell" not in str(error):
                raise
            if isinstance(obj, _RecomputeCell):
                raise CapabilityError(
                    "recompute() of Cells without sharded parameters works in mindspore.value_and_grad only. Else "
                    "recompute by hp_dtensor.parallel.recompute.checkpoint(block, x, platform=platform)"
                ) from error
        outputs = output if isinstance(output, (tuple, list)) else (output,)

        def backward(*grads: Tensor | None) -> Any:
            # A bprop expects a gradient of every output, and returns one of every input.
            full = [ops.zeros_like(y) if g is None else g for y, g in zip(outputs, grads, strict=True)]
            return obj.bprop(*given, output, full[0] if outputs[0] is output else type(output)(full))

        # Views: the node would otherwise return a tensor that it was given.
        views = [y.view(y.shape) for y in outputs]
        result = autograd.custom_function(lambda *_: views[0] if outputs[0] is output else views, backward, *given)
        return result if outputs[0] is output else type(output)(result)

    return call_custom_bprop


def recomputing_sharded(own: Callable[..., Any]) -> Callable[..., Any]:
    """Make `Cell.recompute()` and `mindspore.recompute` of sharded Cells recompute by `checkpoint`.

    MindSpore's own works inside its `value_and_grad`, on plain tensors. There and elsewhere without sharded parameters
    nothing changes.
    """

    @functools.wraps(own)
    def call(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:
        if self._recompute_cell is None and not isinstance(self, _RecomputeCell):
            return own(self, *args, **kwargs)
        block = self.net if isinstance(self, _RecomputeCell) else self
        found = next((x for x in held_tensors(block, args, kwargs) if isinstance(x, DTensor) or is_substitute(x)), None)
        if found is None or is_local():
            return own(self, *args, **kwargs)
        platform = get_platform("mindspore")
        tensors = [i for i, x in enumerate(args) if isinstance(x, Tensor) and platform.requires_grad(x)]
        first = tensors[0] if tensors else None

        def run(x: Tensor) -> Any:
            given = args if first is None else (*args[:first], x, *args[first + 1 :])
            if block is not self:
                return block(*given, **kwargs)
            recompute_cell, self._recompute_cell = self._recompute_cell, None
            try:
                return own(self, *given, **kwargs)
            finally:
                self._recompute_cell = recompute_cell

        if len(tensors) > 1 and not platform.recomputes_on_unpack:
            raise CapabilityError(
                f"recompute() of {type(block).__name__}, of which several inputs need gradients: MindSpore 2.9 finds "
                "that of the first one only; use MindSpore 2.10, or leave recompute() out"
            )
        if first is None:
            # As `checkpoint`: no gradient reaches the inputs, so the block is not recomputed.
            return run(None)
        return checkpoint(run, args[first], platform=platform)

    return call


Function = Callable[..., Any]


def refusing_source(own: Function) -> Function:
    """Make the compiler of source code (`jit`'s default) check arguments, Cell and closure."""

    @functools.wraps(own)
    def compile(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        check_graph("mindspore.jit", (args, kwargs), self.obj, _method(self.fn, [] if self.obj is None else [self.obj]))
        return own(self, method_name, *args, **kwargs)

    return compile


def refusing_cell(own: Function) -> Function:
    """Make the compiler of Cells (GRAPH_MODE, `Cell.compile`, `mindspore.export`) check arguments and Cell."""

    @functools.wraps(own)
    def compile(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        check_graph("GRAPH_MODE", (args, kwargs), obj)
        return own(self, obj, *args, **kwargs)

    return compile


def refusing_bytecode(own: Function) -> Function:
    """Make `jit(capture_mode="bytecode")` check arguments, Cell and closure."""

    @functools.wraps(own)
    def enter(self: Any) -> Any:
        # Arguments are locals of the calling wrapper, which does not pass them on.
        caller = sys._getframe(1).f_locals
        args = caller.get("args", ())
        check_graph("mindspore.jit", (args, caller.get("kwds")), _method(self.fn, args))
        return own(self)

    return enter


def refusing_trace(own: Function) -> Function:
    """Make `jit(capture_mode="trace")` check arguments, Cell and closure."""

    @functools.wraps(own)
    def begin(fn_name: str, *args: Any, **kwargs: Any) -> Any:
        # The function is a local of the calling wrapper too.
        caller = sys._getframe(1).f_locals
        given = caller.get("args", args)
        check_graph("mindspore.jit", given, _method(caller.get("fn"), given))
        return own(fn_name, *args, **kwargs)

    return begin


def _method(function: Any, args: Sequence[Any]) -> Any:
    """Return a function to compile, bound to its first argument if it is a method of that."""
    is_method = bool(args) and isinstance(function, FunctionType) and hasattr(args[0], function.__name__)
    return MethodType(function, args[0]) if is_method else function


def check_graph(compiler: str, arguments: Any, *compiled: Any) -> None:
    """Check what a graph would compute with: its arguments, and the functions and Cells to compile.

    Inside `LocalOperations` nothing is checked.

    Raises:
        CapabilityError: there is a DTensor, or a tensor that replaces a parameter of a sharded Cell in its forward.
    """
    if is_local():
        return
    given = {id(x) for x in tensors_in(arguments, Tensor)}
    for x in held_tensors(arguments, *compiled):
        if isinstance(x, MindSporeDTensor):
            raise CapabilityError(
                f"{compiler} of something with a DTensor {x._spec!r}: the graph would compute on this rank's shard as "
                f"if it were the global tensor. {_WITHOUT_GRAPHS}, or compile a function of local tensors and call "
                "that inside local_map"
            )
        if is_substitute(x) and id(x) not in given:
            raise CapabilityError(
                f"{compiler} of something with the parameter {x.name!r} of a sharded Cell: in a forward a plain tensor "
                "stands for it, which the graph would take for a constant without a gradient, and never read again. "
                f"{_WITHOUT_GRAPHS}, or compile a function that gets its parameters as arguments"
            )


_WITHOUT_GRAPHS = (
    "Run it in PyNative mode (mindspore.set_context(mode=mindspore.PYNATIVE_MODE)) without mindspore.jit, which vmap, "
    "jvp, jacfwd and jacrev use too, and which MS_JIT=0 in the environment turns off"
)
