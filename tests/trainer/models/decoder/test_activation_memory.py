"""Formulas of activation bytes against counted ones, and what follows from them."""

from __future__ import annotations

import pytest
from activation_meter import measure

from hp_trainer.models import DecoderConfig
from hp_trainer.models.decoder.activation_memory import MicroBatchShape, decoder_activations
from hp_trainer.models.recomputation import KINDS, NOTHING_RECOMPUTED, BlockRecompute
from hp_trainer.sizes import format_size, parse_size
from hp_trainer.training.activation_budget import Demand

SMALL = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
DENSE = {**SMALL, "intermediate_size": 96}
EXPERTS = {**SMALL, "num_experts": 8, "moe_intermediate_size": 40, "num_shared_experts": 1}
ROUTED = {**SMALL, "num_experts": 8, "moe_intermediate_size": 40}
BALANCED = {"norm_topk_prob": False, "load_balance_coeff": None}
# Options, degrees, what the shape says beside batch and length.
CASES = {
    "dense": (DENSE, {}, {}),
    "16 bits": (DENSE, {}, {"dtype": "bfloat16"}),
    "norms": ({**DENSE, "qk_norm": "head", "post_norms": True}, {}, {"dtype": "bfloat16"}),
    "full norms, soft cap": ({**DENSE, "qk_norm": "full", "attention_soft_cap": 30.0}, {}, {}),
    "window": ({**DENSE, "sliding_window": 16}, {}, {"length": 640, "batch": 1}),
    "latent": ({**DENSE, "attention": "latent", "q_lora_rank": 24}, {}, {"length": 640, "batch": 1}),
    "experts": (EXPERTS, {}, {}),
    "experts by Sinkhorn": ({**EXPERTS, **BALANCED, "routing": "sinkhorn"}, {}, {}),
    "experts that choose": ({**EXPERTS, **BALANCED, "routing": "expert_choice"}, {}, {}),
    "experts that choose, 16 bits": (
        {**EXPERTS, **BALANCED, "routing": "expert_choice"},
        {},
        {"dtype": "bfloat16", "fused_experts": False},
    ),
    "experts, 16 bits": (EXPERTS, {}, {"dtype": "bfloat16", "fused_experts": False}),
    "tp": (DENSE, {"tp": 2}, {"tp": 2}),
    "tp, norms, 16 bits": ({**DENSE, "qk_norm": "head"}, {"tp": 2}, {"tp": 2, "dtype": "bfloat16"}),
    "tp, norms of results": ({**DENSE, "post_norms": True}, {"tp": 2}, {"tp": 2}),
    "tp, gathered inputs": (
        DENSE,
        {"tp": 2, "tp_reshard_after_forward": False},
        {"tp": 2, "tp_reshards": False, "dtype": "bfloat16"},
    ),
    "tp, tied head": ({**DENSE, "tie_word_embeddings": True}, {"tp": 2}, {"tp": 2}),
    "tp, small tied head": ({**DENSE, "tie_word_embeddings": True, "vocab_size": 120}, {"tp": 2}, {"tp": 2}),
    "tp, latent": ({**DENSE, "attention": "latent"}, {"tp": 2}, {"tp": 2, "length": 640, "batch": 1}),
    "tp, experts": (EXPERTS, {"tp": 2}, {"tp": 2, "etp": 1}),
    "tp, sharded experts": (EXPERTS, {"tp": 2, "etp": 2}, {"tp": 2, "etp": 2}),
    "tp, sharded experts alone": (ROUTED, {"tp": 2, "etp": 2}, {"tp": 2, "etp": 2}),
    "tp, sharded experts alone, 16 bits": (
        ROUTED,
        {"tp": 2, "etp": 2},
        {"tp": 2, "etp": 2, "dtype": "bfloat16", "fused_experts": False},
    ),
    "tp, sharded experts of gathered inputs": (
        ROUTED,
        {"tp": 2, "etp": 2, "tp_reshard_after_forward": False},
        {"tp": 2, "etp": 2, "tp_reshards": False},
    ),
    "tp, sharded experts of peers": (
        ROUTED,
        {"tp": 2, "etp": 2, "ep": 2, "expert_mesh": "peer"},
        {"tp": 2, "etp": 2, "ep": 2, "splits_tokens": True},
    ),
    "ulysses": (DENSE, {"cp": 2, "ulysses_degree": 2}, {"cp": 2}),
    "ring": (DENSE, {"cp": 2, "ulysses_degree": 1}, {"cp": 2, "cp_method": "ring"}),
    "gathered keys": (DENSE, {"cp": 2, "cp_method": "all_gather"}, {"cp": 2, "cp_method": "all_gather"}),
    "ep": (EXPERTS, {"dp_shard": 2, "ep": 2}, {"ep": 2}),
}


# Rows are not spread evenly over ranks of experts, and the loss of sharded sequences saves a little more per token.
ROUGH = ("ep", "tp, sharded experts of peers")


@pytest.mark.parametrize("name", CASES)
def test_formulas_are_within_a_fiftieth_of_counted_bytes(name, hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("the bytes are counted on torch")
    options, degrees, sizes = CASES[name]
    config, shape = DecoderConfig(num_hidden_layers=2, **options), MicroBatchShape(**{"batch": 2, "length": 64} | sizes)
    found = measure(config, degrees, batch=shape.batch, length=shape.length, dtype=shape.dtype)
    message = decoder_activations(config, shape)
    assert message.blocks[1].saved() == pytest.approx(found.block, rel=0.06 if name in ROUGH else 0.02)
    assert message.head.saved() == pytest.approx(found.head, rel=0.04)


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("dense", ()),
        ("dense", ("attention",)),
        ("dense", ("products",)),
        ("tp", KINDS),
        ("experts", KINDS),
        ("experts that choose", ()),
    ],
)
def test_what_recomputation_keeps_is_within_a_fiftieth_of_counted_bytes(name, keep, hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("the bytes are counted on torch")
    options, degrees, sizes = CASES[name]
    config, shape = DecoderConfig(num_hidden_layers=2, **options), MicroBatchShape(batch=2, length=64, **sizes)
    settings = {"recompute": "selective", "recompute_keep": keep} if keep else {"recompute": "full"}
    found = measure(config, degrees, **settings)
    chosen = BlockRecompute(mode="selective" if keep else "full", keep=keep)
    assert decoder_activations(config, shape).blocks[1].saved(chosen) == pytest.approx(found.block, rel=0.02)


def test_a_pipeline_holds_several_micro_batches():
    config = DecoderConfig(num_hidden_layers=4, **DENSE)
    blocks = decoder_activations(config, MicroBatchShape(batch=1, length=32)).blocks[:2]
    one, three = (Demand(blocks=blocks, in_flight=each).peak([NOTHING_RECOMPUTED] * 2) for each in (1, 3))
    assert three == one + 2 * sum(block.saved() for block in blocks)


def test_recomputation_keeps_less_the_less_it_keeps():
    config = DecoderConfig(num_hidden_layers=2, **EXPERTS)
    block = decoder_activations(config, MicroBatchShape(batch=1, length=32, tp=2, ep=2)).blocks[1]
    modes = [
        BlockRecompute(mode="full"),
        BlockRecompute(mode="selective", keep=("attention",)),
        BlockRecompute(mode="selective", keep=("attention", "collectives")),
        BlockRecompute(mode="selective", keep=("attention", "collectives", "products")),
    ]
    assert sorted({block.saved(each) for each in modes}) == [block.saved(each) for each in modes]
    again = [block.recomputed_flops(each) for each in modes]
    assert again[0] > again[1] == again[2] > again[3]
    sent = [block.recomputed_sent(each) for each in modes]
    assert sent[0] == sent[1] > sent[2] == sent[3] == 0
    assert (block.recomputed_flops(), block.recomputed_sent(), block.recomputed_bytes()) == (0, 0, 0)


@pytest.mark.parametrize(("text", "size"), [("20GiB", 20 * 2**30), (" 512 MiB ", 2**29), ("1.5kB", 1500), ("7B", 7)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "20", "GiB", "-1GiB", "0MiB", "0.1B", "1 gib", "1e3MiB", "999999999TiB", "9" * 400 + "B"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"expected a size above 0 with its unit, such as 20GiB.*got "):
        parse_size(text)


def test_sizes_are_shown_in_the_unit_that_fits():
    assert [format_size(each) for each in (3.0, 2**10, 3 * 2**29, 2**40)] == ["3 B", "1.00 KiB", "1.50 GiB", "1.00 TiB"]
