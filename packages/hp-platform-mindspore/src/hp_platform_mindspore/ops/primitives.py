"""MindSpore's primitives on DTensors: what runs when `__fallback__` intercepts one.

A primitive is translated to its canonical name and torch's arguments (`primitive_names.py`), and runs by the sharding
rule of that name. Primitives that are several operations, or whose results differ from the operation's, are in
`COMPOSED`: functions of (run, args, primitive), where `run` has the operations by canonical name, and `args` are the
call's arguments. For a primitive of the older kind, `args` lack the primitive and its name; its attributes are those of
`primitive`.

To support a new primitive: add a line to `primitive_names.py` with the name of an operation that has a rule, an adapter
if its arguments differ, and a call in `tests/test_mindspore_operation_names.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mindspore import Tensor

from hp_dtensor.exceptions import CapabilityError
from hp_platform_mindspore.ops.cpu_kernels.empty import unless_empty
from hp_platform_mindspore.ops.namespace import FOUND, POINTWISE, check_composed, dispatched, unwrapping
from hp_platform_mindspore.ops.primitive_names import (
    WITHOUT_KERNEL,
    caller,
    canonical,
    is_older_kind,
    nll_loss,
    older_method,
    unless_default,
)
from hp_platform_mindspore.platform_base import MindSporeBase
from hp_platform_mindspore.tensor.dtensor import LocalOperations, copy_values


def call_primitive(platform: MindSporeBase, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a primitive on DTensors.

    Args:
        func: what MindSpore passes to `__fallback__`; `func.name` is the primitive's name.
        args: its arguments; for a primitive of the older kind, (primitive, name, arguments).

    Raises:
        CapabilityError: neither MindSpore nor this package has a kernel for it on this device.
    """
    if func.name == "typeof":  # called by some of MindSpore's own functions
        with LocalOperations():
            return func(*args, **kwargs)
    if func.name in ASSIGNING and platform.is_grad_enabled():
        # MindSpore does not record them, so that parameters may be written in a forward, or to accumulate gradients.
        with platform.no_grad():
            return call_primitive(platform, func, args, kwargs)
    # These decompose into other primitives, which are intercepted in turn.
    older = older_method(func.name)
    if older is not None:
        return older(*args, **kwargs)
    composed = COMPOSED.get(func.name)
    if composed is not None:
        primitive, given = (args[0], args[2]) if is_older_kind(args) else (None, args)
        if len(kwargs) > 1:
            raise TypeError(f"{func.name} of DTensors takes {', '.join(kwargs)} by position only")
        return composed(platform.operations, (*given, *kwargs.values()), primitive)
    name, (given, named) = canonical(func.name, args, kwargs)
    # Redistributes the source, which no sharding rule does.
    if name == "copy_":
        return copy_values(*given[:2])
    # Indexing has its own conversion of indices, in `__getitem__`.
    if name == "getitem":
        return given[0][given[1]]
    # Only on CPU: Ascend has kernels for what is not composed here.
    if not platform.capabilities.native_operations:
        check_composed(name)
    operation = platform.own_operation(name)
    if operation is not None:
        return operation(*given, **named)
    # Refused: in-place kernels of the CPU compute, but silently store nothing.
    if func.name.startswith("Inplace"):
        raise CapabilityError(
            f"{func.name} on a DTensor: MindSpore's own does not write on CPU; use an operation that returns a new "
            "tensor"
        )
    # Another primitive of the same operation has a kernel.
    kernel = FOUND[name] if func.name in WITHOUT_KERNEL else caller(func, args)
    # Pointwise kernels of MindSpore may crash on empty shards.
    if name in POINTWISE:
        kernel = unless_empty(kernel, name)
    return dispatched(platform, name, unwrapping(kernel), given, named)


ASSIGNING = frozenset({"Assign", "AssignAdd", "AssignSub"})


Function = Callable[[Any, tuple[Any, ...], Any], Any]


def _convolution(run: Any, args: tuple[Any, ...], primitive: Any) -> Tensor:
    """Run `Conv2D` or `Conv3D`, which `mindspore.nn.Conv1d`, `2d` and `3d` call."""
    x, weight = args
    # Attributes of the primitive may have entries for batch and channels first; only the last `count` are spatial.
    count = weight.ndim - 2
    stride, dilation = (tuple(getattr(primitive, name))[-count:] for name in ("stride", "dilation"))
    kernel, groups = tuple(weight.shape[2:]), int(getattr(primitive, "group", getattr(primitive, "groups", 1)))
    x, padding = _explicitly_padded(run, x, primitive, kernel, stride, dilation)
    return getattr(run, f"conv{count}d")(x, weight, None, stride, padding, dilation, groups)


def _explicitly_padded(
    run: Any, x: Tensor, primitive: Any, kernel: Any, stride: Any, dilation: Any, value: float = 0.0
) -> tuple[Any, Any]:
    """Pad the input if its padding is asymmetric, and return it with the padding that remains to be applied."""
    mode = str(primitive.pad_mode).lower()
    if mode in ("valid", "2"):
        return x, (0,) * len(kernel)
    if mode in ("same", "1"):
        options = zip(x.shape[2:], kernel, stride, dilation, strict=True)
        # "same": the result has ceil(size / stride) positions, and an odd total has its extra element behind.
        totals = [max(0, (-(-size // s) - 1) * s + d * (k - 1) + 1 - size) for size, k, s, d in options]
        pairs = [(total // 2, total - total // 2) for total in totals]
    else:
        given = tuple(primitive.pad)
        pairs = [given[2 * i : 2 * i + 2] for i in range(len(kernel))]
    if all(before == after for before, after in pairs):
        return x, tuple(before for before, _ in pairs)
    # `pad` takes pairs from the last dimension backwards.
    flat = tuple(size for pair in reversed(pairs) for size in pair)
    return run.pad(x, flat, value=value), (0,) * len(kernel)


def _padded_max_pool(run: Any, args: tuple[Any, ...], primitive: Any) -> Tensor:
    """Run `MaxPool` of `mindspore.nn.MaxPool2d`: without padding, or padded to keep the size."""
    kernel, stride = tuple(primitive.kernel_size)[-2:], tuple(primitive.strides)[-2:]
    x, padding = _explicitly_padded(run, args[0], primitive, kernel, stride, (1, 1), -math.inf)
    return run.max_pool2d(x, kernel, stride, padding)


def _unpadded_avg_pool(run: Any, args: tuple[Any, ...], primitive: Any) -> Tensor:
    """Run `AvgPool`, of `mindspore.nn.AvgPool2d`, without padding."""
    pool = run.avg_pool2d  # refused on CPU, whatever the padding
    if str(primitive.pad_mode).lower() not in ("valid", "2"):
        raise TypeError(f"avg pooling of DTensors with pad_mode {primitive.pad_mode!r}: use mint.nn.functional")
    kernel, stride = tuple(primitive.kernel_size)[-2:], tuple(primitive.strides)[-2:]
    return pool(args[0], kernel, stride)


def _batch_norm(run: Any, args: tuple[Any, ...], primitive: Any) -> tuple[Any, ...]:
    """Return the result and four times None: MindSpore's callers use only the first result."""
    x, weight, bias, mean, variance, training, *rest = args
    if primitive is None:
        momentum, eps = rest
    else:
        eps, momentum = primitive.epsilon, primitive.momentum
    return run.batch_norm(x, mean, variance, weight, bias, bool(training), momentum, eps), None, None, None, None


def _dropout(name: str) -> Function:
    return lambda run, args, primitive: (getattr(run, name)(args[0], 1.0 - primitive.keep_prob, True), None)


def _adaptive_max_pool(name: str) -> Function:
    return lambda run, args, primitive: getattr(run, name)(args[0], args[1], True)


def _diagonal_matrix(run: Any, args: tuple[Any, ...], primitive: Any) -> Tensor:
    x, offset = args
    return run.diag_embed(x, offset) if x.ndim == 1 else run.diagonal(x, offset, 0, 1)


def _value_and_index(name: str) -> Function:
    def found(run: Any, args: tuple[Any, ...], primitive: Any) -> tuple[Tensor, Tensor]:
        values, positions = getattr(run, name)(*args)
        return positions, values

    return found


def _meshgrid(run: Any, args: tuple[Any, ...], primitive: Any) -> tuple[Tensor, ...]:
    """Expand vectors to grids; with `xy` (1) indexing the first two dimensions are swapped."""
    tensors, indexing = args
    # The primitive gets the indexing as a number, the method as a string.
    swapped = indexing in (1, "xy") and len(tensors) > 1
    order = [1, 0, *range(2, len(tensors))] if swapped else range(len(tensors))
    shape = tuple(tensors[i].shape[0] for i in order)
    positions = list(order)
    return tuple(
        run.expand(run.reshape(x, tuple(-1 if place == i else 1 for place in positions)), shape)
        for i, x in enumerate(tensors)
    )


def _with_channel_bias(run: Any, args: tuple[Any, ...], primitive: Any) -> Tensor:
    """Run `BiasAdd` along dimension 1, or along the last one if channels are last."""
    x, bias = args[:2]
    last = str(args[2] if len(args) > 2 else primitive.data_format) in ("NHWC", "1") or x.ndim == 2
    return run.add(x, bias if last else run.reshape(bias, (-1, *[1] * (x.ndim - 2))))


def _adaptive_avg_pool(run: Any, args: tuple[Any, ...], primitive: Any) -> Tensor:
    """Run an adaptive average pool, whose primitive has -1 for the size of the input."""
    sizes = tuple(None if n == -1 else n for n in primitive.output_size)
    return getattr(run, f"adaptive_avg_pool{len(sizes)}d")(args[0], sizes)


def _norm(name: str) -> Function:
    """Run `LayerNormExt` over a shape, or `GroupNorm` over a number of groups."""

    def normalized(run: Any, args: tuple[Any, ...], primitive: Any) -> tuple[Any, ...]:
        x, over, weight, bias, eps = args
        return getattr(run, name)(x, over, unless_default(weight, 1), unless_default(bias, 0), eps), None, None

    return normalized


def _layer_norm(run: Any, args: tuple[Any, ...], primitive: Any) -> tuple[Any, ...]:
    """Run `LayerNorm`, which normalizes the dimensions from an axis on."""
    x, weight, bias = args[:3]
    axis = primitive.begin_norm_axis % x.ndim
    if axis != primitive.begin_params_axis % x.ndim:
        raise TypeError("LayerNorm of DTensors: begin_norm_axis and begin_params_axis must be the same")
    return run.layer_norm(x, tuple(x.shape[axis:]), weight, bias, primitive.epsilon), None, None


def _rms_norm(run: Any, args: tuple[Any, ...], primitive: Any) -> tuple[Any, ...]:
    x, weight = args[:2]
    eps = args[2] if len(args) > 2 else primitive.epsilon
    return run.rms_norm(x, weight, eps), None


def _nll_loss(run: Any, args: tuple[Any, ...], primitive: Any) -> tuple[Any, ...]:
    (x, target), options = nll_loss(args, {})
    return run.nll_loss(x, target, **options), None


def _embedding_lookup(run: Any, args: tuple[Any, ...], primitive: Any) -> Tensor:
    """Run `EmbeddingLookup`, of `mindspore.nn.EmbeddingLookup`."""
    table, ids, offset = args
    if offset:
        raise TypeError("EmbeddingLookup of DTensors takes no offset")
    return run.embedding(ids, table)


def _max_pool(run: Any, args: tuple[Any, ...], primitive: Any) -> Any:
    """Run `FuncMaxPool2D`, which returns values and indices whatever its last argument is."""
    *given, _ = args
    return run.max_pool2d(*given, True)


def _max_pool_with_indices(run: Any, args: tuple[Any, ...], primitive: Any) -> Any:
    """Run `MaxPoolWithArgmaxV2`, of `mindspore.ops.max_pool2d`."""
    options = [tuple(getattr(primitive, name))[-2:] for name in ("kernel_size", "strides", "pads", "dilation")]
    return run.max_pool2d(args[0], *options, primitive.ceil_mode, True)


def _avg_pool_3d(run: Any, args: tuple[Any, ...], primitive: Any) -> Tensor:
    """Run `AvgPool3D`, also of `mindspore.ops.avg_pool1d` and `2d`, which add dimensions of one element."""
    pads = tuple(primitive.pad_list)
    if primitive.pad_mode == "SAME" or pads[::2] != pads[1::2]:
        raise TypeError("avg_pool of DTensors takes the same padding before and behind")
    kernel, stride = (tuple(getattr(primitive, name))[-3:] for name in ("kernel_size", "strides"))
    options = primitive.ceil_mode, primitive.count_include_pad, primitive.divisor_override or None
    if kernel[0] == args[0].shape[2] == 1 and pads[0] == 0:
        image = run.squeeze(args[0], 2)
        return run.unsqueeze(run.avg_pool2d(image, kernel[1:], stride[1:], pads[2::2], *options), 2)
    return run.avg_pool3d(args[0], kernel, stride, pads[::2], *options)


def _one_hot(run: Any, args: tuple[Any, ...], primitive: Any) -> Tensor:
    """Run `OneHot` with any two values, in a last dimension. Ids outside of the classes get the second value only."""
    ids, classes, on, off = args[:4]
    axis = primitive.axis
    if axis not in (-1, ids.ndim):
        raise TypeError("one_hot of DTensors has its classes in the last dimension")
    # One more class for ids outside, which `one_hot` refuses.
    outside = run.logical_or(run.lt(ids, 0), run.ge(ids, classes))
    every = run.one_hot(run.masked_fill(ids, outside, classes), classes + 1)
    hot = run.cast(run.narrow(every, -1, 0, classes), on.dtype)
    on, off = float(on), float(off)
    return hot if (on, off) == (1.0, 0.0) else run.add(run.mul(hot, on - off), off)


def _median(run: Any, args: tuple[Any, ...], primitive: Any) -> tuple[Any, ...]:
    find = run.nanmedian if primitive.ignore_nan else run.median
    return (find(args[0]), None) if primitive.global_median else find(args[0], primitive.axis, primitive.keep_dims)


def _resize(mode: str) -> Function:
    """Return a function for `ResizeBilinearV2` or `ResizeNearestNeighborV2` of `mindspore.ops.interpolate`."""

    def resize(run: Any, args: tuple[Any, ...], primitive: Any) -> Tensor:
        x, size, align_corners, half_pixel = args
        # Torch has two ways to map positions, MindSpore three.
        known = align_corners != half_pixel if mode != "nearest" else not (align_corners or half_pixel)
        if not known:
            raise TypeError(f"{mode} resizing of DTensors has no align_corners={align_corners} with {half_pixel=}")
        wanted = tuple(int(n) for n in (size.asnumpy() if isinstance(size, Tensor) else size))
        return run.interpolate(x, wanted, mode=mode, align_corners=align_corners or None)

    return resize


def _swiglu(run: Any, args: tuple[Any, ...], primitive: Any) -> Tensor:
    """Run `Swiglu`: SiLU of one half, times the other half."""
    gate, value = run.chunk(args[0], 2, args[1])
    return run.mul(run.silu(gate), value)


def _norm_over_axes(run: Any, args: tuple[Any, ...], primitive: Any) -> Tensor:
    axes = primitive.axis
    return run.norm(args[0], float(primitive.p), axes if isinstance(axes, int) else tuple(axes), primitive.keep_dims)


COMPOSED: dict[str, Function] = {
    "Median": _median,
    "KLDivLoss": lambda run, args, primitive: run.kl_div(*args, reduction=primitive.reduction),
    "ResizeBilinearV2": _resize("bilinear"),
    "ResizeNearestNeighborV2": _resize("nearest"),
    "Swiglu": _swiglu,
    "LpNorm": _norm_over_axes,
    "Unique2": lambda run, args, primitive: run.unique(args[0], True, True, True),
    "AdaptiveAvgPool3D": _adaptive_avg_pool,
    "BiasAdd": _with_channel_bias,
    "LayerNormExt": _norm("layer_norm"),
    "GroupNorm": _norm("group_norm"),
    # MindSpore's callers use only the first of two results.
    "LogSigmoid": lambda run, args, primitive: (run.logsigmoid(args[0]), None),
    "LayerNorm": _layer_norm,
    "RmsNorm": _rms_norm,
    "NLLLoss": _nll_loss,
    "FuncMaxPool2D": _max_pool,
    "MaxPoolWithArgmaxV2": _max_pool_with_indices,
    "AvgPool3D": _avg_pool_3d,
    "OneHot": _one_hot,
    "AdaptiveAvgPool2D": _adaptive_avg_pool,
    "IndexAdd": lambda run, args, primitive: run.index_add(args[0], primitive.axis, *args[1:3]),
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "MaxPool": _padded_max_pool,
    "AvgPool": _unpadded_avg_pool,
    "BatchNorm": _batch_norm,
    "BatchNormExt": _batch_norm,
    "Dropout": _dropout("dropout"),
    "Dropout2D": _dropout("dropout2d"),
    "Dropout3D": _dropout("dropout3d"),
    "AdaptiveMaxPool1D": _adaptive_max_pool("adaptive_max_pool1d"),
    "AdaptiveMaxPool2D": _adaptive_max_pool("adaptive_max_pool2d"),
    "PixelShuffle": lambda run, args, primitive: run.pixel_shuffle(*args),
    "DiagExt": _diagonal_matrix,
    "TraceExt": lambda run, args, primitive: run.sum(run.diagonal(args[0], 0, 0, 1)),
    "Trace": lambda run, args, primitive: run.sum(run.diagonal(args[0], 0, 0, 1)),
    "ArgMaxWithValue": _value_and_index("max"),
    "ArgMinWithValue": _value_and_index("min"),
    "EqualExt": lambda run, args, primitive: run.all(run.eq(*args)),
    "EmbeddingLookup": _embedding_lookup,
    "ExpandAs": lambda run, args, primitive: run.expand(args[0], tuple(args[1].shape)),
    "ViewAs": lambda run, args, primitive: run.reshape(args[0], tuple(args[1].shape)),
    "GeLU": lambda run, args, primitive: run.gelu(args[0], approximate="tanh"),
    "SparseSoftmaxCrossEntropyWithLogits": lambda run, args, primitive: run.cross_entropy(*args),
    "SoftmaxCrossEntropyWithLogits": lambda run, args, primitive: (run.cross_entropy(*args, reduction="none"), None),
    "SigmoidCrossEntropyWithLogits": lambda run, args, primitive: run.binary_cross_entropy_with_logits(
        *args, reduction="none"
    ),
    "Flatten": lambda run, args, primitive: run.flatten(args[0], 1),
    "Meshgrid": _meshgrid,
}
