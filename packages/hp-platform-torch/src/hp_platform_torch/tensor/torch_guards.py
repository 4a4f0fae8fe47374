"""Where torch takes a tensor without asking it: `__torch_function__` is not called there, and C++ sees the shard.

Results would be those of one rank's data, without any error. So these entrances ask first: DTensors are refused
where nothing better is possible, and hooks of modules get their gradients as DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch._functorch import eager_transforms, vmap
from torch.nn import init
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.spec.tensor_spec import TensorSpec, has_gradient
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_platform_torch.tensor import backward_inputs
from hp_platform_torch.tensor import torch_compile as compiling
from hp_platform_torch.tensor.dtensor import TorchDTensor, _intercepting, unwrap, unwrap_gradient, wrap_gradient

Tensor = torch.Tensor

# Functions that hand on what they get, or run forward and backward on DTensors again.
_TRANSPARENT = ("torch.utils.checkpoint", "torch.distributed.fsdp", "torch.distributed._composable")


def guard() -> None:
    """Ask at the entrances; a second call changes nothing."""
    if hasattr(torch.autograd.Function.apply, "_asks_dtensors"):
        return
    torch.autograd.Function.apply = _asking(vars(torch.autograd.Function)["apply"])  # type: ignore[method-assign]
    _replace(torch.autograd, "_engine_run_backward", backward_inputs.noting)
    _replace(CheckpointFunction, "backward", _giving_shards)
    _replace(eager_transforms, "_wrap_for_grad", _refusing, "torch.func (grad, vjp and the like)", _TRANSFORMS_A_SHARD)
    _replace(vmap, "_add_batch_dim", _refusing, "torch.func (vmap)", _TRANSFORMS_A_SHARD)
    _replace(
        eager_transforms,
        "_maybe_wrap_functional_tensor",
        _refusing,
        "torch.func.functionalize",
        _TRANSFORMS_A_SHARD,
    )
    for name in _OF_THE_WHOLE:
        _replace(init, name, _keeping_the_shard)
    for owner in (torch, torch.utils.dlpack):
        _replace(owner, "to_dlpack", _refusing, "to_dlpack", _EXPORTS_A_SHARD)
    for name in ("trace", "trace_module"):
        _replace(torch.jit, name, _refusing_to_trace, f"torch.jit.{name}")
    _replace(torch.export, "export", _refusing_to_trace, "torch.export")
    _replace(torch._C.ScriptFunction, "__call__", _refusing_arguments, "a function made by torch.jit.script")
    _replace(torch.Tensor, "set_", _refusing_source)
    _replace(torch.Tensor, "new_full", _taking_numbers)
    _replace(torch.Tensor, "new_tensor", _copying_as_new)
    compiling.guard()


def _replace(owner: Any, name: str, asking: Callable[..., Any], *told: str) -> None:
    """Put what asks first in the place of an entrance."""
    setattr(owner, name, asking(getattr(owner, name), *told))


def _asking(apply: Any) -> Any:
    plain = getattr(apply, "__func__", apply)  # torch 2.15's is C++'s own class method, which takes the class as it is

    @functools.wraps(plain)
    def asked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()) if kwargs else args:
            if type(x) is TorchDTensor:
                break
        else:
            return plain(cls, *args, **kwargs)
        if not _intercepting():  # the shard is meant
            return plain(cls, *args, **kwargs)
        if cls is BackwardHookFunction:
            return _with_dtensor_hooks(plain(cls, *args), args)
        if not cls.__module__.startswith(_TRANSPARENT):
            _refuse_function(cls, x)
        outputs = plain(cls, *args, **kwargs)
        if cls is CheckpointFunction:
            _refuse_contributions(outputs)
        return outputs

    asked._asks_dtensors = True  # type: ignore[attr-defined]
    return classmethod(asked)


def _refuse_function(cls: type, x: TorchDTensor) -> NoReturn:
    raise ShardingRuleError(
        f"{cls.__qualname__}.apply on {x.spec!r}: torch hands the backward of an autograd.Function plain local "
        f"gradients, whatever its forward got. Let it work on local tensors, with the placements said: "
        f"hp_dtensor.local_map({cls.__qualname__}.apply, out_placements, in_placements)."
    )


def _refuse_contributions(outputs: Any) -> None:
    """The backward of a reentrant checkpoint gets gradients of what ranks contribute: of a sum alone, those of it."""
    for x in tree_leaves(outputs):
        if type(x) is TorchDTensor and x.requires_grad and not has_gradient(x.spec):
            raise ShardingRuleError(
                f"torch.utils.checkpoint with use_reentrant=True of a function that returns {x.spec!r}: its backward "
                "would take gradients of contributions for those of the whole. Redistribute the result to Replicate() "
                "or Shard, or say use_reentrant=False."
            )


def _giving_shards(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of a reentrant checkpoint finds DTensors as gradients of its inputs; autograd takes local ones."""

    @functools.wraps(backward)
    def giving(*args: Any) -> tuple[Any, ...]:
        return tuple(map(unwrap, backward(*args)))

    return giving


_TRANSFORMS_A_SHARD = (
    "would transform this rank's shard alone. Use torch.autograd.grad, or transform local tensors inside "
    "hp_dtensor.local_map."
)
_WORKS_ON_A_SHARD = (
    "would work on this rank's shard alone. Call it on local tensors inside hp_dtensor.local_map, or the function "
    "that it was made of."
)
_EXPORTS_A_SHARD = "would give this rank's shard; say so with x.to_local()"


def _refusing(function: Callable[..., Any], name: str, effect: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def refused(x: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is TorchDTensor:
            raise ShardingRuleError(f"{name} of {x.spec!r} {effect}")
        return function(x, *args, **kwargs)

    return refused


def _refusing_arguments(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _intercepting():
            for x in tree_leaves((args, kwargs)):
                if type(x) is TorchDTensor:
                    raise ShardingRuleError(f"{name} with {x.spec!r} {_WORKS_ON_A_SHARD}")
        return method(self, *args, **kwargs)

    return refused


def _refusing_source(set_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_)
    def refused(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if type(x) is TorchDTensor and _intercepting():
                raise ShardingRuleError(f"set_ of a plain tensor to {x.spec!r} {_EXPORTS_A_SHARD}")
        return set_(self, *args, **kwargs)

    return refused


def _refusing_to_trace(trace: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Neither among the inputs nor among the parameters of a module."""

    @functools.wraps(trace)
    def refused(*args: Any, **kwargs: Any) -> Any:
        given = tree_leaves((args, kwargs))
        held = [x for module in given if isinstance(module, torch.nn.Module) for x in module.parameters()]
        for x in (*given, *held):
            if type(x) is TorchDTensor:
                raise ShardingRuleError(
                    f"{name} with {x.spec!r} would record this rank's part of the work alone. Trace with plain "
                    "tensors, or use torch.compile, which leaves operations on DTensors as they are."
                )
        return trace(*args, **kwargs)

    return refused


# Tensors made of numbers and of data -----------------------------------------------------------------------


def _taking_numbers(new_full: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A DTensor without dimensions as the value is that of the whole, as in `float(x)`: every rank calls it."""

    @functools.wraps(new_full)
    def filled(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return new_full(self, *map(_number, args), **{name: _number(value) for name, value in kwargs.items()})

    return filled


def _number(x: Any) -> Any:
    return x.item() if type(x) is TorchDTensor and not x._spec.shape and _intercepting() else x


def _copying_as_new(new_tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(new_tensor)
    def copied(self: Tensor, data: Any, **options: Any) -> Tensor:
        if type(data) is TorchDTensor and _intercepting():
            return _copy(data, **{"dtype": self.dtype, "device": self.device, **options})
        return new_tensor(self, data, **options)

    return copied


def _copy(
    data: TorchDTensor, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False
) -> Tensor:
    wanted = {name: value for name, value in (("dtype", dtype), ("device", device)) if value is not None}
    copy = data.detach().clone()
    copy = copy.to(**wanted) if wanted else copy
    return (copy.pin_memory() if pin_memory else copy).requires_grad_(requires_grad)


# Initial values --------------------------------------------------------------------------------------------

_OF_THE_WHOLE = ("orthogonal_", "sparse_", "eye_", "dirac_")
"""Functions of `torch.nn.init` that need the whole matrix at once."""


def _keeping_the_shard(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Every rank fills the whole, from generators that are in step, and keeps its shard: one parameter at a time."""

    @functools.wraps(function)
    def filled(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if type(tensor) is not TorchDTensor or not _intercepting():
            return function(tensor, *args, **kwargs)
        spec = tensor._spec
        whole = torch.empty(spec.shape, dtype=spec.dtype, device=tensor.device)
        function(whole, *args, **kwargs)
        with torch.no_grad():
            tensor.copy_(distribute_tensor(whole, spec.mesh, spec.placements, source_rank=None))
        return tensor

    return filled


# Backward hooks of modules ---------------------------------------------------------------------------------


def _with_dtensor_hooks(outputs: tuple[Tensor, ...], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """The results of the identity that carries a module's backward hooks, which get gradients as DTensors."""
    specs = [x._spec if type(x) is TorchDTensor else None for x in inputs]
    node = next((x.grad_fn for x in outputs if x.grad_fn is not None), None)
    if node is not None:
        register = node.register_hook
        node.register_hook = lambda hook: register(_on_dtensors(hook, specs))  # type: ignore[method-assign]
    return outputs


def _on_dtensors(hook: Callable[..., Any], specs: Sequence[TensorSpec | None]) -> Callable[..., Any]:
    def hooked(*grads: tuple[Tensor | None, ...]) -> Any:
        changed = hook(*(_placed(several, specs) for several in grads))
        if changed is None:
            return None
        listed = changed if isinstance(changed, tuple) else (changed,)
        return tuple(x if spec is None else unwrap_gradient(spec, x) for x, spec in zip(listed, specs, strict=True))

    return hooked


def _placed(grads: tuple[Tensor | None, ...], specs: Sequence[TensorSpec | None]) -> tuple[Tensor | None, ...]:
    return tuple(
        x if x is None or spec is None else wrap_gradient(spec, x) for x, spec in zip(grads, specs, strict=True)
    )
