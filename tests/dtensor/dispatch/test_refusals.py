"""Operations that are refused say what came, from where, and the way out, on every rank and every time."""

from __future__ import annotations

import numpy as np
import pytest
from placed_arrays import MATRIX, on_ranks, place

from hp_dtensor import DeviceMesh, Replicate, Shard, from_local
from hp_dtensor.exceptions import MixedOperandsError, ShardingRuleError
from hp_dtensor.platform.interface import Platform


def test_plain_and_distributed_operands_do_not_mix(hp_platform: Platform) -> None:
    """pytorch/pytorch#153354, #156535, #134212: a plain operand is refused with the way out, never guessed."""

    def program(platform: Platform, mesh: DeviceMesh) -> str:
        _, x = place(platform, mesh, MATRIX, (Shard(0),))
        with pytest.raises(MixedOperandsError) as refusal:
            platform.ops.add(x, platform.from_numpy(MATRIX.copy()))
        return str(refusal.value)

    message = on_ranks(hp_platform, program)
    assert "add: a plain tensor of shape [5, 4]" in message
    assert "distribute_tensor" in message


def test_a_refused_operation_is_refused_again(hp_platform: Platform) -> None:
    """A plain scalar in a list, and a result that is not as the rule says: not only the first time."""

    def program(platform: Platform, mesh: DeviceMesh) -> None:
        from hp_dtensor.dispatch import operation

        _, x = place(platform, mesh, MATRIX, (Shard(0),))
        scalar = platform.ops.sum(x)
        plain = platform.ops.sum(platform.from_numpy(MATRIX.copy()))
        for _ in range(2):
            with pytest.raises(MixedOperandsError, match=r"stack: a plain tensor of shape \[\] among DTensors"):
                platform.ops.stack([plain, scalar], 0)
            with pytest.raises(ShardingRuleError, match="exp: the sharding rule expects"):
                operation.dispatch(platform, "exp", lambda _: platform.from_numpy(np.ones(7, np.float32)), (x,), {})

    on_ranks(hp_platform, program)


def test_ids_outside_a_cut_table_fail_on_every_rank(hp_platform: Platform) -> None:
    """Megatron-style tables give zeros for an id that no rank has."""

    def program(platform: Platform, mesh: DeviceMesh) -> str:
        ids = from_local(platform.from_numpy(np.array([0, 9])), mesh, (Replicate(),))
        _, table = place(platform, mesh, MATRIX, (Shard(0),))
        with pytest.raises((IndexError, RuntimeError)) as failure:
            platform.ops.embedding(ids, table)
        return type(failure.value).__name__

    assert on_ranks(hp_platform, program) in ("IndexError", "RuntimeError")


def test_an_operation_without_a_rule_names_itself_and_the_way_out(hp_platform: Platform) -> None:
    """pytorch/pytorch#164543: errors that can be read."""
    from hp_dtensor.dispatch import operation

    def program(platform: Platform, mesh: DeviceMesh) -> list[str]:
        _, x = place(platform, mesh, MATRIX, (Shard(0),))
        messages = []
        for name, keywords in (("mystery", {}), ("sum", {"where": True}), ("nonzero", {})):
            with pytest.raises(ShardingRuleError) as refusal:
                operation.dispatch(platform, name, lambda *_: None, (x,), keywords)
            messages.append(str(refusal.value))
        return messages

    messages = on_ranks(hp_platform, program)
    for name, message in zip(("mystery", "sum", "nonzero"), messages, strict=True):
        assert name in message
        assert "S(0)" in message
        assert "edistribute" in message
    assert "'where'" in messages[1]
