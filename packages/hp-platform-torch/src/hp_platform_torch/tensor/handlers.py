"""Handlers of torch's functions that no sharding rule decides: autograd, hooks, accessors, lists of tensors,
comparisons.

To give a function a handler, add it to `HANDLERS`. A function with a sharding rule needs none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hp_dtensor.dispatch.arguments import no_rule
from hp_dtensor.dispatch.implicit_replication import is_replicating
from hp_dtensor.dispatch.operation import dispatch, registered_sharding
from hp_dtensor.exceptions import GradientPathError, MixedOperandsError, ShardingRuleError
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.gradients import check_autograd_reaches, check_hook, plain_backward_arguments
from hp_dtensor.tensor.redistribution import observe_gradient, shortcut_views, with_shortcuts
from hp_platform_torch.ops.decompositions import DECOMPOSED
from hp_platform_torch.ops.namespace import property_of
from hp_platform_torch.tensor.dtensor import READS_NUMBER, TorchDTensor, unwrap_gradient, wrap_gradient, wrap_in_place
from hp_platform_torch.tensor.torch_operation import Handler, LocalOperations, first_spec, locally, run_into, specs_of

Tensor = torch.Tensor


def _backward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Handler of `torch.Tensor.backward`. Interception stays on, so that hooks and recomputation get DTensors."""
    _run_backward(*args, **kwargs)


def _run_backward(
    loss: TorchDTensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | Tensor | None = None,
) -> None:
    # Backward runs on plain tensors. For a partial loss each rank starts from its own summand, with the seed of the
    # sum: d(sum)/d(summand) = 1, so the loss need not be reduced first.
    root, seed = plain_backward_arguments(loss, gradient)
    if inputs is not None:
        check_autograd_reaches("backward(inputs=...)", _listed(inputs))
        inputs = [_accumulating(x) for x in ((inputs,) if isinstance(inputs, Tensor) else inputs)]
    torch.autograd.backward(root, seed, retain_graph, create_graph, inputs=inputs)


def _backward_of_several(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Handler of `torch.autograd.backward` for one or several tensors."""
    call = inspect.signature(func).bind(*args, **kwargs).arguments
    outputs = _listed(call.pop("tensors"))
    seeds = call.pop("grad_tensors", None)
    seeds = [None] * len(outputs) if seeds is None else _listed(seeds)
    roots = [plain_backward_arguments(output, seed) for output, seed in zip(outputs, seeds, strict=True)]
    inputs = call.pop("inputs", None)
    check_autograd_reaches("backward(inputs=...)", _listed(inputs) if inputs is not None else ())
    inputs = None if inputs is None else [_accumulating(x) for x in _listed(inputs)]
    func([root for root, _ in roots], [seed for _, seed in roots], inputs=inputs, **call)


def _accumulating(x: Any) -> Any:
    """Return the `_edge` of a tensor whose `grad` is requested; raise if part of its gradient bypasses it."""
    if isinstance(x, TorchDTensor) and shortcut_views(x):
        raise GradientPathError(
            f"backward with {x._spec!r} among its inputs: part of its gradient goes straight to what it was "
            "redistributed from; use torch.autograd.grad"
        )
    return _edge(x)


def _edge(x: Any) -> Any:
    """Return the gradient edge of a DTensor, so that requesting its gradient is not intercepted as an operation."""
    if not isinstance(x, TorchDTensor):
        return x
    with LocalOperations():
        return get_gradient_edge(x)


def _autograd_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Handler of `torch.autograd.grad`; gradients of DTensors are DTensors."""
    call = inspect.signature(func).bind(*args, **kwargs).arguments
    outputs, inputs = _listed(call.pop("outputs")), _listed(call.pop("inputs"))
    check_autograd_reaches("torch.autograd.grad", inputs)
    seeds = call.pop("grad_outputs", None)
    seeds = [None] * len(outputs) if seeds is None else _listed(seeds)
    roots = [plain_backward_arguments(output, seed) for output, seed in zip(outputs, seeds, strict=True)]
    materialize = call.pop("materialize_grads", False)
    # A gathered `x` that ranks then use differently has two gradient paths: through `x` itself, and through its varying
    # views straight to what it was gathered from (`tensor/redistribution.py`). The gradient asked for is the sum of
    # both, the second reduced over the ranks that use the views.
    past = [shortcut_views(x) if isinstance(x, TorchDTensor) else [] for x in inputs]
    allow_unused = True if materialize or any(past) else call.get("allow_unused")
    grads = func(
        [root for root, _ in roots],
        [*map(_edge, inputs), *(view for views in past for _, view in views)],
        [seed for _, seed in roots],
        **{**call, "allow_unused": allow_unused},
    )
    found = _with_shortcut_gradients(inputs, past, grads)
    if None in [g if g is None else 0 for g in found] and not materialize and not call.get("allow_unused"):
        raise RuntimeError(f"torch.autograd.grad: input {[g is None for g in found].index(True)} is unused")
    return tuple(_gradient_of(x, grad, materialize) for x, grad in zip(inputs, found, strict=True))


def _with_shortcut_gradients(
    inputs: Sequence[Any], past: Sequence[Any], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return one gradient per input: the one through it plus those of its varying views, the rest of `grads`."""
    rest = iter(grads[len(inputs) :])
    return [
        with_shortcuts(x, grad, [(axes, next(rest)) for axes, _ in views]) if views else grad
        for x, views, grad in zip(inputs, past, grads, strict=False)
    ]


def _gradient_of(x: Any, grad: Tensor | None, materialize: bool) -> Tensor | None:
    if grad is None:
        return torch.zeros_like(x) if materialize and not isinstance(x, GradientEdge) else None
    return wrap_gradient(x._spec, grad) if isinstance(x, TorchDTensor) else grad


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, (Tensor, GradientEdge)) else list(value)


def _register_hook(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Handler of `Tensor.register_hook`: the hook gets the gradient as a DTensor, and may return one."""
    x, hook = inspect.signature(func).bind(*args, **kwargs).args
    check_hook(x)
    spec = x._spec

    def on_dtensor(grad: Tensor) -> Tensor | None:
        changed = hook(wrap_gradient(spec, grad))
        return None if changed is None else unwrap_gradient(spec, changed)

    with LocalOperations():
        return func(x, on_dtensor)


def _retain_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    observe_gradient(args[0])
    locally(func, args, kwargs)


AUTOGRAD_FUNCTIONS: dict[Callable[..., Any], Handler] = {
    torch.autograd.grad: _autograd_grad,
    torch.autograd.backward: _backward_of_several,
    torch.Tensor.backward: _backward,
    torch.Tensor.register_hook: _register_hook,
    torch.Tensor.retain_grad: _retain_grad,
}


def on_lists(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Handler of list functions (`_foreach_*`, `_fused_*`): one call on all local tensors, if layouts agree."""
    name = func.__name__
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscale(func, *args, **kwargs)
    if name in _REDUCED:
        return _reduced(name, *args, **kwargs)
    lists = [
        value
        for value in (*args, *kwargs.values())
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor)
    ]
    placed = [specs_of(tensors) for tensors in lists]
    if name.startswith("_foreach_") and any(spec is not None and spec.is_partial for spec in set(placed[0])):
        return _one_by_one(name, len(placed[0]), args, kwargs)
    specs = _common_specs(name, lists, placed)
    _check_numbers(name, (*args, *kwargs.values()))
    with LocalOperations():
        results = func(*args, **kwargs)
    if name.endswith("_") or results is None:
        return results
    return type(results)(
        [
            x if spec is None else wrap_in_place(x, spec.with_dtype(x.dtype))
            for x, spec in zip(results, specs, strict=True)
        ]
    )


def _one_by_one(name: str, count: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...] | None:
    """Run a list function as one call per tensor, for lists of `count` tensors of which some are partial.

    The sharding rule of the operation says what stays partial: the sum of two partial tensors does, their product does
    not.
    """
    operation = name.removeprefix("_foreach_")
    if operation.startswith(("addcmul", "addcdiv")) and len(args) > 3:
        args, kwargs = args[:3], {"value": args[3], **kwargs}  # of single tensors it is a keyword
    function = getattr(torch, operation, None) or getattr(torch.Tensor, operation)

    def of(value: Any, position: int) -> Any:
        return value[position] if isinstance(value, (list, tuple)) and len(value) == count else value

    results = [
        function(*[of(x, i) for x in args], **{key: of(x, i) for key, x in kwargs.items()}) for i in range(count)
    ]
    return None if operation.endswith("_") else tuple(results)


def _unscale(func: Callable[..., Any], grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale gradients for `torch.amp.GradScaler`; `found_inf` is reduced over all ranks that have shards of them."""
    # Placements are checked before the call writes `found_inf`.
    specs = [spec for spec in _common_specs(func.__name__, [grads], [specs_of(grads)]) if spec is not None]
    with LocalOperations():
        func(grads, found_inf, inv_scale)
    # In order of first use, which is the same on all ranks; a set's order may differ.
    for mesh in dict.fromkeys(spec.mesh for spec in specs):
        if mesh.get_coordinate() is not None:
            mesh.group_over(tuple(range(mesh.ndim))).all_reduce(found_inf, "max")


_REDUCED: dict[str, Callable[..., Tensor]] = {
    "_foreach_max": torch.max,
    "_foreach_norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "_foreach_powsum": lambda x, ord=2, dtype=None: torch.sum(x.abs().pow(ord), dtype=dtype),
}
"""List functions that reduce each tensor -> the reduction of one DTensor, which includes the other ranks' shards."""


def _reduced(name: str, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return tuple(_REDUCED[name](x, *args, **kwargs) for x in tensors)


def _common_specs(
    name: str, lists: Sequence[Sequence[Tensor]], specs: Sequence[list[TensorSpec | None]]
) -> list[TensorSpec | None]:
    """Return the spec at each position of the lists, given those of each list, after checking that they agree."""
    first = specs[0]
    for spec in set(first):
        if spec is not None and spec.is_partial:
            where = first.index(spec)
            raise ShardingRuleError(f"{name}: tensor {where} is partial ({spec!r}); batch_redistribute the list first")
    for tensors, others in zip(lists[1:], specs[1:], strict=True):
        if others != first:
            _check_positions(name, first, tensors, others)
    return first


def _check_numbers(name: str, values: Sequence[Any]) -> None:
    """Refuse a DTensor as the common factor of a list if it is partial, or if its gradient would be."""
    for x in values:
        if type(x) is TorchDTensor and (x._spec.is_partial or (torch.is_grad_enabled() and x.requires_grad)):
            raise ShardingRuleError(
                f"{name}: a number that is partial or requires a gradient ({x._spec!r}) would differ between "
                "ranks; pass its value, float(x), which every rank must call"
            )


def _check_positions(
    name: str, first: Sequence[TensorSpec | None], tensors: Sequence[Tensor], others: Sequence[TensorSpec | None]
) -> None:
    problems = []
    for position, (spec, x, other) in enumerate(zip(first, tensors, others, strict=True)):
        if other is None and (spec is None or x.dim() == 0):
            continue
        same = (
            spec is not None
            and other is not None
            and ((spec.mesh, spec.placements, spec.shape) == (other.mesh, other.placements, other.shape))
        )
        if not same:
            problems.append(f"tensor {position}: {spec or 'a plain tensor'} and {other or 'a plain tensor'}")
    if problems:
        raise MixedOperandsError(f"{name} on lists whose tensors are placed differently: {'; '.join(problems)}")


def refuse_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    raise ShardingRuleError(
        f"{func.__name__} would see local shards only; for gradient clipping use hp_dtensor.clip_grad_norm_, "
        "otherwise full_tensor() or to_local()"
    )


_CLIPPING = frozenset({"linalg_vector_norm"})
# Called on the local tensor; the result is returned unchanged.
_LOCAL_NAMES = """
    requires_grad_ register_post_accumulate_grad_hook is_contiguous storage_offset
    element_size is_floating_point is_complex is_signed is_inference is_conj is_neg is_pinned is_shared
    share_memory_ get_device untyped_storage storage record_stream has_names _is_view _is_zerotensor
    is_tensor is_distributed detach_ _typed_storage _has_compatible_shallow_copy_type __dir__ result_type
"""
_LOCAL = frozenset(_LOCAL_NAMES.split())
_TENSOR_VALUED_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})


def handler_of(func: Callable[..., Any]) -> Handler | None:
    """Return the handler of a function, or None if it has a sharding rule."""
    # Attributes of a tensor arrive here too, as the getters and setters of properties.
    accessed = property_of(func)
    if accessed is not None and func not in DECOMPOSED:
        return None if accessed in _TENSOR_VALUED_PROPERTIES else locally
    # An operator called through `torch.ops`, or by a dispatch mode.
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
    """Handler of operators of torch's dispatcher: custom ones, or those that a dispatch mode calls in a backward.

    Such a mode works with the tensors that autograd saved, and would take their global shapes for local ones.
    """
    if func in READS_NUMBER:
        return args[0].item()
    platform = first_spec(args, kwargs).mesh.platform
    saved = is_in_torch_dispatch_mode() and platform.is_in_backward()
    placed = is_replicating() or registered_sharding(str(func)) is not None
    if placed and not saved and not func._schema.is_mutable:  # type: ignore[attr-defined]
        return dispatch(platform, str(func), func, args, kwargs)
    raise ShardingRuleError(
        f"{no_rule(str(func), args, kwargs)} It comes from torch.ops, or from a dispatch mode (FlopCounterMode) "
        "around a backward alone, which would take global shapes for local ones: enter the mode before the forward."
    )


def _run_decomposed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if kwargs.get("out") is not None:
        return run_into(function, args, kwargs)
    return function(*args, **{name: value for name, value in kwargs.items() if name != "out"})


def _detach(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TorchDTensor:
    """Handler of `detach`: its result shares the storage with any placements, so no rule may redistribute."""
    x: TorchDTensor = args[0] if args else kwargs["input"]
    with LocalOperations():
        result = torch.Tensor.detach(x)
    detached = wrap_in_place(result, x._spec)
    detached._copied_by = x._copied_by
    return detached


def _view_in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TorchDTensor:
    """Handler of `t_`, `squeeze_` and similar, which give a tensor other dimensions: local data and spec change."""
    x, *rest = args
    # The view itself says where the shards are afterwards, and whether the data would have to be sent for it.
    view = getattr(x.detach(), func.__name__[:-1])(*rest, **kwargs)
    if view._copied_by is not None and x._copied_by is None:
        raise ShardingRuleError(
            f"{func.__name__} of {x._spec!r}: it removes a sharded dimension, which needs a copy; use "
            f"{func.__name__[:-1]}, or redistribute the tensor first"
        )
    if func is torch.Tensor.squeeze_:
        # By name, as a shard may have one row of a dimension that has several.
        wanted = inspect.signature(lambda dim=None: None).bind(*rest, **kwargs).arguments.get("dim")
        dims = range(x.dim()) if wanted is None else (wanted,) if isinstance(wanted, int) else wanted
        rest, kwargs = [tuple({d % x.dim() for d in dims if x.dim() and x.shape[d] == 1})], {}
    with LocalOperations():
        func(x, *rest, **kwargs)
    x._spec = view._spec
    return x


# Shapes of other tensors -----------------------------------------------------------------------------------


def _like_other(method: str) -> Handler:
    def handler(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        x, other = args[0], args[1] if len(args) > 1 else kwargs["other"]
        if method == "view" and x.shape == other.shape:
            return _view_as_it_is(x)
        return getattr(x, method)(tuple(other.shape))

    return handler


def _view_as_it_is(x: Tensor) -> Tensor:
    """Return a view of `x` in its own shape, with any placements.

    Torch creates such views of inputs that an `autograd.Function` returns, and treats their gradients as those of `x`.
    """
    if not isinstance(x, TorchDTensor):
        return x.view(x.shape)
    with LocalOperations():
        view = wrap_in_place(torch.Tensor.view_as(x, x), x._spec)
    view._copied_by = x._copied_by
    return view


def _data_ptr(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Handler of `data_ptr`: reading `numel()` elements from the address would run past the end of a shard."""
    x: TorchDTensor = args[0]
    if x._spec.is_partial or x._spec.local_shape != x._spec.shape:
        raise ShardingRuleError(
            f"data_ptr of {x._spec!r}: this rank's memory holds a shard or a summand of it. Use the address of "
            "to_local(). To save a sharded model with safetensors or save_pretrained, call on every rank "
            "hp_fsdp.get_model_state_dict(model, options=hp_fsdp.StateDictOptions(full_state_dict=True)), and give "
            "rank 0's to save_file, or to save_pretrained(folder, state_dict=...)"
        )
    return int(locally(func, args, kwargs))


def _equal(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Handler of `torch.equal`. It communicates, so every rank must call it."""
    x, y = inspect.signature(lambda input, other: None).bind(*args, **kwargs).args
    return x.shape == y.shape and bool((x == y).all())


def _allclose(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Handler of `torch.allclose`. It communicates, so every rank must call it."""
    return bool(torch.isclose(*args, **kwargs).all())


def _number_of_elements(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    x = args[0] if args else kwargs["input"]
    return x.numel()


def _initialize(method: str) -> Handler:
    """Return the handler of a function of `torch.nn.init` that fills by a method; torch passes keywords of its own."""

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
    **dict.fromkeys(
        (
            getattr(torch.Tensor, f"{name}_")
            for name in ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze")
        ),
        _view_in_place,
    ),
    torch.numel: _number_of_elements,
    torch.Tensor.data_ptr: _data_ptr,
    torch.Tensor.stride: lambda func, args, kwargs: args[0].stride(*args[1:], **kwargs),
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
