"""MindSpore's primitives in terms of torch's operations: the names, and what adapts their arguments."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from mindspore.ops import tensor_method

from hp_platform_mindspore.ops import argument_adapters as adapters
from hp_platform_mindspore.ops.argument_adapters import Adapter, Arguments

SAME_ARGUMENTS: dict[str, str] = {
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Muls": "mul",
    "Div": "div",
    "RealDiv": "div",
    "Divs": "div",
    "Pow": "pow",
    "PowTensorScalar": "pow",
    "PowScalarTensor": "pow",
    "FloorDiv": "floor_divide",
    "RemainderTensorScalar": "remainder",
    "RemainderTensorTensor": "remainder",
    "Neg": "neg",
    "Abs": "abs",
    "Exp": "exp",
    "Log": "log",
    "Sqrt": "sqrt",
    "Rsqrt": "rsqrt",
    "Reciprocal": "reciprocal",
    "Inv": "reciprocal",
    "Sin": "sin",
    "Cos": "cos",
    "Tanh": "tanh",
    "Erf": "erf",
    "Sigmoid": "sigmoid",
    "ReLU": "relu",
    "SiLU": "silu",
    "IsFinite": "isfinite",
    "Square": "square",
    "ClampScalar": "clamp",
    "ClampTensor": "clamp",
    "Maximum": "maximum",
    "Minimum": "minimum",
    "Equal": "eq",
    "NotEqual": "ne",
    "Less": "lt",
    "LessEqual": "le",
    "Greater": "gt",
    "GreaterEqual": "ge",
    "LogicalAnd": "logical_and",
    "LogicalOr": "logical_or",
    "LogicalNot": "logical_not",
    "BitwiseAndTensor": "bitwise_and",
    "BitwiseOrTensor": "bitwise_or",
    "Select": "where",
    "MaskedFillScalar": "masked_fill",
    "MaskedFill": "masked_fill",
    "ToDtype": "cast",
    "Clone": "clone",
    "ZerosLike": "zeros_like",
    "OnesLike": "ones_like",
    "StopGradient": "detach",
    "ReduceMax": "amax",
    "ReduceMin": "amin",
    "MatMulExt": "matmul",
    "BatchMatMulExt": "bmm",
    "Dense": "linear",
    "LogSoftmax": "log_softmax",
    "FlattenExt": "flatten",
    "TExt": "t",
    "TransposeExtView": "transpose",
    "ExpandDims": "unsqueeze",
    "ExpandDimsView": "unsqueeze",
    "Concat": "cat",
    "SplitWithSize": "split",
    "SplitWithSizeView": "split",
    "Chunk": "chunk",
    "ChunkView": "chunk",
    "NarrowView": "narrow",
    "UnstackExtView": "unbind",
    "ReverseV2": "flip",
    "GatherD": "gather",
    "IndexSelect": "index_select",
    "InplaceCopy": "copy_",
    **{
        name: name.lower()
        for name in """
            Expm1 Erfc Sinh Cosh Asinh Acosh Atanh Atan Asin Tan Sinc Softsign Floor Ceil Trunc ReLU6 Elu SeLU CeLU Mish
            Softplus Log1p Lgamma Digamma Sign IsInf Round Erfinv Logit Atan2 Fmax Hypot Xlogy IsClose Heaviside
            NextAfter Lerp Addcmul Addcdiv PReLU GLU Cdist Tile Triu Diagonal Scatter LogAddExp LogAddExp2
        """.split()
    },
    "ACos": "acos",
    "BesselI0": "i0",
    "HSwish": "hardswish",
    "HSigmoid": "hardsigmoid",
    "HShrink": "hardshrink",
    "SoftShrink": "softshrink",
    "Mod": "fmod",
    "FmodTensor": "fmod",
    "FmodScalar": "fmod",
    "LessScalar": "lt",
    "EqScalar": "eq",
    "NeScalar": "ne",
    "GreaterScalar": "gt",
    "GreaterEqualScalar": "ge",
    "LessEqualScalar": "le",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "LeftShift": "bitwise_left_shift",
    "RightShift": "bitwise_right_shift",
    "LogicalXor": "logical_xor",
    "NanToNum": "nan_to_num",
    "EmptyLike": "empty_like",
    "Narrow": "narrow",
    "NewZeros": "new_zeros",
    "NewOnes": "new_ones",
    "NewEmpty": "new_empty",
    "Nansum": "nansum",
    "DeprecatedReduceAll": "all",
    "Any": "any",
    "AnyExt": "any",
    "MaxDim": "max",
    "MinDim": "min",
    "Ger": "outer",
    "Outer": "outer",
    "BitwiseNot": "bitwise_not",
    "BitwiseAndScalar": "bitwise_and",
    "BitwiseOrScalar": "bitwise_or",
    "BitwiseXorTensor": "bitwise_xor",
    "BitwiseXorScalar": "bitwise_xor",
    "FloorDivScalar": "floor_divide",
    "RemainderScalarTensor": "remainder",
    "Atan2Ext": "atan2",
    "Conv1DExt": "conv1d",
    "Conv2DExt": "conv2d",
    "Conv3DExt": "conv3d",
    "Conv1DPadding": "conv1d",
    "Conv2DPadding": "conv2d",
    "Conv3DPadding": "conv3d",
    "ConvTranspose2D": "conv_transpose2d",
    "AvgPool1D": "avg_pool1d",
    "AvgPool2D": "avg_pool2d",
    "AvgPool3DExt": "avg_pool3d",
    "AdaptiveAvgPool1D": "adaptive_avg_pool1d",
    "AdaptiveAvgPool2DExt": "adaptive_avg_pool2d",
    "AdaptiveAvgPool3DExt": "adaptive_avg_pool3d",
    "EluExt": "elu",
    "SoftplusExt": "softplus",
    "MishExt": "mish",
    "LeakyReLUExt": "leaky_relu",
    "Hardtanh": "hardtanh",
    "Threshold": "threshold",
    "GeluExt": "gelu",
    "LogSumExp": "logsumexp",
    "CountNonZero": "count_nonzero",
    "MedianExt": "median",
    "MedianDim": "median",
    "Kthvalue": "kthvalue",
    "Cummax": "cummax",
    "Cummin": "cummin",
    "CumminExt": "cummin",
    "ArgMaxExt": "argmax",
    "ArgMinExt": "argmin",
    "TopkExt": "topk",
    "TrilExt": "tril",
    "Roll": "roll",
    "Repeat": "repeat",
    "RepeatInterleaveInt": "repeat_interleave",
    "IndexFillScalar": "index_fill",
    "IndexFillTensor": "index_fill",
    "ScatterAddExt": "scatter_add",
    "MaskedSelect": "masked_select",
    "NonZero": "nonzero",
    "UniqueConsecutive": "unique_consecutive",
    "Mm": "mm",
    "Mv": "mv",
    "Dot": "dot",
    "SeLUExt": "selu",
    "Log2": "log2",
    "Log10": "log10",
    "IsNan": "isnan",
    "BitwiseAnd": "bitwise_and",
    "Fmin": "fmin",
    "SelectExtView": "select",
    "SelectView": "select",
}

ADAPTED: dict[str, tuple[str, Adapter]] = {
    **dict.fromkeys(("AddExt", "AddScalar"), ("add", adapters.scaled_second)),
    **dict.fromkeys(("SubExt", "SubScalar"), ("sub", adapters.scaled_second)),
    "SumExt": ("sum", adapters.without_dtype),
    "MeanExt": ("mean", adapters.without_dtype),
    "ReduceSum": ("sum", adapters.by_axis),
    "ReduceMean": ("mean", adapters.by_axis),
    "ProdExt": ("prod", adapters.typed("dim", "keepdim", "dtype")),
    "ReduceProd": ("prod", adapters.by_axis),
    "ReduceAll": ("all", adapters.by_axis),
    **dict.fromkeys(("ReduceAny", "DeprecatedReduceAny"), ("any", adapters.by_axis)),
    "Softmax": ("softmax", adapters.along_one),
    "Max": ("amax", adapters.all_of),
    "Min": ("amin", adapters.all_of),
    "MatMul": ("matmul", adapters.matmul),
    "BatchMatMul": ("matmul", adapters.matmul),
    "Argmax": ("argmax", adapters.first_two),
    "CumSum": ("cumsum", adapters.scan),
    "Gather": ("index_select", adapters.gather),
    "Embedding": ("embedding", adapters.embedding),
    "SplitTensor": ("split", adapters.even_pieces),
    "SplitTensorView": ("split", adapters.even_pieces),
    "TopK": ("topk", adapters.topk),
    "Reshape": ("reshape", adapters.variadic),
    "View": ("reshape", adapters.variadic),
    "BroadcastTo": ("expand", adapters.variadic),
    "BroadcastToView": ("expand", adapters.variadic),
    "Transpose": ("permute", adapters.permutation),
    "TransposeView": ("permute", adapters.permutation),
    "DeprecatedTranspose": ("permute", adapters.permutation),
    "Squeeze": ("squeeze", adapters.squeeze),
    "Argmin": ("argmin", adapters.first_two),
    "CumProd": ("cumprod", adapters.scan),
    "CumulativeLogsumexp": ("logcumsumexp", adapters.scan_by_tensor),
    "ReduceStd": ("std_mean", adapters.spread),
    "PadV3": ("pad", adapters.pad),
    "SearchSorted": ("searchsorted", adapters.searched),
    "Slice": ("getitem", adapters.sliced),
    "StridedSlice": ("getitem", adapters.strided_slice),
    "Split": ("split", adapters.equal_pieces),
    "SmoothL1Loss": ("smooth_l1_loss", adapters.loss("beta")),
    "BinaryCrossEntropy": ("binary_cross_entropy", adapters.loss("weight")),
    "BCEWithLogitsLoss": ("binary_cross_entropy_with_logits", adapters.loss("weight", "pos_weight")),
    "StackExt": ("stack", adapters.first_two),
    "Stack": ("stack", adapters.first_two),
    "Unstack": ("unbind", adapters.first_two),
    "Sort": ("sort", adapters.all_arguments),
    "IndexAddExt": ("index_add", adapters.scaled_index),
    "IndexPut": ("index_put", adapters.put),
    "LinalgVectorNorm": ("linalg_vector_norm", adapters.typed("p", "dim", "keepdim", "dtype")),
    "Norm": ("norm", adapters.typed("p", "dim", "keepdim", "dtype")),
    "LogSoftmaxExt": ("log_softmax", adapters.typed("dim", "dtype")),
    "CumsumExt": ("cumsum", adapters.typed("dim", "dtype")),
    "FullLike": ("full_like", adapters.typed("fill_value", "dtype")),
    "NewFull": ("new_full", adapters.typed("size", "fill_value", "dtype")),
    "Cast": ("cast", adapters.cast),
    "SortExt": ("sort", adapters.sorting),
    "ArgSort": ("argsort", adapters.sorting),
    "BincountExt": ("bincount", adapters.counted),
    "OneHotExt": ("one_hot", adapters.hot),
    "ConstantPadND": ("pad", adapters.constant_pad),
    "Tril": ("tril", adapters.all_arguments),
    **{name: (name.lower(), adapters.scaled_sum) for name in ("Addmm", "Addmv", "Addbmm", "Baddbmm")},
    "DivMod": ("div", adapters.rounded),
    "DivMods": ("div", adapters.rounded),
    "Scatter": ("scatter", adapters.scattered),
    "ScatterValue": ("scatter", adapters.scattered),
    "KLDiv": ("kl_div", adapters.divergence),
    "SoftMarginLoss": ("soft_margin_loss", adapters.loss()),
    "L1LossExt": ("l1_loss", adapters.loss()),
    "MSELossExt": ("mse_loss", adapters.loss()),
    "HuberLoss": ("huber_loss", adapters.loss()),
    "CrossEntropyLoss": ("cross_entropy", adapters.of_logits),
    "Std": ("std", adapters.spread_of),
    "Var": ("var", adapters.spread_of),
    "StdMean": ("std_mean", adapters.spread_of),
    "VarMean": ("var_mean", adapters.spread_of),
    "FuncDropoutExt": ("dropout", adapters.first(3)),
    "Dropout1dExt": ("dropout1d", adapters.first(3)),
    "Dropout2dExt": ("dropout2d", adapters.first(3)),
    "Dropout3dExt": ("dropout3d", adapters.first(3)),
    "RandLikeExt": ("rand_like", adapters.random_like),
    "RandnLike": ("randn_like", adapters.random_like),
    "ZerosLikeExt": ("zeros_like", adapters.typed("dtype")),
    "OnesLikeExt": ("ones_like", adapters.typed("dtype")),
    "BernoulliExt": ("bernoulli", adapters.first(1)),
    "MultinomialExt": ("multinomial", adapters.first(3)),
    **{f"UpsampleNearest{n}D": ("interpolate", adapters.upsampled("nearest")) for n in (1, 2, 3)},
    "UpsampleLinear1D": ("interpolate", adapters.upsampled("linear")),
    "UpsampleBilinear2D": ("interpolate", adapters.upsampled("bilinear")),
    "UpsampleTrilinear3D": ("interpolate", adapters.upsampled("trilinear")),
    "UpsampleBicubic2D": ("interpolate", adapters.upsampled("bicubic")),
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
    "InplaceAddsExt": ("add_", adapters.scaled_second),
    "InplaceSubScalar": ("sub_", adapters.scaled_second),
    "InplaceFloorDivides": ("floor_divide_", adapters.all_arguments),
    "InplaceReLU": ("relu_", adapters.all_arguments),
    "InplaceScatterSrc": ("scatter_", adapters.scattered),
    "InplaceScatterValue": ("scatter_", adapters.scattered),
    "InplaceScatterSrcReduce": ("scatter_", adapters.scattered),
    "InplaceScatterValueReduce": ("scatter_", adapters.scattered),
    "InplaceScatterAdd": ("scatter_add_", adapters.all_arguments),
    "InplaceIndexCopy": ("index_copy_", adapters.all_arguments),
    "InplaceUniform": ("uniform_", adapters.first(3)),
    "InplaceNormal": ("normal_", adapters.first(3)),
    "InplaceExponential": ("exponential_", adapters.first(2)),
    "InplaceBernoulliScalar": ("bernoulli_", adapters.first(2)),
    "InplaceBernoulliTensor": ("bernoulli_", adapters.first(2)),
    "InplaceRandom": ("random_", adapters.first(3)),
}
"""In-place primitives; others are called as the operation that they are the in-place form of."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "Unstack": ("axis",),
    "Sort": ("axis", "descending"),
    "Stack": ("axis",),
    "Tril": ("diagonal",),
    "IndexPut": ("accumulate",),
    "CumulativeLogsumexp": ("exclusive", "reverse"),
    "PadV3": ("mode", "paddings_contiguous"),
}
"""Attributes of primitives of the older kind that are arguments here, behind the tensors."""


SECOND_OPERAND = frozenset({"other", "exponent", "mat2", "tensor2"})
"""What MindSpore's methods of two operands call the second one."""

WITHOUT_KERNEL = frozenset(
    """
    EluExt MishExt SoftplusExt Hardtanh Log2 Log10 IsNan BitwiseAnd
    BitwiseAndScalar BitwiseOrTensor BitwiseOrScalar BitwiseXorTensor BitwiseXorScalar RemainderScalarTensor Atan2Ext
    """.split()
)
"""Primitives that the CPU lacks, of operations for which another one does."""


def primitives_of(name: str) -> list[str]:
    """The primitives that are taken for an operation: what error messages and profiles of MindSpore show."""
    same = [primitive for primitive, known in SAME_ARGUMENTS.items() if known == name]
    adapted = [primitive for primitive, (known, _) in (ADAPTED | WRITING).items() if known == name]
    return sorted({*same, *adapted})


def canonical(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[str, Arguments]:
    """torch's name and arguments of a primitive's call; an unknown primitive keeps its own."""
    given, named = tuple(args), dict(kwargs or {})
    if is_older_kind(args):
        given = (*args[2], *(getattr(args[0], attribute) for attribute in ATTRIBUTES.get(name, ())))
    if len(given) == 1 and (second := SECOND_OPERAND & named.keys()):
        given = (*given, *(named.pop(key) for key in second))
    if name in WRITING:
        known, adapt = WRITING[name]
        return known, adapt(given, named)
    if name.startswith("Inplace"):
        known, arguments = canonical(name.removeprefix("Inplace"), given, named)
        return f"{known}_", arguments
    if name in ADAPTED:
        known, adapt = ADAPTED[name]
        return known, adapt(given, named)
    return SAME_ARGUMENTS.get(name, name), (given, named)


@functools.cache
def older_method(name: str) -> Callable[..., Any] | None:
    """MindSpore's function for the older signature of a method (`x.mean(axis=1)`), which it writes in terms of others.

    None: `name` is no such method, or one that `ADAPTED` knows.
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    if name in ADAPTED or not words.startswith("deprecated_"):
        return None
    return getattr(tensor_method, words.replace("deprecated_", "deprecated_tensor_", 1), None)


def caller(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """`func` as a function of the arguments that `canonical` gives, for an operation with the same arguments."""
    if not is_older_kind(args):
        return func
    primitive, name, _ = args
    return lambda *given: func(primitive, name, given)


def is_older_kind(args: tuple[Any, ...]) -> bool:
    """Primitives of the older kind come as (primitive, name, arguments)."""
    return len(args) == 3 and isinstance(args[1], str)
