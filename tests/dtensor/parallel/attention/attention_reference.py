"""Attention by brute force in NumPy, float64, with its gradients: one matrix of scores, one mask of truth values."""

from __future__ import annotations

import numpy as np


def visible(queries, keys, causal, window, documents):
    """Return `[batch or 1, queries, keys]`; documents `[batch, keys]`."""
    i, j = np.arange(keys - queries, keys)[:, None], np.arange(keys)
    seen = np.ones((queries, keys), bool)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= np.abs(i - j) < window
    if documents is None:
        return seen[None]
    return seen & (documents[:, keys - queries :, None] == documents[:, None, :])


def attend(
    q, k, v, *, causal=True, window=None, documents=None, scale=None, soft_cap=None, sinks=None, seen=None, factors=1.0
):
    """Return (result, function from its gradient to the gradients of q, k, v and sinks)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    ke, ve = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    raw = scale * q @ ke.swapaxes(-1, -2)
    s = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    if seen is None:
        seen = visible(q.shape[2], k.shape[2], causal, window, documents)
    s = np.where(seen[:, None], s, -np.inf)
    extra = np.full((*s.shape[:3], 1), -np.inf)
    if sinks is not None:
        extra[:] = np.asarray(sinks, np.float64)[None, :, None, None]
    every = np.concatenate([s, extra], -1)
    p = np.exp(every - every.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    p, of_sink = p[..., :-1], p[..., -1:]
    out = (p * factors) @ ve

    def grads(g):
        g = np.asarray(g, np.float64)
        delta = (g * out).sum(-1, keepdims=True)
        d_s = p * (factors * (g @ ve.swapaxes(-1, -2)) - delta)
        d_sinks = -(of_sink * delta).sum((0, 2, 3))
        if soft_cap is not None:
            d_s = d_s * (1 - np.tanh(raw / soft_cap) ** 2)
        d_s = d_s * scale

        def shared(x):
            return x.reshape(x.shape[0], k.shape[1], groups, *x.shape[2:]).sum(2)

        found = [d_s @ ke, shared(d_s.swapaxes(-1, -2) @ q), shared((p * factors).swapaxes(-1, -2) @ g)]
        return found if sinks is None else [*found, d_sinks]

    return out, grads


def expected(arrays, mask, options):
    """Return the result and the gradients of queries, keys, values and sinks, if any, by brute force."""
    q, k, v, grad, *sinks = arrays
    documents = None if "positions" not in mask else documents_of(mask["positions"])
    given = {name: value for name, value in mask.items() if name != "positions"}
    out, grads = attend(q, k, v, documents=documents, **given, **options, sinks=sinks[0] if sinks else None)
    return [out, *grads(grad)]


def dropout_factors(p, rows, heads, queries, keys):
    """Return what dropout multiplies the softmax by, entry by entry in Python's integers: SplitMix64 of indices."""
    found = np.empty((len(rows), heads, queries, keys))
    for (row, head, i, j), _ in np.ndenumerate(found):
        number = rows[row] % 2**64
        for index in (head, i + keys - queries, j):
            number = (number + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
            number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) % 2**64
            number = ((number ^ number >> 27) * 0x94D049BB133111EB) % 2**64
            number ^= number >> 31
        found[row, head, i, j] = 0 if number >> 40 < round(p * 2**24) else 1 / (1 - p)
    return found


def compare(found, wanted, rtol=2e-5, atol=1e-5):
    """Compare float32 with float64; MindSpore's exponential and logarithm are off by up to 3e-6 on the CPU."""
    for name, x, y in zip(("result", "query", "key", "value", "sinks"), found, wanted, strict=False):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=name)
    assert len(found) == len(wanted)


def documents_of(positions):
    return np.cumsum(positions == 0, axis=1)


def positions_of(*rows):
    """Return positions `[batch, length]` of documents of these lengths in each row."""
    return np.array([np.concatenate([np.arange(n) for n in row]) for row in rows])


def inputs(batch=2, heads=4, kv_heads=2, queries=None, keys=13, width=8, out_width=None, seed=0):
    random = np.random.default_rng(seed)

    def draw(*shape):
        return random.standard_normal(shape).astype(np.float32)

    queries, out_width = queries or keys, out_width or width
    return (
        draw(batch, heads, queries, width),
        draw(batch, kv_heads, keys, width),
        draw(batch, kv_heads, keys, out_width),
        draw(batch, heads, queries, out_width),
        draw(heads),
    )
