"""Attention on plain tensors and DTensors, and context parallelism: attention of sequences sharded over ranks."""

from hp_dtensor.parallel.attention.context_parallel import (
    ContextParallel,
    context_parallel,
    context_parallel_attention,
    use_sequence_sharding,
)
from hp_dtensor.parallel.attention.cost import (
    AttentionShape,
    ContextChoice,
    ContextCost,
    choose_context_parallel,
)
from hp_dtensor.parallel.attention.functional import attention
from hp_dtensor.parallel.attention.masks import AttentionDropout, AttentionMask
from hp_dtensor.parallel.attention.sharding import SequenceSharding

__all__ = [
    "AttentionDropout",
    "AttentionMask",
    "AttentionShape",
    "ContextChoice",
    "ContextCost",
    "ContextParallel",
    "SequenceSharding",
    "attention",
    "choose_context_parallel",
    "context_parallel",
    "context_parallel_attention",
    "use_sequence_sharding",
]
