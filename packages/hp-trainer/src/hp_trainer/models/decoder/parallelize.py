"""Parallelization of the decoder over the meshes of `ParallelDims`.

Tensor parallelism comes first (with sequence-parallel activations between the projections, arXiv 2205.05198), then
context and expert parallelism, then FSDP, block by block. Every gradient is the sum over the tokens of the global
batch: nothing is averaged, and the loss is divided once by the global number of tokens.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.parallel.distribute_module import distribute_module, place_parameter
from hp_dtensor.parallel.parallelize_module import ParallelStyle, parallelize_module
from hp_dtensor.parallel.tensor_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from hp_dtensor.spec.placements import Replicate, Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from hp_moe import (
    AutoDispatcher,
    BaseExpertParallel,
    DispatchRates,
    ExpertParallel,
    ExpertTensorParallel,
    MoE,
    ReplicatedExperts,
    ReplicatingDispatcher,
    TensorParallel,
    TwoLevelDispatcher,
    expert_shard_dim,
    moe_layers,
)
from hp_trainer.models.base import precision_policy
from hp_trainer.models.decoder.lora import place_adapters
from hp_trainer.parallel import context_style

if TYPE_CHECKING:
    from hp_trainer.config import TrainingConfig
    from hp_trainer.parallel import ParallelDims

# decoder.py defines these classes and imports this module.
Decoder = Any
DecoderBlock = Any


def parallelize(
    model: Decoder,
    dims: ParallelDims,
    mesh: DeviceMesh,
    training: TrainingConfig | None = None,
    *,
    reshard_after_forward: bool | None = None,
) -> Decoder:
    """Parallelize a decoder in place; see `LanguageModel.parallelize`."""
    # Order matters: each style wraps what the earlier ones sharded, and FSDP shards the local shards of all of them.
    dims.validate_against_model(model)
    if dims.tp_enabled:
        _tensor_parallel(model, mesh["tp"], dims.tp_reshard_after_forward)
    if dims.cp_enabled:
        # Only attention communicates, all else is per token. Positions are those in the full sequence, so tables must
        # be longer than this rank's shard.
        style = context_style(dims, model.config, training)
        model.rotary.sequence_ranks = mesh["cp"].size()
        for block in model.layers:
            style.apply(block.attention, mesh["cp"])
    for block in model.layers:
        if block.moe is not None:
            _expert_parallel(block.moe, dims, mesh)
            if training is not None:
                block.moe.step_tokens = training.global_batch_size * training.sequence_length
    moe_layers(model)  # called for its side effect: it sets the layers' names, for messages
    _shard_over_data(model, dims, mesh, precision_policy(training), reshard_after_forward)
    if training is not None and training.compile:
        for block in model.layers:
            model.platform.compile_module(block, training.compile_backend)
    return model


# Tensor parallel -----------------------------------------------------------------------------------------


def _tensor_parallel(model: Decoder, mesh: DeviceMesh, reshards: bool) -> None:
    """Shard activations along the sequence between modules, and along heads or hidden width within them.

    Embedding and head are sharded along the vocabulary, so that the loss is computed on sharded logits.

    Args:
        reshards: save the shards of gathered sequences, and gather them again in backward.
    """
    sequence = Shard(1)
    plan: dict[str, ParallelStyle] = {}
    if model.embed is not None:
        plan["embed"] = RowwiseParallel(output_layouts=sequence, use_local_output=False)
    if model.norm is not None:
        plan["norm"] = SequenceParallel()
    if model.head is not None:
        plan["head"] = ColwiseParallel(input_layouts=sequence, use_local_output=False, reshard_after_forward=reshards)
    elif model.norm is not None:
        model.embed.reshard_after_forward = reshards
    # No rank broadcasts its values: parameters have none yet, or the same on all ranks.
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for block in model.layers:
        parallelize_module(block, mesh, _block_plan(block, reshards), src_data_rank=None)
        place_adapters(block, mesh)
        if getattr(block.attention, "sinks", None) is not None:
            place_parameter(block.attention, "sinks", mesh, (Shard(0),), src_data_rank=None)
        # The remaining modules see the full input: norms over all heads, and the narrow vectors of latent attention.
        distribute_module(block.attention, mesh)


def _block_plan(block: DecoderBlock, reshards: bool) -> dict[str, ParallelStyle]:
    sequence = Shard(1)
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        # Rotation, mask and dropout are those of the full sequence already.
        "attention": PrepareModuleInput(
            input_layouts=(sequence, None, None, None),
            desired_input_layouts=(Replicate(), None, None, None),
            reshard_after_forward=reshards,
        ),
        **_attention_plan(block.attention),
        "attention.o_proj": RowwiseParallel(output_layouts=sequence, use_local_output=False),
        "ffn_norm": SequenceParallel(),
    }
    for name in ("post_attention_norm", "post_ffn_norm"):
        if getattr(block, name) is not None:
            plan[name] = SequenceParallel()
    if block.feed_forward is not None:
        plan |= _feed_forward_plan("feed_forward", reshards)
    if block.moe is not None and block.moe.shared_experts is not None:
        plan |= _feed_forward_plan("moe.shared_experts", reshards)
    return plan


def _attention_plan(attention: Any) -> dict[str, ParallelStyle]:
    """Shard projections and the norms of single heads by heads; modules that all heads share are replicated."""
    plan: dict[str, ParallelStyle] = {}
    for name in ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"):
        if getattr(attention, name, None) is not None:
            plan[f"attention.{name}"] = ColwiseParallel(use_local_output=False)
    if getattr(attention, "q_norm", None) is not None and attention.config.qk_norm == "head":
        plan |= dict.fromkeys(("attention.q_norm", "attention.k_norm"), SequenceParallel(sequence_dim=2))
    elif getattr(attention, "q_norm", None) is not None:
        # A norm over all heads needs full rows; its result is sharded by heads again.
        by_heads = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(-1), use_local_output=False
        )
        plan |= dict.fromkeys(("attention.q_norm", "attention.k_norm"), by_heads)
    return plan


def _feed_forward_plan(name: str, reshards: bool) -> dict[str, ParallelStyle]:
    return {
        name: PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), reshard_after_forward=reshards
        ),
        f"{name}.w1": ColwiseParallel(use_local_output=False),
        f"{name}.w3": ColwiseParallel(use_local_output=False),
        f"{name}.w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }


# Experts -------------------------------------------------------------------------------------------------


def _expert_parallel(moe: MoE, dims: ParallelDims, mesh: DeviceMesh) -> None:
    style, axes = _expert_style(dims)
    if style is not None:
        style.apply(moe, mesh[axes])
    # Replicated over `tp`, unless the style of the experts has done so.
    if dims.tp_enabled and not isinstance(moe.router.gate.weight, DTensor):
        distribute_module(moe.router.gate, mesh["tp"])
    if dims.tp_enabled and moe.shared_gate is not None:
        distribute_module(moe.shared_gate, mesh["tp"])
    moe.reshard_after_forward = dims.tp_reshard_after_forward
    moe.token_mesh = _token_mesh(dims, mesh)
    if dims.cp_enabled:
        moe.sequence_mesh = mesh["cp"]


def _expert_style(dims: ParallelDims) -> tuple[BaseExpertParallel | None, tuple[str, ...]]:
    """Return the style of expert parallelism for these degrees, and the mesh axes that it is applied to.

    `ep` ranks of the peer mesh have the same tokens, so they split them. Those of the folded mesh are dense ranks, each
    with tokens of its own (with `etp` = `tp`, each group of `tp` ranks).
    """
    peer = dims.expert_mesh == "peer"
    dispatch = _dispatch_options(dims)
    # The peer mesh may leave etp at its default where it changes nothing.
    etp = dims.etp if dims.tp_enabled else 1
    if dims.ep_enabled and etp > 1:
        return ExpertTensorParallel(**dispatch, split_tokens=peer), ("ep", "etp")
    if etp > 1:
        return TensorParallel(), ("etp",)
    if peer and dims.tp_enabled:
        # Experts are replicated over the tp ranks here. The folded mesh shards them over efsdp instead.
        if not dims.ep_enabled:
            return ReplicatedExperts(), ("tp",)
        return ExpertParallel(**dispatch, split_tokens=True), ("ep", "tp")
    return (ExpertParallel(**dispatch, split_tokens=peer), ("ep",)) if dims.ep_enabled else (None, ())


def _dispatch_options(dims: ParallelDims) -> dict[str, Any]:
    """Return the arguments of a style that select the dispatcher of tokens."""
    name, node = dims.ep_dispatcher or "all_to_all", dims.ep_node_size
    if dims.ep_copies or dims.ep_move_interval:
        wire_format = None if name == "all_to_all" else name.removeprefix("all_to_all_")
        options: dict[str, Any] = {
            "slots": dims.ep_copies,
            "wire_format": wire_format,
            "num_chunks": dims.ep_chunks or 1,
        }
        return {"dispatcher": functools.partial(ReplicatingDispatcher, **options)}
    if name == "two_level" and node is not None:
        return {"dispatcher": functools.partial(TwoLevelDispatcher, inner_size=node)}
    if name == "auto" and node is not None:
        rates = DispatchRates(inner_size=node)
        return {"dispatcher": functools.partial(AutoDispatcher, rates=rates, num_chunks=dims.ep_chunks)}
    return {"dispatcher": name, "num_chunks": dims.ep_chunks}


def _token_mesh(dims: ParallelDims, mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of one axis over all ranks that route different tokens."""
    # Tensor parallel experts: ranks of `tp` route the same rows. Otherwise each routes its shard of the sequence.
    axes = ["loss"]
    if dims.expert_mesh == "peer":
        axes.append("ep")
    if dims.etp == 1:
        axes.append("tp")
    return mesh.flatten("token", axes)


# Fully sharded data parallel -----------------------------------------------------------------------------


def _shard_over_data(
    model: Decoder,
    dims: ParallelDims,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | None,
) -> None:
    outer = _replica_axes(dims, mesh)
    dense, experts = mesh[*outer, "fsdp"], mesh[*outer, "efsdp"]
    # The block casts its inputs, so experts get rows in the right dtype; their scores must remain float32.
    expert_policy = replace(policy, cast_forward_inputs=False)
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    # From the inside out: `fully_shard` of an outer module takes only parameters that no inner group has.
    for block in model.layers:
        if block.moe is not None:
            # Experts move as full rows of the stack, so their owners may be sharded along other dimensions only.
            moves = dims.ep_move_interval is not None
            along = Shard(1 if moves else expert_shard_dim(block.moe.num_experts, dims.ep, experts.size(-1)))
            _shard(block.moe.experts, experts, expert_policy, options, along)
        _shard(block, dense, policy, options)
    if dims.pp_enabled and model.config.tie_word_embeddings and model.embed is not None:
        # A group of its own, so that the copies of the first and the last stage are sharded alike.
        _shard(model.embed, dense, replace(policy, cast_forward_inputs=False), options)
        register_fsdp_forward_method(model.embed, "logits")
    _shard(model, dense, policy, options)


def _replica_axes(dims: ParallelDims, mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the axis, if any, over which weights are replicated and their gradients all-reduced.

    Context parallel ranks shard one copy of the weights in the folded mesh, and are replicas in the peer mesh.
    """
    axes = ["dp_replicate"] if dims.dp_replicate > 1 else []
    if dims.expert_mesh == "peer" and dims.cp_enabled:
        axes.append("cp")
    if len(axes) == 2:
        mesh.flatten("replicas", axes)
        return ("replicas",)
    return tuple(axes)


def _shard(
    module: Any,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    options: dict[str, Any],
    along: Shard | None = None,
) -> None:
    placement = None if along is None else lambda weight: along
    fully_shard(module, mesh, mp_policy=policy, shard_placement_fn=placement, **options)
    # The loss is a sum over tokens, divided once by their global number, so gradients are summed, not averaged.
    module.set_reduce_op_type("sum", recurse=False)
