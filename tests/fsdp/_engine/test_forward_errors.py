"""Errors name the rank and the module where they happen, and the next step works."""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy
import pytest
from fsdp_errors import CASE, Either, check_next_step, expected_grads
from fsdp_training import (
    DIM,
    Block,
    Case,
    build,
    full_grads,
    full_value,
    held_bytes,
    mesh_of,
    micro_loss,
    sharded,
    sharded_modules,
    step,
)

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import GradientPathError, LaunchError, MixedOperandsError
from hp_dtensor.parallel import nn
from hp_dtensor.spec.rank_checks import check_mode
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    CallOrderError,
    FSDPStateError,
    FullyShardError,
    fully_shard,
    memory_use,
    register_fsdp_forward_method,
)


def test_a_forward_that_failed_keeps_nothing_of_its_graph(hp_platform):
    def rank():
        model, records = sharded(hp_platform, CASE), []

        def fail(module, args, kwargs, output):
            records.append(weakref.ref(model.blocks[0]._fsdp.group.use))
            raise ArithmeticError("on purpose")

        hp_platform.add_forward_hook(model.blocks[1].down, fail)
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="on purpose"):
                step(hp_platform, model, CASE)
        gc.collect()
        return [record() is None for record in records]

    assert run_ranks(rank, 2, hp_platform) == [[True, True]] * 2


def test_hooks_on_gradients_before_sharding_are_refused_by_name(hp_platform):
    """The sharded parameters would silently lack them."""
    mesh, model = mesh_of(hp_platform, 1), build(hp_platform, CASE)
    handle = model.blocks[0].up.weight.register_hook(lambda grad: grad)
    with pytest.raises(FullyShardError, match=r"^blocks\.0\.up\.weight: hooks have been registered on the gradient"):
        fully_shard(model, mesh)
    handle.remove()
    fully_shard(model, mesh)


class Trap:
    """A hook of forward that raises in forward, or when the gradient of its output is known."""

    def __init__(self, where):
        self.where = where
        self.is_set = True

    def __call__(self, module, args, kwargs, output):
        if self.is_set and self.where == "forward":
            raise ArithmeticError("on purpose")
        if self.is_set:
            output.register_hook(self.fail)

    def fail(self, grad):
        raise ArithmeticError("on purpose")


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_step_after_an_exception_works(hp_platform, where, stage):
    """Without `reset`, twice in a row, while groups are unsharded, prefetched or reduced."""
    expected = expected_grads(hp_platform)

    def rank():
        case = Case((2,), num_blocks=3, options={"zero_stage": stage})
        model = sharded(hp_platform, case)
        parameters = [parameter for _, parameter in hp_platform.named_parameters(model)]
        trap = Trap(where)
        hp_platform.add_forward_hook(model.blocks[1].down, trap)
        for _ in range(2):
            trap.is_set = True
            with pytest.raises(ArithmeticError, match="on purpose"):
                step(hp_platform, model, CASE)
            trap.is_set = False
            if where == "forward":
                assert held_bytes(model) == [0] * 4
            if stage == 3:
                check_next_step(hp_platform, model, parameters, expected)
            else:
                step(hp_platform, model, CASE)
        trap.is_set = True
        with pytest.raises(ArithmeticError, match="on purpose"):
            step(hp_platform, model, CASE)
        model.reset()
        assert held_bytes(model) == [0] * 4
        assert memory_use(model).full_gradients == 0

    run_ranks(rank, 2, hp_platform)


def test_a_backward_after_one_that_failed_has_gradients(hp_platform):
    """There is no forward between them, which would reset the groups."""

    def loss(model):
        y = model(hp_platform.from_numpy(numpy.ones((2, DIM), numpy.float32)))
        return hp_platform.ops.sum(hp_platform.ops.mul(y, y))

    def rank():
        model = Either()
        for block in (model.first, model.second, model):
            fully_shard(block, mesh_of(hp_platform, 2))
        object.__setattr__(model, "forward", lambda x: model.second(model.first(x)))
        hp_platform.backward(loss(model))
        expected = full_grads(hp_platform, model)
        for _, parameter in hp_platform.named_parameters(model):
            hp_platform.set_grad(parameter, None)
        records, trap = loss(model), Trap("backward")
        hp_platform.add_forward_hook(model.first.down, trap)
        failing = loss(model)
        with pytest.raises(ArithmeticError, match="on purpose"):
            hp_platform.backward(failing)
        hp_platform.backward(records)
        found = full_grads(hp_platform, model)
        assert [name for name in found if found[name] is None] == [name for name in found if "unused" in name]
        for name, grad in found.items():
            if grad is not None:
                numpy.testing.assert_allclose(grad, expected[name], rtol=1e-6, err_msg=name)
        assert not any(each._fsdp.group.held_bytes for each in (model.first, model.second))

    run_ranks(rank, 2, hp_platform)


def test_a_part_called_outside_its_groups_forward_is_told_the_way(hp_platform):
    def rank():
        model = sharded(hp_platform, CASE)
        step(hp_platform, model, CASE)
        x = hp_platform.from_numpy(numpy.ones((2, DIM), numpy.float32))
        with pytest.raises(MixedOperandsError, match="register_fsdp_forward_method"):
            model.blocks[0].up(x)

    run_ranks(rank, 2, hp_platform)


def test_a_method_that_computes_when_its_call_is_over_is_refused(hp_platform):
    """Its body would run when the parameters are sharded again."""

    class Streaming(nn.Linear):
        def stream(self, x):
            yield self.forward(x)

    with nn.building(hp_platform):
        model = fully_shard(Streaming(3, 3), mesh_of(hp_platform, 1))
    with pytest.raises(FullyShardError, match=r"Streaming\.stream is a generator .*methods that it calls"):
        register_fsdp_forward_method(model, "stream")


def test_modules_of_one_class_called_on_their_own_are_told_apart(hp_platform):
    def rank():
        with nn.building(hp_platform):
            linears = [nn.Linear(3, outputs) for outputs in (5, 40)]
        for linear in linears:
            fully_shard(linear, mesh_of(hp_platform, 3))
        x = hp_platform.from_numpy(numpy.ones((2, 3), numpy.float32))
        with check_mode():
            linears[current_world(hp_platform).rank == 1](x)

    with pytest.raises(LaunchError) as caught:
        run_ranks(rank, 3, hp_platform)
    assert isinstance(caught.value.__cause__, CallOrderError)


def test_reset_before_the_first_forward_frees_what_unshard_has_gathered(hp_platform):
    """Those of modules below too, whether they have had a forward or not."""

    def rank():
        model = sharded(hp_platform, CASE)
        block = model.blocks[0]
        x = hp_platform.from_numpy(numpy.ones((1, 1, DIM), numpy.float32))
        hp_platform.backward(hp_platform.ops.sum(block(x)))
        for module in (block, model.blocks[1], model):
            module.unshard()
        assert sum(size > 0 for size in held_bytes(model)) == 3
        model.blocks[1].reset()
        assert held_bytes(model.blocks[1]) == [0]
        model.reset()
        assert held_bytes(model) == [0] * 4
        assert all(isinstance(parameter, DTensor) for _, parameter in hp_platform.named_parameters(model))
        step(hp_platform, model, CASE)

    run_ranks(rank, 2, hp_platform)


def test_hooks_on_gradients_that_autograd_does_not_have_are_refused(hp_platform):
    def rank():
        model = sharded(hp_platform, CASE)
        with pytest.raises(
            GradientPathError, match=r"register_hook of .*: fully_shard sets its gradient at the end of backward"
        ):
            model.embed.weight.register_hook(lambda grad: None)

    run_ranks(rank, 2, hp_platform)


class Counting(nn.Module):
    """Stores what its forwards write in a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.count, self.writes = self.parameter((3,)), self.parameter((4,)), False

    def forward(self, x):
        if self.writes:
            self.platform.copy_(self.count, self.platform.from_numpy(numpy.ones(4, numpy.float32)))
        return self.ops.mul(x, self.weight)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_forward_that_writes_frozen_parameters_is_refused(hp_platform, stage, recorded):
    """Writes to full parameters would be lost. On one rank they are not."""
    x = hp_platform.from_numpy(numpy.ones(3, numpy.float32))

    def rank():
        with nn.building(hp_platform):
            model = Counting()
        init_parameters(model, lambda name, shape: Normal(0.4), seed=1)
        hp_platform.set_requires_grad(model.count, False)
        size = current_world(hp_platform).size
        fully_shard(model, mesh_of(hp_platform, size), zero_stage=stage)
        with hp_platform.enable_grad() if recorded else hp_platform.no_grad():
            model(x)
            model.writes = True
            if size == 1:
                model(x)
                assert full_value(hp_platform, model.count).tolist() == [1.0] * 4
                return
            with pytest.raises(FSDPStateError, match=r"Counting on rank .*count: written in place while gathered"):
                model(x)
            model.writes = False
            model(x)

    run_ranks(rank, 1, hp_platform)
    run_ranks(rank, 2, hp_platform)


def test_a_step_without_the_gradients_that_wait_is_noticed(hp_platform):
    def rank():
        model = sharded(hp_platform, CASE)
        model.set_requires_gradient_sync(False)
        step(hp_platform, model, CASE)
        step(hp_platform, model, CASE, 1)
        weight = model.blocks[2].up.weight
        hp_platform.copy_(weight, hp_platform.zeros(hp_platform.local_shape(weight), weight.dtype))
        with pytest.raises(FSDPStateError, match=r"rank \d: the parameters of blocks\.2 \(Block\) were changed"):
            step(hp_platform, model, CASE)
        with hp_platform.no_grad():
            micro_loss(hp_platform, model, CASE, 0, 0, 0)
        model.reset()
        model.set_requires_gradient_sync(True)
        step(hp_platform, model, CASE)
        assert memory_use(model).full_gradients == 0

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_that_are_sharded_already_are_told_the_order(hp_platform, tied):
    """By a module above, or through a tie to another module."""

    def rank():
        mesh, block = mesh_of(hp_platform, 2), Block()
        fully_shard(block.out if tied else block, mesh)
        if tied:
            block.down = block.up = None
            block.other = nn.Linear(3, DIM)
            block.other.weight = block.out.weight
        with pytest.raises(FullyShardError, match=r"weight has been sharded by another fully_shard: if of a module ab"):
            fully_shard(block if tied else block.up, mesh)

    run_ranks(rank, 2, hp_platform)


def test_an_ignored_parameter_that_a_module_around_it_has_too_stays_tied(hp_platform):
    def rank():
        mesh, block = mesh_of(hp_platform, 2), Block()
        block.other = nn.Linear(DIM, DIM)
        block.other.weight = shared = block.up.weight
        fully_shard(block.up, mesh, ignored_params=[shared])
        message = (
            r"other.weight is the same parameter as up.weight, which an earlier fully_shard was given in ignored_params"
        )
        with pytest.raises(FullyShardError, match=message):
            fully_shard(block, mesh)
        fully_shard(block, mesh, ignored_params=[shared])
        assert block.other.weight is block.up.weight is shared

    run_ranks(rank, 2, hp_platform)


def test_parameters_added_after_sharding_are_told(hp_platform):
    """Frozen and ignored parameters may be added."""

    def rank():
        block = Block()
        block.local, block.frozen, block.added = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), None
        for _, parameter in hp_platform.named_parameters(block.frozen):
            hp_platform.set_requires_grad(parameter, False)
        late = block.frozen
        block.frozen = None
        fully_shard(block, mesh_of(hp_platform, 2), ignored_params=[block.local.weight])
        block.frozen, block.added = late, nn.Linear(DIM, 3)
        x = hp_platform.from_numpy(numpy.ones((2, DIM), numpy.float32))
        for _ in range(2):
            with pytest.raises(FSDPStateError, match=r"Block on rank \d: added.weight: added after fully_shard"):
                block(x)
        block.added = None
        block(x)

    run_ranks(rank, 2, hp_platform)


def test_groups_are_called_by_their_places(hp_platform):
    def rank():
        model = sharded(hp_platform, CASE)
        step(hp_platform, model, CASE)
        names = [module._fsdp.group.name for module in sharded_modules(model)]
        assert names == ["Net", "blocks.0 (Block)", "blocks.1 (Block)", "blocks.2 (Block)"]
        group = model.blocks[1]._fsdp.group
        group.unshard()
        group.use_unsharded()
        with pytest.raises(FSDPStateError, match=r"blocks\.1 \(Block\).*'unsharded'.*'sharded'"):
            group.reshard()
        model.blocks[1].reshard()

    run_ranks(rank, 2, hp_platform)


def test_a_module_is_not_resharded_within_its_forward(hp_platform):
    class Resharding(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(2, 2)

        def forward(self, x):
            self.reshard()
            return self.map(x)

    with nn.building(hp_platform):
        model = fully_shard(Resharding(), mesh_of(hp_platform, 1))
    with pytest.raises(FSDPStateError, match=r"Resharding on rank 0: reshard\(\) in state 'unsharded'"):
        model(hp_platform.from_numpy(numpy.ones((1, 2), numpy.float32)))
    model.reshard()


def test_a_parameter_that_has_been_replaced_is_told(hp_platform):
    """Its new value would be lost."""
    with nn.building(hp_platform):
        model = fully_shard(nn.Linear(2, 2), mesh_of(hp_platform, 1))
    ones = hp_platform.from_numpy(numpy.ones((2, 2), numpy.float32))
    model.weight = hp_platform.Parameter(ones)
    with pytest.raises(
        FSDPStateError, match="weight of the module is not the parameter that fully_shard has set there"
    ):
        model(ones)


def test_a_sharded_module_is_not_pickled(hp_platform):
    with nn.building(hp_platform):
        model = fully_shard(nn.Linear(2, 2), mesh_of(hp_platform, 1))
    with pytest.raises(TypeError, match="save get_model_state_dict"):
        pickle.dumps(model)


def test_a_list_of_modules_is_refused_as_a_module(hp_platform):
    """Its hooks would never run. A Python list of its modules forms a group."""

    def rank():
        mesh = mesh_of(hp_platform, 1)
        with nn.building(hp_platform):
            layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        with pytest.raises(FullyShardError, match="a ModuleList is never called itself"):
            fully_shard(layers, mesh)
        fully_shard([layers[0], layers[1]], mesh)

    run_ranks(rank, 1, hp_platform)
