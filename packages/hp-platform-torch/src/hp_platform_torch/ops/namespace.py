"""The namespace `platform.ops`, and the canonical names of torch's functions, methods and operators.

`platform.ops` has torch's functions by the names of `hp_dtensor.platform.interface`, for any tensors. Sharding rules
are registered under the canonical names.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from hp_platform_torch.ops.attention import local_attention
from hp_platform_torch.ops.norms import rms_norm

Tensor = torch.Tensor
Number = int | float | bool


def build_ops(default_device: Callable[[], torch.device]) -> SimpleNamespace:
    """Return the namespace; its creation functions allocate on `default_device()`."""
    return SimpleNamespace(**_SAME_IN_TORCH, **_ADAPTED, **_creation(default_device))


def _creation(default_device: Callable[[], torch.device]) -> dict[str, Callable[..., Tensor]]:
    def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=default_device())

    def ones(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.ones(tuple(shape), dtype=dtype, device=default_device())

    def full(shape: Sequence[int], value: Number, dtype: torch.dtype) -> Tensor:
        return torch.full(tuple(shape), value, dtype=dtype, device=default_device())

    def arange(end: int, dtype: torch.dtype) -> Tensor:
        return torch.arange(end, dtype=dtype, device=default_device())

    return {"zeros": zeros, "ones": ones, "full": full, "arange": arange}


def sum_(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return torch.sum(x) if dim is None and not keepdim else torch.sum(x, dim, keepdim)


def mean(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return torch.mean(x) if dim is None and not keepdim else torch.mean(x, dim, keepdim)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    # A DTensor comes to `local_attention` by its rule.
    attend = local_attention if type(query) is Tensor else F.scaled_dot_product_attention
    return attend(query, key, value, is_causal=is_causal, enable_gqa=enable_gqa)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits, targets, reduction=reduction)


def topk(x: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(x, k, dim)
    return values, indices


def argsort(x: Tensor, dim: int = -1, stable: bool = True, descending: bool = False) -> Tensor:
    return torch.argsort(x, dim=dim, stable=stable, descending=descending)


def bincount(x: Tensor, minlength: int) -> Tensor:
    if type(x) is Tensor and x.is_cuda and 0 < minlength < 2**31 - 1:
        # torch.bincount waits for the device to read the largest value, which decides the length of its result.
        counts = torch.histc(x.int(), minlength + 1, 0, minlength)
        return counts[:minlength].long()
    if type(x) is Tensor and x.device.type == "npu" and minlength > 0:
        # As on CUDA: values out of range are counted in a bin at either end, and dropped.
        bins = torch.zeros(minlength + 2, dtype=torch.int64, device=x.device)
        places = x.long().clamp(-1, minlength) + 1
        return bins.scatter_add_(0, places, torch.ones_like(places))[1:-1]
    return torch.bincount(x, minlength=minlength)


_ADAPTED: dict[str, Callable[..., Any]] = {
    # Python's operators, because they also accept a number as the first operand
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "maximum": lambda x, y: torch.maximum(x, y) if isinstance(y, Tensor) else torch.clamp(x, min=y),
    "minimum": lambda x, y: torch.minimum(x, y) if isinstance(y, Tensor) else torch.clamp(x, max=y),
    "clamp": lambda x, min=None, max=None: torch.clamp(x, min=min, max=max),
    "cast": lambda x, dtype: x.to(dtype),
    "sum": sum_,
    "mean": mean,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "softmax": lambda x, dim: torch.softmax(x, dim),
    "log_softmax": lambda x, dim: torch.log_softmax(x, dim),
    "rms_norm": lambda x, weight, eps: rms_norm(x, (x.shape[-1],), weight, eps),
    "cross_entropy": cross_entropy,
    "embedding": F.embedding,
    "linear": F.linear,
    "silu": F.silu,
    "gelu": F.gelu,
    "one_hot": F.one_hot,
    "reshape": lambda x, shape: torch.reshape(x, tuple(shape)),
    "permute": lambda x, dims: torch.permute(x, tuple(dims)),
    "expand": lambda x, shape: x.expand(tuple(shape)),
    "split": lambda x, sizes, dim=0: torch.split(x, list(sizes), dim),
    "cat": lambda tensors, dim=0: torch.cat(tuple(tensors), dim),
    "stack": lambda tensors, dim=0: torch.stack(tuple(tensors), dim),
    "repeat_interleave": lambda x, repeats, dim: torch.repeat_interleave(x, repeats, dim),
    "index_put": lambda x, index, values: torch.index_put(x, (index,), values),
    "topk": topk,
    "argsort": argsort,
    "bincount": bincount,
}

_SAME_NAMES = """
    zeros_like ones_like eq ne lt le gt ge logical_and logical_or
    neg exp log sqrt rsqrt abs sin cos tanh sigmoid relu isfinite logical_not square
    where masked_fill clone amax amin argmax logsumexp cumsum matmul bmm
    transpose unsqueeze squeeze chunk narrow index_select gather
"""

_SAME_IN_TORCH: dict[str, Callable[..., Any]] = {name: getattr(torch, name) for name in _SAME_NAMES.split()}


# Operator methods whose names differ from those of the functions.
_OPERATORS = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pos": "positive",
    "invert": "bitwise_not",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}

_SYNONYMS = {
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "clip": "clamp",
    "fix": "trunc",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "concatenate": "cat",
    "concat": "cat",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "split_with_sizes": "split",
    "special_expit": "sigmoid",
    **{f"arc{name}": f"a{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tanh", "tan2")},
    "_threshold": "threshold",
}

# Functions that share their name with another operation (`Tensor.unfold`).
_RENAMED = {F.unfold: "im2col", F.fold: "col2im"}

_PROPERTIES = {"T": "t", "mT": "mT"}

_REFLECTED = frozenset(
    f"__r{name}__"
    for name in (
        "add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "matmul",
        "and", "or", "xor", "lshift", "rshift",
    )
)  # fmt: skip
_IN_PLACE = frozenset(f"__i{name[3:]}" for name in _REFLECTED)


def property_of(func: Callable[..., Any]) -> str | None:
    """Return the name of the tensor property that `func` gets, sets or deletes; None if it is no accessor."""
    if getattr(func, "__name__", "") not in ("__get__", "__set__", "__delete__"):
        return None
    return getattr(func.__self__, "__name__", None)  # type: ignore[attr-defined]


def canonical_name(func: Callable[..., Any]) -> tuple[str, bool]:
    """Return (name, reflected): `Tensor.__iadd__` is `add_`, and `__rsub__` is `sub` with reversed operands."""
    # By the function object, before its name: the name alone is ambiguous.
    if func in _RENAMED:
        return _RENAMED[func], False
    accessed = property_of(func)
    # Accessors of properties are all called `__get__`.
    if accessed is not None:
        return _PROPERTIES.get(accessed, accessed), False
    name = getattr(func, "__name__", repr(func))
    reflected, in_place = name in _REFLECTED, name in _IN_PLACE
    if name.startswith("__") and name.endswith("__"):
        name = name[3:-2] if reflected or in_place else name[2:-2]
        name = _OPERATORS.get(name, name)
    in_place = in_place or (name.endswith("_") and not name.startswith("_"))
    # Synonyms are written without the suffix of in-place methods.
    stem = name.rstrip("_")
    return _SYNONYMS.get(stem, stem) + ("_" if in_place else ""), reflected


def names_of(name: str) -> list[str]:
    """Return the functions, methods and properties of torch with a canonical name, for documentation."""
    return sorted(_names().get(name, ())) or [
        f"{path}.{name}"
        for path, owner in (
            ("torch.Tensor", torch.Tensor),
            ("torch.nn.functional", F),
            ("torch.nn.init", torch.nn.init),
        )
        if hasattr(owner, name)
    ]


@functools.cache
def _names() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for functions in torch.overrides.get_overridable_functions().values():
        for func in functions:
            shown = torch.overrides.resolve_name(func)
            if shown is not None:
                found.setdefault(canonical_name(func)[0], set()).add(shown.removesuffix(".__get__"))
    return found


def function_named(name: str) -> Callable[..., Any] | None:
    """Return torch's function with a canonical name, or else the method or property; None if there is none."""
    renamed = next((func for func, other in _RENAMED.items() if other == name), None)
    if renamed is not None or name == "unfold":  # torch.nn.functional's is another operation
        return renamed or torch.Tensor.unfold
    for owner in (F, torch, torch.Tensor, torch.nn.init, torch.linalg):
        found = getattr(owner, name.removeprefix("linalg_") if owner is torch.linalg else name, None)
        if callable(found):
            return found
    accessed = {"numpy_T": "T"}.get(name, name)
    is_property = hasattr(getattr(torch.Tensor, accessed, None), "__get__")
    return (lambda x: getattr(x, accessed)) if is_property else None
