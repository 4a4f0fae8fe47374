"""What goes wrong in other libraries of sharded tensors, each by its public issue; here it must be right.

Elsewhere: needless gathers, pytorch/pytorch#167106 (`test_fewest_bytes.py`); objects kept per step, #178276, #181761,
NVIDIA-NeMo/Automodel#2888 (`test_bounded_caches.py`); mistakes found before anything is sent, #124990
(`test_bad_input.py`); random numbers of one device, #146190 (`test_torch_random.py`); one owner per matrix,
pytorch/torchtitan#3502 (`test_muon.py`); shards that do not tile in a checkpoint, NVIDIA/Megatron-LM#6024
(`test_checkpoint.py`); convolution backward, inference mode, `detach_` (`test_torch_known_failures.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DeviceMesh, Partial, Replicate, Shard, from_local
from hp_dtensor.exceptions import MixedOperandsError, ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks

Array = np.ndarray[Any, Any]
MATRIX = np.arange(20, dtype=np.float32).reshape(5, 4) % 7 - 3


def place(platform: Platform, mesh: DeviceMesh, array: Array, placements: Sequence[Any]) -> tuple[Any, Any]:
    """(leaf, DTensor) of a whole array; partial ones hold it on the first rank."""
    from hp_dtensor.testing.rule_proof import local_part

    local = platform.from_numpy(local_part(array, mesh, placements))
    if platform.is_floating(local.dtype):
        platform.set_requires_grad(local, True)
    return local, from_local(local, mesh, placements, shape=array.shape)


def on_ranks(platform: Platform, program: Callable[..., Any], size: int = 4, shape: tuple[int, ...] = (4,)) -> Any:
    def run() -> Any:
        return program(platform, DeviceMesh("cpu", shape, platform=platform))

    return run_ranks(run, size, platform)[0]


def whole(platform: Platform, x: Any) -> Array:
    return platform.to_numpy(platform.detach(x.full_tensor()))


def test_a_flattened_mesh_gives_right_data(hp_platform: Platform) -> None:
    """pytorch/pytorch#194457: nested uneven shards gathered over a flattened mesh."""

    def program(platform: Platform, mesh: DeviceMesh) -> bool:
        mesh.flatten("all")
        return all(
            np.array_equal(whole(platform, place(platform, mesh, array, (Shard(0), Shard(0)))[1]), array)
            for array in (MATRIX, MATRIX[:, :3].copy(), np.ones((6, 4), np.float32))
        )

    assert on_ranks(hp_platform, program, shape=(2, 2))


def test_gradients_are_not_off_by_the_number_of_ranks(hp_platform: Platform) -> None:
    """mindspore-ai/hyper-parallel#685, pytorch/pytorch#172932: products of replicated, cut and partial operands."""

    def program(platform: Platform, mesh: DeviceMesh) -> list[str]:
        ops, wrong = platform.ops, []
        for left, right in itertools.product((Replicate(), Shard(0), Shard(1), Partial()), repeat=2):
            x, dx = place(platform, mesh, MATRIX, (left,))
            w, dw = place(platform, mesh, MATRIX.T.copy(), (right,))
            loss = ops.sum(ops.matmul(dx, dw)).full_tensor()
            grads = platform.grad([loss], [x, w])
            expected = np.broadcast_to(MATRIX.T.sum(1), MATRIX.shape)
            got = from_local(grads[0], mesh, (Replicate() if left.is_partial() else left,), shape=MATRIX.shape)
            if not np.allclose(whole(platform, got), expected):
                wrong.append(f"{left} {right}")
        return wrong

    assert on_ranks(hp_platform, program) == []


def test_norms_count_every_element_once(hp_platform: Platform) -> None:
    """mindspore-ai/hyper-parallel#735: a gradient norm of replicated and cut tensors was 48.47 for 28.98."""
    from hp_dtensor import clip_grad_norm_

    def program(platform: Platform, mesh: DeviceMesh) -> float:
        parameters = []
        for placement in (Replicate(), Shard(0), Shard(1)):
            _, x = place(platform, mesh, MATRIX, (placement,))
            parameter = platform.Parameter(x)
            platform.set_grad(parameter, platform.ops.mul(platform.detach(x), 1.0))
            parameters.append(parameter)
        norm = clip_grad_norm_(parameters, 1e9)
        return float(platform.to_numpy(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    assert on_ranks(hp_platform, program) == pytest.approx(float(np.sqrt(3 * (MATRIX**2).sum())), rel=1e-5)


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
        from hp_dtensor.dispatch import dispatch

        _, x = place(platform, mesh, MATRIX, (Shard(0),))
        scalar = platform.ops.sum(x)
        plain = platform.ops.sum(platform.from_numpy(MATRIX.copy()))
        for _ in range(2):
            with pytest.raises(MixedOperandsError, match=r"stack: a plain tensor of shape \[\] among DTensors"):
                platform.ops.stack([plain, scalar], 0)
            with pytest.raises(ShardingRuleError, match="exp: the sharding rule expects"):
                dispatch.dispatch(platform, "exp", lambda _: platform.from_numpy(np.ones(7, np.float32)), (x,), {})

    on_ranks(hp_platform, program)


def test_a_partial_product_is_reduced_and_scattered_along_any_dimension(hp_platform: Platform) -> None:
    """mindspore-ai/hyper-parallel#764: its reduce-scatter path crashed; here also unevenly, with its gradient."""

    def program(platform: Platform, mesh: DeviceMesh) -> list[str]:
        ops, wrong = platform.ops, []
        for dim in (0, 1):
            x, dx = place(platform, mesh, MATRIX, (Shard(1),))
            _, dw = place(platform, mesh, MATRIX.T.copy(), (Shard(0),))
            product = ops.matmul(dx, dw)
            assert product.placements == (Partial(),)
            y = product.redistribute(placements=(Shard(dim),))
            (grad,) = platform.grad([ops.sum(ops.mul(y, y)).full_tensor()], [x])
            expected = MATRIX @ MATRIX.T
            grad = from_local(grad, mesh, (Shard(1),), shape=MATRIX.shape)
            for name, got, wanted in (("value", y, expected), ("gradient", grad, 2 * expected @ MATRIX)):
                if not np.allclose(whole(platform, got), wanted):
                    wrong.append(f"{name}, dimension {dim}")
        return wrong

    assert on_ranks(hp_platform, program) == []


def test_plain_and_distributed_parameters_are_clipped_together(hp_platform: Platform) -> None:
    """pytorch/pytorch#134551: of a model that is parallel in part; plain gradients are equal on all ranks."""
    from hp_dtensor import clip_grad_norm_

    def program(platform: Platform, mesh: DeviceMesh) -> tuple[float, Array, Array]:
        _, x = place(platform, mesh, MATRIX, (Shard(0),))
        cut, plain = platform.Parameter(platform.detach(x)), platform.Parameter(platform.from_numpy(MATRIX.copy()))
        platform.set_grad(cut, platform.ops.mul(platform.detach(x), 2.0))
        platform.set_grad(plain, platform.from_numpy(MATRIX.copy()))
        norm = float(platform.to_numpy(clip_grad_norm_([cut, plain], 1.0, platform=platform)))
        return norm, whole(platform, platform.get_grad(cut)), platform.to_numpy(platform.get_grad(plain))

    norm, cut, plain = on_ranks(hp_platform, program)
    expected = float(np.sqrt(5 * (MATRIX**2).sum()))
    assert norm == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(cut, 2 * MATRIX / expected, rtol=1e-4)
    np.testing.assert_allclose(plain, MATRIX / expected, rtol=1e-4)


@pytest.mark.parametrize("dim", [0, 1])
def test_argmax_with_an_empty_shard(hp_platform: Platform, dim: int) -> None:
    """IndexError in torch 2.13 for 6 rows over 4 ranks along the cut dimension."""
    array = np.random.default_rng(1).permutation(18).reshape(6, 3).astype(np.float32)

    def program(platform: Platform, mesh: DeviceMesh) -> Array:
        _, x = place(platform, mesh, array, (Shard(0),))
        return whole(platform, platform.ops.argmax(x, dim))

    np.testing.assert_array_equal(on_ranks(hp_platform, program), array.argmax(dim))


def test_views_of_uneven_shards(hp_platform: Platform) -> None:
    """pytorch/pytorch#143372, #179502: flattening and unflattening of dimensions that ranks share unevenly."""

    def program(platform: Platform, mesh: DeviceMesh) -> list[str]:
        wrong = []
        for placement, target in itertools.product((Shard(0), Shard(1)), ((20,), (2, 10), (5, 2, 2), (4, 5))):
            _, x = place(platform, mesh, MATRIX, (placement,))
            if not np.array_equal(whole(platform, platform.ops.reshape(x, target)), MATRIX.reshape(target)):
                wrong.append(f"{placement} {target}")
        return wrong

    assert on_ranks(hp_platform, program) == []


def test_stack_of_many_keeps_placements(hp_platform: Platform) -> None:
    """pytorch/pytorch#168255: operations on lists of tensors are planned as any other, once."""
    from hp_dtensor.dispatch import dispatch

    def program(platform: Platform, mesh: DeviceMesh) -> tuple[Any, int, int]:
        _, x = place(platform, mesh, MATRIX, (Shard(0),))
        first = platform.ops.stack([x] * 8, 0)
        known = len(dispatch._plans)
        platform.ops.stack([x] * 8, 0)
        return first.placements, known, len(dispatch._plans)

    placements, known, after = on_ranks(hp_platform, program)
    assert placements == (Shard(1),)
    assert known == after


def test_ids_outside_a_cut_table_fail_on_every_rank(hp_platform: Platform) -> None:
    """Megatron-style tables give zeros for an id that no rank has."""

    def program(platform: Platform, mesh: DeviceMesh) -> str:
        ids = from_local(platform.from_numpy(np.array([0, 9])), mesh, (Replicate(),))
        _, table = place(platform, mesh, MATRIX, (Shard(0),))
        with pytest.raises((IndexError, RuntimeError)) as failure:
            platform.ops.embedding(ids, table)
        return type(failure.value).__name__

    assert on_ranks(hp_platform, program) in ("IndexError", "RuntimeError")


def test_ties_share_the_gradient_whatever_ranks_hold_them(hp_platform: Platform) -> None:
    """Reductions by rank first would give a rank's only winner as much as another's three."""
    array = np.array([3, 1, 3, 3, 3, 0], np.float32)

    def program(platform: Platform, mesh: DeviceMesh) -> Array:
        local, x = place(platform, mesh, array, (Shard(0),))
        (grad,) = platform.grad([platform.ops.amax(x, 0).full_tensor()], [local])
        return whole(platform, from_local(grad, mesh, (Shard(0),), shape=array.shape))

    np.testing.assert_allclose(on_ranks(hp_platform, program), (array == 3) / 4.0)


def test_an_operation_without_a_rule_names_itself_and_the_way_out(hp_platform: Platform) -> None:
    """pytorch/pytorch#164543: errors that can be read."""
    from hp_dtensor.dispatch import dispatch

    def program(platform: Platform, mesh: DeviceMesh) -> list[str]:
        _, x = place(platform, mesh, MATRIX, (Shard(0),))
        messages = []
        for name, keywords in (("mystery", {}), ("sum", {"where": True}), ("nonzero", {})):
            with pytest.raises(ShardingRuleError) as refusal:
                dispatch.dispatch(platform, name, lambda *_: None, (x,), keywords)
            messages.append(str(refusal.value))
        return messages

    messages = on_ranks(hp_platform, program)
    for name, message in zip(("mystery", "sum", "nonzero"), messages, strict=True):
        assert name in message
        assert "S(0)" in message
        assert "edistribute" in message
    assert "'where'" in messages[1]
