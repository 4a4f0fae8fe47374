"""Picking elements along one dimension by a tensor of positions: `gather`, `index_select`, `take_along_dim`.

The dimension is whole, unless few positions are picked: then each rank gives those that it has, and zeros otherwise,
so that a partial result is sent instead of the input.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from hp_dtensor.rules.engine.factors import LINEAR, Factorization, uncut
from hp_dtensor.rules.engine.local_call import LocalCall
from hp_dtensor.rules.engine.notation import line
from hp_dtensor.rules.engine.registry import OpCall, RuleRegistry, names_for
from hp_dtensor.rules.indexing.owned_ids import check_ids, own_ids


def register(registry: RuleRegistry) -> None:
    registry.register("gather", "input dim index * sparse_grad=False", _gather)
    registry.register("index_select", "input dim index", _index_select)
    registry.register(
        "take_along_dim", "input index dim=None", line("... dim! ..., ... x! ... -> ... x ...", linear="0")
    )


def _gather(call: OpCall) -> Factorization:
    """Dimensions in which input and index agree are parallel; the others must be whole."""
    shape, index = (spec.shape for spec in call.tensors)
    dim = call.dim(call["dim"])
    if len(shape) != len(index):
        raise call.whole("its rule is of an index with as many dimensions")
    dims, sizes = names_for("d", shape)
    index_dims = []
    fixed = {f"d{dim}"}
    for i, size in enumerate(index):
        if i != dim and size == shape[i]:
            index_dims.append((f"d{i}",))
            continue
        sizes[f"x{i}"] = size
        fixed |= {f"d{i}"} if i != dim else set()
        fixed |= {f"x{i}"}
        index_dims.append((f"x{i}",))
    rule = Factorization((dims, tuple(index_dims)), (tuple(index_dims),), sizes, cuts=uncut(fixed), partial=LINEAR)
    return _picked_by_owners(call, rule, dim)


def _index_select(call: OpCall) -> Factorization:
    shape, index = (spec.shape for spec in call.tensors)
    dim = call.dim(call["dim"])
    if len(index) != 1:
        raise call.refuse(f"its index must have one dimension, got {list(index)}")
    dims, sizes = names_for("d", shape)
    output = (*dims[:dim], ("x",), *dims[dim + 1 :])
    rule = Factorization((dims, (("x",),)), (output,), sizes | {"x": index[0]}, cuts=uncut({f"d{dim}"}), partial=LINEAR)
    return _picked_by_owners(call, rule, dim)


def _picked_by_owners(call: OpCall, rule: Factorization, dim: int) -> Factorization:
    """The rule with the dimension cut where few are picked: each rank gives those that it has, zeros otherwise."""
    shape, index = (spec.shape for spec in call.tensors)
    picked = index[dim] if len(index) > 1 or call.name != "index_select" else index[0]
    platform = call.tensors[0].mesh.platform
    if 2 * picked > shape[dim] or platform.dtype_name(call.tensors[0].dtype) == "bool":
        return rule
    factor = f"d{dim}"
    return replace(
        rule,
        cuts=replace(rule.cuts, fixed=rule.cuts.fixed - {factor}),
        partial=replace(rule.partial, reduced={factor: "sum"}),
        work=replace(rule.work, by_factor={factor: functools.partial(_own_picked, dim)}),
    )


def _own_picked(dim: int, call: LocalCall) -> Any:
    platform, ops = call.platform, call.platform.ops
    x, index, size = call.arguments["input"], call.arguments["index"], call.sizes[f"d{dim}"]
    start, length = call.spans[f"d{dim}"]
    if not length:
        check_ids(platform, index, size)
        return ops.cast(_zeros_picked(call, dim), x.dtype)
    own, inside = own_ids(ops, index, start, length, size)
    rows = call.on(x, index=own)
    if call.name == "index_select":
        inside = ops.reshape(inside, (-1, *[1] * (len(x.shape) - dim - 1)))
    if platform.is_floating(rows.dtype):
        return ops.masked_fill(rows, ops.logical_not(inside), 0.0)  # which may be infinite
    return ops.mul(rows, ops.cast(inside, rows.dtype))


def _zeros_picked(call: LocalCall, dim: int) -> Any:
    """The zeros that a rank without anything of the dimension picks, in the graph of the input."""
    ops, index = call.platform.ops, call.arguments["index"]
    zeros = ops.sum(call.arguments["input"], dim, True)
    shape = list(zeros.shape)
    shape[dim] = index.shape[0]
    if call.name == "gather":
        shape = list(index.shape)
        for other, length in enumerate(shape):
            zeros = zeros if other == dim else ops.narrow(zeros, other, 0, length)
    return ops.expand(zeros, tuple(shape))
