"""The layer without dispatch or grouped products: every expert on every token, by the platform's own autograd.

It takes scores and experts from the layer's router, whose oracle is in `test_router.py`.
"""

from __future__ import annotations


def loop_over_experts(layer, rows):
    """Output `[tokens, dim]` of a `MoE` whose weights are plain, for `rows` `[tokens, dim]`."""
    scores, experts, _ = layer.router(rows, layer.expert_bias)
    out = loop_of(layer.experts, rows, scores, experts)
    if layer.shared_experts is None:
        return out
    shared = layer.shared_experts(rows)
    if layer.shared_gate is not None:
        shared = layer.ops.mul(layer.ops.sigmoid(layer.shared_gate(rows)), shared)
    return layer.ops.add(out, shared)


def loop_of(module, rows, scores, experts):
    """The same for experts alone: each slot's score weighs input, hidden row or result of the slot's expert."""
    ops, platform = module.ops, module.platform
    out = ops.zeros_like(rows)
    for slot in range(experts.shape[1]):
        score = ops.narrow(scores, 1, slot, 1)
        for expert in range(module.num_experts):
            chosen = ops.cast(ops.eq(ops.narrow(experts, 1, slot, 1), expert), platform.dtype("float32"))
            out = ops.add(out, ops.mul(chosen, _expert(module, expert, rows, score)))
    return out


def _expert(module, expert, rows, score):
    ops, position = module.ops, module.score_position

    def of_expert(name):
        weight = getattr(module, name)
        return None if weight is None else ops.squeeze(ops.narrow(weight, 0, expert, 1), 0)

    w1, w2, w3, b1, b2, b3 = map(of_expert, ("w1", "w2", "w3", "b1", "b2", "b3"))
    x = ops.mul(rows, score) if position == "before" else rows
    up = None if w3 is None else ops.linear(x, w3, b3)
    y = ops.linear(module.activation.apply(ops, ops.linear(x, w1, b1), up), w2, b2)
    return y if position == "before" else ops.mul(y, score)
