"""Sequences shared by ranks train the decoder as one rank does, by every method and beside every other axis."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decoder_training import CONFIG, train_decoder
from test_decoder_layouts import assert_same, on_ranks, one_rank

DENSE = replace(CONFIG, num_experts=None, num_key_value_heads=2)
WINDOWS = replace(
    DENSE, sliding_window=3, layer_pattern=("sliding", "full"), attention_sinks=True, attention_soft_cap=2.0
)
LATENT = replace(
    CONFIG, attention="latent", q_lora_rank=6, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6
)

LAYOUTS = {
    # of two ranks
    "ring": ({"cp": 2, "cp_method": "ring"}, {"config": DENSE}),
    "ulysses": ({"cp": 2}, {"config": DENSE, "packed": True}),
    "all-gather": ({"cp": 2, "cp_method": "all_gather"}, {"config": WINDOWS, "packed": True}),
    "experts in every rank": ({"cp": 2, "cp_method": "auto", "ep": 2}, {}),
    "uneven": ({"cp": 2, "cp_method": "ring"}, {"config": WINDOWS, "length": 7, "packed": True}),
    # of four
    "data and sequence": ({"dp_shard": 2, "cp": 2, "cp_method": "ring", "ep": 4}, {"packed": True, "accumulate": 2}),
    "replicas and sequence": ({"dp_replicate": 2, "cp": 2}, {"config": WINDOWS, "recompute": True}),
    "tensor and sequence": ({"tp": 2, "cp": 2, "cp_method": "ring"}, {"config": WINDOWS, "packed": True}),
    "both methods": ({"cp": 4, "ulysses_degree": 2, "ep": 2}, {"packed": True, "recompute": True}),
    "all four exchange heads": ({"cp": 4, "cp_method": "ulysses"}, {"config": WINDOWS, "packed": True}),
    "latent attention": ({"cp": 4, "cp_method": "ring"}, {"config": LATENT}),
    "peer experts": ({"cp": 2, "ep": 2, "expert_mesh": "peer"}, {}),
    "peer experts, replicas": ({"dp_replicate": 2, "cp": 2, "ep": 1, "expert_mesh": "peer"}, {"config": DENSE}),
    # of eight
    "data, tensor and sequence": ({"dp_shard": 2, "tp": 2, "cp": 2, "cp_method": "all_gather", "ep": 2}, {}),
    "uneven, eight ranks": ({"cp": 8, "cp_method": "ring"}, {"config": DENSE, "length": 13}),
    "tensor, both methods": ({"tp": 2, "cp": 4, "ulysses_degree": 2, "cp_method": "auto"}, {"config": DENSE}),
}
ON_SLOW_PLATFORMS = ("ring", "ulysses", "all-gather", "uneven", "tensor and sequence")


def of_one_rank(options):
    """Train on one rank with those options that change what is computed."""
    return one_rank(**{key: value for key, value in options.items() if key not in ("recompute", "accumulate")})


def degrees_of(degrees):
    size = 1
    for name in ("dp_replicate", "dp_shard", "cp", "tp"):
        size *= degrees.get(name, 1)
    if degrees.get("expert_mesh") == "peer":
        size *= degrees.get("ep", 1)
    return {"etp": 1 if degrees.get("ep", 1) > 1 else degrees.get("tp", 1), **degrees, "world_size": size}


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_as_one_rank(platform, name):
    if platform.name != "torch" and name not in ON_SLOW_PLATFORMS:
        pytest.skip("of four ranks: all on torch, one that combines axes elsewhere")
    degrees, options = LAYOUTS[name]
    assert_same(on_ranks(degrees_of(degrees), **options), of_one_rank(options))


@pytest.mark.real_ranks
@pytest.mark.parametrize("name", ["all-gather", "uneven", "data and sequence", "both methods"])
def test_on_real_processes(platform, rank_pool, name):
    degrees = degrees_of(LAYOUTS[name][0])
    if platform.name != "torch" and degrees["world_size"] > 2:
        pytest.skip("four ranks: on torch")
    options = LAYOUTS[name][1]
    pool = rank_pool(degrees["world_size"])
    assert_same(pool.run(_train, degrees, options), of_one_rank(options))


def _train(degrees, options):
    return train_decoder(degrees, **options)
