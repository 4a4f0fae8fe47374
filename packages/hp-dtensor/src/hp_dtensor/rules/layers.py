"""Rules of layers: normalization, embedding, attention; convolutions, pooling and interpolation."""

from __future__ import annotations

import math
from typing import Any

from hp_dtensor.rules.factors import (
    Dims,
    Factorization,
    LocalCall,
    LocalWork,
    Operands,
    PartialResults,
    ShardingLimits,
    unsharded,
)
from hp_dtensor.rules.gather_scatter import check_ids, own_ids, zeros_outside
from hp_dtensor.rules.notation import line
from hp_dtensor.rules.reductions import sum_over
from hp_dtensor.rules.registry import OpCall, Rule, RuleRegistry, dim_factors

Tensor = Any


def register(registry: RuleRegistry) -> None:
    registry.register("rms_norm", "input normalized_shape weight=None eps=None", _norm)
    registry.register("layer_norm", "input normalized_shape weight=None bias=None eps=1e-5", _norm)
    registry.register(
        "group_norm", "input num_groups weight=None bias=None eps=1e-5", line("n c! ...!, [c] -> n c ...")
    )
    registry.register(
        "embedding",
        "input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False sparse=False",
        _embedding,
    )
    registry.register("embedding_bag", "input weight ...", _embedding_bag)
    registry.register(
        "scaled_dot_product_attention",
        "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False",
        _attention,
    )
    registry.register(
        "batch_norm",
        "input running_mean running_var weight=None bias=None training=False momentum=0.1 eps=1e-5",
        _batch_norm,
    )
    conv = "input weight bias=None stride=1 padding=0 dilation=1 groups=1"
    registry.register("conv1d conv2d conv3d", conv, _convolution)
    transposed = "input weight bias=None stride=1 padding=0 output_padding=0 groups=1 dilation=1"
    registry.register("conv_transpose1d conv_transpose2d conv_transpose3d", transposed, _transposed_convolution)
    pool = "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False"
    registry.register("max_pool1d max_pool2d max_pool3d", pool, _pool("dilation"))
    average = "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True divisor_override=None"
    registry.register("avg_pool1d avg_pool2d avg_pool3d", average, _pool(None))
    for kind, signature in (("avg", "input output_size"), ("max", "input output_size return_indices=False")):
        registry.register(" ".join(f"adaptive_{kind}_pool{n}d" for n in (1, 2, 3)), signature, _adaptive_pool)
    registry.register(
        "instance_norm",
        "input weight=None bias=None running_mean=None running_var=None use_input_stats=True momentum=0.1 eps=1e-5 ...",
        _instance_norm,
    )
    registry.register(
        "interpolate",
        "input size=None scale_factor=None mode=nearest align_corners=None recompute_scale_factor=None antialias=False",
        _interpolate,
    )


def _norm(call: OpCall) -> Factorization:
    """Normalize over the last dimensions, those of `normalized_shape`, which are unsharded."""
    shape = call.tensors[0].shape
    normalized = call["normalized_shape"]
    count = 1 if isinstance(normalized, int) else len(normalized)
    dims, sizes = dim_factors("d", shape)
    # Scale and shift have one element for each normalized one and are used by every row.
    tail = dims[len(shape) - count :]
    inputs = (dims, *((tail,) * (len(call.tensors) - 1)))
    return Factorization(inputs, (dims,), sizes, limits=unsharded(dim[0] for dim in tail))


def _embedding(call: OpCall) -> Factorization:
    """Look up ids of any shape in a table `[vocabulary, width]`. A sharded vocabulary gives partial rows."""
    for option in ("max_norm", "sparse"):
        if call[option]:
            raise call.refuse(f"{option} is not supported: each rank would apply it to its own ids")
    ids, table = (spec.shape for spec in call.tensors)
    dims, sizes = dim_factors("d", ids)
    sizes = sizes | {"vocabulary": table[0], "width": table[1]}
    # A gradient that is divided by the number of occurrences of an id needs all ids.
    fixed = {"vocabulary", *(f"d{i}" for i in range(len(ids)))} if call["scale_grad_by_freq"] else ()
    return Factorization(
        (dims, (("vocabulary",), ("width",))),
        ((*dims, ("width",)),),
        sizes,
        limits=unsharded(fixed),
        partial=PartialResults(reduced={"vocabulary": "sum"}, terms=(frozenset({1}),)),
        work=LocalWork(by_factor={"vocabulary": _embedding_of_shard}),
    )


def _embedding_of_shard(call: LocalCall) -> Tensor:
    """Return the rows of ids in this rank's shard of the vocabulary, and zeros for the others."""
    ops = call.platform.ops
    ids, table = call.arguments["input"], call.arguments["weight"]
    start, length = call.spans["vocabulary"]
    if length == 0:
        check_ids(call.platform, ids, call.sizes["vocabulary"])
        # An empty product has the gradient of the table, so that backward calls the same collectives on every rank.
        nothing = ops.zeros((*ids.shape, 0), table.dtype)
        return ops.matmul(nothing, table)
    # Each id has one owner. The owner returns its row and the other ranks zeros, so the sum over ranks is the row
    # (arXiv 1909.08053). The mask also zeroes the gradient, so no rank gets gradients for rows of another shard.
    own, inside = own_ids(ops, ids, start, length, call.sizes["vocabulary"])
    rows = ops.embedding(own, table)
    padding = call.arguments["padding_idx"]
    if padding is not None:  # the row of the padding id gets no gradient
        is_padding = ops.unsqueeze(ops.eq(ids, padding % call.sizes["vocabulary"]), -1)
        rows = ops.where(is_padding, call.platform.detach(rows), rows)
    return zeros_outside(call.platform, rows, ops.unsqueeze(inside, -1))


def _embedding_bag(call: OpCall) -> Factorization:
    if call.arguments.get("max_norm") is not None:
        raise call.refuse("max_norm is not supported, because it writes the table")
    raise call.needs_replicated("a bag may contain ids of several ranks")


def _attention(call: OpCall) -> Factorization:
    """Attend with parallel batch, heads and, unless causal, queries of `[batch, heads, length, width]`."""
    if call["dropout_p"]:
        raise call.refuse("dropout is not supported for DTensors; use hp_dtensor.attention")
    query, key, value = (spec.shape for spec in call.tensors[:3])
    if {len(query), len(key), len(value)} != {4} or not query[0] == key[0] == value[0] or key[1:3] != value[1:3]:
        raise call.refuse("expected [batch, heads, length, width] of one batch size, with as many keys as values")
    groups = query[1] // max(key[1], 1)
    names = {"batch": query[0], "heads": key[1], "q": query[2], "k": key[2], "width": query[3], "out": value[3]}
    # Query heads that share a key-value head are adjacent, so a shard of key-value heads has one shard of query heads.
    heads = ("heads",) if groups == 1 else ("heads", "group")
    sizes = names if groups == 1 else {**names, "group": groups}
    inputs: tuple[Dims, ...] = (
        (("batch",), heads, ("q",), ("width",)),
        (("batch",), ("heads",), ("k",), ("width",)),
        (("batch",), ("heads",), ("k",), ("out",)),
    )
    output: Dims = (("batch",), heads, ("q",), ("out",))
    if len(call.tensors) == 4:
        scores = (query[0], query[1], query[2], key[2])
        names_of_scores: Dims = (("batch",), heads, ("q",), ("k",))
        mask = call.broadcast_factors(
            "the mask's shape", call.tensors[3].shape, scores, names_of_scores, to="the scores"
        )
        inputs = (*inputs, mask)
    # The kernel's causal mask compares local positions, so a shard of the queries would see the wrong keys.
    fixed = frozenset({"k", "width", "out", *(["q"] if call["is_causal"] else [])})
    return Factorization(inputs, (output,), sizes, limits=unsharded(fixed))


def _batch_norm(call: OpCall) -> Factorization:
    """Normalize the parallel channels of `[batch, channels, ...]`. In training, statistics are summed over ranks."""
    shape = call.tensors[0].shape
    if len(shape) < 2:
        raise call.needs_replicated("its rule needs [batch, channels, ...]")
    dims, sizes = dim_factors("d", shape)
    inputs: tuple[Dims, ...] = (dims, *((dims[1],),) * (len(call.tensors) - 1))
    if not call["training"]:  # kernels refuse empty input
        return Factorization(inputs, (dims,), sizes, limits=ShardingLimits(nonempty=frozenset(sizes)))
    tracked = sum(call[name] is not None for name in ("running_mean", "running_var"))
    summed = [dim[0] for i, dim in enumerate(dims) if i != 1]
    return Factorization(
        inputs,
        (dims,),
        sizes,
        limits=ShardingLimits(nonempty=frozenset({dims[1][0]})),
        work=LocalWork(by_factor=dict.fromkeys(summed, _batch_norm_over_ranks), any_order=frozenset(summed)),
        operands=Operands(written=frozenset(range(1, 1 + tracked))),
    )


def _batch_norm_over_ranks(call: LocalCall) -> Tensor:
    """Normalize by the mean and variance over all ranks, in two passes, in float32 for half precision."""
    ops, arguments = call.platform.ops, call.arguments
    x = arguments["input"]
    wide = call.to_float32(x)
    others = tuple(i for i in range(len(x.shape)) if i != 1)
    count = math.prod(call.sizes[f"d{i}"] for i in others)
    groups = [group for i in others for group in call.groups.get(f"d{i}", ())]
    # Each rank uses the replicated sums with its own rows, so their gradients are summed over ranks (`vary`).
    mean = ops.div(sum_over(ops.sum(wide, others, True), groups, vary=True), float(count))
    centered = ops.sub(wide, mean)
    variance = ops.div(sum_over(ops.sum(ops.mul(centered, centered), others, True), groups, vary=True), float(count))
    result = ops.mul(centered, ops.rsqrt(ops.add(variance, arguments["eps"])))
    channel = (1, -1, *[1] * (len(x.shape) - 2))
    if arguments["weight"] is not None:
        result = ops.mul(result, ops.reshape(arguments["weight"], channel))
    if arguments["bias"] is not None:
        result = ops.add(result, ops.reshape(arguments["bias"], channel))
    # Running statistics have the unbiased variance, the normalization the biased one.
    _update_running(call, mean, ops.mul(variance, count / max(1, count - 1)))
    return ops.cast(result, x.dtype)


def _update_running(call: LocalCall, mean: Tensor, variance: Tensor) -> None:
    """Write the running mean and variance in place, alike on every rank."""
    platform, ops, momentum = call.platform, call.platform.ops, call.arguments["momentum"]
    for name, value in (("running_mean", mean), ("running_var", variance)):
        running = call.arguments[name]
        if running is not None:
            now = ops.cast(ops.reshape(platform.detach(value), tuple(running.shape)), running.dtype)
            platform.copy_(running, ops.add(ops.mul(running, 1.0 - momentum), ops.mul(now, momentum)))


Sizes = tuple[int, ...]


def _spatial(value: Any, count: int) -> Sizes:
    """Return an argument such as a stride as one integer per spatial dimension."""
    if isinstance(value, int):
        return (value,) * count
    items = tuple(value)
    return items * count if len(items) == 1 else items


def _convolution(call: OpCall) -> Factorization:
    image, kernel = _sizes(call)
    stride, dilation = _spatial(call["stride"], len(kernel)), _spatial(call["dilation"], len(kernel))
    # The padding of both sides together.
    if call["padding"] == "valid":
        padding: Sizes = (0,) * len(kernel)
    elif call["padding"] == "same":
        padding = tuple(d * (k - 1) for d, k in zip(dilation, kernel, strict=True))
    else:
        padding = tuple(2 * pad for pad in _spatial(call["padding"], len(kernel)))
    positions = tuple(
        (size + pad - d * (k - 1) - 1) // s + 1
        for size, pad, d, k, s in zip(image, padding, dilation, kernel, stride, strict=True)
    )
    return _channels(call, image, kernel, positions, transposed=False)


def _transposed_convolution(call: OpCall) -> Factorization:
    image, kernel = _sizes(call)
    options = [_spatial(call[name], len(kernel)) for name in ("stride", "padding", "dilation", "output_padding")]
    positions = tuple(
        (size - 1) * s - 2 * pad + d * (k - 1) + extra + 1
        for size, k, s, pad, d, extra in zip(image, kernel, *options, strict=True)
    )
    return _channels(call, image, kernel, positions, transposed=True)


def _sizes(call: OpCall) -> tuple[Sizes, Sizes]:
    """Return the spatial sizes of the image and of the kernel of a convolution."""
    image, weight = call.tensors[0].shape, call.tensors[1].shape
    count = len(weight) - 2
    # The framework refuses anything else.
    if count < 1 or len(image) not in (count + 1, count + 2) or min(_spatial(call["stride"], count)) < 1:
        raise call.needs_replicated("its rule needs an image or a batch of images, and strides of at least 1")
    return image[-count:], weight[2:]


def _channels(call: OpCall, image: Sizes, kernel: Sizes, positions: Sizes, transposed: bool) -> Factorization:
    """Return the rule `n ci p, co ci k (, co) -> n co q` of a convolution; transposed weights are `ci co k`."""
    shape, weight = call.tensors[0].shape, call.tensors[1].shape[:2]
    groups, count = call["groups"], len(kernel)
    # Sharded input channels give partial sums over them, sharded output channels shard the weight: row- and
    # column-parallel layers. Neither sends anything.
    batch: Dims = (("n",),) if len(shape) == count + 2 else ()
    sizes = {"ci": shape[-count - 1], "co": weight[1] * groups if transposed else weight[0]}
    if batch:
        sizes["n"] = shape[0]
    names = {kind: tuple((f"{kind}{i}",) for i in range(count)) for kind in ("p", "k", "q")}
    for kind, lengths in (("p", image), ("k", kernel), ("q", positions)):
        sizes |= {f"{kind}{i}": length for i, length in enumerate(lengths)}
    fixed = {f"{kind}{i}" for kind in ("p", "k", "q") for i in range(count)}
    channels = ("ci", "co") if transposed else ("co", "ci")
    if groups != 1:
        # The weight's second dimension has the channels of one group, and each block of `co` reads one block of `ci`.
        fixed |= {"ci", "co", "cg"}
        sizes["cg"], channels = weight[1], (channels[0], "cg")
    inputs: tuple[Dims, ...] = ((*batch, ("ci",), *names["p"]), (*((name,) for name in channels), *names["k"]))
    terms: tuple[frozenset[int], ...] = (frozenset({0, 1}),)
    if len(call.tensors) == 3:
        # The bias is a term of its own: it must enter the partial sums over input channels once.
        inputs, terms = (*inputs, (("co",),)), (*terms, frozenset({2}))
    return Factorization(
        inputs,
        ((*batch, ("co",), *names["q"]),),
        sizes,
        limits=ShardingLimits(fixed=frozenset(fixed), nonempty=frozenset({"n", "ci", "co"})),
        partial=PartialResults(reduced={"ci": "sum"} if groups == 1 else {}, terms=terms),
    )


def _pool(dilated: str | None) -> Rule:
    """Return the rule of pooling; `dilated` is the argument with its dilation, if it has one."""

    def rule(call: OpCall) -> Factorization:
        count = int(call.name[-2])
        kernel = _spatial(call["kernel_size"], count)
        stride = kernel if call["stride"] in (None, ()) else _spatial(call["stride"], count)
        padding = _spatial(call["padding"], count)
        if min(stride) < 1:
            raise call.needs_replicated("its rule needs strides of at least 1")
        dilation = _spatial(call[dilated], count) if dilated else (1,) * count
        options = zip(call.tensors[0].shape[-count:], kernel, stride, padding, dilation, strict=True)
        return _unsharded_positions(call, tuple(_windows(*option, bool(call["ceil_mode"])) for option in options))

    return rule


def _windows(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """Return the number of windows of a pool along a dimension, as torch counts them."""
    covered = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (covered + (stride - 1 if ceil else 0)) // stride + 1
    # torch ignores a last window that would start in the padding behind the end.
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


def _instance_norm(call: OpCall) -> Factorization:
    """Normalize each channel of each image of `[batch, channels, ...]` separately."""
    if call["running_mean"] is not None or call["running_var"] is not None:
        raise call.refuse("it would write the running statistics; torch.nn.functional.instance_norm takes them")
    if len(call.tensors) != 1:
        raise call.needs_replicated("its rule needs an image as its only tensor")
    return _unsharded_positions(call, call.tensors[0].shape[2:])


def _interpolate(call: OpCall) -> Factorization:
    positions = call.tensors[0].shape[2:]
    if call["size"] is not None:
        return _unsharded_positions(call, _spatial(call["size"], len(positions)))
    factor = call["scale_factor"]
    factors = [factor] * len(positions) if isinstance(factor, (int, float)) else list(factor or ())
    if len(factors) != len(positions):
        raise call.needs_replicated("its rule needs a size, or a factor for each spatial dimension")
    return _unsharded_positions(call, tuple(int(n * f) for n, f in zip(positions, factors, strict=True)))


def _adaptive_pool(call: OpCall) -> Factorization:
    count = int(call.name[-2])
    wanted = _spatial(call["output_size"], count)
    shape = call.tensors[0].shape[-count:]
    return _unsharded_positions(call, tuple(size if w is None else w for size, w in zip(shape, wanted, strict=True)))


def _unsharded_positions(call: OpCall, positions: Sizes) -> Factorization:
    """Return the rule of an operation with the spatial output sizes `positions`, which are unsharded."""
    # Windows overlap, so a sharded position would need a halo of its neighbours' rows, with a different width for every
    # kernel, stride and padding. Batch and channels need no communication at all.
    shape, count = call.tensors[0].shape, len(positions)
    if count == 0:
        raise call.needs_replicated("its rule needs [batch, channels, positions ...]")  # the framework refuses others
    leading: Dims = tuple((f"c{i}",) for i in range(len(shape) - count))
    sizes = {f"c{i}": size for i, size in enumerate(shape[:-count])}
    sizes |= {f"p{i}": size for i, size in enumerate(shape[-count:])}
    sizes |= {f"q{i}": size for i, size in enumerate(positions)}
    fixed = frozenset(name for name in sizes if name[0] in "pq")
    before = tuple((f"p{i}",) for i in range(count))
    after = tuple((f"q{i}",) for i in range(count))
    parallel = frozenset(sizes) - fixed
    outputs = ((*leading, *after),) * (2 if call.arguments.get("return_indices") else 1)
    return Factorization(((*leading, *before),), outputs, sizes, limits=ShardingLimits(fixed=fixed, nonempty=parallel))
