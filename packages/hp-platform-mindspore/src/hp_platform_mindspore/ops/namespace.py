"""The operations of the platform: `platform.ops` and what is beyond it, on plain tensors and DTensors.

A function of `platform.ops` or `platform.operations` called with DTensors goes to hp_dtensor's dispatch under its
canonical (torch) name, before MindSpore decomposes it into primitives that hide its arguments. Everything else that a
program calls on a DTensor (`x + y`, `mint.matmul`, `nn.Dense`) arrives as a primitive (`primitives.py`).

Kernels on plain tensors are chosen by the device: `NATIVE_KERNELS` on Ascend, and on CPU those composed in
`cpu_kernels/`. `FOUND` are functions of MindSpore that work as they are; they consist of primitives, so they take
DTensors by the rules of these.

In-place operations are composed of operations that return a new tensor: MindSpore's own have no effect on CPU, or no
kernel. The result is computed from a copy, so that nothing that backward needs is overwritten, and then stored. When
operations are recorded, MindSpore's `copy_` passes on the gradient, but not through views: gradients of tensors that
share memory with the written one would be wrong, so that is refused.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hp_dtensor.dispatch.operation import dispatch
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import OP_NAMES
from hp_dtensor.rules.pointwise import LINEAR_UNARY, NONLINEAR
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.tensor.dtensor import DTensor
from hp_platform_mindspore.ops.cpu_kernels import (
    creation,
    nn,
    pointwise,
    products,
    reductions,
    scattering,
    shapes,
)
from hp_platform_mindspore.ops.cpu_kernels.creation import Generator, random_operations
from hp_platform_mindspore.ops.cpu_kernels.empty import unless_empty
from hp_platform_mindspore.ops.cpu_kernels.pointwise import cast
from hp_platform_mindspore.ops.cpu_kernels.shapes import tensor_split
from hp_platform_mindspore.platform_base import Capabilities, MindSporeBase
from hp_platform_mindspore.tensor.autograd import is_recording, turn_grad_flag_on
from hp_platform_mindspore.tensor.dtensor import LocalOperations, MindSporeDTensor, is_local, unwrap
from hp_platform_mindspore.tensor.memory import FLOATING

SHARING = frozenset(
    """
    view reshape flatten unflatten ravel transpose swapaxes permute t mT adjoint movedim moveaxis squeeze unsqueeze
    expand broadcast_to narrow select split chunk unbind getitem diagonal contiguous to type type_as cast float double
    half bfloat16 int long short byte bool tensor_split hsplit vsplit
    """.split()
)
"""Operations whose results may share the memory, and the gradient, of their first argument."""

WRITTEN: dict[str, Callable[..., Tensor]] = {
    "zero_": ops.zeros_like,
    "fill_": lambda x, value: shapes.expand(_as_tensor(value, x), x.shape),
    "copy_": lambda x, source, non_blocking=False: shapes.expand(source, x.shape),
}
"""In-place operations without an out-of-place form of the same name, and functions of what they store."""

PRUNED_AT = 64


def _as_tensor(value: Any, x: Tensor) -> Tensor:
    return pointwise.cast(value, x.dtype) if isinstance(value, Tensor) else creation.full((), value, x.dtype)


def writing(platform: MindSporeBase, name: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the form of `kernel` that stores its result in its first argument and returns that."""

    @functools.wraps(kernel)
    def write(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        source = platform.unwrap(x)
        # If recorded, the kernel reads a copy: its backward may need the values that are overwritten below.
        assign(platform, name, x, kernel(pointwise.clone(source) if is_recording(x) else source, *args, **kwargs))
        return x

    return write


def set_item(platform: MindSporeBase, x: Tensor, index: Any, value: Any) -> Tensor:
    """Execute `x[index] = value` on a plain tensor, or on a DTensor inside `LocalOperations`, and return `x`."""
    source = platform.unwrap(x)
    written = scattering.put(pointwise.clone(source) if is_recording(x) else source, index, value)
    assign(platform, "setitem", x, written)
    return x


def assign(platform: MindSporeBase, name: str, x: Tensor, result: Tensor) -> None:
    """Store a result in `x`, a plain tensor, or a DTensor inside `LocalOperations`.

    Raises:
        ValueError: the result has another shape.
        TypeError: the result is floating-point and `x` is not.
        CapabilityError: the operation is recorded, and `x` shares memory with a view.
    """
    if tuple(result.shape) != tuple(x._shape):
        raise ValueError(f"{name}: a result of shape {list(result.shape)} does not fit into {list(x._shape)}")
    if result.dtype in FLOATING and x.dtype not in FLOATING:
        # As torch, which does not truncate floating-point results either.
        raise TypeError(f"{name}: a result of {result.dtype} cannot be stored in {x.dtype}; cast first")
    # Recorded by MindSpore, unlike a write through NumPy.
    if is_recording(x, result):
        _check_unshared(name, x)
        x.copy_(pointwise.cast(result, x.dtype))
    else:
        platform.copy_(x, result)


# Which tensors share memory ------------------------------------------------------------------------------


def remember_sharing(source: Any, results: Any) -> None:
    """Record that DTensors among `results` may be views of `source`.

    A tensor and its views share one list of weak references, the original first.
    """
    if not isinstance(source, DTensor):
        return
    # Weak references: views are made in each forward, and must not live as long as their original.
    family = source.__dict__.get("_sharing")
    if family is None:
        family = [weakref.ref(source)]
        if not (
            source._is_leaf and source._requires_grad
        ):  # a leaf that requires grad cannot be written while recording
            source._sharing = family
    # Pruned only when long: a tensor may get a view in every step of a loop, and pruning is linear.
    if len(family) >= PRUNED_AT:
        family[1:] = [member for member in family[1:] if member() is not None]
    for view in results if isinstance(results, (tuple, list)) else (results,):
        if view is not source:
            view._sharing = family
            family.append(weakref.ref(view))


def _check_unshared(name: str, x: Any) -> None:
    family = getattr(x, "_sharing", None)
    if family is None:
        return
    # `x` is a view if it is not the original, or has a view if another member is alive.
    if family[0]() is not x or any(member() is not None for member in family[1:]):
        raise CapabilityError(
            f"{name} where gradients are recorded, on a tensor that shares memory with "
            f"{'one that it is a view of' if family[0]() is not x else 'a view of it'}: MindSpore's gradients would be "
            "wrong. Use an operation that returns a new tensor, write a clone, or write inside no_grad."
        )


F = mint.nn.functional


def _native_topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    values, indices = mint.topk(x, k, dim, largest, sorted)
    return values, indices


def _native_sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    values, indices = mint.sort(x, dim=dim, descending=descending, stable=stable)
    return values, indices


_FLASH_DTYPES = (ms.float16, ms.bfloat16)
_FLASH_MASK_SIZE = 2048


def fits_flash_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `ops.flash_attention_score` takes these tensors, by its documentation."""
    # The layout is [batch, heads, length, head_dim].
    if any(x.ndim != 4 for x in (query, key, value)):
        return False
    width = query.shape[-1]
    return (
        query.dtype in _FLASH_DTYPES
        and query.dtype == key.dtype == value.dtype
        and key.shape == value.shape == (query.shape[0], *key.shape[1:3], width)
        and width % 16 == 0
        and 0 < width <= 512
        and query.size > 0
        and key.size > 0
        and query.shape[1] % key.shape[1] == 0
    )


def _native_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    """Attend by CANN's fused kernel, which shares key heads by itself, or by matrix products where it does not fit."""
    if not fits_flash_attention(query, key, value):
        return products.scaled_dot_product_attention(query, key, value, is_causal, enable_gqa)
    # Query i sees the keys up to i (leftUpCausal), with the mask of fixed size that this mode requires.
    causal = {"attn_mask": _flash_mask(), "sparse_mode": 2} if is_causal else {}
    return ops.flash_attention_score(
        query,
        key,
        value,
        query.shape[1],
        scalar_value=1.0 / math.sqrt(query.shape[-1]),
        input_layout="BNSD",
        **causal,
    )


@functools.cache
def _flash_mask() -> Tensor:
    """Return the mask of causal modes: True above the diagonal, where keys are discarded."""
    return Tensor(np.triu(np.ones((_FLASH_MASK_SIZE, _FLASH_MASK_SIZE), np.bool_), 1))


CPU_KERNELS: dict[str, Callable[..., Any]] = {
    **creation.KERNELS,
    **pointwise.KERNELS,
    **shapes.KERNELS,
    **reductions.KERNELS,
    **products.KERNELS,
    **nn.KERNELS,
    **scattering.KERNELS,
}
"""By canonical name, on plain tensors, with torch's order of arguments."""

_SORTED = "sort along the dimension and pick by position"
NOT_COMPOSED: dict[str, str] = {
    **{f"conv_transpose{n}d": "multiply by a matrix of the kernel" for n in (1, 2, 3)},
    "adaptive_max_pool3d": "use max_pool3d with the kernel size that gives the wanted size",
    **dict.fromkeys(("im2col", "col2im"), "index the windows and use matmul"),
    **dict.fromkeys(("mode", "kthvalue", "quantile", "nanquantile"), _SORTED),
    **dict.fromkeys(("cummax", "cummin"), "use amax or amin of slices"),
    **dict.fromkeys(("scatter_reduce", "index_reduce"), "use scatter_add or index_add for sums"),
    "index_copy": "use scatter",
    "unique_consecutive": "compare neighbours",
}
"""Operations with a sharding rule for which MindSpore's CPU lacks kernels or their gradients; what to use instead."""


def check_composed(name: str) -> None:
    """Refuse an operation that has neither a kernel of MindSpore on CPU nor one here.

    Raises:
        CapabilityError: it is in `NOT_COMPOSED`, or the in-place form of one there.
    """
    # In-place forms are made of the operations.
    if (instead := NOT_COMPOSED.get(name.removesuffix("_"))) is not None:
        raise CapabilityError(
            f"{name} of DTensors does not run on MindSpore's CPU, which lacks kernels for it or its gradient. Run it "
            f"on Ascend, if MindSpore has it there, or on the torch platform; here, {instead}"
        )


_OWN = """
    all any count_nonzero max min argmin prod norm std var cumprod roll tril triu einsum median kthvalue cummax cummin
    bitwise_not logaddexp scatter scatter_add index_add masked_select nonzero unique_consecutive conv1d conv2d conv3d
    conv_transpose2d avg_pool1d avg_pool2d avg_pool3d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d batch_norm interpolate
"""
# Kernels that find positions on the host, which only a CPU's memory allows, or are MindSpore's for a CPU.
_ON_HOST = ({"copysign", "fmin", *reductions.ORDER_KERNELS, *scattering.KERNELS, *nn.IMAGE_KERNELS}) - {
    "aminmax",
    "searchsorted",
    "bucketize",
}

NATIVE_KERNELS: dict[str, Callable[..., Any]] = {
    **{name: kernel for name, kernel in CPU_KERNELS.items() if name not in _ON_HOST},
    # Unlike that of the CPU, which reads host memory, it can be compiled by `mindspore.jit`.
    "cast": lambda x, dtype: x if x.dtype == dtype else x.astype(dtype),
    **{name: getattr(F, name, None) or getattr(mint, name) for name in _OWN.split()},
    "full": lambda shape, value, dtype: mint.full(tuple(shape), value, dtype=dtype),
    "arange": lambda end, dtype: mint.arange(end, dtype=dtype),
    "gelu": F.gelu,
    "argmax": mint.argmax,
    "logsumexp": mint.logsumexp,
    "cumsum": mint.cumsum,
    "log_softmax": F.log_softmax,
    "rms_norm": lambda x, weight, eps: ops.rms_norm(x, weight, eps)[0],
    "cross_entropy": lambda logits, targets, reduction="mean": F.cross_entropy(logits, targets, reduction=reduction),
    "embedding": F.embedding,
    "stack": lambda tensors, dim=0: mint.stack(list(tensors), dim),
    "index_select": mint.index_select,
    "topk": _native_topk,
    "sort": _native_sort,
    "argsort": lambda x, dim=-1, stable=True, descending=False: _native_sort(x, dim, descending, stable)[1],
    "bincount": lambda x, minlength: mint.bincount(x, minlength=minlength),
    "one_hot": F.one_hot,
    "scaled_dot_product_attention": _native_attention,
}
"""Kernels for Ascend by canonical name; `CPU_KERNELS` are those for CPU."""


_OF_MINT = """
    expm1 erf erfc sinh cosh tan sinc floor ceil trunc log1p reciprocal isnan isinf sign round atanh erfinv fmod
    remainder
    xlogy logical_xor isclose nan_to_num lerp ravel t swapaxes concat hstack dstack
    diff
"""
_OF_OPS = """
    exp2 asinh atan deg2rad rad2deg softsign tanhshrink frac i0 positive relu6 elu celu mish softplus hardtanh
    log2 log10 lgamma digamma sgn signbit acos asin acosh atan2 fmax logaddexp2 hypot true_divide bitwise_and bitwise_or
    bitwise_xor bitwise_left_shift bitwise_right_shift heaviside nextafter ldexp addcmul addcdiv type_as
    inner kron addmv addbmm addr adjoint movedim moveaxis fliplr flipud rot90 vstack column_stack atleast_2d
    pixel_shuffle pixel_unshuffle
"""
_OF_F = "hardswish hardsigmoid hardshrink softshrink glu broadcast_to"
_METHODS = "float double int long short bool byte half bfloat16 contiguous to type view new_zeros new_ones new_empty"

FOUND: dict[str, Callable[..., Any]] = {
    **{name: getattr(mint, name) for name in _OF_MINT.split()},
    **{name: getattr(ops, name) for name in _OF_OPS.split()},
    **{name: getattr(F, name) for name in _OF_F.split()},
    **{name: (lambda x, *args, name=name: getattr(x, name)(*args)) for name in _METHODS.split()},
    "flatten": mint.flatten,
    "tensor_split": tensor_split,
    "hsplit": lambda x, parts: tensor_split(x, parts, 0 if x.ndim == 1 else 1),
    "vsplit": lambda x, parts: tensor_split(x, parts, 0),
}


POINTWISE = frozenset(f"{NONLINEAR} {LINEAR_UNARY} alias".split())


def unwrapping(kernel: Callable[..., Any], written: bool = False) -> Callable[..., Any]:
    """Return `kernel` called with the local data of DTensors among its arguments, also in lists.

    Args:
        written: `kernel` writes its first argument, which is passed unchanged.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        # In-place kernels need the DTensor itself, to count the write and to find views of it.
        local = (*args[:1], *_unwrapped(args[1:])) if written else _unwrapped(args)
        return kernel(*local, **{name: _unwrapped(value) for name, value in kwargs.items()})

    return run


def _unwrapped(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_unwrapped(item) for item in value])
    return unwrap(value) if isinstance(value, DTensor) else value


def dispatched(
    platform: MindSporeBase, name: str, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `hp_dtensor.dispatch.operation`, and record which results share memory with the first argument."""
    # MindSpore's own value_and_grad leaves the grad flag off; what follows would silently be missing in gradients.
    turn_grad_flag_on()
    result = dispatch(platform, name, kernel, args, kwargs)
    if name in SHARING and args:
        remember_sharing(args[0], result)
    return result


_getitem = unwrapping(shapes.getitem)


def getitem(x: Tensor, index: Any) -> Any:
    """Return `x[index]`: of a DTensor by its sharding rule, of a plain tensor by MindSpore's own indexing."""
    if not isinstance(x, MindSporeDTensor):
        return x[index]
    return dispatched(x._spec.mesh.platform, "getitem", _getitem, (x, index), {})


def setitem(x: MindSporeDTensor, index: Any, value: Any) -> None:
    """Execute `x[index] = value` on a DTensor."""
    platform = x._spec.mesh.platform

    def store(_: Tensor, index: Any, value: Any) -> Tensor:
        with LocalOperations():
            return set_item(platform, x, _unwrapped(index), _unwrapped(value))

    dispatch(platform, "setitem", store, (x, index, value), {})


Function = Callable[..., Any]


class Operations:
    """All operations as attributes, by canonical name; each takes plain tensors or DTensors."""

    getitem = staticmethod(getitem)
    setitem = staticmethod(setitem)

    def __init__(self, platform: MindSporeBase) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Function:
        function = self._platform.operation(name)
        if function is None:
            check_composed(name)
            raise CapabilityError(f"MindSpore has no operation {name!r} here")
        return function


def build_ops(platform: MindSporeBase) -> SimpleNamespace:
    """Return the namespace `platform.ops`, made of the kernels for the platform's device."""
    kernels = kernels_of(platform.capabilities)
    return SimpleNamespace(**{name: _intercepting(platform, name, kernels[name]) for name in OP_NAMES})


def build_functions(platform: MindSporeBase, generator: Generator) -> dict[str, Function]:
    """Return the kernels beyond `ops` by name: composed, random, and in-place ones.

    Args:
        generator: returns the generator from which random operations draw.
    """
    known = kernels_of(platform.capabilities)
    made = {name: kernel for name, kernel in known.items() if name not in OP_NAMES}
    random = random_operations(generator)
    if platform.capabilities.bfloat16_operations is not None:
        random = {name: _through_float32(kernel) for name, kernel in random.items()}
    made |= random
    # MindSpore's own pointwise kernels may crash on empty shards; the composed ones handle them.
    found = {name: unless_empty(kernel, name) if name in POINTWISE else kernel for name, kernel in FOUND.items()}
    out_of_place = {**found, **known, **made}
    # In-place forms exist for operations that have both a rule `name_` and an out-of-place kernel.
    in_place = {
        name: writing(platform, name, made.pop(name, None) or out_of_place[name[:-1]])
        for name in rule_registry().names()
        if name.endswith("_") and (name in made or name[:-1] in out_of_place)
    }
    in_place |= {name: writing(platform, name, kernel) for name, kernel in WRITTEN.items()}
    return {name: _intercepting(platform, name, kernel) for name, kernel in {**made, **in_place}.items()}


def kernels_of(capabilities: Capabilities) -> dict[str, Function]:
    """Return all kernels on plain tensors by name; those without bfloat16 support compute bfloat16 in float32."""
    kernels = NATIVE_KERNELS if capabilities.native_operations else CPU_KERNELS
    direct = capabilities.bfloat16_operations
    if direct is None:
        return kernels
    return {name: kernel if name in direct else _through_float32(kernel) for name, kernel in kernels.items()}


def _through_float32(kernel: Function) -> Function:
    """Return `kernel` computing in float32 and rounding to bfloat16, if an argument is bfloat16.

    MindSpore's CPU does the same where it has bfloat16 kernels.
    """

    @functools.wraps(kernel)
    def computed(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, Tensor) and x.dtype == ms.bfloat16 for x in args):
            return kernel(*args, **kwargs)
        result = kernel(*[_cast(x, ms.bfloat16, ms.float32) for x in args], **kwargs)
        if isinstance(result, tuple):
            return tuple(_cast(x, ms.float32, ms.bfloat16) for x in result)
        return _cast(result, ms.float32, ms.bfloat16)

    return computed


def _cast(x: Any, source: Any, target: Any) -> Any:
    return cast(x, target) if isinstance(x, Tensor) and x.dtype == source else x


def _intercepting(platform: MindSporeBase, name: str, kernel: Function) -> Function:
    # Made once per operation, not in each call.
    local = unwrapping(kernel, written=name.endswith("_"))
    adapt = _ADAPTED.get(name)

    @functools.wraps(kernel)
    def operation(*args: Any, **kwargs: Any) -> Any:
        # Plain tensors take the shortest way: this check is their only cost.
        if not (any(map(_is_distributed, args)) or (kwargs and any(map(_is_distributed, kwargs.values())))):
            return kernel(*args, **kwargs)
        if is_local():
            return local(*args, **kwargs)
        # Only few operations differ in their arguments from their rule.
        if adapt is not None:
            return dispatched(platform, name, *adapt(local, *args, **kwargs))
        return dispatched(platform, name, local, args, kwargs)

    return operation


def _is_distributed(value: Any) -> bool:
    if isinstance(value, DTensor):
        return True
    return isinstance(value, (list, tuple)) and any(isinstance(item, DTensor) for item in value)


# Operations whose sharding rule has torch's full argument list, where that of `ops` is shorter.

Adapted = tuple[Function, tuple[Any, ...], dict[str, Any]]


def _rms_norm(run: Function, x: Any, weight: Any, eps: float) -> Adapted:
    return lambda x, shape, weight, eps: run(x, weight, eps), (x, (x.shape[-1],), weight, eps), {}


def _argsort(run: Function, x: Any, dim: int = -1, stable: bool = True, descending: bool = False) -> Adapted:
    return run, (x, dim), {"stable": stable, "descending": descending}


def _cross_entropy(run: Function, logits: Any, targets: Any, reduction: str = "mean") -> Adapted:
    return run, (logits, targets), {"reduction": reduction}


def _attention(
    run: Function, query: Any, key: Any, value: Any, is_causal: bool = False, enable_gqa: bool = False
) -> Adapted:
    return run, (query, key, value), {"is_causal": is_causal, "enable_gqa": enable_gqa}


def _index_put(run: Function, x: Any, index: Any, values: Any, accumulate: bool = False) -> Adapted:
    """Adapt `ops.index_put`, which has one index for the first dimension, or MindSpore's method, which has a tuple."""
    if isinstance(index, Tensor) and not accumulate:
        return lambda x, indices, values: run(x, indices[0], values), (x, (index,), values), {}
    indices = (index,) if isinstance(index, Tensor) else index
    return unwrapping(scattering.index_put), (x, indices, values), {"accumulate": accumulate}


_ADAPTED: dict[str, Callable[..., Adapted]] = {
    "rms_norm": _rms_norm,
    "index_put": _index_put,
    "argsort": _argsort,
    "bincount": lambda run, x, minlength: (run, (x,), {"minlength": minlength}),
    "cross_entropy": _cross_entropy,
    "scaled_dot_product_attention": _attention,
}
