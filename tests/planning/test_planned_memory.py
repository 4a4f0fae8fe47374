"""Planned memory against the bytes that torch's allocator gives to real ranks on the CPU in a step."""

from __future__ import annotations

from typing import Any

import pytest
from planned_runs import config_of, measured_peak, shape_of

from hp_trainer.planning.memory import plan_memory
from hp_trainer.planning.shapes import stage_buffers

pytestmark = pytest.mark.real_ranks

# Large enough that what plans leave out, such as masks and rotary tables, is small.
MODEL = {
    "model__vocab_size": 512,
    "model__hidden_size": 96,
    "model__num_attention_heads": 6,
    "model__num_key_value_heads": 2,
    "model__head_dim": 16,
    "model__intermediate_size": 256,
    "model__num_hidden_layers": 4,
    "training__sequence_length": 128,
    "training__global_batch_size": 4,
}
# Plans are made for an even choice of experts.
EXPERTS = {"model__num_experts": 8, "model__moe_intermediate_size": 64, "model__force_uniform_routing": True}
PEER = {**EXPERTS, "parallel__ep": 2, "parallel__expert_mesh": "peer"}
SHORT = {"training__sequence_length": 16}
# The fullest moment is the loss for long sequences, a block's backward or the reductions for short ones.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "half precision": (1, {"training__dtype": "bfloat16"}),
    "recomputed": (1, {"training__recompute": "full"}),
    "accumulated": (1, {"training__micro_batch_size": 1}),
    "the embedding is the head, accumulated": (
        1,
        {
            **SHORT,
            "model__tie_word_embeddings": True,
            "model__vocab_size": 2560,
            "model__num_hidden_layers": 1,
            "training__micro_batch_size": 1,
        },
    ),
    "experts": (1, EXPERTS),
    "experts in half precision": (1, {**EXPERTS, "training__dtype": "bfloat16"}),
    "matrices on their way": (1, {**SHORT, "optimizer": "muon"}),
    "8 bits": (1, {**SHORT, "optimizer": "adamw_8bit"}),
    "first blocks frozen": (1, {"training__freeze": "[embed.*, layers.0.*, layers.1.*]"}),
    "adapters": (1, {"model__lora__rank": 4}),
    "shards": (2, SHORT),
    "shards, accumulated, another optimizer": (2, {**SHORT, "training__micro_batch_size": 1, "optimizer": "lion"}),
    "shards, reduced after each micro-batch": (
        2,
        {**SHORT, "training__micro_batch_size": 1, "parallel__reduce_gradients": "micro_batch"},
    ),
    "replicas, reduced after each micro-batch": (
        2,
        {
            **SHORT,
            "parallel__dp_replicate": 2,
            "training__micro_batch_size": 1,
            "parallel__reduce_gradients": "micro_batch",
        },
    ),
    "shards that stay after forward": (2, {**SHORT, "parallel__reshard_after_forward": False}),
    "tensor": (2, {"parallel__tp": 2}),
    "tensor, recomputed": (2, {"parallel__tp": 2, "training__recompute": "full"}),
    "context": (2, {"parallel__cp": 2}),
    "ring, recomputed": (2, {"parallel__cp": 2, "parallel__cp_method": "ring", "training__recompute": "full"}),
    "experts spread": (2, {**EXPERTS, "parallel__ep": 2}),
    "experts spread, recomputed": (2, {**EXPERTS, "parallel__ep": 2, "training__recompute": "full"}),
    "experts of peers": (2, {**PEER, "parallel__dp_shard": 1}),
    "experts of peers and shards": (4, {**PEER, "parallel__dp_shard": 2}),
    "experts in a pipeline": (2, {**EXPERTS, "parallel__pp": 2}),
    "latent": (2, {"model__attention": "latent"}),
    "pipeline": (2, {"parallel__pp": 2}),
    "pipeline in a V": (2, {"parallel__pp": 2, "pipeline__schedule": "zero_bubble_v"}),
    "pipeline, all forwards first": (2, {"parallel__pp": 2, "pipeline__schedule": "gpipe"}),
    "pipeline, weights later": (2, {"parallel__pp": 2, "pipeline__schedule": "zero_bubble_h1"}),
    "pipeline in a V, recomputed": (
        2,
        {"parallel__pp": 2, "pipeline__schedule": "zero_bubble_v", "training__recompute": "full"},
    ),
    "pipeline from both ends": (2, {"parallel__pp": 2, "pipeline__schedule": "dualpipe_v"}),
    "pipeline and shards": (4, {"parallel__pp": 2, "training__global_batch_size": 16}),
    "pipeline, gathered for each use": (
        4,
        {**SHORT, "parallel__pp": 2, "parallel__reshard_after_forward": True, "training__global_batch_size": 16},
    ),
    "pipeline, all forwards first, gathered for each use": (
        4,
        {
            **SHORT,
            "parallel__pp": 2,
            "pipeline__schedule": "gpipe",
            "parallel__reshard_after_forward": True,
            "training__global_batch_size": 16,
        },
    ),
    "pipeline, gathered and reduced for each use": (
        4,
        {**SHORT, "parallel__pp": 2, "parallel__reduce_gradients": "micro_batch", "training__global_batch_size": 16},
    ),
    "pipeline, all forwards first, reduced for each use": (
        2,
        {
            "parallel__pp": 2,
            "pipeline__schedule": "gpipe",
            "parallel__reduce_gradients": "micro_batch",
            "model__vocab_size": 1536,
        },
    ),
    "pipeline, the head alone, reduced for each use": (
        2,
        {"parallel__pp": 2, "pipeline__layers": "[4, 0]", "parallel__reduce_gradients": "micro_batch"},
    ),
    "tensor and shards": (4, {"parallel__tp": 2}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_memory_is_within_a_tenth_of_what_is_measured(platform, rank_pool, name: str) -> None:
    if platform.name != "torch":
        pytest.skip("MindSpore's CPU does not tell what it allocates")
    world_size, changed = CASES[name]
    settings = MODEL | changed
    alone = world_size == 1
    measured = [measured_peak(settings)] if alone else rank_pool(world_size).run(measured_peak, settings)
    shape = shape_of(config_of(**settings), world_size)
    for place, parts in enumerate([stage_buffers(shape, rank) for rank in range(shape.dims.pp)]):
        largest = max(peak for rank, peak in enumerate(measured) if shape.dims.coordinate(rank)["pp"] == place)
        planned = plan_memory(shape, parts)
        assert planned.total == pytest.approx(largest, rel=0.1), planned
