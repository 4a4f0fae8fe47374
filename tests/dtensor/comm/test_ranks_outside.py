"""Operations on a mesh of some ranks: the others make the same calls, work on nothing and communicate nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DeviceMesh, Replicate, Shard, distribute_tensor
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks
from hp_dtensor.testing.rule_proof import Operations

LOGITS = np.linspace(-2.0, 2.0, 20, dtype=np.float32).reshape(4, 5) ** 2
TARGETS = np.array([0, 4, 2, 3])
INSIDE = (1, 2)

CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    **{
        f"cross entropy {reduction}": lambda ops, x, t, reduction=reduction: ops.cross_entropy(
            x, t, reduction=reduction
        )
        for reduction in ("mean", "sum", "none")
    },
    "log_softmax": lambda ops, x, t: ops.log_softmax(x, 1),
    "cumsum": lambda ops, x, t: ops.cumsum(x, 1),
    "roll": lambda ops, x, t: ops.roll(x, 2, 1),
    "flip": lambda ops, x, t: ops.flip(x, (0, 1)),
    "a slice": lambda ops, x, t: x[1:, 1:4],
    "a sum": lambda ops, x, t: ops.sum(x, 1),
}


def _called(platform: Platform, placements: Sequence[Any], name: str) -> tuple[Any, int, Any, Any]:
    """Placements, collectives, local shape, and inside the whole result."""
    mesh = DeviceMesh("cpu", (2,), ranks=INSIDE, platform=platform)
    x = distribute_tensor(platform.from_numpy(LOGITS), mesh, placements)
    targets = distribute_tensor(platform.from_numpy(TARGETS), mesh, (Replicate(),))
    with record_collectives() as log:
        result = CALLS[name](Operations(platform), x, targets)
    whole = platform.to_numpy(result.full_tensor()) if mesh.get_coordinate() is not None else None
    return result.placements, log.count(), platform.local_shape(platform.unwrap(result)), whole


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_outside_makes_the_same_call(hp_platform: Platform, name: str, placement: Any) -> None:
    plain = CALLS[name](Operations(hp_platform), hp_platform.from_numpy(LOGITS), hp_platform.from_numpy(TARGETS))
    results = run_ranks(_called, 3, hp_platform, hp_platform, (placement,), name)
    assert len({placements for placements, *_ in results}) == 1
    assert results[0][1] == 0
    assert set(results[0][2]) <= {0}
    for rank in INSIDE:
        np.testing.assert_allclose(results[rank][3], hp_platform.to_numpy(plain), rtol=1e-5, atol=1e-6)
