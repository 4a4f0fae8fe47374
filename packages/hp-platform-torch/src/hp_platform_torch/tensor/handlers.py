"""Handlers of torch's functions that no sharding rule decides: accessors, autograd, lists of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hp_dtensor.dispatch import dispatch, implicit_regions
from hp_dtensor.dispatch.arguments import no_rule
from hp_dtensor.dispatch.registered_shardings import registered_sharding
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.rules.tables import rule_registry
from hp_platform_torch.ops.decompositions import DECOMPOSED
from hp_platform_torch.ops.names import property_of
from hp_platform_torch.tensor.autograd_functions import AUTOGRAD_FUNCTIONS
from hp_platform_torch.tensor.dtensor import READS_NUMBER, TorchDTensor, adopt
from hp_platform_torch.tensor.local_operations import LocalOperations, locally
from hp_platform_torch.tensor.tensor_lists import on_lists, refuse_norm
from hp_platform_torch.tensor.torch_functions import Handler, first_spec, run_into

Tensor = torch.Tensor

_CLIPPING = frozenset({"linalg_vector_norm"})
# Answered by the local tensor, the result returned as it is.
_LOCAL_NAMES = """
    requires_grad_ register_post_accumulate_grad_hook is_contiguous storage_offset
    element_size is_floating_point is_complex is_signed is_inference is_conj is_neg is_pinned is_shared
    share_memory_ get_device untyped_storage storage record_stream has_names _is_view _is_zerotensor
    is_tensor is_distributed detach_ _typed_storage _has_compatible_shallow_copy_type __dir__ result_type
"""
_LOCAL = frozenset(_LOCAL_NAMES.split())
_TENSOR_VALUED_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})


def handler_of(func: Callable[..., Any]) -> Handler | None:
    """Return the handler of a function; None where a sharding rule decides."""
    accessed = property_of(func)
    if accessed is not None and func not in DECOMPOSED:
        return None if accessed in _TENSOR_VALUED_PROPERTIES else locally
    if isinstance(func, torch._ops.OpOverload):
        return _below_autograd
    if (
        isinstance(func, torch._ops.OpOverloadPacket)
        and not str(func).startswith("aten.")
        and len(func.overloads()) == 1
    ):
        return lambda func, args, kwargs: getattr(func, func.overloads()[0])(*args, **kwargs)  # type: ignore[attr-defined]
    name = getattr(func, "__name__", "")
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return on_lists
    if name in _LOCAL:
        return locally
    if name in _CLIPPING and rule_registry().get(name) is None:
        return refuse_norm
    decomposed = DECOMPOSED.get(func)
    if decomposed is not None:
        return lambda func, args, kwargs: _run_decomposed(decomposed, args, kwargs)
    return HANDLERS.get(func)


def _below_autograd(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Handle an operation of torch's dispatcher: a custom one, or one that a dispatch mode calls in a backward.

    Such a mode works with what autograd has saved and does not know of shards.
    """
    if func in READS_NUMBER:
        return args[0].item()
    platform = first_spec(args, kwargs).mesh.platform
    saved = is_in_torch_dispatch_mode() and platform.is_in_backward()
    placed = implicit_regions.is_replicating() or registered_sharding(str(func)) is not None
    if placed and not saved and not func._schema.is_mutable:  # type: ignore[attr-defined]
        return dispatch.dispatch(platform, str(func), func, args, kwargs)
    raise ShardingRuleError(
        f"{no_rule(str(func), args, kwargs)} It comes from torch.ops, or from a dispatch mode (FlopCounterMode) "
        "around a backward alone, which would take global shapes for local ones: enter the mode before the forward."
    )


def _run_decomposed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if kwargs.get("out") is not None:
        return run_into(function, args, kwargs)
    return function(*args, **{name: value for name, value in kwargs.items() if name != "out"})


def _detach(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TorchDTensor:
    """Handle `detach`: the result shares the storage, whatever the placements, so no rule may redistribute."""
    x: TorchDTensor = args[0] if args else kwargs["input"]
    with LocalOperations():
        result = torch.Tensor.detach(x)
    detached = adopt(result, x._spec)
    detached._copied_by = x._copied_by
    return detached


# Shapes of other tensors -----------------------------------------------------------------------------------


def _like_other(method: str) -> Handler:
    def handler(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        x, other = args[0], args[1] if len(args) > 1 else kwargs["other"]
        if method == "view" and x.shape == other.shape:
            return _view_as_it_is(x)
        return getattr(x, method)(tuple(other.shape))

    return handler


def _view_as_it_is(x: Tensor) -> Tensor:
    """Return a view of `x` of its own shape, whatever the placements.

    torch makes such views of what an `autograd.Function` hands on, and takes their gradients for those of `x`.
    """
    if not isinstance(x, TorchDTensor):
        return x.view(x.shape)
    with LocalOperations():
        view = adopt(torch.Tensor.view_as(x, x), x._spec)
    view._copied_by = x._copied_by
    return view


def _stride(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0].stride(*args[1:], **kwargs)


def _data_ptr(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Handle `data_ptr`: whoever reads as many elements as `numel()` tells would read past the end of a shard."""
    x: TorchDTensor = args[0]
    if x._spec.is_partial or x._spec.local_shape != x._spec.shape:
        raise ShardingRuleError(
            f"data_ptr of {x._spec!r}: this rank's memory holds a shard or a summand of it. Give the address of "
            "to_local(). To save a sharded model with safetensors or save_pretrained, call on every rank "
            "hp_fsdp.get_model_state_dict(model, options=hp_fsdp.StateDictOptions(full_state_dict=True)), and give "
            "rank 0's to save_file, or to save_pretrained(folder, state_dict=...)"
        )
    return int(locally(func, args, kwargs))


def _equal(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Handle `torch.equal`, which communicates: every rank must call it."""
    x, y = inspect.signature(lambda input, other: None).bind(*args, **kwargs).args
    return x.shape == y.shape and bool((x == y).all())


def _allclose(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Handle `torch.allclose`, which communicates: every rank must call it."""
    return bool(torch.isclose(*args, **kwargs).all())


def _number_of_elements(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    x = args[0] if args else kwargs["input"]
    return x.numel()


def _initialize(method: str) -> Handler:
    """Make the handler of a function of `torch.nn.init`, which torch passes on with keywords of its own: `method`."""

    def handler(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        values = dict(kwargs)
        x, generator = values.pop("tensor"), values.pop("generator", None)
        with torch.no_grad():
            return getattr(x, method)(*values.values(), **({} if generator is None else {"generator": generator}))

    return handler


HANDLERS: dict[Callable[..., Any], Handler] = {
    **AUTOGRAD_FUNCTIONS,
    torch.Tensor.detach: _detach,
    torch.detach: _detach,
    torch.numel: _number_of_elements,
    torch.Tensor.data_ptr: _data_ptr,
    torch.Tensor.stride: _stride,
    torch.equal: _equal,
    torch.Tensor.equal: _equal,
    torch.allclose: _allclose,
    torch.Tensor.allclose: _allclose,
    torch.Tensor.view_as: _like_other("view"),
    torch.Tensor.reshape_as: _like_other("reshape"),
    torch.Tensor.expand_as: _like_other("expand"),
    torch.nn.init.uniform_: _initialize("uniform_"),
    torch.nn.init.normal_: _initialize("normal_"),
    torch.nn.init.constant_: _initialize("fill_"),
}
