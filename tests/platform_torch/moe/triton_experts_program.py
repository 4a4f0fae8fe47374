"""The Triton kernels of the experts, on the CPU through Triton's interpreter; prints what the tests assert on, as JSON.

A process of its own, as the interpreter must be chosen (TRITON_INTERPRET=1) before anything imports triton. Memory
is poisoned: what a kernel reads or returns without writing it shows as NaN or as an index out of range.
"""

from __future__ import annotations

import json
import warnings

import torch

import hp_moe.experts
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.platform.selection import get_platform
from hp_moe import GroupedExperts, Routing, TokenPermutation
from hp_platform_torch.moe import fused_experts as module
from hp_platform_torch.moe.fused_experts import Tile, TileSizes, fused_experts, order_rows, schedule_tiles

PLATFORM = get_platform("torch")


def poison() -> None:
    def poisoned(make):
        def empty(*args, **kwargs):
            result = make(*args, **kwargs)
            return result.fill_(float("nan") if result.is_floating_point() else -(10**6))

        return empty

    torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)
    torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)


def tiles(**options) -> TileSizes:
    return TileSizes(*[Tile(16, 16, 16, 4, 2, **options)] * 6)


# tokens, dim, hidden_dim, experts, slots, and what is not as usual; widths that fill no tile among them.
CASES = {
    "even": (12, 32, 16, 4, 2, {}),
    "uneven": (21, 24, 40, 5, 3, {"tiles": tiles(group=2), "again": True}),
    "scores before": (9, 24, 20, 4, 3, {"score_before": True}),
    "no scores": (9, 24, 20, 4, 3, {"scored": False}),
    "slots without a copy": (9, 24, 20, 4, 3, {"absent": True, "tiles": tiles(parts=2)}),
    "scores before, slots without a copy": (9, 24, 20, 4, 3, {"absent": True, "score_before": True}),
    "one slot, one token": (1, 16, 16, 3, 1, {}),
    "all to one expert": (35, 16, 16, 2, 1, {"only": 1}),
    "an expert twice": (9, 16, 16, 3, 2, {"twice": True}),
    "half precision": (12, 24, 20, 4, 2, {"dtype": torch.float16}),
}


def problem(tokens, dim, hidden_dim, experts, slots, options):
    """(x, keys, scores, weights): expert 0 gets no rows; `experts` is the key of a slot without a copy."""
    generator = torch.Generator().manual_seed(tokens + dim + slots)
    dtype = options.get("dtype", torch.float32)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    keys = normal(tokens, experts - 1).topk(slots, 1).indices + 1
    if options.get("absent"):
        keys[torch.rand(keys.shape, generator=generator) < 0.3] = experts
    if options.get("only"):
        keys[:] = options["only"]
    if options.get("twice"):
        keys = keys[:, :1].expand(tokens, slots).contiguous()
    shapes = ((hidden_dim, dim), (dim, hidden_dim), (hidden_dim, dim))
    weights = tuple((normal(experts, *shape) / shape[1] ** 0.5).to(dtype) for shape in shapes)
    scores = torch.rand(keys.shape, generator=generator) if options.get("scored", True) else None
    return normal(tokens, dim).to(dtype), keys, scores, weights


def oracle(x, keys, scores, weights, score_before):
    """float64, one expert at a time."""
    out, (w1, w2, w3) = torch.zeros_like(x, dtype=torch.float64), (weight.double() for weight in weights)
    for expert in range(w1.shape[0]):
        token, slot = (keys == expert).nonzero(as_tuple=True)
        score = 1.0 if scores is None else scores[token, slot].double()[:, None]
        rows = x.double()[token] * (score if score_before else 1.0)
        results = (torch.nn.functional.silu(rows @ w1[expert].T) * (rows @ w3[expert].T)) @ w2[expert].T
        out = out.index_add(0, token, results if score_before else results * score)
    return out


def run_case(tokens, dim, hidden_dim, experts, slots, options):
    x, keys, scores, weights = problem(tokens, dim, hidden_dim, experts, slots, options)
    leaves = [leaf.requires_grad_() for leaf in (x, *weights, *([] if scores is None else [scores]))]
    grad = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(7)).to(x.dtype)
    counts = torch.bincount(keys.reshape(-1), minlength=experts + 1)[:experts]
    order = order_rows(TokenPermutation(PLATFORM, keys, int(counts.sum())), experts)
    before = options.get("score_before", False)

    def once():
        y = fused_experts(x, order, counts, scores, weights, before, options.get("tiles", tiles()))
        return y, *torch.autograd.grad(y, leaves, grad)

    got = once()
    y = oracle(x, keys, scores, weights, before)
    expected = (y, *torch.autograd.grad(y, leaves, grad.double()))
    return {
        "errors": [float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)],
        # The interpreter runs a kernel's programs in one order, so that one case is enough.
        "repeats": not options.get("again") or all(torch.equal(a, b) for a, b in zip(got, once(), strict=True)),
        "nothing for expert 0": not any(part[0].any() for part in got[2:5]),
    }


def layer_results(recomputed, fused):
    """Output and gradients of `GroupedExperts`, by the kernels or not, saved or recomputed in backward."""
    module._applies = lambda *_: True
    hp_moe.experts._implementation = lambda platform: module.checked_fused_experts if fused else None
    with nn.building(PLATFORM):
        layer = GroupedExperts(24, 16, 4)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
    x = torch.randn(10, 24, generator=generator).requires_grad_()
    scores = torch.rand(10, 2, generator=generator).requires_grad_()
    experts = torch.randn(10, 4, generator=generator).topk(2, 1).indices
    routing = Routing(experts, torch.bincount(experts.reshape(-1), minlength=4), scores)
    y = checkpoint(layer, x, routing, platform=PLATFORM) if recomputed else layer(x, routing)
    y.square().sum().backward()
    return [y.detach(), x.grad, scores.grad, *(weight.grad for weight in layer.parameters())]


def run_layer():
    plain = layer_results(False, False)
    # First in a checkpoint: the check of the first use must leave no trace in what recomputation repeats.
    again, retained = layer_results(True, True), layer_results(False, True)
    return {
        "error": max(float((a - b).norm() / b.norm()) for a, b in zip(plain, retained, strict=True)),
        "recomputed alike": all(torch.equal(a, b) for a, b in zip(retained, again, strict=True)),
        "checked": [passed for kind, passed in module._passed.items() if kind.dim == 24],
    }


def run_check():
    """A right compiler passes the check of the first use; one that gives wrong numbers is reported and not used."""
    kind = module.Kind(torch.device("cpu"), torch.float32, 24, 16, 2, None, tiles())
    error = module.largest_error(kind, PLATFORM)
    with torch.autocast("cpu", torch.bfloat16):
        in_autocast = module._check(kind, PLATFORM)
    module.largest_error = lambda *_: 0.5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        passes = [module._passes(kind, PLATFORM) for _ in range(2)]
    messages = [str(each.message) for each in caught]
    return {"error": error, "in autocast": in_autocast, "passes": passes, "warnings": messages}


def run_schedule():
    schedule = schedule_tiles(torch.tensor([5, 0, 8, 1]), 14, 4)
    used = int(schedule.num_tiles)
    return {"tiles": schedule.table[:used].tolist(), "ends": schedule.row_ends.tolist(), "most": schedule.max_tiles}


def main() -> None:
    poison()
    results = {name: run_case(*case) for name, case in CASES.items()}
    print(json.dumps({"cases": results, "layer": run_layer(), "check": run_check(), "schedule": run_schedule()}))


if __name__ == "__main__":
    main()
