"""Degrees are inferred and checked before anything is built, and the mesh is arithmetic on them."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest

from hp_dtensor.comm.links import Links
from hp_dtensor.comm.world import fake_world
from hp_dtensor.parallel.attention import AttentionShape, choose_context_parallel
from hp_trainer.exceptions import ParallelDimsError
from hp_trainer.parallel import ParallelDims, context


def message(**degrees: object) -> str:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(**degrees)
    return str(caught.value)


def test_shard_degree_fills_what_is_left() -> None:
    assert ParallelDims(dp_shard=-1, tp=2, dp_replicate=2, world_size=16).dp_shard == 4


def test_peer_experts_take_ranks_of_their_own() -> None:
    dims = ParallelDims(dp_shard=-1, tp=2, ep=2, world_size=16, expert_mesh="peer")
    assert (dims.dp_shard, dims.non_dp_size, dims.efsdp_size) == (4, 4, 4)


def test_folded_experts_reuse_the_dense_ranks() -> None:
    dims = ParallelDims(dp_shard=2, tp=2, ep=2, world_size=4)
    assert (dims.efsdp_size, dims.dp_size, dims.non_dp_size) == (2, 2, 2)
    assert ParallelDims(dp_shard=2, tp=2, ep=2, etp=2, world_size=4).efsdp_size == 1


def test_a_shard_degree_that_is_no_whole_number_is_refused_with_the_nearest_legal_degrees() -> None:
    assert message(dp_shard=-1, tp=3, pp=2, world_size=8) == (
        "parallel degrees: 1 problem\n"
        "dp_shard: -1 cannot be filled: world_size / (dp_replicate*cp*tp*pp) = 8 / (1*1*3*2) = 8/6 "
        "is not an integer\n"
        "    expected: dp_replicate*cp*tp*pp to divide 8\n"
        "    got: 6\n"
        "    try: tp=2 or 4, or world_size=6"
    )


def test_a_wrong_product_spells_the_equation() -> None:
    assert message(dp_shard=3, tp=2, world_size=4) == (
        "parallel degrees: 1 problem\n"
        "dp_shard: dp_replicate*dp_shard*cp*tp*pp = 1*3*1*2*1 = 6 is not world_size = 4\n"
        "    expected: a product of 4\n"
        "    got: 6\n"
        "    try: dp_shard=2, or world_size=6"
    )


def test_the_peer_equation_has_ep() -> None:
    text = message(dp_shard=2, ep=3, world_size=4, expert_mesh="peer")
    assert "dp_replicate*dp_shard*cp*tp*pp*ep = 1*2*1*1*1*3 = 6 is not world_size = 4" in text
    assert "ep=2, or world_size=6" in text


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ParallelDimsError) as caught:
        ParallelDims(dp_shard=3, tp=3, etp=2, cp=4, ulysses_degree=3, world_size=8)
    assert [problem.path for problem in caught.value.problems] == ["dp_shard", "etp", "ulysses_degree"]
    assert "tp=2 or 4" in caught.value.problems[0].hint
    assert "ulysses_degree=2 or 4" in str(caught.value)


@pytest.mark.parametrize("value", [0, -2, 1.5, True, "2", None])
def test_a_degree_is_a_whole_number_of_at_least_one(value: object) -> None:
    assert f"tp: impossible degree\n    expected: an integer >= 1\n    got: {value!r}" in message(tp=value)


def test_only_the_shard_degree_may_be_left_open() -> None:
    assert "expected: -1 or an integer >= 1\n    got: -2" in message(dp_shard=-2)
    assert "tp: impossible degree" in message(tp=-1)


def test_experts_that_do_not_fit_the_dense_ranks_name_the_legal_degrees() -> None:
    assert message(dp_shard=4, tp=2, ep=3, world_size=8) == (
        "parallel degrees: 1 problem\n"
        "ep: dp_shard*cp*tp = 4*1*2 = 8 ranks cannot be split into efsdp*ep*etp = efsdp*3*1\n"
        "    expected: ep to divide 8\n"
        "    got: 3\n"
        "    try: ep=2 or 4"
    )


def test_expert_tensor_parallel_is_all_of_tp_or_nothing() -> None:
    assert "etp: experts are tensor parallel over all tp ranks or not at all" in message(
        tp=4, ep=2, etp=2, dp_shard=2, world_size=8
    )


def test_an_unknown_way_to_place_experts_is_refused() -> None:
    assert "expected: 'folded' or 'peer'\n    got: 'both'" in message(expert_mesh="both")


def test_from_config_reads_any_object_and_the_older_dp() -> None:
    dims = ParallelDims.from_config(SimpleNamespace(dp=2, tp=2, ep=2, ulysses_degree=None), world_size=4)
    assert (dims.dp_shard, dims.etp, dims.expert_mesh) == (2, 2, "folded")
    both = SimpleNamespace(dp=4, dp_shard=1, tp=2, etp=1)
    assert ParallelDims.from_config(both, 2).dp_shard == 1


def test_an_open_shard_degree_beside_experts_is_refused_until_it_is_said_where_they_live() -> None:
    assert message(dp_shard=-1, ep=4, world_size=8) == (
        "parallel degrees: 1 problem\n"
        "dp_shard: -1 with ep = 4 is ambiguous: dp_shard would be 8 if experts reuse the dense ranks (folded), "
        "2 if ep is an axis of its own (peer)\n"
        "    expected: expert_mesh, or dp_shard itself\n"
        "    got: -1\n"
        "    try: expert_mesh='folded' or 'peer'"
    )
    with pytest.raises(ParallelDimsError, match="is ambiguous"):
        ParallelDims.from_config(SimpleNamespace(dp_shard=-1, ep=4), world_size=8)
    read = {
        kind: ParallelDims.from_config(SimpleNamespace(dp_shard=-1, ep=4, expert_mesh=kind), world_size=8).dp_shard
        for kind in ("folded", "peer")
    }
    assert read == {"folded": 8, "peer": 2}


def test_a_given_shard_degree_says_itself_where_experts_live() -> None:
    assert ParallelDims(dp_shard=8, ep=4, world_size=8).expert_mesh == "folded"
    assert ParallelDims(dp_shard=2, ep=4, world_size=8).expert_mesh == "peer"
    assert ParallelDims.from_config(SimpleNamespace(dp=2, tp=2, ep=2), world_size=8).expert_mesh == "peer"
    assert ParallelDims(dp_shard=-1, world_size=8).expert_mesh == "folded"
    assert "= 4 is not world_size = 8" in message(dp_shard=4, ep=4, world_size=8)


def test_replicas_are_no_shards() -> None:
    dims = ParallelDims(dp_replicate=2, world_size=2)
    assert (dims.dp_replicate_enabled, dims.fsdp_enabled, dims.fsdp_size) == (True, False, 1)
    assert ParallelDims(dp_shard=2, world_size=2).fsdp_enabled


@pytest.mark.parametrize(
    ("config", "world_size", "num_experts", "ep"),
    [
        ({"dp_shard": -1}, 4, 8, 4),
        ({"dp_shard": -1}, 12, 8, 4),
        ({"dp_shard": -1, "tp": 2, "etp": 1}, 4, 8, 4),
        ({"dp_shard": -1, "tp": 2}, 4, 8, 2),
        ({"dp_shard": 2, "dp_replicate": 3}, 6, 8, 2),
        ({"dp_shard": -1}, 4, None, 1),
    ],
)
def test_expert_parallel_ranks_may_be_as_many_as_fit(config: dict, world_size: int, num_experts, ep: int) -> None:
    config = SimpleNamespace(ep=-1, expert_mesh="folded", **config)
    assert ParallelDims.from_config(config, world_size, num_experts).ep == ep


def test_summary_is_one_line_with_every_degree() -> None:
    assert ParallelDims(dp_shard=2, tp=2, ep=2, world_size=4).summary() == (
        "dp_replicate=1 dp_shard=2 cp=1 tp=2 pp=1 ep=2 etp=1 efsdp=2 ulysses=1 expert_mesh=folded dp=2 world=4"
    )


def test_enabled_properties_follow_the_degrees() -> None:
    dims = ParallelDims(cp=2, tp=2, world_size=4)
    assert (dims.tp_enabled, dims.cp_enabled, dims.ep_enabled, dims.pp_enabled) == (True, True, False, False)
    assert dims.fsdp_enabled  # over cp: its ranks hold the same weights
    assert dims.ulysses_size == 2
    assert ParallelDims(cp=2, cp_method="ring", world_size=2).ulysses_size == 1


def test_a_model_is_checked_against_the_degrees_all_at_once() -> None:
    config = SimpleNamespace(num_attention_heads=6, num_key_value_heads=3, num_experts=6)
    dims = ParallelDims(dp_shard=1, tp=4, ep=4, world_size=4)
    with pytest.raises(ParallelDimsError) as caught:
        dims.validate_against_model(SimpleNamespace(config=config), seq_len=30)
    assert str(caught.value) == (
        "parallel degrees do not fit the model: 4 problems\n"
        "tp: num_attention_heads = 6 cannot be split over tp = 4\n"
        "    expected: a divisor of 6\n    got: 4\n    try: tp=3 or 6\n"
        "tp: num_key_value_heads = 3 cannot be split over tp = 4\n"
        "    expected: a divisor of 3\n    got: 4\n    try: tp=3\n"
        "ep: num_experts = 6 cannot be split over ep = 4\n"
        "    expected: a divisor of 6\n    got: 4\n    try: ep=3 or 6\n"
        "tp: seq_len = 30 cannot be split over cp*tp = 1*4 = 4\n"
        "    expected: cp*tp to divide 30\n    got: 4\n    try: seq_len=28 or 32, or cp*tp=3 or 5"
    )


def test_fields_a_model_lacks_are_skipped() -> None:
    ParallelDims(tp=2, world_size=2).validate_against_model(SimpleNamespace(config=SimpleNamespace()))
    ParallelDims(tp=2, world_size=2).validate_against_model(object(), seq_len=8)


def test_one_rank_has_a_mesh_with_every_name() -> None:
    mesh = ParallelDims().build_mesh()
    assert (mesh.mesh_dim_names, mesh.shape) == (("dp_shard",), (1,))
    names = ("pp", "dp_replicate", "cp", "tp", "fsdp", "dp", "batch", "loss", "efsdp", "ep", "etp")
    assert all(mesh[name].size() == 1 for name in names)


def lines(dims: ParallelDims, name: str) -> list[tuple[int, ...]]:
    """The groups along an axis, as every rank sees its own."""
    found = []
    for rank in range(dims.world_size):
        with fake_world(dims.world_size, rank) as world:
            found.append(dims.build_mesh(world=world)[name].ranks_along(name))
    return sorted(set(found))


def test_folded_axes_have_pp_outermost_and_tp_innermost() -> None:
    dims = ParallelDims(dp_replicate=1, dp_shard=2, tp=2, pp=2, ep=2, world_size=8)
    assert lines(dims, "tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert lines(dims, "pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert lines(dims, "fsdp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert lines(dims, "ep") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert lines(dims, "efsdp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert lines(dims, "etp") == [(rank,) for rank in range(8)]


def test_folded_experts_with_tensor_parallel_experts() -> None:
    dims = ParallelDims(dp_shard=4, tp=2, ep=2, etp=2, world_size=8)
    assert lines(dims, "etp") == lines(dims, "tp")
    assert lines(dims, "ep") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert lines(dims, "efsdp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_folded_fsdp_and_loss_span_context_parallel_ranks() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=2, cp=2, world_size=8)
    assert lines(dims, "fsdp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert lines(dims, "loss") == [tuple(range(8))]
    assert lines(dims, "batch") == lines(dims, "dp") == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_peer_axes_keep_the_original_order() -> None:
    dims = ParallelDims(dp_shard=2, ep=2, tp=2, pp=2, etp=2, world_size=16, expert_mesh="peer")
    with fake_world(16) as world:
        assert dims.build_mesh(world=world).mesh_dim_names == ("dp_shard", "ep", "tp", "pp")
    assert lines(dims, "pp")[0] == (0, 1)
    assert lines(dims, "etp") == lines(dims, "tp")
    assert lines(dims, "tp")[0] == (0, 2)
    assert lines(dims, "ep")[0] == (0, 4)
    assert lines(dims, "efsdp") == lines(dims, "fsdp") == lines(dims, "dp_shard")
    assert lines(dims, "loss")[0] == (0, 8)


def test_every_name_splits_all_ranks_into_equal_groups() -> None:
    for expert_mesh, etp, cp in itertools.product(("folded", "peer"), (1, 2), (1, 2)):
        dims = ParallelDims(
            dp_replicate=2, dp_shard=-1, cp=cp, tp=2, ep=2, etp=etp, world_size=32, expert_mesh=expert_mesh
        )
        for name in ("dp_replicate", "fsdp", "dp", "loss", "efsdp", "ep", "etp", "tp"):
            members = [rank for line in lines(dims, name) for rank in line]
            assert sorted(members) == list(range(32)), (dims.summary(), name)


def test_batch_rank_is_the_coordinate_on_the_batch_axis() -> None:
    for expert_mesh in ("folded", "peer"):
        dims = ParallelDims(dp_replicate=2, dp_shard=-1, tp=2, ep=2, world_size=16, expert_mesh=expert_mesh)
        for rank in range(16):
            with fake_world(16, rank) as world:
                mesh = dims.build_mesh(world=world)
                assert mesh["batch"].get_local_rank() == dims.batch_rank(rank)


def test_a_world_of_another_size_is_refused() -> None:
    with fake_world(4) as world, pytest.raises(ParallelDimsError, match="got: a world of 4 ranks"):
        ParallelDims(dp_shard=2, world_size=2).build_mesh(world=world)


def calls_for(world_size: int) -> int:
    """The calls and returns, of Python and of C functions, that it takes to build the layout of a world."""
    count = itertools.count()
    sys.setprofile(lambda *event: next(count))
    try:
        with fake_world(world_size, world_size - 1) as world:
            dims = ParallelDims(dp_replicate=2, dp_shard=-1, tp=2, ep=2, world_size=world_size, expert_mesh="folded")
            dims.build_mesh(world=world)
    finally:
        sys.setprofile(None)
    return next(count)


def test_a_million_ranks_cost_what_eight_do() -> None:
    calls_for(8)
    assert calls_for(2**20) <= 1.1 * calls_for(8)


def test_context_parallel_ranks_do_not_drop_choices_by_position() -> None:
    config = SimpleNamespace(num_attention_heads=4, capacity_factor=1.0, drop_policy="position")
    dims = ParallelDims(cp=2, dp_shard=1, world_size=2)
    with pytest.raises(ParallelDimsError, match=r"which model[.]drop_policy=position drops"):
        dims.validate_against_model(config)
    ParallelDims(dp_shard=2, world_size=2).validate_against_model(config)
    config.drop_policy = "probability"
    dims.validate_against_model(config)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_costs_of_a_long_sequence_are_those_counted_on_all_of_it(method) -> None:
    shape = AttentionShape(batch=1, length=8192, heads=32, kv_heads=8, head_dim=128)
    rates = {"links": Links(bandwidth=50e9), "flops": 1e14}
    full = choose_context_parallel(shape, 2, method=method, ulysses_degree=1, **rates).best
    found = context._compare(shape, 2, method, 1).best
    assert found.forward_bytes == full.forward_bytes
    assert found.seconds == pytest.approx(full.seconds, rel=0.01)


def test_degrees_may_be_given_by_position() -> None:
    by_name = ParallelDims(dp_replicate=1, dp_shard=2, cp=2, tp=2, ulysses_degree=2, world_size=8)
    assert ParallelDims(1, 2, 2, 2, 1, 1, 1, 2, 8) == by_name


@pytest.mark.parametrize(("setting", "value"), [("ep_copies", 2), ("ep_move_interval", 5)])
def test_placement_by_loads_is_refused_with_adapters_which_record_none(setting: str, value: int) -> None:
    dims = ParallelDims(dp_shard=2, ep=2, world_size=2, **{setting: value})
    for rank, number in ((None, 0), (8, 1)):
        model = SimpleNamespace(num_experts=4, lora=SimpleNamespace(rank=rank))
        found = [problem for problem in dims.model_problems(model) if problem.path == setting]
        assert len(found) == number
    assert "has no effect with adapters" in found[0].what
