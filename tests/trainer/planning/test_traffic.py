"""Bytes on the wire that a plan states against those that simulated ranks have sent."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from planned_runs import config_of, random_batch, setup_rank, shape_of

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.parallel import nn
from hp_dtensor.testing import run_ranks
from hp_trainer.pipeline import Pipeline, PipelineStage
from hp_trainer.pipeline.transfers import Transfers
from hp_trainer.planning.shapes import stage_buffers
from hp_trainer.planning.traffic import message_buffers, stage_traffic
from hp_trainer.training.step import OptimizerStep

# Every rank gets every token: which experts tokens choose does not change the bytes.
EXPERTS = {"model__num_experts": 4, "model__num_experts_per_tok": 4, "model__num_dense_layers": 1}
BALANCED = {"model__norm_topk_prob": False}
PEERS = {"parallel__expert_mesh": "peer", "parallel__cp_method": "ring"}
LATENT = {"model__attention": "latent", "model__kv_lora_rank": 6, "model__qk_rope_head_dim": 4}
EVERY_SECOND = {"training__recompute": "full", "training__recompute_every": 2}
KEEPS_ATTENTION = {"training__recompute": "selective", "training__recompute_keep": "[attention]"}
KEEPS_COLLECTIVES = {"training__recompute": "selective", "training__recompute_keep": "[collectives]"}
RANKS = {
    "shards": (2, {}),
    "shards that stay after forward": (2, {"parallel__reshard_after_forward": False}),
    "shards, micro-batches": (2, {"training__micro_batch_size": 2}),
    "half precision": (2, {"training__dtype": "bfloat16"}),
    "half precision summed in half": (2, {"training__dtype": "bfloat16", "training__reduce_dtype": "bfloat16"}),
    "shards, reduced after each micro-batch": (
        4,
        {"training__micro_batch_size": 2, "parallel__dp_replicate": 2, "parallel__reduce_gradients": "micro_batch"},
    ),
    "replicas": (4, {"parallel__dp_replicate": 2}),
    "replicas only": (2, {"parallel__dp_replicate": 2}),
    "frozen": (2, {"training__freeze": "[embed.*, layers.0.*]"}),
    "tensor": (2, {"parallel__tp": 2}),
    "tensor, recomputed": (2, {"parallel__tp": 2, "training__recompute": "full"}),
    "tensor, norms of heads, sinks, biases": (
        2,
        {
            "parallel__tp": 2,
            "model__qk_norm": "head",
            "model__attention_sinks": True,
            "model__qkv_bias": True,
            "model__output_bias": True,
            "model__post_norms": True,
        },
    ),
    "tensor, norms over heads": (2, {"parallel__tp": 2, "model__qk_norm": "full"}),
    "tensor, small tied head": (2, {"parallel__tp": 2, "model__tie_word_embeddings": True}),
    "tensor, large tied head": (
        2,
        {"parallel__tp": 2, "model__tie_word_embeddings": True, "model__vocab_size": 300},
    ),
    "tensor, latent": (2, {"parallel__tp": 2, **LATENT}),
    "tensor, latent, compressed": (2, {"parallel__tp": 2, "model__q_lora_rank": 5, **LATENT}),
    "tensor and shards": (4, {"parallel__tp": 2}),
    "ring": (2, {"parallel__cp": 2, "parallel__cp_method": "ring"}),
    "ulysses": (2, {"parallel__cp": 2, "parallel__cp_method": "ulysses"}),
    "gathered keys, recomputed": (
        2,
        {"parallel__cp": 2, "parallel__cp_method": "all_gather", "training__recompute": "full"},
    ),
    "tensor, every second block recomputed": (2, {"parallel__tp": 2, **EVERY_SECOND, "model__qk_norm": "full"}),
    "tensor, collectives saved": (2, {"parallel__tp": 2, **KEEPS_COLLECTIVES}),
    "tensor, within a budget": (2, {"parallel__tp": 2, "training__activation_budget": "150KiB"}),
    "ring, attention saved": (2, {"parallel__cp": 2, "parallel__cp_method": "ring", **KEEPS_ATTENTION}),
    "ring, collectives saved": (2, {"parallel__cp": 2, "parallel__cp_method": "ring", **KEEPS_COLLECTIVES}),
    "ulysses, collectives saved": (2, {"parallel__cp": 2, "parallel__cp_method": "ulysses", **KEEPS_COLLECTIVES}),
    "heads exchanged in a ring, attention saved": (
        4,
        {
            "parallel__cp": 4,
            "parallel__ulysses_degree": 2,
            "parallel__cp_method": "ring",
            "parallel__dp_shard": 1,
            **KEEPS_ATTENTION,
        },
    ),
    "ring and tensor": (4, {"parallel__cp": 2, "parallel__tp": 2, "parallel__cp_method": "ring"}),
    "experts": (2, {**EXPERTS, "parallel__ep": 2}),
    "tensor, norms of results, recomputed": (
        2,
        {"parallel__tp": 2, "model__post_norms": True, "training__recompute": "full"},
    ),
    "experts, shared, recomputed": (
        2,
        {**EXPERTS, "model__num_shared_experts": 1, "parallel__ep": 2, "training__recompute": "full"},
    ),
    "experts, shared, tensor, recomputed": (
        2,
        {**EXPERTS, "model__num_shared_experts": 1, "parallel__tp": 2, "training__recompute": "full"},
    ),
    "experts of peers, recomputed": (
        2,
        {**EXPERTS, "parallel__ep": 2, "parallel__expert_mesh": "peer", "training__recompute": "full"},
    ),
    "experts, recomputed": (2, {**EXPERTS, "parallel__ep": 2, "training__recompute": "full"}),
    "experts, collectives saved": (2, {**EXPERTS, "parallel__ep": 2, **KEEPS_COLLECTIVES}),
    "experts, first blocks recomputed": (
        2,
        {
            **EXPERTS,
            "parallel__ep": 2,
            "model__num_hidden_layers": 3,
            "training__recompute": "full",
            "training__recompute_blocks": "[layers.0, layers.1]",
        },
    ),
    "experts, shared and gated, tensor": (
        4,
        {
            **EXPERTS,
            "parallel__ep": 2,
            "parallel__tp": 2,
            "model__num_shared_experts": 1,
            "model__shared_expert_gate": True,
            "model__router_bias": True,
        },
    ),
    **{
        f"experts, {name}{', recomputed' * (recompute == 'full')}": (
            4,
            {**EXPERTS, "parallel__ep": 4, "parallel__ep_dispatcher": name, "training__recompute": recompute, **more},
        )
        for recompute in ("none", "full")
        for name, more in (
            ("all_to_all_int8", {}),
            ("copy_per_expert", {}),
            ("all_gather", {}),
            ("two_level", {"parallel__ep_node_size": 2}),
            ("all_to_all", {"parallel__ep_chunks": 2}),
        )
    },
    # A gather of scores over the ranks that share sequences.
    **{
        f"experts by {routing}, {name}": (4, {**EXPERTS, **BALANCED, "model__routing": routing, **settings})
        for routing, name, settings in (
            ("sinkhorn", "tensor ranks", {"parallel__ep": 4, "parallel__tp": 2, "parallel__etp": 1}),
            ("sinkhorn", "sharded", {"parallel__tp": 2, **KEEPS_COLLECTIVES}),
            ("expert_choice", "peers", {"parallel__ep": 2, "parallel__tp": 2, **PEERS, "parallel__etp": 1}),
            ("expert_choice", "peers, ring", {"parallel__ep": 2, "parallel__cp": 2, **PEERS}),
            ("expert_choice", "gathered", {"parallel__ep": 4, "parallel__ep_dispatcher": "all_gather"}),
            ("expert_choice", "recomputed", {"parallel__ep": 2, "parallel__tp": 2, "training__recompute": "full"}),
        )
    },
    "experts over tensor ranks": (4, {**EXPERTS, "parallel__ep": 4, "parallel__tp": 2, "parallel__etp": 1}),
    "peer experts": (4, {**EXPERTS, "parallel__ep": 2, "parallel__expert_mesh": "peer"}),
    "peer experts, tensor": (4, {**EXPERTS, "parallel__ep": 2, "parallel__tp": 2, "parallel__expert_mesh": "peer"}),
    "peer experts, tensor around them": (
        4,
        {**EXPERTS, "parallel__ep": 2, "parallel__tp": 2, "parallel__etp": 1, "parallel__expert_mesh": "peer"},
    ),
    "peer experts, ring": (
        4,
        {
            **EXPERTS,
            "parallel__ep": 2,
            "parallel__cp": 2,
            "parallel__expert_mesh": "peer",
            "parallel__cp_method": "ring",
        },
    ),
    "pipeline": (2, {"parallel__pp": 2}),
    "pipeline, tied": (2, {"parallel__pp": 2, "model__tie_word_embeddings": True}),
    "pipeline in a V, shards": (
        4,
        {"parallel__pp": 2, "pipeline__schedule": "zero_bubble_v", "model__num_hidden_layers": 4},
    ),
    "pipeline, gathered for each use": (4, {"parallel__pp": 2, "parallel__reshard_after_forward": True}),
    "pipeline in loops, tied, gathered for each use": (
        4,
        {
            "parallel__pp": 2,
            "parallel__reshard_after_forward": True,
            "pipeline__schedule": "interleaved_1f1b",
            "model__num_hidden_layers": 4,
            "model__tie_word_embeddings": True,
        },
    ),
    "pipeline, reduced after each micro-batch": (
        4,
        {"parallel__pp": 2, "parallel__reduce_gradients": "micro_batch", "pipeline__schedule": "gpipe"},
    ),
    "pipeline, left unsharded after forward, reduced after each micro-batch": (
        4,
        {
            "parallel__pp": 2,
            "parallel__reshard_after_forward": False,
            "parallel__reduce_gradients": "micro_batch",
            "pipeline__schedule": "interleaved_1f1b",
            "model__num_hidden_layers": 4,
        },
    ),
    "pipeline and tensor": (4, {"parallel__pp": 2, "parallel__tp": 2}),
    "interleaved pipeline and experts": (
        4,
        {
            **EXPERTS,
            "parallel__pp": 2,
            "parallel__ep": 2,
            "pipeline__schedule": "interleaved_1f1b",
            "model__num_hidden_layers": 4,
        },
    ),
}
ON_EVERY_PLATFORM = ("tensor, recomputed", "pipeline, tied")


def _sent(settings: dict[str, Any], axes: list[str]) -> tuple[dict[tuple[int, ...], dict[str, float]], Any]:
    """Return the bytes that this rank has sent in its second step, by group and collective, and its groups by axis."""
    config = config_of(**settings)
    setup = setup_rank(config)
    step = OptimizerStep(setup)
    for index in range(2):
        with record_collectives() as log:
            step.accumulate_gradients(random_batch(setup, index))
        setup.optimizer.zero_grad()
    found: dict[Any, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for record in log.records:
        found[tuple(sorted(record.group))][record.name] += record.wire_bytes
    return {ranks: dict(sent) for ranks, sent in found.items()}, _groups(setup, axes)


def _groups(setup: Any, axes: list[str]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of this rank's groups, by the names of axes."""
    groups = {}
    for name in axes:
        if name in ("ep_inner", "ep_outer"):
            ranks, node = setup.mesh["ep"].group_along().ranks, setup.config.parallel.ep_node_size
            place = ranks.index(setup.mesh.world.rank)
            first = place // node * node
            groups[name] = tuple(ranks[first : first + node] if name == "ep_inner" else ranks[place % node :: node])
            continue
        parts = name.split("+")
        mesh = setup.mesh[parts[0]] if len(parts) == 1 else setup.mesh.flatten("planned_" + "_".join(parts), parts)
        groups[name] = tuple(sorted(mesh.group_along().ranks))
    return groups


@pytest.mark.parametrize("name", list(RANKS))
def test_bytes_on_the_wire_are_those_of_the_plan(platform, name: str) -> None:
    world_size, settings = RANKS[name]
    if platform.name != "torch" and name not in ON_EVERY_PLATFORM:
        pytest.skip("collectives are chosen without the framework; a few cases show that it makes the same ones")
    shape = shape_of(config_of(**settings), world_size)
    planned = [stage_traffic(shape, parts) for parts in [stage_buffers(shape, rank) for rank in range(shape.dims.pp)]]
    axes = sorted({each.axis for stage in planned for each in stage} - {"pp"})
    sent, groups = zip(*run_ranks(_sent, world_size, platform, settings, axes), strict=True)
    for place, stage in enumerate(planned):
        ranks = [rank for rank in range(world_size) if shape.dims.coordinate(rank)["pp"] == place]
        # Other groups are those of neighbouring stages, or a part of the ranks that share a sequence.
        other = "pp" if shape.dims.pp_enabled else "cp"
        found = _mean(sent, groups, ranks, axes, other)
        assert _expected(stage, [groups[rank] for rank in ranks]) == pytest.approx(found)


def _expected(stage: list[Any], groups: list[dict[str, tuple[int, ...]]]) -> dict[tuple[str, str], float]:
    """Return the planned bytes by collective and the names of all axes that are the same ranks."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    for each in stage:
        total[_name(each.axis, groups[0]), each.collective] += each.bytes
    return dict(total)


def _mean(sent: Any, groups: Any, ranks: list[int], axes: list[str], other: str) -> dict[tuple[str, str], float]:
    total: dict[tuple[str, str], float] = defaultdict(float)
    for rank in ranks:
        names = {group: _name(axis, groups[rank]) for axis, group in groups[rank].items()}
        for group, by_name in sent[rank].items():
            for name, num_bytes in by_name.items():
                if num_bytes:
                    total[names.get(group, other), name] += num_bytes / len(ranks)
    return {key: value for key, value in total.items() if not math.isclose(value, 0)}


def _name(axis: str, groups: dict[str, tuple[int, ...]]) -> str:
    """Return one name for axes over the same ranks."""
    if axis == "pp":
        return "pp"
    return min(other for other, group in groups.items() if group == groups[axis])


@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_planned_messages_are_those_that_ranks_have_memory_for(platform, num_microbatches) -> None:
    settings = {"pipeline__microbatches": num_microbatches, "training__global_batch_size": num_microbatches}
    shape = shape_of(config_of(model__num_hidden_layers=4, parallel__pp=4, **settings), 4)
    post = Transfers._receive

    def program() -> int:
        mesh, posted = init_device_mesh("cpu", (4,), ("pp",), platform=platform), []

        def receive(*args: Any) -> Any:
            posted.append(1 + sum(map(len, pipeline._transfers._arriving.values())))
            return post(pipeline._transfers, *args)

        with nn.building(platform):
            stage = PipelineStage(nn.Linear(2, 2), mesh.get_rank(), 4)
        loss, number = (lambda y, _: platform.ops.sum(y)), num_microbatches
        pipeline = Pipeline([stage], "1f1b", mesh["pp"], loss, num_microbatches=number, fixed_shapes=True)
        batch = platform.from_numpy(np.ones((number, 2), np.float32))
        pipeline.step(batch)  # shapes are known after it
        pipeline._transfers._receive = receive
        pipeline.step(batch)
        return max(posted)

    # One more is being sent.
    assert run_ranks(program, 4, platform) == [message_buffers(shape, rank) - 1 for rank in range(4)]
