"""Modules of torch as users write them, for plans of such."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from planned_runs import peak_of

from hp_trainer.config import TrainerConfig, parse_config
from hp_trainer.plugins import registries


@dataclass(frozen=True, kw_only=True)
class Options:
    vocab_size: int = 512
    width: int = 96
    layers: int = 4


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.reshape(batch, length, 6, width // 6).transpose(1, 2) for part in parts)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(torch.nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(options.vocab_size, options.width)
        self.blocks = torch.nn.ModuleList(Block(options.width) for _ in range(options.layers))
        self.norm = torch.nn.LayerNorm(options.width)
        self.head = torch.nn.Linear(options.width, options.vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(options: Options) -> Transformer:
    return Transformer(options)


def tied(options: Options) -> Transformer:
    model = Transformer(options)
    model.head.weight = model.embed.weight
    return model


def half(options: Options) -> torch.nn.Module:
    return Transformer(options).to(torch.bfloat16)


def llama(options: Options) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": options.width, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 256}
    sizes |= {"num_hidden_layers": options.layers, "vocab_size": options.vocab_size}
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **sizes))


class ByValues(Transformer):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * ids.max().item()


def by_values(options: Options) -> torch.nn.Module:
    return ByValues(options)


class OneLength(Transformer):
    """Computes with samples of one length alone."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.places = torch.nn.Parameter(torch.zeros(64, options.width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks[0](self.embed(ids) + self.places)))


def one_length(options: Options) -> torch.nn.Module:
    return OneLength(options)


class Bigrams(torch.nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(options.vocab_size, options.width)
        self.head = torch.nn.Linear(options.width, options.vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def without_blocks(options: Options) -> torch.nn.Module:
    return Bigrams(options)


class LaysItselfOut(Transformer):
    def parallelize(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a plan refuses such a module before it is parallelized")


def lays_itself_out(options: Options) -> torch.nn.Module:
    return LaysItselfOut(options)


def config_of(build: str, **settings: Any) -> TrainerConfig:
    """Return a configuration whose model is one of this file; two underscores stand for the dot."""
    yaml = f"""\
model: {{name: "{Path(__file__).absolute()}:{build}"}}
data: {{path: none.txt}}
training: {{steps: 1, global_batch_size: 4, sequence_length: 128, clip_norm: null}}
"""
    given = [(name.replace("__", "."), str(value)) for name, value in settings.items()]
    return parse_config(yaml, given, registered=registries()).config


def measured_peak(build: str, settings: dict[str, Any], steps: int) -> int:
    """Return the bytes that this rank holds at the peak of a step of one of these models; see `peak_of`."""
    return peak_of(config_of(build, **settings), steps)
