"""The decoder's loss in NumPy, float64, written from the formulas."""

from __future__ import annotations

import numpy
from moe_reference import ReferenceMoE, sigmoid


def summed_loss(config, weights, ids, targets, positions=None):
    """Cross entropy summed over all targets but -100, in nats; `weights` by the decoder's parameter names."""
    if positions is None:
        positions = numpy.tile(numpy.arange(ids.shape[1]), (len(ids), 1))
    w = {name: value.astype(numpy.float64) for name, value in weights.items()}
    x = w["embed.weight"][ids] * (config.hidden_size**0.5 if config.scale_embeddings else 1.0)
    for i in range(config.num_hidden_layers):
        mine = {name[len(prefix) :]: v for name, v in w.items() if name.startswith(prefix := f"layers.{i}.")}
        x = _block(config, mine, x, positions, config.window_of(i))
    x = _norm(config, x, w["norm.weight"])
    logits = x @ w.get("head.weight", w["embed.weight"]).T
    if config.logit_soft_cap is not None:
        logits = config.logit_soft_cap * numpy.tanh(logits / config.logit_soft_cap)
    shifted = logits - logits.max(-1, keepdims=True)
    log_total = numpy.log(numpy.exp(shifted).sum(-1))
    picked = numpy.take_along_axis(shifted, numpy.maximum(targets, 0)[..., None], -1)[..., 0]
    return (log_total - picked)[targets != -100].sum()


def _block(config, w, x, positions, window):
    attend = _latent_attention if config.attention == "latent" else _attention
    attended = attend(config, w, _norm(config, x, w["attention_norm.weight"]), positions, window)
    x = x + _post(config, w, "post_attention_norm", attended)
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
    return x + _post(config, w, "post_ffn_norm", out.reshape(x.shape))


def _attention(config, w, x, positions, window):
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def project(name, count):
        rows = x @ w[f"attention.{name}.weight"].T + w.get(f"attention.{name}.bias", 0.0)
        norm = w.get(f"attention.{name[0]}_norm.weight")
        if norm is not None and config.qk_norm == "full":
            rows = _norm(config, rows, norm)
        rows = rows.reshape(*x.shape[:2], count, width)
        return _norm(config, rows, norm) if norm is not None and config.qk_norm == "head" else rows

    q = _rotate(config, project("q_proj", heads), positions)
    k = _rotate(config, project("k_proj", kv_heads), positions)
    out = _attend(config, w, q, k, project("v_proj", kv_heads), positions, window, width**-0.5)
    return out @ w["attention.o_proj.weight"].T + w.get("attention.o_proj.bias", 0.0)


def _latent_attention(config, w, x, positions, window):
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim

    def project(name, y):
        return y @ w[f"attention.{name}.weight"].T

    if config.q_lora_rank is None:
        q = project("q_proj", x)
    else:
        q = project("q_b_proj", _norm(config, project("q_a_proj", x), w["attention.q_a_norm.weight"]))
    q = q.reshape(*x.shape[:2], heads, nope + rope)
    both = project("kv_a_proj", x)
    narrow, shared = both[..., : config.kv_lora_rank], both[..., config.kv_lora_rank :]
    kv = project("kv_b_proj", _norm(config, narrow, w["attention.kv_a_norm.weight"]))
    kv = kv.reshape(*x.shape[:2], heads, nope + config.v_head_dim)
    shared = numpy.repeat(_rotate(config, shared[:, :, None], positions), heads, 2)
    q = numpy.concatenate([q[..., :nope], _rotate(config, q[..., nope:], positions)], -1)
    k = numpy.concatenate([kv[..., :nope], shared], -1)
    out = _attend(config, w, q, k, kv[..., nope:], positions, window, (nope + rope) ** -0.5)
    return project("o_proj", out)


def _attend(config, w, q, k, v, positions, window, scale):
    """Attention one token and one head at a time: `[batch, length, heads * width]`."""
    batch, length, heads, _ = q.shape
    scale = scale if config.attention_scale is None else config.attention_scale
    out = numpy.zeros((batch, length, heads, v.shape[-1]))
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // k.shape[2])
            for t in range(length):
                # A document begins where its position is 0, so the distance to its beginning is the position itself.
                first = t - positions[b, t]
                first = first if window is None else max(first, t - window + 1)
                scores = k[b, first : t + 1, kv] @ q[b, t, h] * scale
                cap = config.attention_soft_cap
                scores = scores if cap is None else cap * numpy.tanh(scores / cap)
                sink = [w["attention.sinks"][h]] if config.attention_sinks else []
                p = numpy.exp(numpy.concatenate([scores, sink]) - scores.max())
                out[b, t, h] = (p / p.sum())[: len(scores)] @ v[b, first : t + 1, kv]
    return out.reshape(batch, length, -1)


def _rotate(config, x, positions):
    half = x.shape[-1] // 2
    out = numpy.empty_like(x)
    for i in range(half):
        angle = positions[:, :, None] * config.rope_theta ** (-i / half)
        pair = (2 * i, 2 * i + 1) if config.rope_interleaved else (i, i + half)
        a, b = x[..., pair[0]], x[..., pair[1]]
        out[..., pair[0]] = a * numpy.cos(angle) - b * numpy.sin(angle)
        out[..., pair[1]] = b * numpy.cos(angle) + a * numpy.sin(angle)
    return out


def _post(config, w, name, x):
    return _norm(config, x, w[f"{name}.weight"]) if config.post_norms else x


def _norm(config, x, weight):
    weight = 1 + weight if config.norm_unit_offset else weight
    return x / numpy.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight
