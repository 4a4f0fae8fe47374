"""torch's own functions on DTensors: every placement of every argument gives the unsharded result and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.spec.placements import Placement
from hp_dtensor.testing import run_ranks
from hp_dtensor.testing.rule_proof import prove
from hp_dtensor.testing.rule_samples import IN_PLACE, Sample

MATRIX = (5, 4)
LIMITS = {(2,): 48, (3,): 12, (2, 2): 12}


def sample(
    name: str,
    call: Callable[..., Any],
    *shapes: tuple[int, ...],
    integers: dict[int, int] | None = None,
    positive: bool = False,
    gradients: bool = True,
    may_refuse: str = "",
) -> Sample:
    return Sample(name, shapes or (MATRIX,), lambda ops, *x: call(*x), integers, positive, gradients, may_refuse)


def both(name: str, **options: Any) -> list[Sample]:
    """As a function and as a method."""
    return [
        sample(f"torch.{name}", lambda x: getattr(torch, name)(x), **options),
        sample(f"Tensor.{name}", lambda x: getattr(x, name)(), **options),
    ]


UNARY = """
    exp2 expm1 erf erfc sinh cosh asinh atan tan ceil floor round trunc sign relu sigmoid tanh square
    deg2rad rad2deg sinc
"""
ACTIVATIONS = """
    relu6 hardtanh hardswish elu selu celu leaky_relu gelu silu mish softplus logsigmoid hardsigmoid softsign
    tanhshrink hardshrink softshrink
"""


def _in_place(name: str, *arguments: Any) -> Sample:
    """On a copy: a leaf that requires a gradient may not be written."""
    return sample(name, lambda x: getattr(x.clone(), name)(*arguments), may_refuse=IN_PLACE)


def _with_statistics(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that returns what `norm` returns and the running statistics that it has written."""

    def run(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, ...]:
        written = mean.detach().clone(), variance.detach().clone()
        result = norm(x, *written)
        return (*(result if isinstance(result, tuple) else (result,)), *written)

    return run


def _after(write: Callable[..., Any], tensors: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
    write(tensors, *args)
    return tensors


def _signs(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, torch.ones_like(x), -torch.ones_like(x))


SAMPLES: list[Sample] = [
    *(case for name in UNARY.split() for case in both(name)),
    *(
        case
        for name in ("log1p", "log2", "log10", "reciprocal", "lgamma", "digamma")
        for case in both(name, positive=True)
    ),
    *both("sgn", gradients=False),
    *(sample(f"F.{name}", lambda x, name=name: getattr(F, name)(x)) for name in ACTIVATIONS.split()),
    sample("x + 1", lambda x: x + 1),
    sample("1 - x", lambda x: 1 - x),
    sample("x * 2.5", lambda x: x * 2.5),
    sample("2 / x", lambda x: 2 / x, positive=True),
    sample("x ** 2", lambda x: x**2),
    sample("-x", lambda x: -x),
    sample("x > y", lambda x, y: x > y, MATRIX, MATRIX, gradients=False),
    sample("x @ y", lambda x, y: x @ y, MATRIX, (4, 3)),
    sample("x.pow(y)", torch.pow, MATRIX, MATRIX, positive=True),
    sample("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), MATRIX, MATRIX, MATRIX),
    sample("lerp", lambda x, y: torch.lerp(x, y, 0.3), MATRIX, MATRIX),
    sample("add alpha", lambda x, y: torch.add(x, y, alpha=2), MATRIX, MATRIX),
    sample("sub alpha", lambda x, y: x.sub(y, alpha=0.5), MATRIX, (4,)),
    sample("masked_fill", lambda m, x: x.masked_fill(m > 0, 2.0), MATRIX, MATRIX),
    sample("clamp", lambda x: x.clamp(-0.5, 0.75)),
    sample("type", lambda x: x.double().float()),
    sample("to", lambda x: x.to(torch.float64)),
    _in_place("add_", 1.0),
    _in_place("mul_", 2.0),
    _in_place("exp_"),
    _in_place("clamp_", -0.5, 0.5),
    sample("add_ tensor", lambda x, y: x.clone().add_(y), MATRIX, MATRIX, may_refuse=IN_PLACE),
    sample("copy_", lambda x, y: x.clone().copy_(y), MATRIX, MATRIX, may_refuse=IN_PLACE),
    *(sample(f"torch.{name} dim", lambda x, name=name: getattr(torch, name)(x, 1)) for name in ("std", "var", "prod")),
    *(
        sample(f"{name} all", lambda x, name=name: getattr(x, name)())
        for name in ("sum", "mean", "max", "min", "std", "norm")
    ),
    *(sample(f"{name} dim", lambda x, name=name: getattr(x, name)(0)[0]) for name in ("max", "min", "median")),
    sample("max of two", torch.max, MATRIX, MATRIX),
    sample("any", lambda x: (x > 0).any(1), gradients=False),
    sample("all", lambda x: (x > -3).all(), gradients=False),
    sample("sum keepdim", lambda x: x.sum((0, 1), keepdim=True)),
    sample("mean dims", lambda x: torch.mean(x, dim=[0])),
    sample("norm dim", lambda x: torch.norm(x, dim=1)),
    sample("cumsum", lambda x: x.cumsum(0)),
    sample("cummax", lambda x: x.cummax(1)[0]),
    sample("F.softmax", lambda x: F.softmax(x, dim=1)),
    sample("softmax dtype", lambda x: x.softmax(-1, dtype=torch.float32)),
    sample("F.glu", lambda x: F.glu(x, 1)),
    sample("argmax all", lambda x: x.argmax(), gradients=False),
    sample("argmin dim", lambda x: x.argmin(0, keepdim=True), gradients=False),
    sample("sort", lambda x: x.sort(dim=0, descending=True)[0]),
    sample("topk", lambda x: x.topk(2)[0]),
    sample("addmm", torch.addmm, (3,), MATRIX, (4, 3)),
    sample("baddbmm", torch.baddbmm, (2, 3, 5), (2, 3, 4), (2, 4, 5)),
    sample("mv", torch.mv, MATRIX, (4,)),
    sample("dot", torch.dot, (5,), (5,)),
    sample("outer", torch.outer, (5,), (4,)),
    sample("einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), (2, 3, 4), (2, 4, 5)),
    sample("einsum sum", lambda x, y: torch.einsum("ij,ij->j", x, y), MATRIX, MATRIX),
    sample("einsum implicit", lambda x, y: torch.einsum("ij,jk", x, y), MATRIX, (4, 3)),
    sample("view", lambda x: x.view(2, 2, 6), (4, 6)),
    sample("view -1", lambda x: x.view(-1, 3), (4, 6)),
    # Rounded, because partial sums have other last bits.
    *(
        sample(f"view as {dtype}", lambda x, dtype=dtype: x.round().view(dtype), gradients=False)
        for dtype in (torch.int32, torch.int16)
    ),
    sample("view as double", lambda x: x.round().view(torch.float64).view(torch.float32), (5, 6), gradients=False),
    sample("t_", lambda x: x.clone().t_()),
    sample("transpose_", lambda x: x.clone().transpose_(0, -1), (5, 4, 3)),
    sample("unsqueeze_", lambda x: x.clone().unsqueeze_(-2)),
    sample("squeeze_ dims", lambda x: x.clone().squeeze_((0, 2)), (5, 4, 1), may_refuse="squeeze_ of"),
    sample("squeeze_", lambda x: x.clone().squeeze_(), (5, 1, 4), may_refuse="squeeze_ of"),
    sample("foreach_add", lambda x: torch._foreach_add([x, x * 2.0], [x * 3.0, x], alpha=2.0)),
    sample("foreach_mul", lambda x: torch._foreach_mul([x, x * 2.0], [x * 3.0, x])),
    sample("foreach_pow", lambda x: torch._foreach_pow(2.0, [x])),
    sample("foreach_sub_", lambda x: _after(torch._foreach_sub_, [x.clone(), x * 2.0], [x * 3.0, x])),
    sample("flatten", lambda x: x.flatten(1), (4, 3, 2)),
    sample("unflatten", lambda x: x.unflatten(1, (2, -1)), (4, 6)),
    sample("x.T", lambda x: x.T),
    sample("x.mT", lambda x: x.mT, (2, 3, 4)),
    sample("permute", lambda x: x.permute(1, 2, 0), (3, 4, 2)),
    sample("movement", lambda x: x.transpose(-1, 0).unsqueeze(0).squeeze(0)),
    sample("expand", lambda x: x.expand(3, -1, 4), (5, 1)),
    sample("repeat", lambda x: x.repeat(2, 1, 3)),
    sample("repeat first", lambda x: x.repeat(3, 1)),
    sample("tile", lambda x: torch.tile(x, (2,))),
    sample("roll", lambda x: torch.roll(x, 2, 0)),
    sample("flip", lambda x: x.flip(1)),
    sample("tril", lambda x: x.tril(), (2, 4, 4)),
    sample("triu", lambda x: torch.triu(x, 1), (4, 5)),
    sample("diagonal", lambda x: x.diagonal(1, 0, 1), (4, 5)),
    sample("F.pad", lambda x: F.pad(x, (1, 2))),
    sample("unfold", lambda x: x.unfold(0, 2, 1)),
    sample("split", lambda x: x.split(2, 1)),
    sample("torch.split", lambda x: torch.split(x, [1, 4])),
    sample("chunk", lambda x: x.chunk(3)),
    sample("unbind", lambda x: x.unbind(1)),
    sample("select", lambda x: x.select(0, 3)),
    sample("index", lambda x: x[2]),
    sample("slices", lambda x: x[::2, 1:]),
    sample("cat", lambda x, y: torch.cat((x, y), dim=-1), MATRIX, (5, 2)),
    sample("stack", lambda x, y: torch.stack([x, y]), MATRIX, MATRIX),
    sample("where scalar", lambda x: torch.where(x > 0, x, 0.0)),
    sample("index_select", lambda x, i: x.index_select(1, i), MATRIX, (3,), integers={1: 4}),
    sample("gather", lambda x, i: x.gather(0, i), MATRIX, (3, 4), integers={1: 5}),
    sample("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), MATRIX, (5, 2), integers={1: 4}),
    sample("scatter_add", lambda x, i, y: x.scatter_add(0, i, y), MATRIX, (3, 4), (3, 4), integers={1: 5}),
    sample("index_add", lambda x, i, y: x.index_add(0, i, y), MATRIX, (3,), (3, 4), integers={1: 5}),
    sample("embedding", lambda i, w: F.embedding(i, w), (2, 3), (7, 4), integers={0: 7}),
    sample("by frequency", lambda i, w: F.embedding(i, w, 2, None, 2.0, True), (2, 3), (4, 3), integers={0: 4}),
    sample("F.instance_norm", lambda x, w, b: F.instance_norm(x, None, None, w, b), (3, 4, 5), (4,), (4,)),
    sample(
        "running F.instance_norm",
        _with_statistics(lambda x, m, v: F.instance_norm(x, m, v, momentum=0.3)),
        *((3, 4, 5), (4,), (4,)),
        positive=True,
        may_refuse=IN_PLACE,
    ),
    sample(
        "F.instance_norm in evaluation",
        lambda x, m, v: F.instance_norm(x, m.detach(), v.detach(), None, None, False),
        (3, 4, 5),
        (4,),
        (4,),
        positive=True,
    ),
    *(
        sample(
            f"native_batch_norm, training={training}",
            _with_statistics(
                lambda x, m, v, training=training: torch.native_batch_norm(x, None, None, m, v, training, 0.3, 1e-5)
            ),
            *((3, 4, 5), (4,), (4,)),
            positive=True,
            may_refuse="have to change the placement",
        )
        for training in (True, False)
    ),
    sample("F.layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), (2, 5, 4), (4,), (4,)),
    sample("F.rms_norm", lambda x, w: F.rms_norm(x, (4,), w), (2, 5, 4), (4,)),
    sample("F.group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (3, 4, 5), (4,), (4,)),
    sample("F.linear", lambda x, w, b: F.linear(x, w, b), (2, 5, 4), (3, 4), (3,)),
    sample("conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), (2, 3, 5), (4, 3, 3), (4,)),
    sample("conv2d", lambda x, w: F.conv2d(x, w, stride=2), (2, 3, 5, 4), (4, 3, 2, 2)),
    sample("conv2d groups", lambda x, w: F.conv2d(x, w, groups=2), (2, 4, 3, 3), (4, 2, 2, 2)),
    sample("conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w, stride=2), (2, 3, 3, 2), (3, 4, 2, 2)),
    sample("max_pool2d", lambda x: F.max_pool2d(x, 2), (2, 3, 4, 5)),
    sample("avg_pool2d", lambda x: F.avg_pool2d(x, 2, stride=1), (2, 3, 4, 5)),
    sample("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (1, 1)), (2, 3, 4, 5)),
    *(
        sample(f"{name} {how}", lambda x, y, name=name, how=how: getattr(F, name)(x, y, reduction=how), MATRIX, MATRIX)
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
        for how in ("mean", "sum", "none")
    ),
    sample("poisson_nll_loss", F.poisson_nll_loss, MATRIX, MATRIX, positive=True),
    sample("poisson", lambda x, y: F.poisson_nll_loss(x, y * 2, False, True), MATRIX, MATRIX, positive=True),
    sample("gaussian_nll_loss", F.gaussian_nll_loss, MATRIX, MATRIX, MATRIX, positive=True),
    sample("gaussian", lambda x, y, v: F.gaussian_nll_loss(x, y, v, True), MATRIX, MATRIX, (5,), positive=True),
    sample("hinge_embedding_loss", lambda x, y: F.hinge_embedding_loss(x, _signs(y)), MATRIX, MATRIX),
    sample("margin_ranking_loss", lambda x, y, t: F.margin_ranking_loss(x, y, _signs(t), 0.3), (5,), (5,), (5,)),
    sample(
        "cosine_embedding_loss", lambda x, y, t: F.cosine_embedding_loss(x, y, _signs(t), 0.1), MATRIX, MATRIX, (5,)
    ),
    sample("triplet_margin_loss", F.triplet_margin_loss, MATRIX, MATRIX, MATRIX),
    sample("triplet swapped", lambda x, y, z: F.triplet_margin_loss(x, y, z, swap=True, p=1), MATRIX, MATRIX, MATRIX),
    sample("triplets", lambda x, y, z: F.triplet_margin_with_distance_loss(x, y, z, reduction="sum"), *(MATRIX,) * 3),
    sample("multi_margin_loss", lambda x, t: F.multi_margin_loss(x, t, 2), MATRIX, (5,), integers={1: 4}),
    sample(
        "multi margin",
        lambda x, t, w: F.multi_margin_loss(x, t, weight=w.detach()),
        MATRIX,
        (5,),
        (4,),
        integers={1: 4},
    ),
    sample("multilabel_margin_loss", lambda x, t: F.multilabel_margin_loss(x, t - 1), MATRIX, MATRIX, integers={1: 5}),
    sample(
        "multilabel", lambda x, t: F.multilabel_margin_loss(x, t - 1, reduction="none"), MATRIX, MATRIX, integers={1: 5}
    ),
    sample(
        "multilabel_soft_margin_loss", lambda x, t: F.multilabel_soft_margin_loss(x, (t > 0).float()), MATRIX, MATRIX
    ),
    sample("kl_div", lambda x, y: F.kl_div(x, y, reduction="batchmean"), MATRIX, MATRIX, positive=True),
    sample("nll_loss", lambda x, t: F.nll_loss(x, t, reduction="sum"), MATRIX, (5,), integers={1: 4}),
    sample("cross_entropy", lambda x, t: F.cross_entropy(x, t), (5, 7), (5,), integers={1: 7}),
    sample("linear, bias of rows", F.linear, (2, 4), (2, 4), (2, 1)),
    sample("linear, bias of everything", F.linear, (3, 4), (5, 4), (3, 5)),
    sample("prelu of a number", F.prelu, (), ()),
    sample("kl_div of numbers", lambda x, t: F.kl_div(x, t, reduction="batchmean"), (), (), positive=True),
    *(
        sample(f"pad, {mode}", lambda x, mode=mode: F.pad(x, (1, 1), mode=mode), (2, 4))
        for mode in ("replicate", "reflect", "circular")
    ),
    sample("smoothing", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (5, 7), (5,), integers={1: 7}),
    sample(
        "sdpa",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (2, 2, 3, 2),
        (2, 2, 3, 2),
        (2, 2, 3, 2),
    ),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda case: case.name)
def test_function_on_dtensors_equals_the_unsharded_one(sample: Sample) -> None:
    platform = get_platform("torch")
    for mesh_shape, limit in LIMITS.items():
        reports = run_ranks(prove, math.prod(mesh_shape), platform, platform, mesh_shape, [sample], limit)
        assert [problem for report in reports for problem in report.wrong] == []
        assert reports[0].refused == []


NORMS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "F.group_norm": (lambda x: F.group_norm(x, 5), (7, 5, 1)),
    "F.batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (7, 5)),
}


@pytest.mark.parametrize(("norm", "shape"), NORMS.values(), ids=NORMS)
def test_a_rank_may_have_one_value_per_channel(
    norm: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]
) -> None:
    full = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)

    def rank() -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (3,))
        x = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
        y = norm(x)
        (y * distribute_tensor(full, mesh, [Shard(0)])).sum().backward()
        assert x.grad is not None
        return [y.full_tensor().detach(), x.grad.full_tensor()]

    leaf = full.clone().requires_grad_()
    y = norm(leaf)
    (y * full).sum().backward()
    for found in run_ranks(rank, 3, "torch"):
        torch.testing.assert_close(found, [y.detach(), leaf.grad])


@pytest.mark.parametrize(("norm", "shape"), NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_one_value_per_channel_of_the_whole_is_refused_on_every_rank(
    norm: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], placement: Placement
) -> None:
    def rank() -> None:
        x = distribute_tensor(torch.ones(1, *shape[1:]), init_device_mesh("cpu", (3,)), [placement])
        with pytest.raises(ValueError, match=rf"more than 1 value per channel .* \[1, {str([*shape[1:]])[1:-1]}\]"):
            norm(x)

    run_ranks(rank, 3, "torch")


UNFIT: dict[str, Callable[..., torch.Tensor]] = {
    "linear": F.linear,
    "addmm": lambda x, w, short: torch.addmm(short, x, w.t()),
    "prelu": lambda x, w, short: F.prelu(x @ w.t(), short),
}


@pytest.mark.parametrize("call", UNFIT.values(), ids=UNFIT)
@pytest.mark.parametrize("shape", [(2,), (1, 1, 4)], ids=str)
def test_what_fits_the_part_and_not_the_whole_is_refused(
    call: Callable[..., torch.Tensor], shape: tuple[int, ...]
) -> None:
    """Each of two ranks has two of four columns, as many as the shorter one has elements."""

    def rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        x, w = distribute_tensor(torch.ones(3, 4), mesh), distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        with pytest.raises(
            ShardingRuleError, match=r"does not broadcast to the result, which is \[|one slope per channel"
        ):
            call(x, w, distribute_tensor(torch.ones(shape), mesh))

    run_ranks(rank, 2, "torch")
