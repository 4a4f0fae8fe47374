"""`hsdp`: every argument and its checks, the methods of `HSDPCell`, and training as on one rank."""

from __future__ import annotations

import functools

import numpy
import numpy as np
import pytest
from fsdp_training import AdamW, Case, build, full_grads, full_value, micro_loss, train_reference

from hp_dtensor import DTensor, Shard, ShardingPlan, distribute_tensor, init_device_mesh, shard_module
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.distribute_module import place_parameter
from hp_dtensor.spec.placements import RaggedShard, Replicate
from hp_dtensor.testing import run_ranks
from hp_fsdp import FSDPModule, HSDPCell, HSDPError, fully_shard, hsdp, hsdp_sync_stream, memory_use

# float32: the same sums in another order, over three optimizer steps.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def linear(platform, rows=4, columns=4):
    with nn.building(platform):
        return nn.Linear(columns, rows)


def ones(platform, *shape):
    return platform.from_numpy(numpy.ones(shape, numpy.float32))


def shard_all(model, **options):
    """Apply `hsdp` to each block, and to the model for the other parameters."""
    for block in model.blocks:
        hsdp(block, **options)
    return hsdp(model, **options)


# Arguments ------------------------------------------------------------------------------------------------

REJECTED = [
    ("shard_size", 1.0),
    ("shard_size", "2"),
    ("shard_size", True),
    ("shard_size", 0),
    ("shard_size", -2),
    ("shard_size", 2),  # of one rank
    ("threshold", 1.5),
    ("threshold", None),
    ("threshold", -1),
    ("optimizer_level", "level0"),
    ("optimizer_level", "LEVEL1"),
    ("optimizer_level", 1),
    ("optimizer_level", None),
    ("enable_grad_accumulation", 1),
    ("enable_grad_accumulation", None),
    ("use_eager_hook", "yes"),
    ("use_eager_hook", 0),
    ("grad_scale", 1),
    ("grad_scale", "1.0"),
    ("grad_scale", 0.0),
    ("grad_scale", float("nan")),
    ("reduce_dtype", "float"),
    ("reduce_dtype", float),
    ("reduce_dtype", 32),
    ("reduce_dtype", "int32"),
    ("comm_async", 0),
    ("comm_async", None),
    ("comm_fusion", "all"),
    ("comm_fusion", 1),
    ("bucket_size", 1.0),
    ("bucket_size", False),
    ("bucket_size", -2),
    ("mesh", "cpu"),
]


@pytest.mark.parametrize(("name", "value"), REJECTED, ids=lambda x: repr(x))
def test_wrong_values_are_rejected_by_name_and_change_nothing(hp_platform, name, value):
    cell = linear(hp_platform)
    before, weight = type(cell), cell.weight
    with pytest.raises(ValueError, match=name) as caught:
        hsdp(cell, **{name: value})
    assert isinstance(caught.value, HSDPError)
    assert repr(value) in str(caught.value) or name == "mesh" or value == 2
    assert type(cell) is before
    assert cell.weight is weight


def test_all_wrong_values_are_reported_together(hp_platform):
    with pytest.raises(ValueError) as caught:
        hsdp(object(), shard_size=0, threshold=-1, optimizer_level="zero", comm_fusion=3)
    for part in ("cell: expected a module", "shard_size", "threshold", "optimizer_level", "comm_fusion"):
        assert part in str(caught.value)


def test_a_mesh_of_two_axes_is_rejected(hp_platform):
    mesh = init_device_mesh(hp_platform.device_types[0], (1, 1), mesh_dim_names=("a", "b"), platform=hp_platform)
    with pytest.raises(ValueError, match="one axis of data-parallel ranks"):
        hsdp(linear(hp_platform), mesh=mesh)


def test_either_kind_of_hook_gives_the_same_gradients(hp_platform):
    grads = []
    for use_eager_hook in (True, False):
        cell = hsdp(linear(hp_platform), use_eager_hook=use_eager_hook)
        hp_platform.backward(hp_platform.ops.sum(cell(ones(hp_platform, 3, 4))))
        grads.append(full_value(hp_platform, hp_platform.get_grad(cell.weight)).tolist())
    assert grads[0] == grads[1] == [[3.0] * 4] * 4


def test_the_object_stays_and_its_class_gains_hsdp_cell(hp_platform):
    cell = linear(hp_platform)
    kind = type(cell)
    assert hsdp(cell) is cell
    assert isinstance(cell, kind)
    assert isinstance(cell, HSDPCell)
    assert isinstance(cell, FSDPModule)
    assert type(cell).__name__ == "HSDPLinear"
    with pytest.raises(ValueError, match="already"):
        hsdp(cell)


@pytest.mark.parametrize(("shard_size", "sizes"), [(-1, (4,)), (4, (4,)), (2, (2, 2)), (1, (4, 1))])
def test_shard_size_ranks_share_a_parameter_and_the_others_replicate_it(hp_platform, shard_size, sizes):
    def rank():
        cell = hsdp(linear(hp_platform, rows=6), shard_size, threshold=0)
        assert cell.weight.device_mesh.shape == sizes
        *replicated, ragged = cell.weight.placements
        assert all(isinstance(placement, Replicate) for placement in replicated)
        assert isinstance(ragged, RaggedShard)
        assert len(ragged.units) == sizes[-1]

    run_ranks(rank, 4, hp_platform)


def test_a_shard_size_that_does_not_divide_the_ranks_names_those_that_do(hp_platform):
    def rank():
        with pytest.raises(ValueError, match=r"shard_size=4 does not divide the 6 .* one of 1, 2, 3, 6"):
            hsdp(linear(hp_platform), 4)

    run_ranks(rank, 6, hp_platform)


def test_threshold_is_in_kilobytes(hp_platform):
    """A parameter of exactly 1 KB is sharded by a threshold of 1, one of 4 bytes less is not."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.exactly, self.less = self.parameter((256,)), self.parameter((255,))

    def rank():
        with nn.building(hp_platform):
            cell = hsdp(Two(), threshold=1)
        assert isinstance(cell.exactly.placements[0], RaggedShard)
        assert isinstance(cell.less.placements[0], Replicate)
        with nn.building(hp_platform):
            default = hsdp(Two())
        assert isinstance(default.exactly.placements[0], Replicate)

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize(
    ("options", "collectives"),
    [
        ({}, 3),
        ({"comm_fusion": True}, 1),
        ({"comm_fusion": True, "bucket_size": 0}, 3),
        ({"comm_fusion": True, "bucket_size": 2}, 2),
        ({"comm_fusion": False, "bucket_size": 2}, 3),
    ],
    ids=str,
)
def test_fusion_and_buckets_decide_how_many_collectives_there_are(hp_platform, options, collectives):
    class Three(nn.Module):
        """Three parameters of 1 KB each."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (self.parameter((256,)) for _ in range(3))

        def forward(self, x):
            return self.ops.add(self.ops.add(self.ops.mul(self.a, x), self.b), self.c)

    def rank():
        with nn.building(hp_platform):
            cell = hsdp(Three(), threshold=0, optimizer_level="level3", **options)
        with record_collectives() as log:
            hp_platform.backward(hp_platform.ops.sum(cell(ones(hp_platform, 256))))
        assert log.count("all_gather") == collectives
        assert log.count("reduce_scatter") == collectives
        assert full_value(hp_platform, hp_platform.get_grad(cell.c)).tolist() == [1.0] * 256

    run_ranks(rank, 2, hp_platform)


def test_levels_decide_what_stays_unsharded(hp_platform):
    def rank():
        for level, keeps_weights in (("level1", True), ("level2", True), ("level3", False)):
            model = shard_all(build(hp_platform, Case((2,))), threshold=0, optimizer_level=level)
            model.set_requires_grad_sync(False)
            hp_platform.backward(micro_loss(hp_platform, model, Case((2,)), 0, 0, 0))
            use = memory_use(model)
            assert (use.full > 0) == keeps_weights, level
            assert (use.full_gradients == 0) == (level == "level2"), level

    run_ranks(rank, 2, hp_platform)


def test_gradients_are_scaled_and_reduced_in_the_given_dtype(hp_platform):
    def rank():
        me = current_world(hp_platform).rank
        x = hp_platform.from_numpy(numpy.full((1, 4), me + 1.0, numpy.float32))
        for dtype in (None, "float16", hp_platform.dtype("float16")):
            cell = hsdp(linear(hp_platform), threshold=0, grad_scale=0.5, reduce_dtype=dtype)
            with record_collectives() as log:
                hp_platform.backward(hp_platform.ops.sum(cell(x)))
            assert full_value(hp_platform, hp_platform.get_grad(cell.weight)).tolist() == [[0.75] * 4] * 4
            assert log.wire_bytes("reduce_scatter") == 8 * (4 if dtype is None else 2)

    run_ranks(rank, 2, hp_platform)


def test_a_mesh_that_cuts_parameters_already_is_refused(hp_platform):
    def rank():
        world = init_device_mesh(hp_platform.device_types[0], (2, 2), mesh_dim_names=("dp", "tp"), platform=hp_platform)
        cell = linear(hp_platform)
        place_parameter(cell, "weight", world["tp"], [Shard(1)])
        with pytest.raises(ValueError, match="weight is a DTensor on mesh"):
            hsdp(cell, mesh=world["tp"])
        hsdp(cell, threshold=0, mesh=world["dp"])
        assert cell.weight.device_mesh.mesh_dim_names == ("tp", "dp")

    run_ranks(rank, 4, hp_platform)


# Methods --------------------------------------------------------------------------------------------------


def test_methods_refuse_wrong_values_and_cells_that_have_not_been_through_hsdp(hp_platform):
    class Early(HSDPCell, nn.Module):
        """A cell that is an `HSDPCell` before `hsdp`."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x)

    with nn.building(hp_platform):
        early, plain = Early(), nn.Linear(2, 2)
    for call in (
        lambda: early.set_requires_grad_sync(True),
        lambda: early.zero_grads(),
        lambda: early.set_forward_prefetch_cells([]),
        lambda: early.set_backward_prefetch_cells([]),
    ):
        with pytest.raises(ValueError, match="call hsdp"):
            call()
    cell = hsdp(early)
    with pytest.raises(ValueError, match="expected a bool, got 1"):
        cell.set_requires_grad_sync(1)
    for method in (cell.set_forward_prefetch_cells, cell.set_backward_prefetch_cells):
        with pytest.raises(ValueError, match="expected a list"):
            method(cell)
        with pytest.raises(ValueError, match="number 1, Linear"):
            method([cell, plain])
        fully_shard(
            plain, init_device_mesh(hp_platform.device_types[0], (1,), mesh_dim_names=("dp",), platform=hp_platform)
        )
        with pytest.raises(ValueError, match="number 0, FSDPLinear"):
            method([plain])
        with nn.building(hp_platform):
            plain = nn.Linear(2, 2)


def test_accumulated_gradients_are_reduced_when_told_so(hp_platform):
    def rank():
        cell = hsdp(linear(hp_platform), threshold=0, enable_grad_accumulation=True)
        x = ones(hp_platform, 1, 4)

        def backward():
            hp_platform.backward(hp_platform.ops.sum(cell(x)))

        backward()
        assert hp_platform.get_grad(cell.weight) is None
        cell.set_requires_grad_sync(True)
        backward()
        assert full_value(hp_platform, hp_platform.get_grad(cell.weight)).tolist() == [[2.0] * 4] * 4
        cell.set_requires_grad_sync(False)
        backward()
        cell.zero_grads()
        assert hp_platform.get_grad(cell.weight) is None
        cell.set_requires_grad_sync(True)
        backward()
        assert full_value(hp_platform, hp_platform.get_grad(cell.weight)).tolist() == [[1.0] * 4] * 4

    run_ranks(rank, 2, hp_platform)


def test_asynchronous_gradients_are_there_after_hsdp_sync_stream(hp_platform):
    def rank():
        model = shard_all(build(hp_platform, Case((2,))), threshold=0, comm_async=True)
        hp_platform.backward(micro_loss(hp_platform, model, Case((2,)), 0, 0, 0))
        grads = [hp_platform.get_grad(p) for _, p in hp_platform.named_parameters(model)]
        assert grads == [None] * len(grads)
        hsdp_sync_stream()
        named = hp_platform.named_parameters(model)
        assert all((hp_platform.get_grad(p) is None) == ("unused" in name) for name, p in named)

    run_ranks(rank, 2, hp_platform)


def test_prefetch_cells_are_gathered_before_they_are_needed(hp_platform):
    case = Case((2,), num_blocks=3)

    def rank():
        model = shard_all(build(hp_platform, case), threshold=0, optimizer_level="level3")
        blocks = list(model.blocks)
        blocks[0].set_forward_prefetch_cells(blocks[1:])
        blocks[2].set_backward_prefetch_cells(blocks[:2])
        held = []
        hp_platform.add_forward_hook(
            blocks[0].up, lambda *_: held.append([b._fsdp.group.held_bytes > 0 for b in blocks])
        )
        hp_platform.backward(micro_loss(hp_platform, model, case, 0, 0, 0))
        assert held[0] == [True] * 3

    run_ranks(rank, 2, hp_platform)


# Training -------------------------------------------------------------------------------------------------


def train(platform, case, **options):
    """Train like `train_reference`, with `hsdp`."""
    model = shard_all(build(platform, case), threshold=0, **options)
    rank, step = current_world(platform).rank, AdamW(platform)
    grads = {}
    for index in range(case.steps):
        for micro in range(case.accumulate):
            model.set_requires_grad_sync(micro == case.accumulate - 1)
            platform.backward(micro_loss(platform, model, case, rank, index, micro))
        hsdp_sync_stream()
        grads = full_grads(platform, model)
        step(model)
        model.zero_grads()
    return grads, {name: full_value(platform, p) for name, p in platform.named_parameters(model)}


@functools.cache
def reference(num_ranks, **options):
    return train_reference(Case((num_ranks,), **options))


# The stages themselves are tested in `test_fully_shard.py`: each level once, and both values of `comm_async`.
@pytest.mark.parametrize(("level", "comm_async"), [("level1", True), ("level2", False), ("level3", True)])
def test_training_equals_the_single_process(hp_platform, level, comm_async):
    case = Case((4,), steps=3, accumulate=2)
    expected = reference(4, steps=3, accumulate=2)
    options = {"shard_size": 2, "optimizer_level": level, "comm_async": comm_async, "comm_fusion": comm_async}
    for grads, weights in run_ranks(functools.partial(train, hp_platform, case, **options), 4, hp_platform):
        for name, grad in expected.grads.items():
            if grad is not None:
                numpy.testing.assert_allclose(grads[name], grad, **CLOSE, err_msg=name)
        for name, weight in expected.weights.items():
            numpy.testing.assert_allclose(weights[name], weight, **CLOSE, err_msg=name)


@pytest.mark.real_ranks
def test_training_equals_the_single_process_on_real_ranks(rank_pool):
    case = Case((2,), steps=2)
    expected = reference(2, steps=2)
    for _, weights in rank_pool(2).run("test_hsdp:train_on_real_rank", case):
        for name, weight in expected.weights.items():
            numpy.testing.assert_allclose(weights[name], weight, **CLOSE, err_msg=name)


def train_on_real_rank(case):
    from hp_dtensor.platform.selection import get_platform

    return train(get_platform(), case, optimizer_level="level2", comm_async=True)


INPUTS = np.linspace(-1, 2, 32, dtype=np.float32).reshape(8, 4)
COLUMNS_THEN_ROWS = {"up.weight": ("tp", "None"), "down.weight": ("None", "tp")}
BATCH = {"input": ("dp", "None")}


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.down(self.platform.ops.tanh(self.up(x)))


def build_two_layers(platform):
    with nn.building(platform):
        model = TwoLayers()
    for i, (_, parameter) in enumerate(platform.named_parameters(model)):
        values = np.cos(np.arange(parameter.shape[0] * parameter.shape[1]) + i).astype(np.float32)
        platform.copy_(parameter, platform.from_numpy(values.reshape(parameter.shape)))
    return model


def trained(platform, model, x):
    """Return the full parameters after three steps of gradient descent."""
    parameters = dict(platform.named_parameters(model))
    for _ in range(3):
        platform.backward(platform.ops.mean(platform.ops.square(model(x))))
        for parameter in parameters.values():
            with platform.no_grad(), platform.local_op():
                local, grad = platform.unwrap(parameter), platform.unwrap(platform.get_grad(parameter))
                platform.copy_(parameter, platform.ops.sub(local, platform.ops.mul(grad, 0.1)))
            platform.set_grad(parameter, None)
    full = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in parameters.items()}
    return {name: platform.to_numpy(platform.detach(each)) for name, each in full.items()}


def rank(platform, shape, names, plan, shard):
    mesh = init_device_mesh(platform.device_types[0], shape, mesh_dim_names=names, platform=platform)
    model = shard_module(build_two_layers(platform), mesh, ShardingPlan(plan, BATCH))
    shard(model, mesh)
    weight = model.up.weight.spec
    result = trained(platform, model, distribute_tensor(platform.from_numpy(INPUTS), mesh))
    return result, dict(zip(weight.mesh.mesh_dim_names, weight.mesh.shape, strict=True))


def with_hsdp(**options):
    return lambda model, mesh: hsdp(model, threshold=0, **options)


CASES = {
    "beside tp": ((2, 2), ("dp", "tp"), COLUMNS_THEN_ROWS, with_hsdp(), {"tp": 2, "hsdp": 2}),
    "outer tp": (
        (2, 2),
        ("tp", "dp"),
        COLUMNS_THEN_ROWS,
        with_hsdp(optimizer_level="level3", comm_fusion=True),
        {"tp": 2, "hsdp": 2},
    ),
    "all ranks": ((3,), ("dp",), {}, with_hsdp(optimizer_level="level3"), {"hsdp": 3}),
    "part of the axis": ((4,), ("dp",), {}, with_hsdp(shard_size=2), {"hsdp_replicate": 2, "hsdp_shard": 2}),
    "two axes": ((2, 2, 2), ("dp", "cp", "tp"), COLUMNS_THEN_ROWS, with_hsdp(comm_fusion=True), {"tp": 2, "hsdp": 4}),
    "fully_shard": (
        (2, 2),
        ("dp", "tp"),
        COLUMNS_THEN_ROWS,
        lambda model, mesh: fully_shard(model, mesh["dp"]),
        {"tp": 2, "dp": 2},
    ),
}


@functools.cache
def on_one_rank(platform):
    return trained(platform, build_two_layers(platform), platform.from_numpy(INPUTS))


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_on_one_rank(hp_platform, case):
    shape, names, plan, shard, expected_axes = CASES[case]
    for weights, axes in run_ranks(rank, int(np.prod(shape)), hp_platform, hp_platform, shape, names, plan, shard):
        assert axes == expected_axes
        for name, values in on_one_rank(hp_platform).items():
            # float32: the same sums in another order, over three steps.
            np.testing.assert_allclose(weights[name], values, rtol=2e-5, atol=2e-6)


def test_ranks_beyond_the_meshes_of_the_parameters_are_found(hp_platform):
    def program():
        mesh = init_device_mesh(hp_platform.device_types[0], (2, 2), mesh_dim_names=("dp", "tp"), platform=hp_platform)
        model = shard_module(build_two_layers(hp_platform), mesh["tp"], ShardingPlan(COLUMNS_THEN_ROWS))
        hsdp(model, threshold=0)
        half = np.split(INPUTS, 2)[mesh.get_local_rank("dp")]
        x = distribute_tensor(hp_platform.from_numpy(half.copy()), mesh["tp"])
        return trained(hp_platform, model, x), model.up.weight.device_mesh.mesh_dim_names

    for weights, axes in run_ranks(program, 4, hp_platform):
        assert axes == ("tp", "hsdp")
        for name, values in on_one_rank(hp_platform).items():
            np.testing.assert_allclose(weights[name], values, rtol=2e-5, atol=2e-6)


def test_meshes_that_do_not_go_together_are_named(hp_platform):
    def program():
        mesh = init_device_mesh(hp_platform.device_types[0], (2, 2), mesh_dim_names=("dp", "tp"), platform=hp_platform)
        model = build_two_layers(hp_platform)
        place_parameter(model.up, "weight", mesh["tp"], [Shard(0)])
        place_parameter(model.down, "weight", mesh.flatten("all"), [Shard(0)])
        with pytest.raises(HSDPError, match=r"axes 'tp' and 'all' share ranks.*; pass mesh="):
            hsdp(model)

    run_ranks(program, 4, hp_platform)
