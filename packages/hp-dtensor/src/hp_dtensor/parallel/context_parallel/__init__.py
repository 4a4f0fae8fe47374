"""Context parallelism: attention of sequences that ranks share."""

from hp_dtensor.parallel.context_parallel.cost import (
    AttentionShape,
    ContextChoice,
    ContextCost,
    choose_context_parallel,
)
from hp_dtensor.parallel.context_parallel.cut import SequenceCut
from hp_dtensor.parallel.context_parallel.function import context_parallel_attention
from hp_dtensor.parallel.context_parallel.style import ContextParallel, use_cut

__all__ = [
    "AttentionShape",
    "ContextChoice",
    "ContextCost",
    "ContextParallel",
    "SequenceCut",
    "choose_context_parallel",
    "context_parallel_attention",
    "use_cut",
]
