"""Normalizations, embedding, attention and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hp_dtensor import collectives
from hp_dtensor.rules import weighted_cross_entropy
from hp_dtensor.rules.factors import Factorization
from hp_dtensor.rules.registry import OpCall, RuleRegistry, names_for

if TYPE_CHECKING:
    from hp_dtensor.dispatch import LocalCall

Tensor = Any


def register(registry: RuleRegistry) -> None:
    registry.register("rms_norm", "input normalized_shape weight=None eps=None", _norm)
    registry.register("layer_norm", "input normalized_shape weight=None bias=None eps=1e-5", _norm)
    registry.register("group_norm", "input num_groups weight=None bias=None eps=1e-5", _group_norm)
    registry.register(
        "embedding",
        "input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False sparse=False",
        _embedding,
    )
    registry.register(
        "scaled_dot_product_attention",
        "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False",
        _attention,
    )
    registry.register(
        "cross_entropy",
        "input target weight=None size_average=None ignore_index=-100 reduce=None reduction=mean label_smoothing=0.0",
        _cross_entropy,
    )


def _norm(call: OpCall) -> Factorization:
    """Over the last dimensions, those of `normalized_shape`, which must be whole."""
    shape = call.tensors[0].shape
    normalized = call["normalized_shape"]
    count = 1 if isinstance(normalized, int) else len(normalized)
    dims, sizes = names_for("d", shape)
    tail = dims[len(shape) - count :]
    inputs = (dims, *((tail,) * (len(call.tensors) - 1)))
    return Factorization(inputs, (dims,), sizes, fixed=frozenset(dim[0] for dim in tail))


def _group_norm(call: OpCall) -> Factorization:
    """`[batch, channels, ...]`: only the batch is parallel."""
    dims, sizes = names_for("d", call.tensors[0].shape)
    inputs = (dims, *((dims[1],),) * (len(call.tensors) - 1))
    return Factorization(inputs, (dims,), sizes, fixed=frozenset(dim[0] for dim in dims[1:]))


def _embedding(call: OpCall) -> Factorization:
    """Ids of any shape, table `[vocabulary, width]`; a cut vocabulary gives partial rows."""
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if call[option]:
            raise call.refuse(f"{option} has no rule: each rank would do it with its own ids")
    ids, table = (spec.shape for spec in call.tensors)
    dims, sizes = names_for("d", ids)
    sizes = sizes | {"vocabulary": table[0], "width": table[1]}
    return Factorization(
        (dims, (("vocabulary",), ("width",))),
        ((*dims, ("width",)),),
        sizes,
        reduced={"vocabulary": "sum"},
        terms=(frozenset({1}),),
        local={"vocabulary": _embedding_of_part},
    )


def _embedding_of_part(call: LocalCall) -> Tensor:
    """Rows whose id is in this rank's part of the vocabulary, zeros elsewhere."""
    ops = call.platform.ops
    ids, table = call.arguments["input"], call.arguments["weight"]
    start, length = call.spans["vocabulary"]
    if length == 0:
        nothing = ops.zeros((*ids.shape, 0), table.dtype)
        return ops.matmul(nothing, table)
    own, inside = _own_ids(ops, ids, start, length)
    rows = ops.embedding(own, table)
    padding = call.arguments["padding_idx"]
    if padding is not None:  # its row gets no gradient
        is_padding = ops.unsqueeze(ops.eq(ids, padding % call.sizes["vocabulary"]), -1)
        rows = ops.where(is_padding, call.platform.detach(rows), rows)
    return ops.mul(rows, ops.cast(ops.unsqueeze(inside, -1), rows.dtype))


def _own_ids(ops: Any, ids: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids relative to a part (0 outside it), and whether each is inside."""
    relative = ops.sub(ids, start)
    inside = ops.logical_and(ops.ge(relative, 0), ops.lt(relative, length))
    return ops.mul(relative, ops.cast(inside, ids.dtype)), inside


def _attention(call: OpCall) -> Factorization:
    """`[batch, heads, length, width]`; batch and (key-value) heads are parallel."""
    if len(call.tensors) != 3 or call["dropout_p"]:
        raise call.refuse("attention of DTensors takes no mask tensor and no dropout so far")
    query, key, value = (spec.shape for spec in call.tensors)
    if {len(query), len(key), len(value)} != {4} or not query[0] == key[0] == value[0] or key[1:3] != value[1:3]:
        raise call.refuse("attention of DTensors takes [batch, heads, length, width] of one batch size")
    groups = query[1] // max(key[1], 1)
    sizes = {
        "batch": query[0],
        "heads": key[1],
        "q": query[2],
        "k": key[2],
        "width": query[3],
        "out": value[3],
    }
    heads = ("heads",) if groups == 1 else ("heads", "group")
    if groups != 1:
        sizes["group"] = groups
    inputs = (
        (("batch",), heads, ("q",), ("width",)),
        (("batch",), ("heads",), ("k",), ("width",)),
        (("batch",), ("heads",), ("k",), ("out",)),
    )
    fixed = frozenset({"k", "width", "out", *(["q"] if call["is_causal"] else [])})
    return Factorization(inputs, ((("batch",), heads, ("q",), ("out",)),), sizes, fixed=fixed)


def _cross_entropy(call: OpCall) -> Factorization:
    """Logits `[rows, classes]` and class indices `[rows]`; rows and classes may both be cut."""
    logits, targets = call.tensors[0].shape, call.tensors[1].shape
    if call["weight"] is not None or len(targets) == 2:
        return weighted_cross_entropy.rule(call)
    if len(logits) != 2 or targets != logits[:1]:
        raise call.refuse(
            "cross_entropy of DTensors takes logits [rows, classes] and targets [rows] or [rows, classes]"
        )
    whole = call["reduction"] == "none"
    return Factorization(
        ((("rows",), ("classes",)), (("rows",),)),
        ((("rows",),) if whole else (),),
        {"rows": logits[0], "classes": logits[1]},
        reduced={} if whole else {"rows": "sum"},
        local={"rows": _cross_entropy_of_part, "classes": _cross_entropy_of_part},
        complete=frozenset({"classes"}),
    )


def _cross_entropy_of_part(call: LocalCall) -> Tensor:
    """In float32 for half-precision logits too, which hold neither the sum over classes nor the count of rows."""
    platform, ops = call.platform, call.platform.ops
    logits, targets = call.arguments["input"], call.arguments["target"]
    dtype = logits.dtype
    if platform.itemsize(dtype) < 4:
        logits = ops.cast(logits, platform.dtype("float32"))
    valid = ops.cast(ops.ne(targets, call.arguments["ignore_index"]), targets.dtype)
    losses = _row_losses(call, logits, ops.mul(targets, valid))
    mask = ops.cast(valid, losses.dtype)
    losses = ops.mul(losses, mask)
    if call.arguments["reduction"] == "none":
        return ops.cast(losses, dtype)
    total = ops.sum(losses)
    if call.arguments["reduction"] == "mean":
        count = ops.sum(mask)
        for group in call.groups.get("rows", ()):
            count = collectives.all_reduce_data(count, group)
        total = ops.div(total, count)
    return ops.cast(total, dtype)


def _row_losses(call: LocalCall, logits: Tensor, targets: Tensor) -> Tensor:
    """logsumexp(logits) - sum of probability * logits per row, classes cut over `groups` (as Megatron-LM does).

    The probability is 1 for the target, less and spread over all classes with label smoothing.
    """
    ops = call.platform.ops
    groups: Sequence[Any] = call.groups.get("classes", ())
    start, length = call.spans.get("classes", (0, logits.shape[1]))
    highest = _row_maxima(call, logits, groups)
    shifted = ops.sub(logits, ops.unsqueeze(highest, 1))
    total = ops.sum(ops.exp(shifted), 1)
    own, inside = _own_ids(ops, targets, start, max(length, 1))
    if length:
        picked = ops.squeeze(ops.gather(shifted, 1, ops.unsqueeze(own, 1)), 1)
        picked = ops.mul(picked, ops.cast(inside, picked.dtype))
    else:
        picked = total
    smoothing = call.arguments["label_smoothing"]
    if smoothing:
        spread = ops.mul(ops.sum(shifted, 1), smoothing / call.sizes["classes"])
        picked = ops.add(ops.mul(picked, 1.0 - smoothing), spread)
    for group in groups:
        total = collectives.all_reduce(total, group)
        picked = collectives.all_reduce(picked, group)
    return ops.sub(ops.log(total), picked)


def _row_maxima(call: LocalCall, logits: Tensor, groups: Sequence[Any]) -> Tensor:
    platform, ops = call.platform, call.platform.ops
    data = platform.detach(logits)
    rows, classes = data.shape
    maxima = ops.amax(data, 1) if classes else ops.full((rows,), float("-inf"), data.dtype)
    for group in groups:
        maxima = collectives.all_reduce_data(maxima, group, "max")
    return maxima
