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

from hp_dtensor.api import distribute_tensor
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.spec import TensorSpec
from hp_platform_torch import compiling
from hp_platform_torch.dtensor import TorchDTensor, _intercepting, unwrap_gradient, wrap_gradient

Tensor = torch.Tensor

# Functions that hand on what they get, or run forward and backward on DTensors again.
_TRANSPARENT = ("torch.utils.checkpoint", "torch.distributed.fsdp", "torch.distributed._composable")


def guard() -> None:
    """Ask at the entrances; a second call changes nothing."""
    if hasattr(torch.autograd.Function.apply, "_asks_dtensors"):
        return
    torch.autograd.Function.apply = _asking(torch.autograd.Function.apply)  # type: ignore[assignment]
    eager_transforms._wrap_for_grad = _refusing(
        eager_transforms._wrap_for_grad, "torch.func (grad, vjp and the like)", _TRANSFORMS_A_SHARD
    )
    vmap._add_batch_dim = _refusing(vmap._add_batch_dim, "torch.func (vmap)", _TRANSFORMS_A_SHARD)
    for name in _OF_THE_WHOLE:
        setattr(init, name, _keeping_the_shard(getattr(init, name)))
    for owner in (torch, torch.utils.dlpack):
        owner.to_dlpack = _refusing(owner.to_dlpack, "to_dlpack", _EXPORTS_A_SHARD)  # type: ignore[attr-defined]
    torch.jit.trace = _refusing_to_trace(torch.jit.trace)  # type: ignore[assignment]
    compiling.guard()


def _asking(apply: Any) -> Any:
    plain = apply.__func__

    @functools.wraps(plain)
    def asked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for x in args:
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
        return plain(cls, *args, **kwargs)

    asked._asks_dtensors = True  # type: ignore[attr-defined]
    return classmethod(asked)


def _refuse_function(cls: type, x: TorchDTensor) -> NoReturn:
    raise ShardingRuleError(
        f"{cls.__qualname__}.apply on {x.spec!r}: torch hands the backward of an autograd.Function plain local "
        f"gradients, whatever its forward got. Let it work on local tensors, with the placements said: "
        f"hp_dtensor.local_map({cls.__qualname__}.apply, out_placements, in_placements)."
    )


_TRANSFORMS_A_SHARD = (
    "would transform this rank's shard alone. Use torch.autograd.grad, or transform local tensors inside "
    "hp_dtensor.local_map."
)
_EXPORTS_A_SHARD = "would give this rank's shard; say so with x.to_local()"


def _refusing(function: Callable[..., Any], name: str, effect: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def refused(x: Any, *args: Any) -> Any:
        if type(x) is TorchDTensor:
            raise ShardingRuleError(f"{name} of {x.spec!r} {effect}")
        return function(x, *args)

    return refused


def _refusing_to_trace(trace: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(trace)
    def refused(func: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        inputs = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
        held = func.parameters() if isinstance(func, torch.nn.Module) else ()
        for x in (*inputs, *held):
            if type(x) is TorchDTensor:
                raise ShardingRuleError(
                    f"torch.jit.trace with {x.spec!r} would record this rank's part of the work alone. Trace with "
                    "plain tensors, or use torch.compile, which leaves operations on DTensors as they are."
                )
        return trace(func, example_inputs, *args, **kwargs)

    return refused


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
