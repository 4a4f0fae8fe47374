"""Tables from MindSpore's primitives to torch's operations: canonical names, and adapters of arguments.

An adapter is called with (args, kwargs) of the primitive's call, without the primitive, and returns those of the
operation, after which most are named."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from mindspore import Tensor, mint, ops
from mindspore._c_expression import typing
from mindspore.ops import tensor_method

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Adapter = Callable[[tuple[Any, ...], dict[str, Any]], Arguments]


def add_scaled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Convert `add(x, y, alpha=a)` to `add(x, a * y)`."""
    x, y, *rest = args
    alpha = rest[0] if rest else kwargs.get("alpha", 1)
    return (x, y if alpha == 1 else y * alpha), {}


def reduction_over_dims(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    names = ("dim", "keepdim", "dtype")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    if given.pop("dtype", None) is not None:
        raise TypeError("sum and mean of a DTensor take no dtype; cast before")
    return args[:1], given


def reduction_over_axes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    given = dict(zip(("axis", "keep_dims", "skip_mode"), args[1:], strict=False)) | kwargs
    if given.pop("skip_mode", False):
        raise TypeError("a reduction of a DTensor takes no skip_mode")
    # In primitives of the older kind an empty axis means all dimensions.
    axis = given.get("axis")
    return args[:1], {"dim": None if axis in ((), []) else axis, "keepdim": bool(given.get("keep_dims", False))}


def first_two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return args[:2], {}


def embedding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    ids, weight, *settings = args
    padding_idx, max_norm, _, scale_grad_by_freq = (*settings, *(None, None, 2.0, False)[len(settings) :])
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq:
        raise TypeError("embedding of a DTensor takes no padding_idx, max_norm or scale_grad_by_freq; mask its result")
    return (ids, weight), {}


def cumulative(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, dim, *exclusive_or_reverse = args
    if any(exclusive_or_reverse):
        raise TypeError("a cumulative operation on a DTensor is neither exclusive nor reverse; flip its input instead")
    return (x, dim), {}


def matmul(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, y, *transposed = args
    x, y = (t.transpose(-2, -1) if flag else t for t, flag in zip((x, y), (*transposed, False, False), strict=False))
    return (x, y), {}


def gather(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Convert `Gather`, which selects slices by a vector of indices, to torch's `index_select`."""
    x, index, dim, *batch_dims = args
    if any(batch_dims):
        raise TypeError("gather of a DTensor takes no batch_dims; use gather_elements")
    return (x, dim, index), {}


def split_by_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, chunk, dim = args if len(args) == 3 else (*args, kwargs.get("dim", 0))
    size = x.shape[dim]
    # The rule of `split` has lengths; the primitive has the length of all chunks but the last.
    return (x, [min(chunk, size - start) for start in range(0, size, chunk)], dim), {}


def topk(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return (args[0], args[1], -1), {}


def shape_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Convert `x.reshape(2, 3)` and `x.reshape(shape=(2, 3))` to `reshape(x, (2, 3))`."""
    x, *given = (*args, *kwargs.values())
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        (given,) = given
    return (x, tuple(given)), {}


def permute(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Pass the given order of dimensions, or the reverse of all if none is given."""
    (x, dims), _ = shape_arguments(args, kwargs)
    return (x, dims or tuple(reversed(range(x.ndim)))), {}


def squeeze(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, dim = (*args, *kwargs.values(), ())[:2]
    if dim in ((), [], None):
        # Without dimensions MindSpore squeezes all of one element; the rule takes them by number.
        dim = tuple(i for i, size in enumerate(x.shape) if size == 1)
    return (x, dim if isinstance(dim, int) else tuple(dim)), {}


def over_all_dims(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return args[:1], {"dim": tuple(range(args[0].ndim))}


def cumulative_by_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Adapt as `cumulative` does, for a primitive whose axis is a tensor."""
    x, dim, *exclusive_or_reverse = args
    return cumulative((x, int(dim.asnumpy()), *exclusive_or_reverse), kwargs)


def reduce_std(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, dims, unbiased, keepdim = args
    return (x, tuple(dims) or None, unbiased, keepdim), {}


def pad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, pads, value, mode, contiguous = args
    if not contiguous:
        raise TypeError("PadV3 of a DTensor takes paddings_contiguous=True: before and after, dimension by dimension")
    # The amounts may be a tensor on the host.
    given = (x, tuple(int(n) for n in pads))
    if mode == "constant":
        return given, {"value": float(value.asnumpy())}
    return given, {"mode": "replicate" if mode == "edge" else mode}


def searchsorted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    boundaries, x, sorter, _, right = args
    if sorter is not None:
        raise TypeError("searchsorted of DTensors takes no sorter")
    return (boundaries, x), {"right": right}


def slice_(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, begin, size = args
    # Slicing becomes indexing, whose rule knows slices of sharded dimensions.
    return (x, tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))), {}


def strided_slice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, begin, end, strides, *masks = args
    if any(masks):
        raise TypeError("StridedSlice with masks on a DTensor: index it with [ ] instead")
    return (x, tuple(slice(*item) for item in zip(begin, end, strides, strict=True))), {}


def split_by_count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, dim, count = args
    return (x, [x.shape[dim] // count] * count, dim), {}


_REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}


def loss(*names: str) -> Adapter:
    """Adapt `loss(input, target, *names, reduction)`, where the reduction is a number."""

    def adapt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        x, target, *values, reduction = args
        given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        return (x, target), {"reduction": _REDUCTIONS[reduction], **given}

    return adapt


def nll_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, target, weight, reduction, ignore_index = args
    # MindSpore passes a tensor of ones where the caller gave no weight.
    weight = unless_default(weight, 1)
    options = {"reduction": _REDUCTIONS[reduction], "ignore_index": ignore_index}
    return (x, target), options if weight is None else {"weight": weight, **options}


def unless_default(x: Any, value: float) -> Any:
    """Return None for the constant tensor that MindSpore makes for an omitted argument."""
    made = type(x) is Tensor and not x._requires_grad and bool((x.asnumpy() == value).all())
    return None if made else x


def first_arguments(count: int) -> Adapter:
    """Return an adapter that passes only the first arguments; those after it are seeds, or have fixed values."""
    return lambda args, kwargs: (args[:count], {})


def random_like(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Drop seed and offset, which belong to MindSpore's own generator."""
    x, _, _, wanted, *_ = args
    return (x,), {} if wanted is None else {"dtype": dtype_of(wanted)}


def with_dtype(*names: str) -> Adapter:
    """Name the arguments after the tensor; the last one is a dtype, omitted if None."""

    def adapt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        given = dict(zip(names, args[1:], strict=False)) | kwargs
        wanted = given.pop(names[-1], None)
        return args[:1], given if wanted is None else given | {"dtype": dtype_of(wanted)}

    return adapt


def dtype_of(value: Any) -> Any:
    """Return the dtype that a primitive gets as a number."""
    return typing.type_id_to_type(value) if isinstance(value, int) else value


def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return (args[0], dtype_of(args[1])), {}


def sort(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return args[:1], dict(zip(("dim", "descending", "stable"), args[1:], strict=False)) | kwargs


def softmax(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Unpack a list of one dimension."""
    x, dim = args
    if isinstance(dim, (list, tuple)):
        (dim, *others) = dim
        if others:
            raise TypeError("softmax of a DTensor goes along one dimension")
    return (x, dim), {}


def bincount(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    given = dict(zip(("weights", "minlength"), args[1:], strict=False)) | kwargs
    if given.get("weights") is not None:
        raise TypeError("bincount of DTensors takes no weights")
    return args[:1], {"minlength": given.get("minlength", 0)}


def one_hot(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, classes, on, off, axis = args
    # `on` and `off` are 0-d tensors.
    if (float(on), float(off), axis) != (1.0, 0.0, -1):
        raise TypeError("one_hot of DTensors gives ones and zeros in a last dimension")
    return (x, classes), {}


def constant_pad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, pads, *value = args
    return (x, tuple(pads)), {"value": float(value[0]) if value else 0.0}


def addmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Adapt `addmm` and the like: pass `beta` and `alpha` by name if they are not 1."""
    given = dict(zip(("beta", "alpha"), args[3:], strict=False)) | kwargs
    # Left out if 1, so that calls with and without them share a cached plan.
    return args[:3], {name: value for name, value in given.items() if value != 1}


def division(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Convert the rounding mode of a division to torch's name."""
    mode = args[2] if len(args) > 2 else kwargs.get("rounding_mode")
    # Primitives get the mode as a number, methods as a string.
    known = {None: None, 0: None, 1: "trunc", 2: "floor", "trunc": "trunc", "floor": "floor"}[mode]
    return args[:2], {} if known is None else {"rounding_mode": known}


def upsample(mode: str) -> Adapter:
    def adapt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        x, size, scales, *align_corners = args
        corners = {"align_corners": align_corners[0]} if align_corners else {}
        return (x,), {"size": size, "scale_factor": scales, "mode": mode, **corners}

    return adapt


def std_or_var(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    given = dict(zip(("dim", "correction", "keepdim"), args[1:], strict=False)) | kwargs
    return (args[0], given.get("dim")), {
        "keepdim": given.get("keepdim", False),
        "correction": given.get("correction", 1),
    }


def kl_div(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, target, reduction, *log_target = args
    return (x, target), {"reduction": _REDUCTIONS[reduction], "log_target": bool(log_target and log_target[0])}


def index_put(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, *both = args[:3]
    # The two come in either order; the indices are the tuple.
    indices, values = both if isinstance(both[0], (tuple, list)) else both[::-1]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    return (x, tuple(indices), values), {"accumulate": bool(accumulate)}


def index_add(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    given = dict(zip(("dim", "index", "source", "alpha"), args[1:], strict=False)) | kwargs
    alpha = given.pop("alpha", 1)
    return args[:1], given if alpha == 1 else {**given, "alpha": alpha}


def scatter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Convert the reduction from a number, and pass a source that is a number as `value`."""
    # Methods pass any of them by name.
    given = dict(zip(("dim", "index", "src", "reduce"), args[1:], strict=False)) | kwargs
    src, reduce = given.get("src", given.get("value")), given.get("reduce", 0)
    how = {} if reduce in (0, "none") else {"reduce": {1: "add", 2: "multiply"}.get(reduce, reduce)}
    if isinstance(src, Tensor):
        return (args[0], given["dim"], given["index"], src), how
    return (args[0], given["dim"], given["index"]), {"value": src, **how}


def cross_entropy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, target, weight, reduction, ignore_index, smoothing, *_ = args
    options = {"reduction": _REDUCTIONS[reduction], "ignore_index": ignore_index, "label_smoothing": smoothing}
    return (x, target), options if weight is None else {"weight": weight, **options}


def copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return (*args, kwargs["src"])[:2] if "src" in kwargs else args[:2], {}


def all_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return args, kwargs


_LOWER_CASE = """
    ACos Abs Acosh Add Addcdiv Addcmul Asin Asinh Atan Atanh Cdist CeLU Ceil Clone Cos Cosh Cummax Diagonal
    Digamma Dot Erf Erfc Erfinv Exp Expm1 Floor Fmax Fmin GLU Hardtanh Heaviside Hypot IsClose IsFinite IsInf
    IsNan Kthvalue Lerp Lgamma Log Log10 Log1p Log2 LogAddExp LogAddExp2 LogSumExp Logit Maximum Minimum Mm Mv
    Nansum Neg NextAfter NonZero PReLU ReLU ReLU6 Repeat Roll Round Rsqrt Scatter SiLU Sigmoid Sign Sin Sinc
    Sinh SoftShrink Softsign Sqrt Square Sub Tan Tanh Threshold Tile Triu Trunc Xlogy
"""
"""Primitives whose canonical name is theirs in lower case."""

_PRIMITIVES: dict[str, str] = {
    "adaptive_avg_pool1d": "AdaptiveAvgPool1D",
    "adaptive_avg_pool2d": "AdaptiveAvgPool2DExt",
    "adaptive_avg_pool3d": "AdaptiveAvgPool3DExt",
    "all": "DeprecatedReduceAll",
    "amax": "ReduceMax",
    "amin": "ReduceMin",
    "any": "Any AnyExt",
    "argmax": "ArgMaxExt",
    "argmin": "ArgMinExt",
    "atan2": "Atan2 Atan2Ext",
    "avg_pool1d": "AvgPool1D",
    "avg_pool2d": "AvgPool2D",
    "avg_pool3d": "AvgPool3DExt",
    "bitwise_and": "BitwiseAndTensor BitwiseAndScalar BitwiseAnd",
    "bitwise_left_shift": "LeftShift",
    "bitwise_not": "BitwiseNot",
    "bitwise_or": "BitwiseOrTensor BitwiseOr BitwiseOrScalar",
    "bitwise_right_shift": "RightShift",
    "bitwise_xor": "BitwiseXor BitwiseXorTensor BitwiseXorScalar",
    "bmm": "BatchMatMulExt",
    "cast": "ToDtype",
    "cat": "Concat",
    "chunk": "Chunk ChunkView",
    "clamp": "ClampScalar ClampTensor",
    "conv1d": "Conv1DExt Conv1DPadding",
    "conv2d": "Conv2DExt Conv2DPadding",
    "conv3d": "Conv3DExt Conv3DPadding",
    "conv_transpose2d": "ConvTranspose2D",
    "copy_": "InplaceCopy",
    "count_nonzero": "CountNonZero",
    "cummin": "Cummin CumminExt",
    "detach": "StopGradient",
    "div": "Div RealDiv Divs",
    "elu": "Elu EluExt",
    "empty_like": "EmptyLike",
    "eq": "Equal EqScalar",
    "flatten": "FlattenExt",
    "flip": "ReverseV2",
    "floor_divide": "FloorDiv FloorDivScalar",
    "fmod": "Mod FmodTensor FmodScalar",
    "gather": "GatherD",
    "ge": "GreaterEqual GreaterEqualScalar",
    "gelu": "GeluExt",
    "gt": "Greater GreaterScalar",
    "hardshrink": "HShrink",
    "hardsigmoid": "HSigmoid",
    "hardswish": "HSwish",
    "i0": "BesselI0",
    "im2col": "Im2ColExt",
    "index_fill": "IndexFill IndexFillScalar IndexFillTensor",
    "index_select": "IndexSelect",
    "le": "LessEqual LessEqualScalar",
    "leaky_relu": "LeakyReLUExt",
    "linear": "Dense",
    "log_softmax": "LogSoftmax",
    "logical_and": "LogicalAnd",
    "logical_not": "LogicalNot",
    "logical_or": "LogicalOr",
    "logical_xor": "LogicalXor",
    "lt": "Less LessScalar",
    "masked_fill": "MaskedFillScalar MaskedFill",
    "masked_select": "MaskedSelect",
    "matmul": "MatMulExt",
    "max": "MaxDim",
    "median": "MedianExt MedianDim",
    "min": "MinDim",
    "mish": "Mish MishExt",
    "mul": "Mul Muls",
    "nan_to_num": "NanToNum",
    "narrow": "NarrowView Narrow",
    "ne": "NotEqual NeScalar",
    "new_empty": "NewEmpty",
    "new_ones": "NewOnes",
    "new_zeros": "NewZeros",
    "ones_like": "OnesLike",
    "outer": "Ger Outer",
    "pow": "Pow PowTensorScalar PowScalarTensor",
    "quantile": "Quantile",
    "reciprocal": "Reciprocal Inv",
    "remainder": "RemainderTensorScalar RemainderTensorTensor RemainderScalarTensor",
    "repeat_interleave": "RepeatInterleaveInt",
    "scatter_add": "ScatterAddExt",
    "select": "SelectExtView SelectView",
    "selu": "SeLU SeLUExt",
    "softplus": "Softplus SoftplusExt",
    "split": "SplitWithSize SplitWithSizeView",
    "t": "TExt",
    "topk": "TopkExt",
    "transpose": "TransposeExtView",
    "tril": "TrilExt",
    "unbind": "UnstackExtView",
    "unique_consecutive": "UniqueConsecutive",
    "unsqueeze": "ExpandDims ExpandDimsView",
    "where": "Select",
    "zeros_like": "ZerosLike",
}
"""By canonical name, the primitives that are the operation under other names."""

SAME_ARGUMENTS: dict[str, str] = {name: name.lower() for name in _LOWER_CASE.split()} | {
    primitive: name for name, primitives in _PRIMITIVES.items() for primitive in primitives.split()
}
"""By primitive, the canonical name of the operation that takes the same arguments in the same order."""

ADAPTED: dict[str, tuple[str, Adapter]] = {
    **dict.fromkeys(("AddExt", "AddScalar"), ("add", add_scaled)),
    **dict.fromkeys(("SubExt", "SubScalar"), ("sub", add_scaled)),
    "SumExt": ("sum", reduction_over_dims),
    "MeanExt": ("mean", reduction_over_dims),
    "ReduceSum": ("sum", reduction_over_axes),
    "ReduceMean": ("mean", reduction_over_axes),
    "ProdExt": ("prod", with_dtype("dim", "keepdim", "dtype")),
    "ReduceProd": ("prod", reduction_over_axes),
    "ReduceAll": ("all", reduction_over_axes),
    **dict.fromkeys(("ReduceAny", "DeprecatedReduceAny"), ("any", reduction_over_axes)),
    "Softmax": ("softmax", softmax),
    "Max": ("amax", over_all_dims),
    "Min": ("amin", over_all_dims),
    "MatMul": ("matmul", matmul),
    "BatchMatMul": ("matmul", matmul),
    "Argmax": ("argmax", first_two),
    "CumSum": ("cumsum", cumulative),
    "Gather": ("index_select", gather),
    "Embedding": ("embedding", embedding),
    "SplitTensor": ("split", split_by_size),
    "SplitTensorView": ("split", split_by_size),
    "TopK": ("topk", topk),
    "Reshape": ("reshape", shape_arguments),
    "View": ("reshape", shape_arguments),
    "BroadcastTo": ("expand", shape_arguments),
    "BroadcastToView": ("expand", shape_arguments),
    "Transpose": ("permute", permute),
    "TransposeView": ("permute", permute),
    "DeprecatedTranspose": ("permute", permute),
    "Squeeze": ("squeeze", squeeze),
    "Argmin": ("argmin", first_two),
    "CumProd": ("cumprod", cumulative),
    "CumulativeLogsumexp": ("logcumsumexp", cumulative_by_tensor),
    "ReduceStd": ("std_mean", reduce_std),
    "PadV3": ("pad", pad),
    "SearchSorted": ("searchsorted", searchsorted),
    "Slice": ("getitem", slice_),
    "StridedSlice": ("getitem", strided_slice),
    "Split": ("split", split_by_count),
    "SmoothL1Loss": ("smooth_l1_loss", loss("beta")),
    "BinaryCrossEntropy": ("binary_cross_entropy", loss("weight")),
    "BCEWithLogitsLoss": ("binary_cross_entropy_with_logits", loss("weight", "pos_weight")),
    "StackExt": ("stack", first_two),
    "Stack": ("stack", first_two),
    "Unstack": ("unbind", first_two),
    "Sort": ("sort", all_arguments),
    "IndexAddExt": ("index_add", index_add),
    "IndexPut": ("index_put", index_put),
    "LinalgVectorNorm": ("linalg_vector_norm", with_dtype("p", "dim", "keepdim", "dtype")),
    "Norm": ("norm", with_dtype("p", "dim", "keepdim", "dtype")),
    "LogSoftmaxExt": ("log_softmax", with_dtype("dim", "dtype")),
    "CumsumExt": ("cumsum", with_dtype("dim", "dtype")),
    "FullLike": ("full_like", with_dtype("fill_value", "dtype")),
    "NewFull": ("new_full", with_dtype("size", "fill_value", "dtype")),
    "Cast": ("cast", cast),
    "SortExt": ("sort", sort),
    "ArgSort": ("argsort", sort),
    "BincountExt": ("bincount", bincount),
    "OneHotExt": ("one_hot", one_hot),
    "ConstantPadND": ("pad", constant_pad),
    "Tril": ("tril", all_arguments),
    **{name: (name.lower(), addmm) for name in ("Addmm", "Addmv", "Addbmm", "Baddbmm")},
    "DivMod": ("div", division),
    "DivMods": ("div", division),
    "Scatter": ("scatter", scatter),
    "ScatterValue": ("scatter", scatter),
    "KLDiv": ("kl_div", kl_div),
    "SoftMarginLoss": ("soft_margin_loss", loss()),
    "L1LossExt": ("l1_loss", loss()),
    "MSELossExt": ("mse_loss", loss()),
    "HuberLoss": ("huber_loss", loss()),
    "CrossEntropyLoss": ("cross_entropy", cross_entropy),
    "Std": ("std", std_or_var),
    "Var": ("var", std_or_var),
    "StdMean": ("std_mean", std_or_var),
    "VarMean": ("var_mean", std_or_var),
    "FuncDropoutExt": ("dropout", first_arguments(3)),
    "Dropout1dExt": ("dropout1d", first_arguments(3)),
    "Dropout2dExt": ("dropout2d", first_arguments(3)),
    "Dropout3dExt": ("dropout3d", first_arguments(3)),
    "RandLikeExt": ("rand_like", random_like),
    "RandnLike": ("randn_like", random_like),
    "ZerosLikeExt": ("zeros_like", with_dtype("dtype")),
    "OnesLikeExt": ("ones_like", with_dtype("dtype")),
    "BernoulliExt": ("bernoulli", first_arguments(1)),
    "MultinomialExt": ("multinomial", first_arguments(3)),
    **{f"UpsampleNearest{n}D": ("interpolate", upsample("nearest")) for n in (1, 2, 3)},
    "UpsampleLinear1D": ("interpolate", upsample("linear")),
    "UpsampleBilinear2D": ("interpolate", upsample("bilinear")),
    "UpsampleTrilinear3D": ("interpolate", upsample("trilinear")),
    "UpsampleBicubic2D": ("interpolate", upsample("bicubic")),
}

WRITING: dict[str, tuple[str, Adapter]] = {
    "InplaceCopy": ("copy_", copied),
    "Assign": ("copy_", first_two),
    "AssignAdd": ("add_", first_two),
    "AssignSub": ("sub_", first_two),
    "InplaceFillScalar": ("fill_", all_arguments),
    "InplaceFillTensor": ("fill_", all_arguments),
    "InplaceFloorDivide": ("floor_divide_", all_arguments),
    "InplaceZero": ("zero_", all_arguments),
    "InplaceMaskedFillTensor": ("masked_fill_", all_arguments),
    "InplaceAddsExt": ("add_", add_scaled),
    "InplaceSubScalar": ("sub_", add_scaled),
    "InplaceFloorDivides": ("floor_divide_", all_arguments),
    "InplaceReLU": ("relu_", all_arguments),
    "InplaceScatterSrc": ("scatter_", scatter),
    "InplaceScatterValue": ("scatter_", scatter),
    "InplaceScatterSrcReduce": ("scatter_", scatter),
    "InplaceScatterValueReduce": ("scatter_", scatter),
    "InplaceScatterAdd": ("scatter_add_", all_arguments),
    "InplaceIndexCopy": ("index_copy_", all_arguments),
    "InplaceUniform": ("uniform_", first_arguments(3)),
    "InplaceNormal": ("normal_", first_arguments(3)),
    "InplaceExponential": ("exponential_", first_arguments(2)),
    "InplaceBernoulliScalar": ("bernoulli_", first_arguments(2)),
    "InplaceBernoulliTensor": ("bernoulli_", first_arguments(2)),
    "InplaceRandom": ("random_", first_arguments(3)),
}
"""In-place primitives whose name is not `Inplace` plus that of the out-of-place primitive."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "Unstack": ("axis",),
    "Sort": ("axis", "descending"),
    "Stack": ("axis",),
    "Tril": ("diagonal",),
    "IndexPut": ("accumulate",),
    "CumulativeLogsumexp": ("exclusive", "reverse"),
    "PadV3": ("mode", "paddings_contiguous"),
}
"""Attributes of primitives of the older kind that become arguments, after the tensors."""


SECOND_OPERAND = frozenset({"other", "exponent", "mat2", "tensor2"})
"""Names of the second operand in MindSpore's binary methods."""

WITHOUT_KERNEL = frozenset(
    """
    EluExt MishExt SoftplusExt Hardtanh Log2 Log10 IsNan BitwiseAnd
    BitwiseAndScalar BitwiseOrTensor BitwiseOrScalar BitwiseXorTensor BitwiseXorScalar RemainderScalarTensor Atan2Ext
    """.split()
)
"""Primitives without a CPU kernel, of operations that another primitive can compute."""


def primitives_of(name: str) -> list[str]:
    """Return the primitives that an operation stands for, as MindSpore's messages and profiles name them."""
    same = [primitive for primitive, known in SAME_ARGUMENTS.items() if known == name]
    adapted = [primitive for primitive, (known, _) in (ADAPTED | WRITING).items() if known == name]
    return sorted({*same, *adapted})


def canonical(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[str, Arguments]:
    """Return torch's name and arguments of a primitive's call; an unknown primitive keeps its own."""
    given, named = tuple(args), dict(kwargs or {})
    if is_older_kind(args):
        given = (*args[2], *(getattr(args[0], attribute) for attribute in ATTRIBUTES.get(name, ())))
    # Methods pass the second operand by name; operations have it by position.
    if len(given) == 1 and (second := SECOND_OPERAND & named.keys()):
        given = (*given, *(named.pop(key) for key in second))
    if name in WRITING:
        known, adapt = WRITING[name]
        return known, adapt(given, named)
    # The name of most in-place primitives is `Inplace` plus that of the out-of-place one.
    if name.startswith("Inplace"):
        known, arguments = canonical(name.removeprefix("Inplace"), given, named)
        return f"{known}_", arguments
    if name in ADAPTED:
        known, adapt = ADAPTED[name]
        return known, adapt(given, named)
    return SAME_ARGUMENTS.get(name, name), (given, named)


@functools.cache
def older_method(name: str) -> Callable[..., Any] | None:
    """Return MindSpore's function for the older signature of a method (`x.mean(axis=1)`), which calls other primitives.

    Returns:
        None if `name` is not such a method, or one that `ADAPTED` has.
    """
    # `DeprecatedMean` -> `deprecated_mean`, whose function is `deprecated_tensor_mean`.
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    if name in ADAPTED or not words.startswith("deprecated_"):
        return None
    return getattr(tensor_method, words.replace("deprecated_", "deprecated_tensor_", 1), None)


def caller(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """Return `func` callable with the arguments that `canonical` returns, for an operation with the same arguments."""
    if not is_older_kind(args):
        return func
    primitive, name, _ = args
    return lambda *given: func(primitive, name, given)


def is_older_kind(args: tuple[Any, ...]) -> bool:
    """Return True for the arguments of a primitive of the older kind: (primitive, name, arguments)."""
    return len(args) == 3 and isinstance(args[1], str)


NOT_ON_DTENSORS = frozenset(
    """
    mint.einsum ops.bernoulli ops.multinomial ops.scatter_add ops.bincount ops.count_nonzero ops.threshold
    ops.diag_embed ops.unique ops.max_pool3d ops.adaptive_max_pool3d
    """.split()
)
"""Functions with an operation's name that refuse DTensors, mean something else, or return plain tensors."""


def names_of(name: str, function: Callable[..., Any]) -> list[str]:
    """Return the paths under which users find an operation: those of its function, else all that have its name."""
    places = (("mint", mint), ("mint.nn.functional", mint.nn.functional), ("ops", ops), ("Tensor", Tensor))
    having = [
        (f"mindspore.{path}.{name}", getattr(owner, name))
        for path, owner in places
        if hasattr(owner, name) and f"{path}.{name}" not in NOT_ON_DTENSORS
    ]
    # If one of the functions is the operation itself, the others only share its name.
    return [path for path, found in having if found is function] or [path for path, _ in having]
