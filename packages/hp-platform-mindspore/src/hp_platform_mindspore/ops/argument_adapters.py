"""Adapters from the arguments of MindSpore's primitives to those of torch's operations.

An adapter is called with (args, kwargs) of the primitive's call, without the primitive, and returns those of the
operation, after which most are named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor
from mindspore._c_expression import typing

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
    x, index, dim, *batch_dims = args
    if any(batch_dims):
        raise TypeError("gather of a DTensor takes no batch_dims; use gather_elements")
    # `Gather` selects slices by a vector of indices: torch's index_select, with another order of arguments.
    return (x, dim, index), {}


def split_by_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, chunk, dim = args if len(args) == 3 else (*args, kwargs.get("dim", 0))
    size = x.shape[dim]
    # The rule of `split` has lengths; the primitive has the length of all chunks but the last.
    return (x, [min(chunk, size - start) for start in range(0, size, chunk)], dim), {}


def topk(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return (args[0], args[1], -1), {}


def shape_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Convert `x.reshape(2, 3)` to `reshape(x, (2, 3))`."""
    if len(args) == 2 and isinstance(args[1], (list, tuple)):
        return (args[0], tuple(args[1])), {}
    return (args[0], tuple(args[1:])), {}


def permute(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Pass the given order of dimensions, or the reverse of all if none is given."""
    (x, dims), _ = shape_arguments(args, kwargs)
    return (x, dims or tuple(reversed(range(x.ndim)))), {}


def squeeze(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, dim = args[0], args[1] if len(args) > 1 else ()
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


def divmod_(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
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
    alpha = args[4] if len(args) > 4 else kwargs.get("alpha", 1)
    return args[:4], {} if alpha == 1 else {"alpha": alpha}


def scatter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, dim, index, src, *reduce = args
    how = {} if not reduce or reduce[0] in (0, "none") else {"reduce": {1: "add", 2: "multiply"}.get(*reduce[:1] * 2)}
    if isinstance(src, Tensor):
        return (x, dim, index, src), how
    return (x, dim, index), {"value": src, **how}


def cross_entropy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, target, weight, reduction, ignore_index, smoothing, *_ = args
    options = {"reduction": _REDUCTIONS[reduction], "ignore_index": ignore_index, "label_smoothing": smoothing}
    return (x, target), options if weight is None else {"weight": weight, **options}


def all_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return args, kwargs
