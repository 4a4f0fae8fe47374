"""Rules of matrix products and einsum. A sharded contracted dimension gives partial results."""

from __future__ import annotations

import re
from dataclasses import replace

from hp_dtensor.rules.factors import Factorization, LocalWork, unsharded
from hp_dtensor.rules.notation import SUM_OF_K, Notation, first_of, line
from hp_dtensor.rules.pointwise import pointwise
from hp_dtensor.rules.registry import OpCall, RuleRegistry

# A sharded `k` gives each rank a sum over its part of k: the result is partial, and nothing is sent (row-parallel
# layers, arXiv 1909.08053). Sharding m, n or a batch dimension sends nothing either and leaves a sharded result.
VECTORS_AND_MATRICES = ("k, k ->", "... m k, k -> ... m", "k, ... k n -> ... n", "... m k, ... k n -> ... m n")
"""Matrix products as in NumPy, by the number of dimensions of each operand."""


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
    registry.register("einsum", "equation *operands", _einsum)
    registry.register("linalg_cross", "input other * dim=-1", _cross)
    registry.register("cross", "input other dim=None", _cross)


def _einsum(call: OpCall) -> Factorization:
    """Take letters as factors. Those that the output lacks are summed, those repeated in an operand are unsharded."""
    left, arrow, right = call["equation"].replace(" ", "").partition("->")
    terms, letters = left.split(","), sorted(filter(str.isalpha, {*left}))
    if not arrow:
        # As in NumPy: letters that occur once, in alphabetical order, behind the broadcast dimensions.
        right = ("..." if "..." in left else "") + "".join(letter for letter in letters if left.count(letter) == 1)
    # `ii -> i` reads the diagonal: a shard of the rows and one of the columns would have few elements in common.
    repeated = frozenset(letter for letter in letters if any(term.count(letter) > 1 for term in terms))
    summed = {name: "sum" for name in (*letters, "...") if name in left and name not in right}
    spaced = [" ".join(re.findall(r"\.\.\.|\w", term)) for term in (*terms, right)]
    text = f"{', '.join(spaced[:-1])} -> {spaced[-1]}"
    try:
        # torch broadcasts operands whose dimension of a letter has size 1.
        notation = Notation(text, summed, repeated, linear=True, broadcasts=True)
    except ValueError as error:
        raise call.refuse(f"equation {call['equation']!r}: {str(error).partition(': ')[2]}") from None
    return notation.rule(call)


def _cross(call: OpCall) -> Factorization:
    """Compute cross products along `dim`, of size 3. All other dimensions are broadcast and parallel."""
    shape = call.broadcast_shape(call.tensors)
    first = next((i for i, size in enumerate(shape) if size == 3), 0)
    dim = first if call["dim"] is None else call["dim"] % max(1, len(shape))
    # Operands broadcast as in a product, and the result is linear in each, as there.
    rule = pointwise("mul")(call)
    # torch defaults to the first dimension of size 3, and a shard of another dimension may have that size too.
    return replace(rule, limits=unsharded({f"d{dim}"}), work=LocalWork(localize=lambda shapes, spans: {"dim": dim}))
