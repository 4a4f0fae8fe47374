"""The functions that every platform's `ops` namespace provides, with torch's names and argument orders.

Model code written against `platform.ops` runs on every platform, on plain tensors and on DTensors. Arguments
that a name below does not show are not part of the contract. `dtype` arguments are the platform's dtypes.
"""

from __future__ import annotations

OP_SIGNATURES: dict[str, str] = {
    # creation (plain tensors on the default device)
    "zeros": "(shape, dtype)",
    "ones": "(shape, dtype)",
    "full": "(shape, value, dtype)",
    "arange": "(end, dtype)",
    "zeros_like": "(x)",
    "ones_like": "(x)",
    # pointwise
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum", "pow"), "(x, y)"),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "(x, y)"),
    **dict.fromkeys(("logical_and", "logical_or"), "(x, y)"),
    **dict.fromkeys(
        (
            "neg",
            "exp",
            "log",
            "sqrt",
            "rsqrt",
            "abs",
            "sin",
            "cos",
            "tanh",
            "sigmoid",
            "relu",
            "silu",
            "gelu",
            "isfinite",
            "logical_not",
            "square",
        ),
        "(x)",
    ),
    "clamp": "(x, min=None, max=None)",
    "where": "(condition, x, y)",
    "masked_fill": "(x, mask, value)",
    "cast": "(x, dtype)",
    "clone": "(x)",
    # reductions
    "sum": "(x, dim=None, keepdim=False)",
    "mean": "(x, dim=None, keepdim=False)",
    "amax": "(x, dim, keepdim=False)",
    "amin": "(x, dim, keepdim=False)",
    "argmax": "(x, dim, keepdim=False)",
    "logsumexp": "(x, dim, keepdim=False)",
    "cumsum": "(x, dim)",
    # products
    "matmul": "(x, y)",
    "bmm": "(x, y)",
    "linear": "(x, weight, bias=None)",
    "scaled_dot_product_attention": "(query, key, value, is_causal=False, enable_gqa=False): [batch, heads, rows, dim]",
    # normalization, losses, tables
    "softmax": "(x, dim)",
    "log_softmax": "(x, dim)",
    "rms_norm": "(x, weight, eps): over the last dimension",
    "cross_entropy": "(logits, targets, reduction='mean' | 'sum' | 'none'): logits [rows, classes], targets [rows], "
    "-100 where a row takes no part",
    "embedding": "(ids, weight)",
    # shapes
    "reshape": "(x, shape)",
    "transpose": "(x, dim0, dim1)",
    "permute": "(x, dims)",
    "unsqueeze": "(x, dim)",
    "squeeze": "(x, dim)",
    "expand": "(x, shape)",
    "cat": "(tensors, dim)",
    "stack": "(tensors, dim)",
    "split": "(x, sizes, dim): list of sizes",
    "chunk": "(x, chunks, dim): pieces of ceil(size / chunks), the last smaller, perhaps fewer; of size 0: all empty",
    "narrow": "(x, dim, start, length)",
    "repeat_interleave": "(x, repeats: int, dim)",
    # selection
    "index_select": "(x, dim, index): differentiable in x",
    "gather": "(x, dim, index): differentiable in x",
    "index_put": "(x, index, values): a copy of x with rows index of dim 0 replaced; differentiable in x and values",
    "topk": "(x, k, dim) -> (values, indices), largest first; ties by lower index are not promised",
    "argsort": "(x, dim, stable=True, descending=False)",
    "bincount": "(x, minlength) -> int64 [minlength]; x int, 1-D, all below minlength",
    "one_hot": "(x, num_classes) -> int64",
}

OP_NAMES: tuple[str, ...] = tuple(OP_SIGNATURES)
