"""Tables from MindSpore's primitives to torch's operations: canonical names, and adapters of arguments."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from mindspore import Tensor, mint, ops
from mindspore.ops import tensor_method

from hp_platform_mindspore.ops import argument_adapters as adapters
from hp_platform_mindspore.ops.argument_adapters import Adapter, Arguments

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
    "index_fill": "IndexFillScalar IndexFillTensor",
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
    **dict.fromkeys(("AddExt", "AddScalar"), ("add", adapters.add_scaled)),
    **dict.fromkeys(("SubExt", "SubScalar"), ("sub", adapters.add_scaled)),
    "SumExt": ("sum", adapters.reduction_over_dims),
    "MeanExt": ("mean", adapters.reduction_over_dims),
    "ReduceSum": ("sum", adapters.reduction_over_axes),
    "ReduceMean": ("mean", adapters.reduction_over_axes),
    "ProdExt": ("prod", adapters.with_dtype("dim", "keepdim", "dtype")),
    "ReduceProd": ("prod", adapters.reduction_over_axes),
    "ReduceAll": ("all", adapters.reduction_over_axes),
    **dict.fromkeys(("ReduceAny", "DeprecatedReduceAny"), ("any", adapters.reduction_over_axes)),
    "Softmax": ("softmax", adapters.softmax),
    "Max": ("amax", adapters.over_all_dims),
    "Min": ("amin", adapters.over_all_dims),
    "MatMul": ("matmul", adapters.matmul),
    "BatchMatMul": ("matmul", adapters.matmul),
    "Argmax": ("argmax", adapters.first_two),
    "CumSum": ("cumsum", adapters.cumulative),
    "Gather": ("index_select", adapters.gather),
    "Embedding": ("embedding", adapters.embedding),
    "SplitTensor": ("split", adapters.split_by_size),
    "SplitTensorView": ("split", adapters.split_by_size),
    "TopK": ("topk", adapters.topk),
    "Reshape": ("reshape", adapters.shape_arguments),
    "View": ("reshape", adapters.shape_arguments),
    "BroadcastTo": ("expand", adapters.shape_arguments),
    "BroadcastToView": ("expand", adapters.shape_arguments),
    "Transpose": ("permute", adapters.permute),
    "TransposeView": ("permute", adapters.permute),
    "DeprecatedTranspose": ("permute", adapters.permute),
    "Squeeze": ("squeeze", adapters.squeeze),
    "Argmin": ("argmin", adapters.first_two),
    "CumProd": ("cumprod", adapters.cumulative),
    "CumulativeLogsumexp": ("logcumsumexp", adapters.cumulative_by_tensor),
    "ReduceStd": ("std_mean", adapters.reduce_std),
    "PadV3": ("pad", adapters.pad),
    "SearchSorted": ("searchsorted", adapters.searchsorted),
    "Slice": ("getitem", adapters.slice_),
    "StridedSlice": ("getitem", adapters.strided_slice),
    "Split": ("split", adapters.split_by_count),
    "SmoothL1Loss": ("smooth_l1_loss", adapters.loss("beta")),
    "BinaryCrossEntropy": ("binary_cross_entropy", adapters.loss("weight")),
    "BCEWithLogitsLoss": ("binary_cross_entropy_with_logits", adapters.loss("weight", "pos_weight")),
    "StackExt": ("stack", adapters.first_two),
    "Stack": ("stack", adapters.first_two),
    "Unstack": ("unbind", adapters.first_two),
    "Sort": ("sort", adapters.all_arguments),
    "IndexAddExt": ("index_add", adapters.index_add),
    "IndexPut": ("index_put", adapters.index_put),
    "LinalgVectorNorm": ("linalg_vector_norm", adapters.with_dtype("p", "dim", "keepdim", "dtype")),
    "Norm": ("norm", adapters.with_dtype("p", "dim", "keepdim", "dtype")),
    "LogSoftmaxExt": ("log_softmax", adapters.with_dtype("dim", "dtype")),
    "CumsumExt": ("cumsum", adapters.with_dtype("dim", "dtype")),
    "FullLike": ("full_like", adapters.with_dtype("fill_value", "dtype")),
    "NewFull": ("new_full", adapters.with_dtype("size", "fill_value", "dtype")),
    "Cast": ("cast", adapters.cast),
    "SortExt": ("sort", adapters.sort),
    "ArgSort": ("argsort", adapters.sort),
    "BincountExt": ("bincount", adapters.bincount),
    "OneHotExt": ("one_hot", adapters.one_hot),
    "ConstantPadND": ("pad", adapters.constant_pad),
    "Tril": ("tril", adapters.all_arguments),
    **{name: (name.lower(), adapters.addmm) for name in ("Addmm", "Addmv", "Addbmm", "Baddbmm")},
    "DivMod": ("div", adapters.divmod_),
    "DivMods": ("div", adapters.divmod_),
    "Scatter": ("scatter", adapters.scatter),
    "ScatterValue": ("scatter", adapters.scatter),
    "KLDiv": ("kl_div", adapters.kl_div),
    "SoftMarginLoss": ("soft_margin_loss", adapters.loss()),
    "L1LossExt": ("l1_loss", adapters.loss()),
    "MSELossExt": ("mse_loss", adapters.loss()),
    "HuberLoss": ("huber_loss", adapters.loss()),
    "CrossEntropyLoss": ("cross_entropy", adapters.cross_entropy),
    "Std": ("std", adapters.std_or_var),
    "Var": ("var", adapters.std_or_var),
    "StdMean": ("std_mean", adapters.std_or_var),
    "VarMean": ("var_mean", adapters.std_or_var),
    "FuncDropoutExt": ("dropout", adapters.first_arguments(3)),
    "Dropout1dExt": ("dropout1d", adapters.first_arguments(3)),
    "Dropout2dExt": ("dropout2d", adapters.first_arguments(3)),
    "Dropout3dExt": ("dropout3d", adapters.first_arguments(3)),
    "RandLikeExt": ("rand_like", adapters.random_like),
    "RandnLike": ("randn_like", adapters.random_like),
    "ZerosLikeExt": ("zeros_like", adapters.with_dtype("dtype")),
    "OnesLikeExt": ("ones_like", adapters.with_dtype("dtype")),
    "BernoulliExt": ("bernoulli", adapters.first_arguments(1)),
    "MultinomialExt": ("multinomial", adapters.first_arguments(3)),
    **{f"UpsampleNearest{n}D": ("interpolate", adapters.upsample("nearest")) for n in (1, 2, 3)},
    "UpsampleLinear1D": ("interpolate", adapters.upsample("linear")),
    "UpsampleBilinear2D": ("interpolate", adapters.upsample("bilinear")),
    "UpsampleTrilinear3D": ("interpolate", adapters.upsample("trilinear")),
    "UpsampleBicubic2D": ("interpolate", adapters.upsample("bicubic")),
}

WRITING: dict[str, tuple[str, Adapter]] = {
    "InplaceCopy": ("copy_", adapters.all_arguments),
    "Assign": ("copy_", adapters.first_two),
    "AssignAdd": ("add_", adapters.first_two),
    "AssignSub": ("sub_", adapters.first_two),
    "InplaceFillScalar": ("fill_", adapters.all_arguments),
    "InplaceFillTensor": ("fill_", adapters.all_arguments),
    "InplaceFloorDivide": ("floor_divide_", adapters.all_arguments),
    "InplaceZero": ("zero_", adapters.all_arguments),
    "InplaceMaskedFillTensor": ("masked_fill_", adapters.all_arguments),
    "InplaceAddsExt": ("add_", adapters.add_scaled),
    "InplaceSubScalar": ("sub_", adapters.add_scaled),
    "InplaceFloorDivides": ("floor_divide_", adapters.all_arguments),
    "InplaceReLU": ("relu_", adapters.all_arguments),
    "InplaceScatterSrc": ("scatter_", adapters.scatter),
    "InplaceScatterValue": ("scatter_", adapters.scatter),
    "InplaceScatterSrcReduce": ("scatter_", adapters.scatter),
    "InplaceScatterValueReduce": ("scatter_", adapters.scatter),
    "InplaceScatterAdd": ("scatter_add_", adapters.all_arguments),
    "InplaceIndexCopy": ("index_copy_", adapters.all_arguments),
    "InplaceUniform": ("uniform_", adapters.first_arguments(3)),
    "InplaceNormal": ("normal_", adapters.first_arguments(3)),
    "InplaceExponential": ("exponential_", adapters.first_arguments(2)),
    "InplaceBernoulliScalar": ("bernoulli_", adapters.first_arguments(2)),
    "InplaceBernoulliTensor": ("bernoulli_", adapters.first_arguments(2)),
    "InplaceRandom": ("random_", adapters.first_arguments(3)),
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
