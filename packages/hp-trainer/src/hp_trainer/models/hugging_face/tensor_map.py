"""Locations of the decoder's tensors in a checkpoint of each architecture.

A checkpoint may store experts one by one or stacked, gate and up projections side by side or interleaved, and matrices
transposed. Each of these is an affine map per dimension, so that any box of a tensor can be read, and any tensor be
written, without the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_trainer.checkpoint import Box
from hp_trainer.models.decoder.parameters import attention_shapes

Array = np.ndarray


@dataclass(frozen=True)
class Piece:
    """A box of one of the decoder's tensors, and its location in a tensor of the checkpoint.

    Attributes:
        box: the box of the decoder's tensor.
        axes: for each dimension of the checkpoint's tensor, the dimension of the decoder's. `box` has size 1 along
            dimensions of the decoder's tensor that do not occur.
        start, stride: element `i` of the box along `axes[d]` is element `start[d] + stride[d] * i` of the checkpoint's
            tensor along `d`.
    """

    source: str
    shape: tuple[int, ...]
    box: Box
    axes: tuple[int, ...]
    start: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self, part: Box, read_slices: Callable[[str, tuple[slice, ...]], Array]) -> Array:
        """Return a part of the box by `read_slices(tensor, slices)` of the checkpoint, in the part's shape."""
        # Dimensions in the checkpoint's order; the decoder's dimensions that are missing have size 1 and come with the
        # reshape.
        return read_slices(self.source, self._slices(part)).transpose(self.order).reshape(part.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The piece's elements in the checkpoint's tensor."""
        return self._slices(self.box)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions of the checkpoint's tensor in the decoder's order."""
        return tuple(sorted(range(len(self.axes)), key=lambda dimension: self.axes[dimension]))

    def place(self, values: Array, into: Array) -> None:
        """Write the elements of the piece's box, in the box's shape, into the checkpoint's tensor `into`."""
        # The inverse of `read`: drop the dimensions of size 1, then order the others as the checkpoint does.
        sizes = [self.box.shape[axis] for axis in sorted(self.axes)]
        ranks = {axis: rank for rank, axis in enumerate(sorted(self.axes))}
        into[self.slices] = values.reshape(sizes).transpose([ranks[axis] for axis in self.axes])

    def _slices(self, part: Box) -> tuple[slice, ...]:
        found = []
        for axis, start, stride in zip(self.axes, self.start, self.stride, strict=True):
            first = start + stride * (part.offset[axis] - self.box.offset[axis])
            # The stop is one after the last index read, since a slice by whole strides could end beyond the tensor.
            found.append(slice(first, first + stride * (part.shape[axis] - 1) + 1, stride))
        return tuple(found)


@dataclass(frozen=True)
class MappedTensor:
    """One tensor of the decoder: its global shape, and the pieces of the checkpoint that form it."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def same(cls, source: str, shape: tuple[int, ...]) -> MappedTensor:
        """Return a tensor that the checkpoint stores unchanged."""
        return cls.within(source, shape, shape)

    @classmethod
    def stacked(cls, sources: list[str], shape: tuple[int, ...]) -> MappedTensor:
        """Return a tensor that stacks tensors of the checkpoint, such as experts, along its first dimension."""
        inner = shape[1:]
        zeros, ones = (0,) * len(inner), (1,) * len(inner)
        axes = tuple(range(1, len(shape)))
        boxes = [Box((i, *zeros), (1, *inner)) for i in range(len(sources))]
        pairs = zip(sources, boxes, strict=True)
        return cls(shape, tuple(Piece(source, inner, box, axes, zeros, ones) for source, box in pairs))

    @classmethod
    def within(
        cls,
        source: str,
        source_shape: tuple[int, ...],
        shape: tuple[int, ...],
        *,
        axes: tuple[int, ...] | None = None,
        start: tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> MappedTensor:
        """Return a tensor that is a possibly transposed slice of one of the checkpoint's; arguments as in `Piece`."""
        count = len(shape)
        piece = Piece(
            source,
            source_shape,
            Box.full(shape),
            axes or tuple(range(count)),
            start or (0,) * count,
            stride or (1,) * count,
        )
        return cls(shape, (piece,))

    def read(self, wanted: Box, read_slices: Callable[[str, tuple[slice, ...]], Array]) -> Array:
        """Return a box of the tensor as float32, reading only the bytes it needs."""
        result = np.empty(wanted.shape, np.float32)
        for piece in self.pieces:
            part = piece.box.intersect(wanted)
            if part is not None:
                result[part.slices_in(wanted)] = piece.read(part, read_slices)
        return result


# `hp_trainer.models.decoder` imports this folder.
DecoderConfig = Any
TensorMap = dict[str, MappedTensor]


@dataclass(frozen=True)
class ExpertNames:
    """Names of experts stored one by one: `<prefix>.experts.<number>.<gate, down or up>.weight`."""

    prefix: str = "mlp"
    gate: str = "gate_proj"
    down: str = "down_proj"
    up: str = "up_proj"
    router: str = "gate"


_EXPERTS = {
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w2", "w3"),
    "gpt_oss": ExpertNames(router="router"),
}


def build_tensor_map(config: DecoderConfig, model_type: str, *, fused: bool = False) -> TensorMap:
    """Return where a checkpoint stores every tensor of the decoder; `fused`: with experts stacked as in memory."""
    hidden, vocab = config.hidden_size, config.vocab_size
    found = {"embed.weight": MappedTensor.same("model.embed_tokens.weight", (vocab, hidden))}
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        found |= _norms(config, ours, theirs)
        found |= dict(_attention(config, f"{ours}.attention", f"{theirs}.self_attn"))
        if config.is_dense(layer):
            found |= _feed_forward(f"{ours}.feed_forward", f"{theirs}.mlp", hidden, config.intermediate_size)
        else:
            found |= _moe(config, model_type, f"{ours}.moe", theirs, fused)
    found["norm.weight"] = MappedTensor.same("model.norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        found["head.weight"] = MappedTensor.same("lm_head.weight", (vocab, hidden))
    return found


def _norms(config: DecoderConfig, ours: str, theirs: str) -> TensorMap:
    names = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    # Gemma's `post_attention_layernorm` follows attention; in Llama the same name precedes the feed-forward network.
    if config.post_norms:
        names |= {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
        names["post_ffn_norm"] = "post_feedforward_layernorm"
    shape = (config.hidden_size,)
    return {f"{ours}.{a}.weight": MappedTensor.same(f"{theirs}.{b}.weight", shape) for a, b in names.items()}


def _attention(config: DecoderConfig, ours: str, theirs: str) -> Iterator[tuple[str, MappedTensor]]:
    renamed = {"q_a_norm": "q_a_layernorm", "kv_a_norm": "kv_a_layernorm", "kv_a_proj": "kv_a_proj_with_mqa"}
    for name, shape in attention_shapes(config):
        first, _, rest = name.partition(".")
        other = f"{renamed.get(first, first)}.{rest}" if rest else first
        yield f"{ours}.{name}", MappedTensor.same(f"{theirs}.{other}", shape)


def _feed_forward(ours: str, theirs: str, hidden: int, width: int) -> TensorMap:
    return {
        f"{ours}.w1.weight": MappedTensor.same(f"{theirs}.gate_proj.weight", (width, hidden)),
        f"{ours}.w2.weight": MappedTensor.same(f"{theirs}.down_proj.weight", (hidden, width)),
        f"{ours}.w3.weight": MappedTensor.same(f"{theirs}.up_proj.weight", (width, hidden)),
    }


def _moe(config: DecoderConfig, model_type: str, ours: str, layer: str, fused: bool) -> TensorMap:
    names = _EXPERTS.get(model_type, ExpertNames())
    hidden, width, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
    # transformers 5 has all architectures' stacked experts under `mlp`.
    theirs = f"{layer}.mlp" if fused else f"{layer}.{names.prefix}"
    router = f"{theirs}.{names.router}"
    found = {f"{ours}.router.gate.weight": MappedTensor.same(f"{router}.weight", (count, hidden))}
    if config.router_bias:
        found[f"{ours}.router.gate.bias"] = MappedTensor.same(f"{router}.bias", (count,))
    # A buffer, not a parameter: only DeepSeek-V3 stores the bias with its weights.
    if config.load_balance_coeff is not None and model_type == "deepseek_v3":
        found[f"{ours}.expert_bias"] = MappedTensor.same(f"{router}.e_score_correction_bias", (count,))
    if config.num_shared_experts:
        shared = config.num_shared_experts * width
        found |= _feed_forward(f"{ours}.shared_experts", f"{theirs}.shared_experts", hidden, shared)
    if model_type == "gpt_oss":
        return found | _alternating_experts(config, f"{ours}.experts", f"{theirs}.experts")
    if fused:
        return found | _fused_experts(config, f"{ours}.experts", f"{theirs}.experts")
    for name, other, shape in (
        ("w1", names.gate, (count, width, hidden)),
        ("w2", names.down, (count, hidden, width)),
        ("w3", names.up, (count, width, hidden)),
    ):
        sources = [f"{theirs}.experts.{i}.{other}.weight" for i in range(count)]
        found[f"{ours}.experts.{name}"] = MappedTensor.stacked(sources, shape)
    return found


def _fused_experts(config: DecoderConfig, ours: str, theirs: str) -> TensorMap:
    """Return experts stacked in two tensors: gate rows, then up rows `[experts, 2 * width, hidden]`; and down."""
    hidden, width, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
    both, shape = (count, 2 * width, hidden), (count, width, hidden)
    source = f"{theirs}.gate_up_proj"
    return {
        f"{ours}.w1": MappedTensor.within(source, both, shape),
        f"{ours}.w3": MappedTensor.within(source, both, shape, start=(0, width, 0)),
        f"{ours}.w2": MappedTensor.same(f"{theirs}.down_proj", (count, hidden, width)),
    }


def _alternating_experts(config: DecoderConfig, ours: str, theirs: str) -> TensorMap:
    """Return experts of gpt-oss: transposed, gate and up columns interleaved `[experts, hidden, 2 * width]`."""
    hidden, width, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
    source, both, shape = f"{theirs}.gate_up_proj", (count, hidden, 2 * width), (count, width, hidden)
    transposed = (0, 2, 1)
    bias = f"{source}_bias"
    return {
        f"{ours}.w1": MappedTensor.within(source, both, shape, axes=transposed, stride=(1, 1, 2)),
        f"{ours}.w3": MappedTensor.within(source, both, shape, axes=transposed, start=(0, 0, 1), stride=(1, 1, 2)),
        f"{ours}.w2": MappedTensor.within(
            f"{theirs}.down_proj", (count, width, hidden), (count, hidden, width), axes=transposed
        ),
        f"{ours}.b1": MappedTensor.within(bias, (count, 2 * width), (count, width), stride=(1, 2)),
        f"{ours}.b3": MappedTensor.within(bias, (count, 2 * width), (count, width), start=(0, 1), stride=(1, 2)),
        f"{ours}.b2": MappedTensor.same(f"{theirs}.down_proj_bias", (count, hidden)),
    }
