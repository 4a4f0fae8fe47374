"""To and from torch's own DTensors on real ranks: no copies, shared groups, distributed checkpoints."""

from __future__ import annotations

import re

import pytest
import torch
import torch_interop_ranks as on_rank


def test_tensors_come_and_go_without_a_copy(two_ranks):
    assert two_ranks.run(on_rank.there_and_back) == [True, True]


def test_gradients_flow_through_torchs_operations(two_ranks):
    assert two_ranks.run(on_rank.gradients) == [True, True]


def test_gradients_of_sums_flow_and_those_of_other_partial_values_are_refused(two_ranks):
    assert two_ranks.run(on_rank.gradients_of_partial_values, "sum") == [([1.0], [1.0, 1.0])] * 2
    for op in ("avg", "max", "min"):
        for messages in two_ranks.run(on_rank.gradients_of_partial_values, op):
            for what, message in zip(("to_torch_dtensor", "from_torch_dtensor"), messages, strict=True):
                assert message == (
                    f"{what}: gradients of Partial({op}) mean another thing in torch's DTensor; redistribute to "
                    "Replicate() or Shard(dim) first, or convert x.detach()"
                )


def test_torchs_tensors_take_part_in_our_operations(two_ranks):
    assert two_ranks.run(on_rank.their_tensor_in_our_operations) == [True, True]


def test_process_groups_are_shared(three_ranks):
    expected = ([4.0, 4.0], [4.0, 4.0], [0, 2], (3,))
    assert three_ranks.run(on_rank.groups_are_shared) == [expected, None, expected]


def test_torchs_mesh_is_taken_wherever_ours_is(two_ranks):
    assert two_ranks.run(on_rank.torchs_mesh_wherever_ours_is) == [[True] * 4] * 2


def test_our_groups_in_calls_of_torch_distributed(three_ranks):
    expected = [4.0, 4.0], 2.0, [0.0, 2.0], ["rank 0", "rank 2"], (2, [0, 2], 2)
    assert three_ranks.run(on_rank.our_groups_in_torchs_calls) == [expected, None, expected]


def test_data_parallel_over_our_groups_and_meshes(two_ranks):
    assert two_ranks.run(on_rank.data_parallel_over_our_groups) == [[[[0.5, 0.5]]] * 3] * 2


def test_a_released_group_is_created_again(three_ranks):
    assert three_ranks.run(on_rank.groups_after_release) == [(False, 2.0), (False, 2.0), None]


def test_our_mesh_over_torchs_groups(three_ranks):
    outside, inside, also_inside = three_ranks.run(on_rank.a_mesh_from_torchs_groups)
    assert inside == also_inside == ([1, 2], torch.int32, [5.0, 5.0])
    assert "from_group takes a ProcessGroup, or one per axis, got" in outside


def test_a_mesh_of_descending_ranks(two_ranks):
    for message, *equal in two_ranks.run(on_rank.descending_ranks):
        assert "has ranks [1, 0] along an axis and communicates in the order [0, 1]" in message
        assert equal == [True] * 3


def test_a_mesh_of_two_axes(two_ranks):
    assert two_ranks.run(on_rank.two_axes) == [True, True]


def test_what_torch_does_not_have_is_refused(two_ranks):
    for message in two_ranks.run(on_rank.refusals):
        assert message == (
            "torch's DTensor has no placement like RaggedShard(0, (5, 2)); "
            "redistribute to Shard(0) or Replicate() first"
        )
    assert "need real ranks of torch.distributed" in two_ranks.run(on_rank.simulated_mesh_is_refused)[0]


@pytest.mark.parametrize("convert", [False, True])
def test_a_distributed_checkpoint_goes_into_another_layout(two_ranks, tmp_path, convert):
    assert two_ranks.run(on_rank.checkpoint, str(tmp_path), convert) == [[True] * 5] * 2


def test_a_distributed_checkpoint_takes_tensors_of_any_layout(three_ranks, tmp_path):
    assert three_ranks.run(on_rank.checkpoint_of_any_layout, str(tmp_path)) == [([], 5)] * 3


def test_a_distributed_checkpoint_of_partial_values_is_refused(two_ranks, tmp_path):
    for errors in two_ranks.run(on_rank.checkpoint_of_partial_values, str(tmp_path)):
        assert len(errors) == 2
        for error in errors:
            assert re.match(r"PlacementError: a checkpoint of partial values, .*: reduce them first", error)


def test_a_distributed_checkpoint_in_the_background(two_ranks, tmp_path):
    assert two_ranks.run(on_rank.checkpoint_in_the_background, str(tmp_path)) == [True, True]
