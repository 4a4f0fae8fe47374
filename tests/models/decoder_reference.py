"""The decoder's loss in NumPy, float64, written from the formulas."""

from __future__ import annotations

import numpy
from moe_reference import ReferenceMoE, sigmoid


def summed_loss(config, weights, ids, targets):
    """Cross entropy summed over all tokens, in nats; `weights` by the decoder's parameter names."""
    w = {name: value.astype(numpy.float64) for name, value in weights.items()}
    x = w["embed.weight"][ids]
    for i in range(config.num_hidden_layers):
        mine = {name[len(prefix) :]: v for name, v in w.items() if name.startswith(prefix := f"layers.{i}.")}
        x = _block(config, mine, x)
    x = _norm(config, x, w["norm.weight"])
    logits = x @ w.get("head.weight", w["embed.weight"]).T
    shifted = logits - logits.max(-1, keepdims=True)
    log_total = numpy.log(numpy.exp(shifted).sum(-1))
    return (log_total - numpy.take_along_axis(shifted, targets[..., None], -1)[..., 0]).sum()


def _block(config, w, x):
    x = x + _attention(config, w, _norm(config, x, w["attention_norm.weight"]))
    inside = _norm(config, x, w["ffn_norm.weight"])
    rows = inside.reshape(-1, inside.shape[-1])
    if "feed_forward.w1.weight" in w:
        gate = rows @ w["feed_forward.w1.weight"].T
        out = (gate * sigmoid(gate) * (rows @ w["feed_forward.w3.weight"].T)) @ w["feed_forward.w2.weight"].T
    else:
        moe = ReferenceMoE(
            {name[4:]: v for name, v in w.items() if name.startswith("moe.")},
            config.num_experts_per_tok,
            score_func=config.score_func,
            route_norm=config.norm_topk_prob,
            route_scale=config.routed_scaling_factor,
        )
        out, _, _ = moe(rows, numpy.zeros_like(rows))
    return x + out.reshape(x.shape)


def _attention(config, w, x):
    batch, length, _ = x.shape
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def project(name, count):
        return (x @ w[f"attention.{name}.weight"].T).reshape(batch, length, count, width)

    q = _rotate(config, _norm(config, project("q_proj", heads), w["attention.q_norm.weight"]))
    k = _rotate(config, _norm(config, project("k_proj", kv_heads), w["attention.k_norm.weight"]))
    v = project("v_proj", kv_heads)
    out = numpy.zeros((batch, length, heads, width))
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            for t in range(length):
                scores = k[b, : t + 1, kv] @ q[b, t, h] / numpy.sqrt(width)
                p = numpy.exp(scores - scores.max())
                out[b, t, h] = (p / p.sum()) @ v[b, : t + 1, kv]
    return out.reshape(batch, length, heads * width) @ w["attention.o_proj.weight"].T


def _rotate(config, x):
    half = config.head_dim // 2
    out = numpy.empty_like(x)
    for t in range(x.shape[1]):
        for i in range(half):
            angle = t * config.rope_theta ** (-2 * i / config.head_dim)
            a, b = x[:, t, :, i], x[:, t, :, i + half]
            out[:, t, :, i] = a * numpy.cos(angle) - b * numpy.sin(angle)
            out[:, t, :, i + half] = b * numpy.cos(angle) + a * numpy.sin(angle)
    return out


def _norm(config, x, weight):
    return x / numpy.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight
