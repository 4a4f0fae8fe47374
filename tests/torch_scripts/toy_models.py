"""Models and data of the scripts: plain torch, nothing of ranks."""

from __future__ import annotations

import torch
from torch import nn


class FeedForward(nn.Module):
    """A gated feed-forward block: `down(silu(gate(h)) * up(h))` with `h = norm(x)`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Layer(nn.Module):
    """Causal attention and a feed-forward block, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = FeedForward(width, 2 * width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class Transformer(nn.Module):
    """Token ids `[batch, length]` -> logits `[batch, length, vocabulary]`."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(step: int, rank: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels `[2, 7]` of a rank at a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(vocabulary, (2, 8), generator=generator)
    return ids[:, :-1], ids[:, 1:]
