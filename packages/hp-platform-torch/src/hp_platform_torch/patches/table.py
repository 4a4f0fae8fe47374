"""Table of the functions of torch that this platform replaces, installed when the platform is first created.

`__torch_function__` gets only calls that torch routes to it. Some functions pass a tensor to C++ or autograd directly;
there a DTensor would count as this rank's shard, and the result would be wrong without an error. Each replacement looks
for DTensors among its arguments, and calls torch's own function if there is none.

To add one: write it (`functools.wraps`, plain tensors first), and add a line to `PATCHES`, a call to `PLAIN_CALLS` of
`tests/test_torch_patches.py`, and the new table to the package's README, which a test compares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hp_dtensor.platform.patch import Patch
from hp_platform_torch import optimizer_step
from hp_platform_torch.patches import autograd_function, compile, replacements


@dataclass(frozen=True, slots=True)
class Registration:
    """A hook or setting of torch that the platform uses; fields as those of `Patch`."""

    name: str
    why: str
    dtensors: str
    register: Callable[[], None]


_BYPASSED = "C++ treats the local shard as the tensor"
_REFUSED = "refused"


def _refused(name: str, replacement: Callable[..., Any], *words: str) -> Patch:
    return Patch(name, _BYPASSED, _REFUSED, lambda function: replacement(function, *words))


def _full(name: str) -> Patch:
    return Patch(
        f"torch.nn.init.{name}",
        "needs the full matrix at once",
        "every rank fills the full tensor and keeps its shard",
        replacements.keeping_the_shard,
    )


PATCHES = (
    Patch(
        "torch.autograd.Function.apply",
        "forward would get DTensors and backward plain local gradients",
        "refused, except in torch's own checkpoints and module hooks, which get DTensors in both",
        autograd_function.refusing_dtensors,
    ),
    Patch(
        "torch.utils.checkpoint.CheckpointFunction.backward",
        "returns DTensors to autograd, which expects local gradients",
        "their local data is returned",
        autograd_function.returning_local_gradients,
    ),
    Patch(
        "torch.autograd._engine_run_backward",
        "does not report whether a backward has `inputs=`",
        "recorded while it runs: `fully_shard` reduces gradients of parameters only when they are requested",
        autograd_function.recording_backward,
    ),
    _refused(
        "torch._functorch.eager_transforms._wrap_for_grad",
        replacements.refusing,
        "torch.func (grad, vjp and the like)",
        replacements.TRANSFORMS_A_SHARD,
    ),
    _refused(
        "torch._functorch.vmap._add_batch_dim",
        replacements.refusing,
        "torch.func (vmap)",
        replacements.TRANSFORMS_A_SHARD,
    ),
    _refused(
        "torch._functorch.eager_transforms._maybe_wrap_functional_tensor",
        replacements.refusing,
        "torch.func.functionalize",
        replacements.TRANSFORMS_A_SHARD,
    ),
    _refused("torch.to_dlpack", replacements.refusing, "to_dlpack", replacements.EXPORTS_A_SHARD),
    _refused("torch.utils.dlpack.to_dlpack", replacements.refusing, "to_dlpack", replacements.EXPORTS_A_SHARD),
    _refused(
        "torch._C.ScriptFunction.__call__", replacements.refusing_arguments, "a function made by torch.jit.script"
    ),
    _refused("torch.Tensor.set_", replacements.refusing_source),
    Patch(
        "torch.nn.parallel.DistributedDataParallel.__init__",
        "treats shards as replicas",
        replacements.REFUSED,
        lambda init: replacements.refusing_sharded(init, "DistributedDataParallel"),
    ),
    Patch(
        "torch.Tensor.new_full",
        _BYPASSED,
        "a 0-d one is converted to its full value",
        replacements.taking_numbers,
    ),
    Patch(
        "torch.Tensor.new_tensor", _BYPASSED, "returns a DTensor with the same placements", replacements.copying_as_new
    ),
    _full("orthogonal_"),
    _full("sparse_"),
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
        replacements.WHY,
        f"{replacements.REFUSED}, where the program has loaded it before",
        replacements.refuse_if_loaded,
    ),
)


@functools.cache
def install() -> Mapping[str, Any]:
    """Install all replacements, once per process; return torch's own functions by their full names."""
    replaced = {patch.name: patch.install() for patch in PATCHES}
    for registration in REGISTRATIONS:
        registration.register()
    return MappingProxyType(replaced)


def as_markdown() -> str:
    """Return the table as Markdown, for the README of this package."""
    rows = [f"| `{entry.name}` | {entry.why} | {entry.dtensors} |" for entry in (*PATCHES, *REGISTRATIONS)]
    return "\n".join(["| in torch | without it | DTensors |", "|---|---|---|", *rows])
