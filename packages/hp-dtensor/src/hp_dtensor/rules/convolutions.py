"""Rules of convolutions, pooling and interpolation on `[batch, channels, positions...]`.

Batch and channels may be sharded; the spatial dimensions are unsharded.
"""

from __future__ import annotations

import math
from typing import Any

from hp_dtensor.rules.factors import LINEAR, Dims, Factorization, PartialResults, ShardingLimits
from hp_dtensor.rules.registry import OpCall, Rule, RuleRegistry

Sizes = tuple[int, ...]


def register(registry: RuleRegistry) -> None:
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
    registry.register("im2col", "input kernel_size dilation=1 padding=0 stride=1", _im2col)
    registry.register("col2im", "input output_size kernel_size dilation=1 padding=0 stride=1", _col2im)
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
    if count < 1 or len(image) not in (count + 1, count + 2):  # the framework refuses anything else
        raise call.needs_replicated("its rule needs an image or a batch of images")
    return image[-count:], weight[2:]


def _channels(call: OpCall, image: Sizes, kernel: Sizes, positions: Sizes, transposed: bool) -> Factorization:
    """Return the rule `n ci p, co ci k (, co) -> n co q`, transposed `ci co k`. Groups need unsharded channels."""
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
        dilation = _spatial(call[dilated], count) if dilated else (1,) * count
        options = zip(call.tensors[0].shape[-count:], kernel, stride, padding, dilation, strict=True)
        return _unsharded_positions(call, tuple(_windows(*option, bool(call["ceil_mode"])) for option in options))

    return rule


def _windows(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """Return the number of windows of a pool or kernel along a dimension, as torch counts them.

    With `ceil`, the last one may reach beyond the end.
    """
    covered = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (covered + (stride - 1 if ceil else 0)) // stride + 1
    # torch ignores a last window that would start in the padding behind the end.
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


def _im2col(call: OpCall) -> Factorization:
    """Copy windows into columns: `[batch, channels, height, width] -> [batch, channels * kernel, windows]`."""
    shape = call.tensors[0].shape
    if len(shape) not in (3, 4):
        raise call.refuse("expected images [batch, channels, height, width] or [channels, height, width]")
    batch, sizes = _of_windows(call, shape[:-2], shape[-2:])
    sizes |= {"p0": shape[-2], "p1": shape[-1]}
    image, columns = (*batch, ("c",), ("p0",), ("p1",)), (*batch, ("c", "k"), ("q",))
    return _linear(image, columns, sizes)


def _col2im(call: OpCall) -> Factorization:
    """Sum overlapping windows, `[batch, channels * kernel, windows] -> [batch, channels, height, width]`."""
    shape, positions = call.tensors[0].shape, _spatial(call["output_size"], 2)
    kernel = math.prod(_spatial(call["kernel_size"], 2))
    if len(shape) not in (2, 3) or shape[-2] % kernel:
        raise call.refuse(f"expected [batch, channels * {kernel}, windows] or [channels * {kernel}, windows]")
    batch, sizes = _of_windows(call, (*shape[:-2], shape[-2] // kernel), positions)
    if sizes["q"] != shape[-1]:
        raise call.refuse(f"an image {list(positions)} has {sizes['q']} windows, got {shape[-1]}")
    sizes |= {"p0": positions[0], "p1": positions[1]}
    image, columns = (*batch, ("c",), ("p0",), ("p1",)), (*batch, ("c", "k"), ("q",))
    return _linear(columns, image, sizes)


def _of_windows(call: OpCall, leading: Sizes, positions: Sizes) -> tuple[Dims, dict[str, int]]:
    """Return the batch dimensions of im2col, and the sizes of batch, channels `c`, window elements `k`, windows `q`."""
    kernel, stride, padding, dilation = (
        _spatial(call[name], 2) for name in ("kernel_size", "stride", "padding", "dilation")
    )
    options = zip(positions, kernel, stride, padding, dilation, strict=True)
    counts = (_windows(*option, False) for option in options)
    sizes = {f"n{i}": size for i, size in enumerate(leading[:-1])}
    batch: Dims = tuple((name,) for name in sizes)
    return batch, sizes | {"c": leading[-1], "k": math.prod(kernel), "q": math.prod(counts)}


def _linear(before: Dims, after: Dims, sizes: dict[str, int]) -> Factorization:
    """Return the rule of im2col and col2im: linear, with batch `n` and channels `c` parallel."""
    # Channels are the outermost factor of the columns' dimension `(c k)`, so sharding them shards both tensors.
    parallel = frozenset(name for name in sizes if name[0] in "nc")
    fixed = frozenset(sizes) - parallel
    return Factorization(
        (before,), (after,), sizes, limits=ShardingLimits(fixed=fixed, nonempty=parallel), partial=LINEAR
    )


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
    factors = [factor] * len(positions) if isinstance(factor, (int, float)) else list(factor)
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
