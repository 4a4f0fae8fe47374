"""The table of everything in MindSpore that this platform replaces, and why; installed when the platform is made.

A replacement asks whether a DTensor is among its arguments. Where none is, it calls MindSpore's own function with what
it was given: to plain tensors nothing happens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor

from hp_dtensor.platform.patch import Patch
from hp_platform_mindspore.patches import functions, gradients, optimizers
from hp_platform_mindspore.tensor import modules


def _of_list(primitive: str, name: str) -> Patch:
    return Patch(
        f"mindspore.ops.operations.{primitive}.check_elim",
        "does not look for DTensors in a list",
        "the operation of that name",
        functools.partial(functions.looking_into_lists, name=name),
    )


def _of_shape(path: str, name: str) -> Patch:
    return Patch(
        f"{path}.{name}",
        "makes its result from the shape alone, as a plain tensor of the whole",
        "the result is a DTensor, or the function is refused",
        functools.partial(functions.giving_dtensors_away, functions.FUNCTIONS[name]),
    )


def _of_graph(name: str, replacement: Callable[[Any], Any]) -> Patch:
    return Patch(name, "compiles a graph of this rank's shard, as if it were the whole", "refused", replacement)


def _of_cat(name: str) -> Patch:
    def replacement(own: Any) -> Any:
        return functions.giving_dtensors_away(lambda run, tensors, dim=0: run.cat(list(tensors), dim), own)

    return Patch(f"mindspore.mint.{name}", "asks in no list (MindSpore 2.9)", "the operation `cat`", replacement)


# The same function is reached by several names, each bound when MindSpore was imported.
_OWNERS = (
    "mindspore.ops",
    "mindspore.ops.function",
    "mindspore.ops.functional",
    "mindspore.ops.function.array_func",
    "mindspore.ops.function.math_func",
    "mindspore.ops.function.random_func",
    "mindspore.common._register_for_tensor.tensor_operator_registry",
)

PATCHES = (
    *(
        Patch(
            f"mindspore.ops.composite.base.{name}.__call__",
            "records in C++, without the nodes of collectives and of sharded modules",
            "the platform's backward, with MindSpore's arguments and results",
            gradients.differentiating_dtensors,
        )
        for name in ("_Grad", "GradOperation")
    ),
    Patch(
        "mindspore.graph.api._PyNativeExecutor.grad",
        "records in C++, without the nodes of collectives and of sharded modules",
        "refused (`mindspore.vjp` and its like)",
        gradients.refusing_dtensors,
    ),
    Patch(
        "mindspore.graph.api._PyNativeExecutor.call_custom_bprop",
        "a `bprop` would get shards without their placements",
        "refused, but for `recompute()` inside `value_and_grad`",
        gradients.explaining_custom_bprop,
    ),
    _of_graph("mindspore.graph.api._JitExecutor.compile", gradients.refusing_source),
    _of_graph("mindspore.graph.api._CellGraphExecutor.compile", gradients.refusing_cell),
    _of_graph("mindspore.graph._utils.pijit_context.PreJit", gradients.refusing_bytecode_arguments),
    _of_graph(
        "mindspore.graph._utils.pijit_context.PIJitCaptureContext.__enter__", gradients.refusing_bytecode_closure
    ),
    _of_graph("mindspore.graph.jit_trace._jit_trace_begin", gradients.refusing_trace),
    Patch(
        "mindspore.Parameter._get_parameter_new_args",
        "not concerned",
        "not concerned; inside `init_empty_weights` parameters are made without data",
        modules.making_parameters,
    ),
    Patch(
        "mindspore.nn.Cell.parameters_and_names",
        "parameters that cells make add up transposed gradients wrongly (plain ones too)",
        "every listed parameter accumulates safely",
        functions.accumulating_safely,
    ),
    Patch(
        "mindspore.experimental.optim.Optimizer._preprocess_param_group",
        "would step on shards of partial sums",
        "placements are checked; optimizers that are not elementwise are refused",
        optimizers.checking,
    ),
    Patch(
        "mindspore.experimental.optim.Optimizer.__call__",
        "each operation of a step would be intercepted",
        "the step runs on local data",
        optimizers.stepping_on_shards,
    ),
    Patch(
        "mindspore.nn.Optimizer.__init__",
        "would step on shards of partial sums; some of its optimizers look at a parameter as a whole",
        "placements are checked; optimizers that are not elementwise are refused",
        optimizers.checking_at_start,
    ),
    Patch(
        "mindspore.nn.Optimizer.__call__",
        "each operation of a step would be intercepted",
        "the step runs on local data",
        optimizers.stepping_on_shards,
    ),
    Patch(
        "mindspore.train.serialization._convert_save_obj_to_param_list",
        "would save this rank's shard",
        "whole tensors are saved; every rank must call `save_checkpoint`",
        functions.saving_whole_tensors,
    ),
    _of_list("Stack", "stack"),
    _of_list("AddN", "addn"),
    _of_list("Einsum", "einsum"),
    *(_of_shape(owner, name) for name in functions.FUNCTIONS for owner in _OWNERS),
    *((_of_cat("cat"), _of_cat("concat")) if ms.__version__.startswith("2.9") else ()),
)


@functools.cache
def install() -> None:
    """Put every replacement in its place, once in a process."""
    for patch in PATCHES:
        if patch.is_there():
            patch.install()
    # Cell's lists ask this of what stands in for a parameter during a forward.
    Tensor.inited_param = None
