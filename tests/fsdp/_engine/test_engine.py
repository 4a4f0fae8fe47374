"""The engine's collectives, copies, memory and states; its numbers are tested elsewhere."""

from __future__ import annotations

import numpy
import pytest
from fsdp_training import (
    AdamW,
    Block,
    Case,
    Net,
    build,
    full_value,
    held_bytes,
    mesh_of,
    micro_loss,
    shard,
    sharded,
    sharded_modules,
    step,
)

from hp_dtensor import CommDebugMode
from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import ProcessGroup, record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.distribute_module import place_parameter
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.spec.placements import RaggedShard, Replicate, Shard
from hp_dtensor.spec.rank_checks import check_mode
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    FSDPModule,
    FSDPStateError,
    FullyShardError,
    fully_shard,
    hsdp,
    hsdp_sync_stream,
)


def buffers(model):
    return [buffer for module in sharded_modules(model) for buffer in module._fsdp.group.buffers]


def address(platform, x):
    """Return the address of a plain tensor's data."""
    return platform.unwrap(x).data_ptr()


# Collectives, copies, memory ------------------------------------------------------------------------------


def test_collectives_of_a_step(hp_platform):
    """Each group is gathered once before forward, the inner ones again for backward, and reduced once."""
    case = Case((2,), num_blocks=3)

    def rank():
        model = sharded(hp_platform, case)
        step(hp_platform, model, case)
        with record_collectives() as log:
            step(hp_platform, model, case)
        sizes = [4 * buffer.layout.shard_numel for buffer in buffers(model)]
        *blocks, root = sorted(sizes, key=lambda size: size == sizes[0])
        gathered = [record.wire_bytes for record in log.records if record.name == "all_gather"]
        assert sorted(gathered) == sorted([root, *blocks, *blocks])
        assert log.count("reduce_scatter") == 4
        assert log.wire_bytes("reduce_scatter") == root + sum(blocks)
        assert log.count() == 7 + 4

    run_ranks(rank, 2, hp_platform)


def test_replicas_only_gather_nothing(hp_platform):
    case = Case((2, 1))

    def rank():
        model = sharded(hp_platform, case)
        with record_collectives() as log:
            step(hp_platform, model, case)
        assert {record.name for record in log.records} == {"all_reduce"}

    run_ranks(rank, 2, hp_platform)


def test_the_shard_is_what_is_gathered_and_parameters_are_views_of_the_result(hp_platform, monkeypatch):
    case = Case((2,), num_blocks=1)
    sent, received = {}, {}
    gather = ProcessGroup.all_gather_into

    def watched(self, output, x, async_op=False):
        sent.setdefault(self.rank, []).append(address(hp_platform, x))
        received.setdefault(self.rank, []).append(address(hp_platform, output))
        return gather(self, output, x, async_op)

    monkeypatch.setattr(ProcessGroup, "all_gather_into", watched)

    def rank():
        model = sharded(hp_platform, case)
        block = model.blocks[0]
        (buffer,) = block._fsdp.group.buffers
        block.unshard()
        me = current_world(hp_platform).rank
        assert sent[me] == [address(hp_platform, buffer.shard)]
        places = zip(buffer.parameters, buffer.layout.offsets, strict=True)
        for parameter, offset in places:
            module, attribute = parameter.owners[0]
            assert address(hp_platform, getattr(module, attribute)) == received[me][0] + 4 * offset
        block.reshard()
        for parameter in buffer.parameters:
            if 0 not in parameter.local_shape:
                inside = address(hp_platform, parameter.sharded) - address(hp_platform, buffer.shard)
                assert inside == 4 * parameter.start

    run_ranks(rank, 2, hp_platform)


def test_gradients_are_views_of_one_reduced_shard(hp_platform):
    case = Case((2,), num_blocks=1)

    def rank():
        model = sharded(hp_platform, case)
        step(hp_platform, model, case)
        (buffer,) = model.blocks[0]._fsdp.group.buffers
        held = [p for p in buffer.parameters if 0 not in p.local_shape and "unused" not in p.name]
        begin = {address(hp_platform, hp_platform.get_grad(p.sharded)) - 4 * p.start for p in held}
        assert len(begin) == 1
        for parameter in held:
            grad = hp_platform.get_grad(parameter.sharded)
            assert isinstance(grad, DTensor)
            assert grad.placements == parameter.sharded.placements

    run_ranks(rank, 2, hp_platform)


def test_full_parameters_are_freed_and_at_most_two_inner_groups_are_unsharded(hp_platform):
    case = Case((2,), num_blocks=5)

    def rank():
        model = sharded(hp_platform, case)
        seen = []
        for block in model.blocks:
            hp_platform.add_forward_hook(block.out, lambda *_: seen.append(held_bytes(model)))
        for _ in range(2):
            step(hp_platform, model, case)
            assert held_bytes(model) == [0] * 6
        assert len(seen) == 10
        for held in seen:
            assert held[0] > 0
            assert sum(1 for size in held[1:] if size) in (1, 2)
        with hp_platform.no_grad():
            micro_loss(hp_platform, model, case, 0, 0, 0)
        assert held_bytes(model) == [0] * 6

    run_ranks(rank, 2, hp_platform)


def test_prefetching_survives_another_order_of_calls(hp_platform):
    class Reordered(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x, order):
            for index in order:
                x = self.blocks[index](x)
            return x

    def rank():
        with nn.building(hp_platform):
            model = Reordered()
        for block in model.blocks:
            fully_shard(block, mesh_of(hp_platform, 2))
        fully_shard(model, mesh_of(hp_platform, 2))
        x = hp_platform.from_numpy(numpy.ones((2, 5), numpy.float32))
        for order in [(0, 1, 2), (2, 1, 0), (1,), (0, 0, 2)]:
            hp_platform.backward(hp_platform.ops.sum(model(x, order)))
            assert held_bytes(model) == [0] * 4

    run_ranks(rank, 2, hp_platform)


# Parameters -----------------------------------------------------------------------------------------------


def test_the_user_sees_ragged_dtensors_outside_and_plain_tensors_inside(hp_platform):
    case = Case((2, 2))

    def rank():
        model = sharded(hp_platform, case)
        inside = []
        hp_platform.add_forward_hook(model.blocks[0].up, lambda m, *_: inside.append(m.weight))
        names = [name for name, _ in hp_platform.named_parameters(build(hp_platform, case))]
        step(hp_platform, model, case)
        assert isinstance(model, FSDPModule)
        assert type(inside[0]) is type(hp_platform.zeros((1,), hp_platform.dtype("float32")))
        assert tuple(inside[0].shape) == (11, 5)
        assert [name for name, _ in hp_platform.named_parameters(model)] == names
        weight = model.blocks[0].up.weight
        assert tuple(weight.shape) == (11, 5)
        assert isinstance(weight, hp_platform.Parameter)
        replicate, ragged = weight.placements
        assert isinstance(replicate, Replicate)
        assert isinstance(ragged, RaggedShard)
        assert sum(ragged.units) == 11
        assert weight.device_mesh.mesh_dim_names == ("replicate", "shard")

    run_ranks(rank, 4, hp_platform)


def test_loading_values_before_and_after_the_first_forward(hp_platform):
    case = Case((2,), num_blocks=1)

    def load(model, seed):
        for name, parameter in hp_platform.named_parameters(model):
            full_value = numpy.random.default_rng([seed, len(name)]).normal(size=tuple(parameter.shape))
            offset, shape = parameter.spec.box()
            box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            value = hp_platform.from_numpy(full_value[box].astype(numpy.float32))
            hp_platform.copy_(hp_platform.unwrap(parameter), value)

    def rank():
        model, plain = sharded(hp_platform, case), build(hp_platform, case)
        for seed in (1, 2):
            load(model, seed)
            values = {name: full_value(hp_platform, p) for name, p in hp_platform.named_parameters(model)}
            for name, parameter in hp_platform.named_parameters(plain):
                hp_platform.copy_(parameter, hp_platform.from_numpy(values[name]))
            expected = micro_loss(hp_platform, plain, case, 0, 0, 0)
            loss = micro_loss(hp_platform, model, case, 0, 0, 0)
            numpy.testing.assert_allclose(hp_platform.to_numpy(loss), hp_platform.to_numpy(expected), rtol=1e-6)

    run_ranks(rank, 2, hp_platform)


# Refusals and corners -------------------------------------------------------------------------------------


class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.fail = False

    def forward(self, x):
        y = self.linear(x)
        if self.fail:
            raise ArithmeticError("on purpose")
        return y


def test_the_next_step_works_after_an_exception_in_forward(hp_platform):
    def rank():
        with nn.building(hp_platform):
            model = nn.ModuleList([Faulty(), Faulty()])
            model.forward = lambda x: model[1](model[0](x))
        for each in model:
            fully_shard(each, mesh_of(hp_platform, 2))
        x = hp_platform.from_numpy(numpy.ones((1, 5), numpy.float32))
        model[1].fail = True
        with pytest.raises(ArithmeticError):
            model[1](model[0](x))
        model[1].fail = False
        hp_platform.backward(hp_platform.ops.sum(model[1](model[0](x))))
        assert held_bytes(model) == [0, 0]

    run_ranks(rank, 2, hp_platform)


def test_resharding_what_is_in_use_names_both_states(hp_platform):
    def rank():
        with nn.building(hp_platform):
            model = nn.Linear(2, 2)
        fully_shard(model, mesh_of(hp_platform, 1))
        group = model._fsdp.group
        group.unshard()
        group.use_unsharded()
        with pytest.raises(FSDPStateError, match=r"Linear.*'unsharded'.*'sharded'"):
            group.reshard()
        model.reshard()

    run_ranks(rank, 1, hp_platform)


def test_parameters_shared_between_groups(hp_platform):
    with nn.building(hp_platform):
        model = build(hp_platform, Case((1,), tied=True))
    fully_shard(model.embed, mesh_of(hp_platform, 1))
    with pytest.raises(FullyShardError, match=r"head\.weight is the same parameter as weight of another group"):
        fully_shard(model, mesh_of(hp_platform, 1))


def test_two_identical_runs_are_bitwise_identical(hp_platform):
    case = Case((2,), num_blocks=2)

    def rank():
        model = sharded(hp_platform, case)
        optimizer = AdamW(hp_platform)
        for index in range(3):
            step(hp_platform, model, case, index)
            optimizer(model)
        return {name: full_value(hp_platform, p) for name, p in hp_platform.named_parameters(model)}

    first, second = (run_ranks(rank, 2, hp_platform)[0] for _ in range(2))
    for name, value in first.items():
        numpy.testing.assert_array_equal(value, second[name])


def test_experts_on_a_mesh_of_their_own(hp_platform):
    """Expert weights sharded over ep are sharded over efsdp, everything else over all ranks."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = self.parameter((5, 3))

        def forward(self, x):
            return self.ops.mul(self.weight.to_local(), x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(3, 3)
            self.experts = Experts()

        def forward(self, x, factor):
            return self.ops.sum(self.dense(x)), self.ops.sum(self.experts(factor))

    values = numpy.arange(15, dtype=numpy.float32).reshape(5, 3)

    def rank():
        me = current_world(hp_platform).rank
        dense = init_device_mesh(hp_platform.device_types[0], (4,), mesh_dim_names=("fsdp",), platform=hp_platform)
        sparse = dense.unflatten("fsdp", (2, 2), ("efsdp", "ep"))
        with nn.building(hp_platform):
            model = Model()
        hp_platform.copy_(model.experts.weight, hp_platform.from_numpy(values))
        place_parameter(model.experts, "weight", sparse["ep"], [Shard(0)])
        fully_shard(model.experts, sparse["efsdp"])
        fully_shard(model, dense)
        weight = model.experts.weight
        assert weight.device_mesh.mesh_dim_names == ("ep", "efsdp")
        numpy.testing.assert_array_equal(full_value(hp_platform, weight), values)
        x = hp_platform.from_numpy(numpy.full((1, 3), me + 1.0, numpy.float32))
        of_dense, of_experts = model(x, hp_platform.from_numpy(numpy.full((1,), me + 1.0, numpy.float32)))
        with record_collectives() as log:
            hp_platform.backward(hp_platform.ops.add(of_dense, of_experts))
        assert {record.group for record in log.records} == {dense.ranks(), sparse.ranks_along("efsdp")}
        numpy.testing.assert_array_equal(full_value(hp_platform, hp_platform.get_grad(model.dense.weight)), 2.5)
        # Ranks 0 and 2 hold the first three rows, 1 and 3 the others; each mean is over its two ranks.
        expected = numpy.repeat([[2.0], [3.0]], (3, 2), axis=0) * numpy.ones((1, 3))
        numpy.testing.assert_array_equal(full_value(hp_platform, hp_platform.get_grad(weight)), expected)

    run_ranks(rank, 4, hp_platform)


@pytest.mark.parametrize(
    ("shape", "tp", "dim"),
    [((3, 2), 2, 0), ((2, 6), 4, 1), ((4, 3, 2), 4, 1), ((1, 5), 1, 1), ((3, 0), 1, 0), ((0, 3), 1, 1), ((1,), 2, 0)],
)
def test_parameters_are_sharded_along_the_first_dimension_of_which_ranks_hold_more_than_one(
    hp_platform, shape, tp, dim
):
    """Every rank shards the same dimension, also one that holds nothing of the tensor-parallel parameter."""

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = self.parameter(shape)

    values = numpy.arange(numpy.prod(shape), dtype=numpy.float32).reshape(shape)

    def rank():
        mesh = init_device_mesh(hp_platform.device_types[0], (2, tp), mesh_dim_names=("dp", "tp"), platform=hp_platform)
        with nn.building(hp_platform):
            model = One()
        hp_platform.copy_(model.weight, hp_platform.from_numpy(values))
        if tp > 1:
            place_parameter(model, "weight", mesh["tp"], [Shard(0)])
        fully_shard(model, mesh["dp"])
        ragged = model.weight.placements[-1]
        assert ragged.dim == dim
        # Ranks that hold other rows from before have other layouts, to which `check_mode` does not object.
        with check_mode():
            numpy.testing.assert_array_equal(full_value(hp_platform, model.weight), values)

    run_ranks(rank, 2 * tp, hp_platform)


BLOCKS = ("blocks.0", "blocks.1")


class Recomputing(Net):
    def forward(self, ids, use_branch=True):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, platform=self.platform)
        return self.head(x)


def reported(comm):
    """Return (forward, backward) by module, each with (count, bytes) by collective."""
    return {
        module: tuple(
            {name: tuple(of[direction].values()) for name, of in collectives.items() if of[direction]["count"]}
            for direction in ("forward", "backward")
        )
        for module, collectives in comm.to_dict().items()
    }


def once(model):
    """Return one collective of its flat shard by the name of each group's module, the root's first."""
    sizes = [module._fsdp.group.buffers[0].layout.shard_numel * 4 for module in sharded_modules(model)]
    return [(name, (1, n)) for name, n in zip((type(model).__name__, *BLOCKS), sizes, strict=True)]


def followed(platform, case, model):
    """Record a step after the first one, in which the order of modules is not known yet."""
    step(platform, model, case)
    with CommDebugMode(model, platform) as comm:
        step(platform, model, case)
    return reported(comm), once(model)


@pytest.mark.parametrize("kind", [Net, Recomputing])
def test_gathers_and_reductions_belong_to_their_modules(hp_platform, kind):
    """The same holds if blocks are recomputed: their parameters are still unsharded then."""
    case = Case((2,))

    def rank():
        with nn.building(hp_platform):
            model = kind(2, False, False, None)
        return followed(hp_platform, case, shard(model, mesh_of(hp_platform, 2), case))

    for modules, (root, *blocks) in run_ranks(rank, 2, hp_platform):
        expected = {name: ({"all_gather": each}, {"all_gather": each, "reduce_scatter": each}) for name, each in blocks}
        name, each = root
        assert modules == {**expected, name: ({"all_gather": each}, {"reduce_scatter": each})}


def test_reductions_over_replicas_belong_to_their_modules(hp_platform):
    case = Case((2, 2), reshard_after_forward=False)

    def rank():
        return followed(hp_platform, case, shard(build(hp_platform, case), mesh_of(hp_platform, 2, 2), case))

    for modules, groups in run_ranks(rank, 4, hp_platform):
        assert modules == {
            name: ({"all_gather": each}, {"reduce_scatter": each, "all_reduce": each}) for name, each in groups
        }


def test_reductions_that_are_waited_for_later_belong_to_backward(hp_platform):
    case = Case((2,))

    def rank():
        model = build(hp_platform, case)
        for module in (*model.blocks, model):
            hsdp(module, shard_size=2, threshold=0, comm_async=True, comm_fusion=True)
        with CommDebugMode(model, hp_platform) as comm:
            step(hp_platform, model, case)
            hsdp_sync_stream()
        return reported(comm), type(model).__name__

    for modules, root in run_ranks(rank, 4, hp_platform):
        assert set(modules) == {root, *BLOCKS}
        for forward, backward in modules.values():
            assert set(forward) == {"all_gather"}
            assert set(backward) == {"reduce_scatter", "all_reduce"}


def test_modules_of_one_group_are_told_by_the_first(hp_platform):
    case = Case((2,), group_list=True)

    def rank():
        model = shard(build(hp_platform, case), mesh_of(hp_platform, 2), case)
        with CommDebugMode(model, hp_platform) as comm:
            step(hp_platform, model, case)
        return reported(comm), type(model).__name__

    for modules, root in run_ranks(rank, 2, hp_platform):
        assert set(modules) == {root, "blocks.0"}


def train_twice(case):
    """Return the weights of two runs on this rank."""
    from fsdp_training import train_sharded

    return [train_sharded(case).weights for _ in range(2)]


@pytest.mark.real_ranks
def test_two_identical_runs_are_bitwise_identical_on_real_ranks(rank_pool):
    """Simulated ranks are tested above."""
    first, second = rank_pool(2).run("test_engine:train_twice", Case((2,), tied=True, accumulate=2))
    for weights in (*first, *second):
        for name, value in first[0].items():
            numpy.testing.assert_array_equal(weights[name], value, err_msg=name)
