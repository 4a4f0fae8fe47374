"""The table of everything that this platform replaces in MindSpore, and why; installed when the platform is created.

MindSpore intercepts primitives (`__fallback__`). Some of its functions never reach one, pass a list to C++, or look at
a shape only. There a DTensor would count as this rank's shard, and the result would be wrong without an error. Each
replacement looks for DTensors among its arguments; without any it calls MindSpore's own function with the same
arguments, so that plain tensors are not affected.

To add one: write the replacement (`functools.wraps`, plain tensors first), and add a line to `PATCHES` that says what
MindSpore would do and what happens to DTensors instead.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mindspore as ms
from mindspore.common._register_for_tensor import tensor_operator_registry

from hp_dtensor.comm.saved_tensors import recomputing_as_now
from hp_dtensor.platform.patch import Patch
from hp_platform_mindspore.patches import functions_without_fallback as functions
from hp_platform_mindspore.patches import gradients, optimizers
from hp_platform_mindspore.tensor import modules


def _of_list(primitive: str, name: str) -> Patch:
    return Patch(
        f"mindspore.ops.operations.{primitive}.check_elim",
        "does not look for DTensors in a list",
        "the operation of that name",
        functools.partial(functions.looking_into_lists, name=name),
    )


@dataclass(frozen=True, slots=True)
class _AliasedPatch(Patch):
    """Replacement of a function of `mindspore.ops` under all names by which MindSpore itself refers to it.

    MindSpore's modules import such a function from each other by name, and methods of tensors find it in a registry.
    Every one of these has a reference of its own, so replacing one would leave the others as they were. `install`
    therefore replaces the attribute in each loaded module of MindSpore, and in the registry, whose value is the
    function. References that users imported before are not replaced.
    """

    def install(self) -> Any:
        """Replace the function wherever MindSpore refers to it, and return MindSpore's own."""
        owner, name = self.place()
        own = getattr(owner, name)
        replaced = self.replacement(own)
        modules = [module for path, module in list(sys.modules.items()) if path.split(".")[0] == "mindspore"]
        for holder in (*modules, tensor_operator_registry):
            # `vars`: some of MindSpore's modules import others when an attribute is looked up.
            if vars(holder).get(name) is own:
                setattr(holder, name, replaced)
        return own


def _of_shape(name: str) -> Patch:
    return _AliasedPatch(
        f"mindspore.ops.{name}",
        "makes its result from the shape alone, as a plain tensor of the global shape, or mixes in plain tensors",
        "the result is a DTensor, or the function is refused",
        functools.partial(functions.for_dtensors, functions.FUNCTIONS[name]),
    )


def _of_amp(name: str) -> Patch:
    return Patch(
        f"mindspore.amp.{name}",
        "compiles a graph, which would scale or look at this rank's shard",
        "the operations of the platform",
        functools.partial(functions.for_dtensors, functions.AMP[name]),
    )


def _of_graph(name: str, replacement: Callable[[Any], Any]) -> Patch:
    return Patch(name, "compiles a graph of this rank's shard, as if it were the global tensor", "refused", replacement)


def _of_cat(name: str) -> Patch:
    def replacement(own: Any) -> Any:
        return functions.for_dtensors(lambda run, tensors, dim=0: run.cat(list(tensors), dim), own)

    return Patch(
        f"mindspore.mint.{name}",
        "does not look for DTensors in a list (MindSpore 2.9)",
        "the operation `cat`",
        replacement,
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
        "refused (`mindspore.vjp` and the like)",
        gradients.refusing_dtensors,
    ),
    Patch(
        "mindspore.graph.api._PyNativeExecutor.call_custom_bprop",
        "works in its own `value_and_grad` only; a `bprop` would get shards of DTensors without placements",
        "a node of the platform's autograd; DTensors are refused",
        gradients.recording_custom_bprop,
    ),
    Patch(
        "mindspore.nn.Cell.__call__",
        "`recompute()` works in its own `value_and_grad` only",
        "sharded Cells are recomputed by `checkpoint`",
        gradients.recomputing_sharded,
    ),
    Patch(
        "mindspore.common.recompute._RecomputeHandle.__init__",
        "recomputes attention outside of `ContextParallel`, over one rank's tokens",
        "recomputed as in forward, as plain tensors are",
        recomputing_as_now,
    ),
    _of_graph("mindspore.graph.api._JitExecutor.compile", gradients.refusing_source),
    _of_graph("mindspore.graph.api._CellGraphExecutor.compile", gradients.refusing_cell),
    _of_graph("mindspore.graph._utils.pijit_context.PIJitCaptureContext.__enter__", gradients.refusing_bytecode),
    _of_graph("mindspore.graph.jit_trace._jit_trace_begin", gradients.refusing_trace),
    Patch(
        "mindspore.Parameter._get_parameter_new_args",
        "allocates the data of every parameter",
        "unchanged; inside `init_empty_weights` parameters get no data",
        modules.making_parameters,
    ),
    Patch(
        "mindspore.nn.Cell.parameters_and_names",
        "parameters made by cells accumulate transposed gradients wrongly (plain ones too)",
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
        "would step on shards of partial sums; some optimizers use statistics of an entire parameter",
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
        "mindspore.mint.distributed.distributed.get_cache_group_rank",
        "calls without a group look this rank up in HCCL's group, which does not exist on CPU",
        "no tensors: the default group is MCCL's on CPU",
        functions.looking_into_own_world,
    ),
    Patch(
        "mindspore.train.serialization._convert_save_obj_to_param_list",
        "would save this rank's shard",
        "global tensors are saved; every rank must call `save_checkpoint`",
        functions.saving_global_tensors,
    ),
    _of_list("Stack", "stack"),
    _of_list("AddN", "addn"),
    _of_list("Einsum", "einsum"),
    *(_of_shape(name) for name in functions.FUNCTIONS),
    *(_of_amp(name) for name in functions.AMP),
    *((_of_cat("cat"), _of_cat("concat")) if ms.__version__.startswith("2.9") else ()),
)


@functools.cache
def install() -> None:
    """Install every replacement, once per process."""
    # A version of MindSpore may lack some of these.
    for patch in PATCHES:
        if patch.exists():
            patch.install()
