"""Context parallel attention on real processes, where a hop really is under way while the rank computes."""

from __future__ import annotations

import attention_reference as reference
import pytest
from context_programs import attend_on_ranks, put_together

from hp_dtensor.parallel.attention import SequenceSharding
from hp_dtensor.platform.selection import get_platform

pytestmark = pytest.mark.real_ranks

DOCUMENTS = ((15, 1, 17, 8), (30, 11))
PACKED = reference.positions_of(*DOCUMENTS)
CASES = {
    2: [("ring", 1, {}), ("all_gather", 1, {"positions": PACKED}), ("ring", 2, {"window": 7})],
    4: [("ring", 1, {"positions": PACKED}), ("ring", 2, {}), ("all_gather", 2, {"window": 7}), ("ring", 4, {})],
}


def attend_by_name(name, *args):
    return attend_on_ranks(get_platform(name), *args)


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_device(hp_platform, rank_pool, ranks):
    arrays = reference.inputs(heads=4, kv_heads=2, keys=41)
    pool = rank_pool(ranks)
    for method, degree, mask in CASES[ranks]:
        documents = DOCUMENTS if "positions" in mask else None
        sharding = SequenceSharding(length=41, ranks=ranks, ulysses_degree=degree, documents=documents)
        for _ in range(2):
            results = pool.run(attend_by_name, hp_platform.name, arrays, mask, {}, degree, method, True, None, sharding)
            reference.compare(put_together(results, sharding), reference.expected(arrays, mask, {}))
