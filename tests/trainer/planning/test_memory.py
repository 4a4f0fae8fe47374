"""Planned memory against the bytes that torch's allocator gives to real ranks on the CPU in a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
from planned_runs import STEPS_COUNTED, config_of, measured_peak, shape_of

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.parallel import nn
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.testing import run_ranks
from hp_fsdp import PlannedParameter, fully_shard, plan_group
from hp_trainer.planning import memory
from hp_trainer.planning.memory import plan_memory
from hp_trainer.planning.shapes import stage_buffers
from hp_trainer.plugins import registries

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
EXPERTS = {"model__num_experts": 8, "model__moe_intermediate_size": 64, "model__routing": "uniform"}
PEER = {**EXPERTS, "parallel__ep": 2, "parallel__expert_mesh": "peer"}
SHORT = {"training__sequence_length": 16}
# The peak is the loss for long sequences, a block's backward or the reductions for short ones.
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
    "experts that choose": (
        1,
        {**EXPERTS, "model__routing": "expert_choice", "model__norm_topk_prob": False, "training__recompute": "full"},
    ),
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
    "experts spread, all tokens gathered": (2, {**EXPERTS, "parallel__ep": 2, "parallel__ep_dispatcher": "all_gather"}),
    "experts spread, copies sent": (2, {**EXPERTS, "parallel__ep": 2, "parallel__ep_dispatcher": "copy_per_expert"}),
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


@pytest.mark.real_ranks
@pytest.mark.parametrize("name", list(CASES))
def test_memory_is_within_a_tenth_of_what_is_measured(platform, rank_pool, name: str) -> None:
    if platform.name != "torch":
        pytest.skip("MindSpore's CPU does not report what it allocates")
    world_size, changed = CASES[name]
    settings = MODEL | changed
    shape = shape_of(config_of(**settings), world_size)
    planned = [plan_memory(shape, stage_buffers(shape, rank)) for rank in range(shape.dims.pp)]
    for steps in STEPS_COUNTED:
        alone = world_size == 1
        peaks = [measured_peak(settings, steps)] if alone else rank_pool(world_size).run(measured_peak, settings, steps)
        measured = [0] * len(planned)
        for rank, peak in enumerate(peaks):
            place = shape.dims.coordinate(rank)["pp"]
            measured[place] = max(measured[place], peak)
        if [each.total for each in planned] == pytest.approx(measured, rel=0.1):
            return
    pytest.fail(f"planned are {planned}, measured {measured}")


SHAPES = {"embed.weight": (64, 72), "0.weight": (8, 8), "0.bias": (8,), "experts": (2, 8, 4)}


def _saved(name):
    """Return the bytes of each parameter's state on this rank."""
    platform = get_platform()
    with nn.building(platform):
        model = nn.Module()
        parameters = {path: model.parameter(shape) for path, shape in SHAPES.items()}
        for index, parameter in enumerate(parameters.values()):
            setattr(model, f"p{index}", parameter)
    fully_shard(model, init_device_mesh("cpu", (2,)))
    named = dict(zip(SHAPES, (getattr(model, f"p{index}") for index in range(len(SHAPES))), strict=True))
    entry = registries().optimizers.get(name, platform.name)
    optimizer = entry.build(list(named.items()), _options(name), platform)
    if hasattr(optimizer, "state_bytes"):
        # Its state is made when it is asked for; it keeps less.
        one = {path: entry.build([(path, x)], _options(name), platform) for path, x in named.items()}
        return {path: each.state_bytes(platform) for path, each in one.items()}
    return {path: sum(_bytes(platform, each) for each in slots.values()) for path, slots in optimizer.state().items()}


def _options(name):
    return registries().optimizers.options(name)()


def _bytes(platform, tensor):
    local = local_of(platform, tensor)
    return math.prod(local.shape) * platform.itemsize(local.dtype)


@pytest.mark.parametrize("name", registries().optimizers.names())
def test_state_is_as_large_as_the_options_say(platform, name: str) -> None:
    (buffer,) = plan_group([PlannedParameter(path, shape) for path, shape in SHAPES.items()], num_shards=2)
    options, held = _options(name), buffer.largest_local_numels()
    expected = {path: options.state_bytes(path, shape, held[path], 4) for path, shape in SHAPES.items()}
    found = run_ranks(_saved, 2, platform, name)
    assert expected in found


def test_a_plan_has_three_buckets_of_the_parameters_at_a_place_of_a_pipeline(monkeypatch):
    monkeypatch.setattr(memory, "BUCKET_ELEMENTS", 1)
    config = config_of(model__num_hidden_layers=4, parallel__pp=2, training__offload_optimizer="true")
    shape = shape_of(config, 2)
    for parts in [stage_buffers(shape, rank) for rank in range(shape.dims.pp)]:
        ends = parts.root.buffers + parts.tied.buffers
        # Blocks are equal, and each is a group.
        blocks = parts.dense[0].buffers * len(parts.layers)
        sizes = [8 * math.prod(each.shape) for buffer in (*blocks, *ends) for each in buffer.parameters]
        assert parts.total.state == sum(sizes)
        updated = memory._updated_share(shape, parts) * parts.total.state
        assert updated == pytest.approx(max(sum(sizes[i : i + 3]) for i in range(len(sizes))))
