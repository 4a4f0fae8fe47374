"""Table of everything in torch that this platform replaces, and why; installed when the platform is first made.

A replacement asks whether a DTensor is among its arguments. Where none is, it calls torch's own function with what it
was given: to plain tensors nothing happens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hp_dtensor.platform.patch import Patch
from hp_platform_torch import optimizer_step
from hp_platform_torch.patches import autograd_function, compile, new_values, process_groups, refusals


@dataclass(frozen=True, slots=True)
class Registration:
    """One of torch's own hooks or settings that the platform uses; fields as those of `Patch`."""

    name: str
    why: str
    dtensors: str
    register: Callable[[], None]


_BYPASSED = "C++ takes the local shard for the tensor"
_REFUSED = "refused"


def _refused(name: str, replacement: Callable[..., Any], *told: str) -> Patch:
    return Patch(name, _BYPASSED, _REFUSED, lambda function: replacement(function, *told))


def _whole(name: str) -> Patch:
    return Patch(
        f"torch.nn.init.{name}",
        "needs the whole matrix at once",
        "every rank fills the whole and keeps its shard",
        new_values.keeping_the_shard,
    )


def _grouped(name: str) -> Patch:
    return Patch(
        f"torch.distributed.{name}",
        "knows torch's own process groups only",
        "not concerned; `mesh.get_group()` is taken as a group",
        process_groups.taking_our_groups,
    )


PATCHES = (
    Patch(
        "torch.autograd.Function.apply",
        "forward would get DTensors and backward plain local gradients",
        "refused, but for torch's own checkpoints and module hooks, which get DTensors in both",
        autograd_function.asking_for_dtensors,
    ),
    Patch(
        "torch.utils.checkpoint.CheckpointFunction.backward",
        "gives DTensors to autograd, which takes local gradients",
        "their local data is given",
        autograd_function.giving_shards,
    ),
    Patch(
        "torch.autograd._engine_run_backward",
        "does not tell whether a backward is for named inputs",
        "noted while it runs: `fully_shard` reduces gradients of parameters only when they are asked for",
        autograd_function.noting,
    ),
    _refused(
        "torch._functorch.eager_transforms._wrap_for_grad",
        refusals.refusing,
        "torch.func (grad, vjp and the like)",
        refusals.TRANSFORMS_A_SHARD,
    ),
    _refused(
        "torch._functorch.vmap._add_batch_dim", refusals.refusing, "torch.func (vmap)", refusals.TRANSFORMS_A_SHARD
    ),
    _refused(
        "torch._functorch.eager_transforms._maybe_wrap_functional_tensor",
        refusals.refusing,
        "torch.func.functionalize",
        refusals.TRANSFORMS_A_SHARD,
    ),
    _refused("torch.to_dlpack", refusals.refusing, "to_dlpack", refusals.EXPORTS_A_SHARD),
    _refused("torch.utils.dlpack.to_dlpack", refusals.refusing, "to_dlpack", refusals.EXPORTS_A_SHARD),
    _refused("torch.jit.trace", refusals.refusing_to_trace, "torch.jit.trace"),
    _refused("torch.jit.trace_module", refusals.refusing_to_trace, "torch.jit.trace_module"),
    _refused("torch.export.export", refusals.refusing_to_trace, "torch.export"),
    _refused("torch._C.ScriptFunction.__call__", refusals.refusing_arguments, "a function made by torch.jit.script"),
    _refused("torch.Tensor.set_", refusals.refusing_source),
    Patch(
        "torch.nn.parallel.DistributedDataParallel.__init__",
        "takes shards for replicas",
        refusals.REFUSED,
        lambda init: refusals.refusing_sharded(init, "DistributedDataParallel"),
    ),
    Patch(
        "torch.Tensor.new_full",
        _BYPASSED,
        "one without dimensions is the number of the whole",
        new_values.taking_numbers,
    ),
    Patch("torch.Tensor.new_tensor", _BYPASSED, "gives a DTensor that is placed alike", new_values.copying_as_new),
    _whole("orthogonal_"),
    _whole("sparse_"),
    _whole("eye_"),
    _whole("dirac_"),
    _grouped("distributed_c10d._group_or_default_group"),
    _grouped("distributed_c10d._get_group_size"),
    _grouped("distributed_c10d._get_object_coll_device"),
    _grouped("distributed_c10d.get_backend"),
    _grouped("distributed_c10d.get_group_rank"),
    _grouped("get_backend"),
    _grouped("get_group_rank"),
    _grouped("get_global_rank"),
    _grouped("get_process_group_ranks"),
    _grouped("barrier"),
    Patch(
        "torch.compile",
        "its graphs would mix global and local shapes",
        "operations on them are left out of the graphs",
        compile.preparing,
    ),
)

REGISTRATIONS = (
    Registration(
        "torch.optim.optimizer.register_optimizer_step_pre_hook",
        "each operation of a step would be intercepted",
        "steps of elementwise optimizers run on local data",
        optimizer_step.install,
    ),
    Registration(
        "torch._dynamo.config.nontraceable_tensor_subclasses",
        "see `torch.compile`, where the program has loaded dynamo before",
        "operations on them are left out of the graphs",
        compile.prepare_if_loaded,
    ),
    Registration(
        "torch.distributed.fsdp",
        refusals.WHY,
        f"{refusals.REFUSED}, where the program has loaded it before",
        refusals.refuse_if_loaded,
    ),
)


@functools.cache
def install() -> Mapping[str, Any]:
    """Put every replacement in its place, once in a process; return torch's own functions by their full names."""
    replaced = {patch.name: patch.install() for patch in PATCHES}
    for registration in REGISTRATIONS:
        registration.register()
    return MappingProxyType(replaced)


def as_markdown() -> str:
    """Return the table as the README of this package shows it."""
    rows = [f"| `{entry.name}` | {entry.why} | {entry.dtensors} |" for entry in (*PATCHES, *REGISTRATIONS)]
    return "\n".join(["| in torch | without it | DTensors |", "|---|---|---|", *rows])
