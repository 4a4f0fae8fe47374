"""What goes wrong says so, on the rank and in the module where it does, and the next step works."""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy
import pytest
from fsdp_training import (
    DIM,
    Block,
    Case,
    build,
    held_bytes,
    mesh_of,
    micro_loss,
    sharded,
    sharded_modules,
    step,
    whole,
    whole_grads,
)

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import GradientPathError, LaunchError, MixedOperandsError, RankMismatchError
from hp_dtensor.parallel import nn
from hp_dtensor.spec.placements import Shard
from hp_dtensor.spec.rank_checks import check_mode
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    CallOrderError,
    Communication,
    CommunicationError,
    FSDPStateError,
    FullyShardError,
    MixedPrecisionPolicy,
    fully_shard,
    memory_use,
    register_fsdp_forward_method,
)

CASE = Case((2,), num_blocks=3)


def expected_grads(platform):
    """Of two ranks' batches."""
    model = build(platform, CASE)
    losses = [micro_loss(platform, model, CASE, rank, 0, 0) for rank in range(2)]
    platform.backward(platform.ops.div(platform.ops.add(*losses), 2))
    return whole_grads(platform, model)


def check_next_step(platform, model, parameters, expected):
    """One more step gives the right gradients, once, and leaves nothing behind."""
    for parameter in parameters:
        platform.set_grad(parameter, None)
    step(platform, model, CASE)
    for name, grad in whole_grads(platform, model).items():
        if expected[name] is not None:
            numpy.testing.assert_allclose(grad, expected[name], rtol=2e-5, atol=2e-6, err_msg=name)
    assert held_bytes(model) == [0] * len(held_bytes(model))
    assert memory_use(model).full_gradients == 0


def test_a_forward_that_failed_keeps_nothing_of_its_graph(hp_platform):
    def rank():
        model, kept = sharded(hp_platform, CASE), []

        def fail(module, args, kwargs, output):
            kept.append(weakref.ref(model.blocks[0]._fsdp.group.use))
            raise ArithmeticError("on purpose")

        hp_platform.add_forward_hook(model.blocks[1].down, fail)
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="on purpose"):
                step(hp_platform, model, CASE)
        gc.collect()
        return [record() is None for record in kept]

    assert run_ranks(rank, 2, hp_platform) == [[True, True]] * 2


def test_hooks_on_gradients_before_sharding_are_refused_by_name(hp_platform):
    """The sharded parameters would not have them, without a word."""
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


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_step_after_an_exception_works(hp_platform, where, stage):
    """Without `reset`, twice in a row, in the midst of groups that are whole, prefetched or reduced."""
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
    """No forward is between them, which would clear up."""

    def loss(model):
        y = model(hp_platform.from_numpy(numpy.ones((2, DIM), numpy.float32)))
        return hp_platform.ops.sum(hp_platform.ops.mul(y, y))

    def rank():
        model = Either()
        for block in (model.first, model.second, model):
            fully_shard(block, mesh_of(hp_platform, 2))
        object.__setattr__(model, "forward", lambda x: model.second(model.first(x)))
        hp_platform.backward(loss(model))
        expected = whole_grads(hp_platform, model)
        for _, parameter in hp_platform.named_parameters(model):
            hp_platform.set_grad(parameter, None)
        kept, trap = loss(model), Trap("backward")
        hp_platform.add_forward_hook(model.first.down, trap)
        failing = loss(model)
        with pytest.raises(ArithmeticError, match="on purpose"):
            hp_platform.backward(failing)
        hp_platform.backward(kept)
        found = whole_grads(hp_platform, model)
        assert [name for name in found if found[name] is None] == [name for name in found if "unused" in name]
        for name, grad in found.items():
            if grad is not None:
                numpy.testing.assert_allclose(grad, expected[name], rtol=1e-6, err_msg=name)
        assert not any(each._fsdp.group.held_bytes for each in (model.first, model.second))

    run_ranks(rank, 2, hp_platform)


class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x, swapped):
        blocks = (self.second, self.first) if swapped else (self.first, self.second)
        return blocks[1](blocks[0](x))


def test_ranks_that_call_modules_in_different_orders_are_named(hp_platform):
    def rank():
        with nn.building(hp_platform):
            model = Either()
        for block in (model.first, model.second):
            fully_shard(block, mesh_of(hp_platform, 3))
        fully_shard(model, mesh_of(hp_platform, 3))
        x = hp_platform.from_numpy(numpy.ones((2, DIM), numpy.float32))
        with check_mode():
            hp_platform.backward(hp_platform.ops.sum(model(x, False)))
            model(x, current_world(hp_platform).rank == 1)

    with pytest.raises(LaunchError) as caught:
        run_ranks(rank, 3, hp_platform)
    cause = caught.value.__cause__
    assert isinstance(cause, CallOrderError)
    assert "ranks 0, 2 calls first (Block)" in str(cause)
    assert "rank 1 calls second (Block)" in str(cause)


def test_a_part_called_outside_its_groups_forward_is_told_the_way(hp_platform):
    def rank():
        model = sharded(hp_platform, CASE)
        step(hp_platform, model, CASE)
        x = hp_platform.from_numpy(numpy.ones((2, DIM), numpy.float32))
        with pytest.raises(MixedOperandsError, match="register_fsdp_forward_method"):
            model.blocks[0].up(x)

    run_ranks(rank, 2, hp_platform)


def test_a_method_that_computes_when_its_call_is_over_is_refused(hp_platform):
    """It would find the parameters sharded again."""

    class Streaming(nn.Linear):
        def stream(self, x):
            yield self.forward(x)

    with nn.building(hp_platform):
        model = fully_shard(Streaming(3, 3), mesh_of(hp_platform, 1))
    with pytest.raises(FullyShardError, match=r"Streaming\.stream is a generator .*methods that it calls"):
        register_fsdp_forward_method(model, "stream")


class Broken(Communication):
    """Collectives of one kind never end."""

    def __init__(self, platform, kind):
        super().__init__(platform)
        self._kind = kind

    def wait(self):
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")

    def all_gather(self, output, shard, group):
        return self if self._kind == "gather" else super().all_gather(output, shard, group)

    def reduce_scatter(self, output, gradients, group):
        return self if self._kind == "reduce" else super().reduce_scatter(output, gradients, group)


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        ("gather", "state 'gathering': could not gather parameters"),
        ("reduce", "state 'sharded': could not reduce grad"),
    ],
)
def test_a_collective_that_times_out_names_group_rank_and_state(hp_platform, kind, action):
    def rank():
        model = sharded(hp_platform, CASE)
        step(hp_platform, model, CASE)
        model.blocks[1].set_communication(Broken(hp_platform, kind))
        rank = current_world(hp_platform).rank
        where = rf"group blocks\.1 \(Block\) on rank {rank}, {action}.* with ranks \[0, 1\]: Timed out .*check_mode"
        with pytest.raises(Exception, match=where) as caught:
            step(hp_platform, model, CASE)
        error = caught.value
        while not isinstance(error, CommunicationError):
            error = error.__cause__ or error.__context__
        model.blocks[1].set_communication("default")
        model.reset()
        step(hp_platform, model, CASE)

    run_ranks(rank, 2, hp_platform)


class OutOfMemory(Communication):
    """One gather fails before it begins."""

    def __init__(self, platform, fails_at):
        super().__init__(platform)
        self._to_come = fails_at

    def all_gather(self, output, shard, group):
        self._to_come -= 1
        if self._to_come == 0:
            raise RuntimeError("no memory for this")
        return super().all_gather(output, shard, group)


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_gather_that_cannot_begin_leaves_nothing_behind(hp_platform, fails_at):
    expected = expected_grads(hp_platform)

    def rank():
        model = sharded(hp_platform, Case((2,), num_blocks=3, options={"bucket_size": 0}))
        parameters = [parameter for _, parameter in hp_platform.named_parameters(model)]
        step(hp_platform, model, CASE)
        model.blocks[1].set_communication(OutOfMemory(hp_platform, fails_at))
        with pytest.raises(CommunicationError, match=r"blocks\.1 .* could not gather .*: no memory for this"):
            step(hp_platform, model, CASE)
        assert held_bytes(model) == [0] * 4
        check_next_step(hp_platform, model, parameters, expected)

    run_ranks(rank, 2, hp_platform)


class Interrupted(Communication):
    """The first gathers fail on their way."""

    def __init__(self, platform, num_failures):
        super().__init__(platform)
        self._to_fail = num_failures

    def all_gather(self, output, shard, group):
        self._to_fail -= 1
        work = super().all_gather(output, shard, group)
        return _Lost(work) if self._to_fail >= 0 else work


class _Lost:
    def __init__(self, work):
        self._work = work

    def wait(self):
        self._work.wait()
        raise RuntimeError("connection lost")


def test_a_gather_that_has_failed_is_not_taken_for_done(hp_platform):
    """Whoever waits for it again has it begin again."""
    expected = expected_grads(hp_platform)

    def rank():
        model = sharded(hp_platform, CASE)
        parameters = [parameter for _, parameter in hp_platform.named_parameters(model)]
        step(hp_platform, model, CASE)
        model.blocks[1].set_communication(Interrupted(hp_platform, 2))
        handle = model.blocks[1].unshard(async_op=True)
        for _ in range(2):
            with pytest.raises(CommunicationError, match=r"blocks\.1 .*: connection lost"):
                handle.wait()
            assert not any(held_bytes(model))
        handle.wait()
        check_next_step(hp_platform, model, parameters, expected)

    run_ranks(rank, 2, hp_platform)


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
    """Of the modules below, too: those that have had a forward of their own and those that have not."""

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
    """Keeps what its forwards write in a parameter that is not trained."""

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
    """What is written to the full ones would be lost; on one rank, which has no others, it is not."""
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
                assert whole(hp_platform, model.count).tolist() == [1.0] * 4
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


def write_uncounted(platform, module, ranks):
    """Add 1 to what these ranks hold, in memory, unseen by any framework."""
    for _, parameter in platform.named_parameters(module):
        if current_world(platform).rank in ranks and 0 not in parameter.spec.local_shape:
            memory = platform.to_numpy(platform.detach(platform.unwrap(parameter)))
            memory += 1


@pytest.mark.parametrize("stage", [1, 2])
def test_every_rank_notices_that_one_has_taken_a_step_without_the_gradients_that_wait(hp_platform, stage):
    """The write itself is not counted, and is on one rank only."""
    case = Case((2, 2), options={"zero_stage": stage})

    def rank():
        model = sharded(hp_platform, case)
        model.set_requires_gradient_sync(False)
        step(hp_platform, model, case)
        step(hp_platform, model, case, 1)
        write_uncounted(hp_platform, model.blocks[1], ranks=(1, 3))
        with pytest.raises(FSDPStateError, match=r"blocks\.1 \(Block\) were changed while .* by this rank or one with"):
            step(hp_platform, model, case)
        with hp_platform.no_grad():
            micro_loss(hp_platform, model, case, 0, 0, 0)
        model.reset()
        model.set_requires_gradient_sync(True)
        step(hp_platform, model, case)

    run_ranks(rank, 4, hp_platform)


@pytest.mark.parametrize("options", [{"zero_stage": 0}, {"zero_stage": 1}, {}], ids=str)
def test_in_check_mode_replicas_that_have_parted_are_named(hp_platform, options):
    case = Case((2, 2), options=options)

    def rank():
        model = sharded(hp_platform, case)
        with check_mode():
            step(hp_platform, model, case)
            write_uncounted(hp_platform, model.blocks[1].up, ranks=(2, 3))
            with pytest.raises(RankMismatchError) as caught:
                step(hp_platform, model, case)
        return str(caught.value)

    messages = run_ranks(rank, 4, hp_platform)
    assert all("group blocks.1 (Block): replicas differ: " in message for message in messages)
    if options.get("zero_stage") == 0:
        assert all("up.bias, up.weight on ranks 0, 1 than on ranks 2, 3. " in message for message in messages)
    else:
        assert all("up.weight on rank 0 than on rank 2" in message for message in messages)


@pytest.mark.parametrize(
    ("different", "told"),
    [
        ("shape", r"fully_shard\(Linear\): ranks differ: rank 0: weight \[4, 5\].*; rank 1: weight \[3, 5\]"),
        ("more", r"ranks differ: rank 0: MixedPrecisionPolicy.*rank 1: .*bias"),
        ("frozen", r"ranks differ: rank 0: weight \[4, 5\][^;]*, frozen; rank 1"),
        ("cut", r"ranks differ: rank 0: .*cut along 0; rank 1: .*cut along 1"),
        ("cut of a row", r"ranks differ: rank 0: .*cut along 0; rank 1: .*cut along 1"),
        ("buckets", r"ranks differ: rank 0: .*bucket_size=None; rank 1: .*bucket_size=0"),
        ("dtype", r"ranks differ: rank 0: MixedPrecisionPolicy.*rank 1: MixedPrecisionPolicy"),
    ],
)
def test_ranks_that_shard_different_models_are_named(hp_platform, different, told):
    def rank():
        mesh = mesh_of(hp_platform, 2)
        number = current_world(hp_platform).rank
        is_other = number == 1
        rows = 1 if different == "cut of a row" else 3 if different == "shape" and is_other else 4
        model = nn.Linear(5, rows, bias=different == "more" and is_other)
        if different == "frozen" and not is_other:
            hp_platform.set_requires_grad(model.weight, False)
        dtype = hp_platform.dtype("float16") if different == "dtype" and is_other else None
        fully_shard(
            model,
            mesh,
            shard_placement_fn=(lambda parameter: Shard(number)) if "cut" in different else None,
            bucket_size=0 if different == "buckets" and is_other else None,
            mp_policy=MixedPrecisionPolicy(output_dtype=dtype),
        )

    with pytest.raises(LaunchError, match=f"RankMismatchError: .*{told}"):
        run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_that_are_sharded_already_are_told_the_order(hp_platform, tied):
    """Of a module above, or tied to another one's since."""

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
        message = r"other.weight is up.weight too, which an earlier fully_shard was given in ignored_params: give it"
        with pytest.raises(FullyShardError, match=message):
            fully_shard(block, mesh)
        fully_shard(block, mesh, ignored_params=[shared])
        assert block.other.weight is block.up.weight is shared

    run_ranks(rank, 2, hp_platform)


def test_parameters_added_after_sharding_are_told(hp_platform):
    """Frozen ones and ignored ones may be there."""

    def rank():
        block = Block()
        block.kept, block.frozen, block.added = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), None
        for _, parameter in hp_platform.named_parameters(block.frozen):
            hp_platform.set_requires_grad(parameter, False)
        late = block.frozen
        block.frozen = None
        fully_shard(block, mesh_of(hp_platform, 2), ignored_params=[block.kept.weight])
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


def test_a_rank_outside_the_mesh_is_named(hp_platform):
    def rank():
        mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("shard",), ranks=[0, 1], platform=hp_platform)
        if current_world(hp_platform).rank == 2:
            with pytest.raises(FullyShardError, match=r"rank 2 is outside mesh \(shard=2\)"):
                fully_shard(build(hp_platform, CASE), mesh)

    run_ranks(rank, 3, hp_platform)


def test_loading_while_gradients_wait_is_noticed_on_ranks_without_a_shard(hp_platform):
    if hp_platform.name == "mindspore":
        pytest.skip("no versions of tensors without elements")

    def rank():
        with nn.building(hp_platform):
            model = nn.Linear(1, 1)
        fully_shard(model, mesh_of(hp_platform, 2))
        x = hp_platform.from_numpy(numpy.ones((2, 1), numpy.float32))
        model.set_requires_gradient_sync(False)
        hp_platform.backward(hp_platform.ops.sum(model(x)))
        model.load_state_dict({"weight": hp_platform.zeros((1, 1), hp_platform.dtype("float32"))})
        with pytest.raises(FSDPStateError, match="were changed while gradients"):
            model(x)
        return 0 in model.weight.spec.local_shape

    assert run_ranks(rank, 2, hp_platform) == [False, True]


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
    with pytest.raises(FSDPStateError, match="weight of the module is not what fully_shard has put there"):
        model(ones)


def test_a_sharded_module_is_not_pickled(hp_platform):
    with nn.building(hp_platform):
        model = fully_shard(nn.Linear(2, 2), mesh_of(hp_platform, 1))
    with pytest.raises(TypeError, match="save get_model_state_dict"):
        pickle.dumps(model)


def test_a_list_of_modules_is_refused_as_a_module(hp_platform):
    """Its hooks would never run; as a Python list its modules form a group."""

    def rank():
        mesh = mesh_of(hp_platform, 1)
        with nn.building(hp_platform):
            layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        with pytest.raises(FullyShardError, match="a ModuleList is never called itself"):
            fully_shard(layers, mesh)
        fully_shard([layers[0], layers[1]], mesh)

    run_ranks(rank, 1, hp_platform)
