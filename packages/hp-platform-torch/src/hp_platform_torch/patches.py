"""The functions of torch that this platform replaces, installed when the platform is first created.

`__torch_function__` gets only calls that torch routes to it. Some functions pass a tensor to C++ or autograd directly;
there a DTensor would count as this rank's shard, and the result would be wrong without an error. Each replacement looks
for DTensors among its arguments, and calls torch's own function if there is none. Refusals name a way out.

To add one: write it (`functools.wraps`, plain tensors first), and add a line to `PATCHES`, a call to `PLAIN_CALLS` of
`tests/test_torch_patches.py`, and the new table to the package's README, which a test compares.

`torch.compile` runs operations on DTensors eagerly and compiles everything else: Dynamo would read global shapes where
its graphs have local ones, so it leaves operations on DTensors out of its graphs. It does not trace into functions of
hp_dtensor, of hp_fsdp (which gathers around compiled forwards) or of hp_moe (whose sizes depend on the tokens). It
does trace into the modules of `hp_dtensor.nn` and the functions of `ops`, which models call: on the plain weights of an
unsharded module they are compiled with the rest of its block."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, MappingProxyType, ModuleType
from typing import Any, NoReturn

import torch
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from hp_dtensor.comm.saved_tensors import as_now, recomputing_as_now
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.patch import Patch
from hp_dtensor.spec.tensor_spec import TensorSpec, has_gradient
from hp_platform_torch import optimizer_step
from hp_platform_torch.tensor.dtensor import TorchDTensor, unwrap, unwrap_gradient, wrap_gradient
from hp_platform_torch.tensor.torch_operation import is_intercepting

_LEFT_ALONE = ("hp_dtensor", "hp_platform_torch", "hp_fsdp", "hp_moe")
_LOOKED_INTO = (
    "hp_dtensor.parallel.nn",
    "hp_moe.experts",
    "hp_platform_torch.ops.namespace",
    "hp_platform_torch.ops.norms",
    "hp_platform_torch.platform",
)


def prepare_when_loaded() -> None:
    """Prepare dynamo if the program has loaded it, else when it does: loading takes a second."""
    if "torch._dynamo" in sys.modules:
        _leave_dtensors_out()
    else:
        sys.meta_path.insert(0, _DynamoFinder())


class _DynamoFinder(MetaPathFinder):
    """Prepares dynamo once it is loaded.

    A program may call the `torch.compile` that it imported before the platform was created.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch._dynamo":
            return None
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module
            loader.exec_module = lambda module: (load(module), _leave_dtensors_out())
        return spec


def preparing(compile_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_)
    def compile_around_dtensors(*args: Any, **kwargs: Any) -> Any:
        _leave_dtensors_out()
        return compile_(*args, **kwargs)

    return compile_around_dtensors


def _leave_dtensors_out() -> None:
    from torch._dynamo import config, trace_rules

    _leave_them_out_in_every_thread()
    config.nontraceable_tensor_subclasses.add(TorchDTensor)  # this thread may have settings of its own
    # Files whose functions dynamo inlines, although it skips their package. Some may have been loaded since.
    files = [sys.modules[name].__file__ for name in _LOOKED_INTO if name in sys.modules]
    trace_rules.get_mod_inlinelist().update(str(file) for file in files)


@functools.cache
def _leave_them_out_in_every_thread() -> None:
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo import config, trace_rules
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    # From torch 2.13 on settings are per thread, and each thread starts with a copy of these.
    config._config["nontraceable_tensor_subclasses"].default.add(TorchDTensor)
    for package in _LEFT_ALONE:
        trace_rules.add(package)
    skipped = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)  # with all that they call
    # Dynamo would trace the methods of the class when a compiled function calls them on a DTensor.
    # Only its own members; those of `torch.Tensor` stay traceable for plain tensors. A compiled optimizer step takes
    # the step of DTensors on local data, whose frames would be compiled again whenever the classes of tensors change.
    for member in (*vars(TorchDTensor).values(), optimizer_step.take_step):
        code = _code_of(member)
        if code is not None:
            set_code_exec_strategy(code, skipped)


def _code_of(member: Any) -> CodeType | None:
    function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
    return getattr(function, "__code__", None)


Tensor = torch.Tensor


# `torch.autograd.Function` --------------------------------------------------------------------------------

_TRANSPARENT = ("torch.utils.checkpoint", "torch.distributed.fsdp", "torch.distributed._composable")
"""Modules whose functions return their inputs, or run forward and backward on DTensors again."""


def _refusing_dtensors(apply: Any) -> Any:
    """Return a `Function.apply` that refuses DTensors, except in torch's own checkpoints and module hooks.

    The backward of such a function gets local gradients of tensors that its forward got as DTensors.
    """
    plain = getattr(apply, "__func__", apply)  # in torch 2.15 a class method of C++

    @functools.wraps(plain)
    def checked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Plain calls first and without a helper: every custom function of the program passes here.
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, TorchDTensor):
                break
        else:
            return plain(cls, *args, **kwargs)
        if not is_intercepting():  # inside `LocalOperations` DTensors stand for their shards
            return plain(cls, *args, **kwargs)
        if cls is BackwardHookFunction:
            return _with_dtensor_hooks(plain(cls, *args), args)
        if not cls.__module__.startswith(_TRANSPARENT):
            _refuse_function(cls, x)
        outputs = plain(cls, *args, **kwargs)
        if cls is CheckpointFunction:
            _refuse_contributions(outputs)
        return outputs

    return classmethod(checked)


def _refuse_function(cls: type, x: TorchDTensor) -> NoReturn:
    raise ShardingRuleError(
        f"{cls.__qualname__}.apply on {x.spec!r}: torch passes the backward of an autograd.Function plain local "
        f"gradients, even if its forward got DTensors. Call it on local tensors and state the placements: "
        f"hp_dtensor.local_map({cls.__qualname__}.apply, out_placements, in_placements)."
    )


def _refuse_contributions(outputs: Any) -> None:
    """Raise for partial results with another reduction than a sum.

    The gradient of their contributions differs from that of the reduced value, and the backward of a reentrant
    checkpoint would confuse the two.
    """
    for x in tree_leaves(outputs):
        if isinstance(x, TorchDTensor) and x.requires_grad and not has_gradient(x.spec):
            raise ShardingRuleError(
                f"torch.utils.checkpoint with use_reentrant=True of a function that returns {x.spec!r}: its backward "
                "would use gradients of contributions as those of the reduced value. Redistribute the result to "
                "Replicate() or Shard, or pass use_reentrant=False."
            )


def _with_dtensor_hooks(outputs: tuple[Tensor, ...], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Wrap hooks registered on the identity node of a module's backward hooks, so that they get DTensor gradients."""
    specs = [x._spec if isinstance(x, TorchDTensor) else None for x in inputs]
    node = next((x.grad_fn for x in outputs if x.grad_fn is not None), None)
    if node is not None:
        # Torch registers the module's hooks on the node only after `apply` has returned it.
        register = node.register_hook
        node.register_hook = lambda hook: register(_on_dtensors(hook, specs))  # type: ignore[method-assign]
    return outputs


def _on_dtensors(hook: Callable[..., Any], specs: Sequence[TensorSpec | None]) -> Callable[..., Any]:
    """Return a node's hook that passes local gradients on to `hook` as DTensors, and unwraps those that it returns."""

    def wrapped(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        pairs = zip(grads, specs, strict=True)
        return tuple(x if x is None or spec is None else wrap_gradient(spec, x) for x, spec in pairs)

    def hooked(*grads: tuple[Tensor | None, ...]) -> Any:
        changed = hook(*map(wrapped, grads))
        if changed is None:
            return None
        listed = changed if isinstance(changed, tuple) else (changed,)
        return tuple(x if spec is None else unwrap_gradient(spec, x) for x, spec in zip(listed, specs, strict=True))

    return hooked


def _returning_local_gradients(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward that unwraps the DTensor gradients of a reentrant checkpoint: autograd expects local ones."""

    @functools.wraps(backward)
    def unwrapped(*args: Any) -> tuple[Any, ...]:
        return tuple(map(unwrap, backward(*args)))

    return unwrapped


# Functions that would use the local shard as the tensor ---------------------------------------------------


_TRANSFORMS_A_SHARD = (
    "would transform this rank's shard alone. Use torch.autograd.grad, or transform local tensors inside "
    "hp_dtensor.local_map."
)
_EXPORTS_A_SHARD = "would export this rank's shard; if that is intended, pass x.to_local()"


def _refusing(name: str, effect: str = _TRANSFORMS_A_SHARD) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a replacement that refuses a DTensor as its first argument; the message has `name` and `effect`."""

    def replacement(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def refused(x: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(x, TorchDTensor):
                raise ShardingRuleError(f"{name} of {x.spec!r} {effect}")
            return function(x, *args, **kwargs)

        return refused

    return replacement


def _refusing_arguments(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `ScriptFunction.__call__` that raises for DTensors anywhere in its arguments."""

    @functools.wraps(call)
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_intercepting():
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, TorchDTensor):
                    raise ShardingRuleError(
                        f"a function made by torch.jit.script with {x.spec!r} would work on this rank's shard alone. "
                        "Call it on local tensors inside hp_dtensor.local_map, or the function that it was made of."
                    )
        return call(self, *args, **kwargs)

    return refused


def _refusing_source(set_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Tensor.set_` that raises for a DTensor as the source of the storage."""

    @functools.wraps(set_)
    def refused(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, TorchDTensor) and is_intercepting():
                raise ShardingRuleError(
                    f"set_ of a plain tensor to {x.spec!r} would use this rank's shard; if that is intended, pass "
                    "x.to_local()"
                )
        return set_(self, *args, **kwargs)

    return refused


def _refusing_sharded(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a replacement of a wrapper's `__init__` that raises for modules with DTensor parameters.

    `DistributedDataParallel` would broadcast rank 0's shards to the other ranks, without an error.
    """

    def replacement(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def refused(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            for path, parameter in module.named_parameters():
                _refuse_parameter(name, path, parameter)
            init(self, module, *args, **kwargs)

        return refused

    return replacement


def _refusing_sharded_parameter(init: Callable[..., None]) -> Callable[..., None]:
    """Return an `__init__` of torch's `FSDPParam`, created by `fully_shard` per parameter, that raises for DTensors."""

    @functools.wraps(init)
    def refused(self: Any, param: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_parameter("torch.distributed.fsdp.fully_shard", "parameter", param)
        init(self, param, *args, **kwargs)

    return refused


def _refuse_parameter(name: str, path: str, parameter: Any) -> None:
    if isinstance(parameter, TorchDTensor):
        raise ShardingRuleError(
            f"{name} of a model whose {path} is {parameter.spec!r}: it would treat shards as replicas, or shard them "
            "again. A model of hp_fsdp.fully_shard reduces its gradients itself: use it as it is; one of "
            "parallelize_module is given to hp_fsdp.fully_shard. With accelerate, prepare the optimizer and the data "
            "loader and not the model: optimizer, loader = accelerator.prepare(optimizer, loader). With a Trainer of "
            "transformers, set trainer.accelerator.prepare_model = functools.partial("
            "trainer.accelerator.prepare_model, evaluation_mode=True) before train(), and save by "
            "model.save_pretrained(folder) on every rank (examples/transformers_trainer.py). With Lightning Fabric, "
            "use ModelParallelStrategy with a parallelize_fn that calls hp_fsdp.fully_shard: set up the plain model."
        )


def refuse_in_fsdp_if_loaded() -> None:
    """Install the refusals in torch's `FullyShardedDataParallel` and `fully_shard`, if the program has loaded them.

    Loading them takes as long as torch itself.
    """
    if "torch.distributed.fsdp" in sys.modules:
        _refuse_in_fsdp()


@functools.cache
def _refuse_in_fsdp() -> None:
    for patch in _PATCHES_OF_FSDP:
        patch.install()


def _copying_dtensors(new_tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a `new_tensor` that copies a DTensor to a DTensor with the same placements."""

    def copy_of(
        data: TorchDTensor, dtype: torch.dtype, device: Any, requires_grad: bool = False, pin_memory: bool = False
    ) -> Tensor:
        copy = data.detach().clone().to(dtype=dtype, device=device)  # detached: `new_tensor` returns a leaf
        return (copy.pin_memory() if pin_memory else copy).requires_grad_(requires_grad)

    @functools.wraps(new_tensor)
    def copied(self: Tensor, data: Any, **options: Any) -> Tensor:
        if isinstance(data, TorchDTensor) and is_intercepting():
            given = {name: value for name, value in options.items() if value is not None}
            return copy_of(data, **{"dtype": self.dtype, "device": self.device, **given})
        return new_tensor(self, data, **options)

    return copied


def _with_full_mask(reduce: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a reduction of `torch.masked` that gives a DTensor without a mask one of ones.

    Without a mask, torch counts the elements in a plain tensor, by which a DTensor cannot be divided.
    """

    @functools.wraps(reduce)
    def reduced(input: Tensor, *args: Any, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if mask is None and isinstance(input, TorchDTensor) and is_intercepting():
            mask = torch.ones_like(input, dtype=torch.bool)
        return reduce(input, *args, mask=mask, **kwargs)

    return reduced


# Recomputation --------------------------------------------------------------------------------------------


def _recomputing_as_in_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward of the reentrant checkpoint that recomputes within the context parallelism of this forward."""

    @functools.wraps(forward)
    def called(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        outputs = forward(ctx, run_function, *args)
        ctx.run_function = as_now(run_function)
        return outputs

    return called


# The table ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registration:
    """A hook or setting of torch that the platform uses; fields as those of `Patch`."""

    name: str
    why: str
    dtensors: str
    register: Callable[[], None]


_BYPASSED = "C++ treats the local shard as the tensor"
_REFUSED = "refused"
_OUTSIDE = "recomputes attention outside of `ContextParallel`, over one rank's tokens"
_AS_IN_FORWARD = "recomputed as in forward, as plain tensors are"

_WRAPS_SHARDS = "treats shards as replicas, or shards them again"
_REFUSED_PARAMETERS = "parameters that are DTensors are refused"
_PATCHES_OF_FSDP = (
    Patch(
        "torch.distributed.fsdp.FullyShardedDataParallel.__init__",
        _WRAPS_SHARDS,
        _REFUSED_PARAMETERS,
        _refusing_sharded("FullyShardedDataParallel"),
    ),
    # Programs import `fully_shard` by name, so replacing the function would miss them.
    Patch(
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.__init__",
        _WRAPS_SHARDS,
        _REFUSED_PARAMETERS,
        _refusing_sharded_parameter,
    ),
)

PATCHES = (
    Patch(
        "torch.autograd.Function.apply",
        "forward would get DTensors and backward plain local gradients",
        "refused, except in torch's own checkpoints and module hooks, which get DTensors in both",
        _refusing_dtensors,
    ),
    Patch(
        "torch.utils.checkpoint.CheckpointFunction.backward",
        "returns DTensors to autograd, which expects local gradients",
        "their local data is returned",
        _returning_local_gradients,
    ),
    # Programs import `checkpoint` by name, so replacing the function would miss them.
    Patch(
        "torch.utils.checkpoint.CheckpointFunction.forward",
        _OUTSIDE,
        _AS_IN_FORWARD,
        _recomputing_as_in_forward,
    ),
    Patch("torch.utils.checkpoint._CheckpointFrame.__init__", _OUTSIDE, _AS_IN_FORWARD, recomputing_as_now),
    Patch(
        "torch._functorch.eager_transforms._wrap_for_grad",
        _BYPASSED,
        _REFUSED,
        _refusing("torch.func (grad, vjp and the like)"),
    ),
    Patch("torch._functorch.vmap._add_batch_dim", _BYPASSED, _REFUSED, _refusing("torch.func (vmap)")),
    Patch(
        "torch._functorch.eager_transforms._maybe_wrap_functional_tensor",
        _BYPASSED,
        _REFUSED,
        _refusing("torch.func.functionalize"),
    ),
    Patch("torch.to_dlpack", _BYPASSED, _REFUSED, _refusing("to_dlpack", _EXPORTS_A_SHARD)),
    Patch("torch.utils.dlpack.to_dlpack", _BYPASSED, _REFUSED, _refusing("to_dlpack", _EXPORTS_A_SHARD)),
    Patch("torch._C.ScriptFunction.__call__", _BYPASSED, _REFUSED, _refusing_arguments),
    Patch("torch.Tensor.set_", _BYPASSED, _REFUSED, _refusing_source),
    Patch(
        "torch.nn.parallel.DistributedDataParallel.__init__",
        _WRAPS_SHARDS,
        _REFUSED_PARAMETERS,
        _refusing_sharded("DistributedDataParallel"),
    ),
    Patch("torch.Tensor.new_tensor", _BYPASSED, "returns a DTensor with the same placements", _copying_dtensors),
    *(
        Patch(f"torch.masked.{name}", "divides them by a plain count", "get a mask of ones", _with_full_mask)
        for name in ("mean", "_ops.mean", "_ops._std_var")
    ),
    Patch(
        "torch.compile",
        "its graphs would mix global and local shapes",
        "operations on them are left out of the graphs",
        preparing,
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
        "see `torch.compile`, where the program has imported that before",
        "operations on them are left out of the graphs",
        prepare_when_loaded,
    ),
    Registration(
        "torch.distributed.fsdp",
        _WRAPS_SHARDS,
        f"{_REFUSED_PARAMETERS}; if the program loads it later, at the latest by the first forward",
        refuse_in_fsdp_if_loaded,
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
