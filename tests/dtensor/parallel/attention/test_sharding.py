"""Attention of packed rows that are sharded within their documents equals one device's, by every method and mask."""

from __future__ import annotations

import attention_reference as reference
import numpy as np
import pytest
from context_programs import attend_on_ranks, put_together

from hp_dtensor import AttentionDropout
from hp_dtensor.exceptions import AttentionError, LaunchError
from hp_dtensor.parallel.attention import SequenceSharding
from hp_dtensor.testing import run_ranks

ROWS = {
    # One row: documents that are spread, undivided, of one token, at the end of a rank's tokens, and padding.
    "one": ((23, 1, 8, 2, 2, 4, 1),),
    "two": ((5, 1, 9, 6, 20), (30, 11)),
    "single tokens": ((1,) * 6 + (3,),),
}
CASES = [
    # method, ranks, ulysses degree, rows, query heads, key-value heads, mask, other options
    ("ring", 2, 1, "one", 4, 2, {}, {}),
    ("ring", 3, 1, "two", 4, 1, {"window": 4}, {"sinks": True}),
    ("ring", 4, 1, "one", 6, 3, {}, {"soft_cap": 0.7, "dropout": AttentionDropout(0.3, np.array([5]))}),
    ("ring", 8, 1, "two", 4, 2, {"causal": False}, {}),
    ("ring", 4, 1, "single tokens", 4, 2, {}, {}),
    ("all_gather", 2, 1, "two", 4, 4, {"causal": False, "window": 3}, {}),
    ("all_gather", 4, 1, "one", 4, 1, {}, {"sinks": True}),
    ("all_gather", 3, 1, "two", 4, 2, {"window": 4}, {"dropout": AttentionDropout(0.3, np.array([5, 6]))}),
    ("ring", 4, 2, "two", 6, 2, {}, {"dropout": AttentionDropout(0.3, np.array([5, 6]))}),
    ("all_gather", 6, 2, "one", 4, 2, {}, {}),
    ("ring", 3, 3, "two", 4, 2, {"window": 4}, {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:6])))
def test_equals_one_device(hp_platform, case):
    method, ranks, degree, rows, heads, kv_heads, mask, options = case
    documents, options = ROWS[rows], dict(options)
    length, has_sinks = sum(documents[0]), options.pop("sinks", False)
    mask = {**mask, "positions": reference.positions_of(*documents)}
    arrays = reference.inputs(batch=len(documents), heads=heads, kv_heads=kv_heads, keys=length)[
        : 5 if has_sinks else 4
    ]
    sharding = SequenceSharding(
        length=length, ranks=ranks, ulysses_degree=degree, documents=documents, even_hops=method == "ring"
    )
    given = arrays, mask, options, degree, method, True, None, sharding
    results = run_ranks(attend_on_ranks, ranks, hp_platform, hp_platform, *given)
    dropout = options.pop("dropout", None)
    if dropout is not None:
        options["factors"] = reference.dropout_factors(dropout.p, dropout.seed.tolist(), heads, length, length)
    reference.compare(put_together(results, sharding), reference.expected(arrays, mask, options))


def refused(hp_platform, program, message):
    with pytest.raises((LaunchError, AttentionError)) as caught:
        run_ranks(program, 2, hp_platform)
    assert message in str(caught.value) + str(caught.value.__cause__)


def test_refuses_ranks_with_different_shardings(hp_platform):
    arrays = reference.inputs(batch=1, keys=12)[:4]
    mask = {"positions": reference.positions_of((8, 4))}

    def program():
        from hp_dtensor import current_world

        documents = ((8, 4),) if current_world().rank else None
        sharding = SequenceSharding(length=12, ranks=2, documents=documents)
        attend_on_ranks(hp_platform, arrays, mask, {}, sharding=sharding)

    refused(hp_platform, program, "ranks [1] shard the sequence differently from rank 0")


def test_refuses_positions_of_another_sharding(hp_platform):
    """Such as those of a model that is not called within `use_sequence_sharding`."""
    arrays = reference.inputs(batch=1, keys=12)[:4]
    positions = reference.positions_of((8, 4))
    packed = SequenceSharding(length=12, ranks=2, documents=((8, 4),))
    plain = SequenceSharding(length=12, ranks=2)
    moved = plain.unshard([packed.shard(positions, rank) for rank in range(2)])

    def program():
        attend_on_ranks(hp_platform, arrays, {"positions": moved}, {}, sharding=plain)

    refused(
        hp_platform, program, "call the model within `use_sequence_sharding` if the sharding is one of packed documents"
    )
