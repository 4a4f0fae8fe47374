"""Matrix products: contracted dimensions that are cut give partial results."""

from __future__ import annotations

from hp_dtensor.rules.engine.notation import SUM_OF_K, first_of, line
from hp_dtensor.rules.engine.registry import RuleRegistry

VECTORS_AND_MATRICES = ("k, k ->", "... m k, k -> ... m", "k, ... k n -> ... n", "... m k, ... k n -> ... m n")
"""Products of operands of one dimension, as in NumPy, and of more."""


def register(registry: RuleRegistry) -> None:
    product = first_of(*(line(text, reduced=SUM_OF_K, linear=True) for text in VECTORS_AND_MATRICES))
    weighted = line("... k, n k -> ... n", reduced=SUM_OF_K, linear=True)
    biased = line("... k, n k, * -> ... n", reduced=SUM_OF_K, linear="0 1 + 2")
    added = line("*, m k, k n -> m n", reduced=SUM_OF_K, linear="0 + 1 2")
    batches_added = line("*, b m k, b k n -> b m n", reduced=SUM_OF_K, linear="0 + 1 2")
    registry.register("matmul bmm mm mv dot", "input other", product)
    registry.register("linear", "input weight bias=None", first_of(weighted, biased))
    registry.register("outer ger", "input other", line("m, n -> m n", linear=True))
    registry.register("cdist", "input other p=2.0 compute_mode=None", line("... m k!, ... n k! -> ... m n"))
    vector_added = line("*, m k, k -> m", reduced=SUM_OF_K, linear="0 + 1 2")
    registry.register("addmv", "input mat vec beta=1 alpha=1", vector_added)
    registry.register("addmm", "input mat1 mat2 beta=1 alpha=1", added)
    registry.register("baddbmm", "input batch1 batch2 beta=1 alpha=1", batches_added)
