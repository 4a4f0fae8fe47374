"""Entry points of a sharded model besides its forward: unshard by hand, other methods, calls from inside, prefetch."""

from __future__ import annotations

import numpy
import pytest
from fsdp_training import (
    Case,
    build,
    full_grads,
    full_value,
    held_bytes,
    loss_of,
    mesh_of,
    sharded,
    step,
)

from hp_dtensor import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.parallel import nn
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    DataParallelMeshDims,
    FullyShardError,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)


def test_unshard_and_reshard_by_hand(hp_platform):
    case = Case((2,), num_blocks=1)

    def rank():
        model = sharded(hp_platform, case)
        expected = full_value(hp_platform, model.blocks[0].up.weight)
        handle = model.blocks[0].unshard(async_op=True)
        handle.wait()
        found = hp_platform.to_numpy(hp_platform.ops.clone(hp_platform.detach(model.blocks[0].up.weight)))
        numpy.testing.assert_array_equal(found, expected)
        step(hp_platform, model, case)
        assert held_bytes(model) == [0, 0]
        model.unshard()
        model.reshard()
        assert isinstance(model.head.weight, DTensor)
        model.blocks[0].unshard()
        x = hp_platform.from_numpy(numpy.ones((1, 5), numpy.float32))
        hp_platform.set_grad(model.blocks[0].scale, None)
        hp_platform.backward(hp_platform.ops.sum(model.blocks[0](x)))
        assert hp_platform.get_grad(model.blocks[0].scale) is not None
        assert held_bytes(model) == [0, 0]

    run_ranks(rank, 2, hp_platform)


def test_other_entry_points(hp_platform):
    class TwoDoors(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x):
            return self.linear(x)

        def encode(self, x):
            return self.ops.mul(self.linear(x), 2.0)

    def rank():
        with nn.building(hp_platform):
            model = TwoDoors()
        fully_shard(model, mesh_of(hp_platform, 2))
        register_fsdp_forward_method(model, "encode")
        x = hp_platform.from_numpy(numpy.ones((2, 5), numpy.float32))
        hp_platform.backward(hp_platform.ops.sum(model.encode(x)))
        numpy.testing.assert_array_equal(full_value(hp_platform, hp_platform.get_grad(model.linear.weight)), 4.0)
        assert held_bytes(model) == [0]

    run_ranks(rank, 2, hp_platform)


class ManyDoors(nn.Module):
    """Its forward calls its entry points, one of which may fail before another is tried, and calls itself."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def encode(self, x, fails=False):
        if fails:
            raise ArithmeticError("on purpose")
        return self.inner(self.ops.tanh(self.first(x)))

    def decode(self, x):
        return self.last(self.ops.tanh(x))

    def forward(self, x, times=2):
        try:
            x = self.encode(x, fails=True)
        except ArithmeticError:
            x = self.encode(x)
        x = self.decode(x)
        return self.first(self(x, times - 1) if times > 1 else x)


class Retrying(nn.Module):
    """Calls itself, and continues if that fails."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(3, 3)

    def forward(self, x, is_first=True):
        if is_first:
            try:
                return self(x, False)
            except ArithmeticError:
                pass
        return self.map(x)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_may_go_on_where_a_hook_fails_in_a_call_of_itself(hp_platform, when):
    """Hooks of users may run outside of those that gather, which then see neither the call nor its failure."""

    def fail(module, args, kwargs, output=None):
        if args[1:] == (False,):
            raise ArithmeticError("on purpose")

    def rank():
        with nn.building(hp_platform):
            model = Retrying()
        hp_platform.copy_(model.map.weight, hp_platform.from_numpy(numpy.eye(3, dtype=numpy.float32)))
        fully_shard(model, mesh_of(hp_platform, 2))
        if when == "before":
            hp_platform.add_forward_pre_hook(model, fail, prepend=True)
        else:
            hp_platform.add_forward_hook(model, fail)
        for count in (1, 2):
            x = hp_platform.from_numpy(numpy.ones((2, 3), numpy.float32))
            y = model(x)
            numpy.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.detach(y)), 1)
            hp_platform.backward(hp_platform.ops.sum(y))
            numpy.testing.assert_array_equal(full_grads(hp_platform, model)["map.weight"], 2 * count)

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize("within", [False, True], ids=["root", "inside"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_forward_may_call_entry_points_and_itself(hp_platform, within, stage):
    """For the root, and for a group inside of another."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.doors, self.head = ManyDoors(), nn.Linear(5, 5)

        def forward(self, x):
            return self.head(self.doors(x)) if within else self.doors(x)

    def build():
        with nn.building(hp_platform):
            model = Around()
        for index, (_, parameter) in enumerate(hp_platform.named_parameters(model)):
            values = numpy.random.default_rng(index).normal(size=(5, 5)) * 0.5
            hp_platform.copy_(parameter, hp_platform.from_numpy(values.astype(numpy.float32)))
        return model

    def grads(model):
        x = hp_platform.from_numpy(numpy.ones((2, 5), numpy.float32))
        for _ in range(2):
            hp_platform.backward(hp_platform.ops.sum(model(x)))
        return full_grads(hp_platform, model)

    expected = grads(build())

    def rank():
        model, mesh = build(), mesh_of(hp_platform, 2)
        doors = model.doors
        for module in (doors.inner, doors, *([model] if within else [])):
            fully_shard(module, mesh, zero_stage=stage)
        for name in ("encode", "decode"):
            register_fsdp_forward_method(doors, name)
        for name, grad in grads(model).items():
            if expected[name] is not None:
                numpy.testing.assert_allclose(grad, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
        assert stage < 3 or not any(each._fsdp.group.held_bytes for each in (doors, doors.inner))

    run_ranks(rank, 2, hp_platform)


def test_explicit_prefetching(hp_platform):
    case = Case((2,), num_blocks=3)

    def rank():
        model = sharded(hp_platform, case)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
        model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
        held = []
        hp_platform.add_forward_hook(model.blocks[0].up, lambda *_: held.append(held_bytes(model)))
        step(hp_platform, model, case)
        assert all(held[0])
        assert held_bytes(model) == [0] * 4

    run_ranks(rank, 2, hp_platform)


CASE = Case((2,), num_blocks=2)


def equal_grads(found, expected):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] is None) == (grad is None), name
        if grad is not None:
            numpy.testing.assert_allclose(found[name], grad, rtol=1e-5, atol=1e-7, err_msg=name)


def test_without_a_mesh_all_ranks_shard(hp_platform):
    def rank():
        model = build(hp_platform, CASE)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model, offload_policy=OffloadPolicy(), ignored_params=None)
        assert model.head.weight.device_mesh.shape == (2,)
        step(hp_platform, model, CASE)
        expected = sharded(hp_platform, CASE)
        step(hp_platform, expected, CASE)
        equal_grads(full_grads(hp_platform, model), full_grads(hp_platform, expected))

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        (DataParallelMeshDims(shard="b"), (2,)),
        (DataParallelMeshDims(shard=("b",), replicate="a"), (2, 2)),
        (DataParallelMeshDims(replicate="a"), (2, 1)),
    ],
)
def test_data_parallel_axes_of_a_mesh_over_all_ranks(hp_platform, dims, shape):
    def rank():
        mesh = init_device_mesh(hp_platform.device_types[0], (2, 2), mesh_dim_names=("a", "b"), platform=hp_platform)
        model = fully_shard(build(hp_platform, CASE), mesh=mesh, dp_mesh_dims=dims)
        assert model.head.weight.device_mesh.shape == shape
        step(hp_platform, model, CASE)

    run_ranks(rank, 4, hp_platform)


def test_data_parallel_axes_that_do_not_fit_are_told(hp_platform):
    mesh = init_device_mesh(hp_platform.device_types[0], (1, 1), mesh_dim_names=("a", "b"), platform=hp_platform)
    model = build(hp_platform, CASE)
    with pytest.raises(ValueError, match="shard, replicate or both"):
        DataParallelMeshDims()
    with pytest.raises(FullyShardError, match=r"\('a', 'b'\) are several axes"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("a", "b")))
    for none in (DataParallelMeshDims(shard=(), replicate="a"), DataParallelMeshDims(shard="a", replicate=())):
        with pytest.raises(FullyShardError, match=r"expected the name of an axis .*, got \(\)"):
            fully_shard(model, mesh=mesh, dp_mesh_dims=none)
    with pytest.raises(FullyShardError, match="expected mesh="):
        fully_shard(model, dp_mesh_dims=DataParallelMeshDims(shard="a"))


def test_micro_batches_that_keep_parameters_gather_once(hp_platform):
    """The last one, which reduces, too: nothing has been written since."""

    def rank():
        model = sharded(hp_platform, CASE)
        for index in range(2):
            with record_collectives() as log:
                for micro in range(2):
                    model.set_requires_gradient_sync(micro == 1)
                    model.set_reshard_after_forward(False)
                    model.set_reshard_after_backward(micro == 1)
                    step(hp_platform, model, CASE, micro)
            assert log.count("all_gather") == 3, index
            for _, parameter in hp_platform.named_parameters(model):
                with hp_platform.no_grad():
                    hp_platform.copy_(parameter, hp_platform.ops.mul(hp_platform.detach(parameter), 0.5))
                hp_platform.set_grad(parameter, None)

    run_ranks(rank, 2, hp_platform)


def test_a_state_dict_that_is_to_be_assigned_is_loaded(hp_platform):
    def rank():
        model, other = sharded(hp_platform, CASE), sharded(hp_platform, CASE)
        weight = model.head.weight
        with hp_platform.no_grad():
            hp_platform.copy_(weight, hp_platform.ops.mul(hp_platform.detach(weight), 2.0))
        assert not any(other.load_state_dict(model.state_dict(), assign=True))
        expected, found = (hp_platform.to_numpy(hp_platform.unwrap(each.head.weight)) for each in (model, other))
        numpy.testing.assert_array_equal(found, expected)

    run_ranks(rank, 2, hp_platform)


def test_an_embedding_need_not_be_gathered_for_backward(hp_platform):
    def rank():
        found, gathers = [], []
        for unshards in (True, False):
            model = build(hp_platform, CASE)
            for module in (model.embed, model):
                fully_shard(module, mesh_of(hp_platform, 2), reshard_after_forward=True)
            model.embed.set_unshard_in_backward(unshards)
            for _ in range(2):
                loss = loss_of(hp_platform, model, CASE)
                with record_collectives() as log:
                    hp_platform.backward(loss)
                gathers.append(log.count("all_gather"))
            found.append(full_grads(hp_platform, model))
        equal_grads(*found)
        # MindSpore reads freed memory without a word, so it is not left without any.
        assert gathers == ([2, 2, 1, 1] if hp_platform.name == "torch" else [2, 2, 2, 2])

    run_ranks(rank, 2, hp_platform)


def test_weights_that_backward_needs_after_all_are_told_or_gathered(hp_platform):
    def rank():
        model = build(hp_platform, CASE)
        for module in (model.head, model):
            fully_shard(module, mesh_of(hp_platform, 2), reshard_after_forward=True)
        model.head.set_unshard_in_backward(False)
        loss = loss_of(hp_platform, model, CASE)
        if hp_platform.name == "torch":
            # torch's own error: every read of freed memory raises.
            with pytest.raises(RuntimeError, match=r"data is not allocated yet|out of bounds for storage of size 0"):
                hp_platform.backward(loss)
            model.head.set_unshard_in_backward(True)
            loss = loss_of(hp_platform, model, CASE)
        hp_platform.backward(loss)
        expected = sharded(hp_platform, CASE)
        hp_platform.backward(loss_of(hp_platform, expected, CASE))
        equal_grads(full_grads(hp_platform, model), full_grads(hp_platform, expected))

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_an_all_reduce_hook_sees_and_may_change_what_has_been_reduced(hp_platform, mesh):
    case = Case(mesh, num_blocks=1)

    def rank():
        plain, model = sharded(hp_platform, case), sharded(hp_platform, case)
        step(hp_platform, plain, case)

        def double(shard):
            hp_platform.copy_(shard, hp_platform.ops.mul(shard, 2.0))

        model.blocks[0].set_all_reduce_hook(double)
        step(hp_platform, model, case)
        expected = {
            name: grad * 2 if name.startswith("blocks.0") and grad is not None else grad
            for name, grad in full_grads(hp_platform, plain).items()
        }
        equal_grads(full_grads(hp_platform, model), expected)
        with pytest.raises(FullyShardError, match="stream=None"):
            model.set_all_reduce_hook(double, stream=object())
        with pytest.raises(FullyShardError, match="expected a function"):
            model.set_all_reduce_hook(None)

    run_ranks(rank, case.size, hp_platform)


def test_other_names_of_settings(hp_platform):
    model = fully_shard(build(hp_platform, CASE), mesh_of(hp_platform, 1))
    settings = model._fsdp.group.settings
    model.set_reduce_scatter_divide_factor(3.0)
    model.set_reduce_scatter_max_input_buffers(2)
    assert (settings.reduce.divide_factor, settings.max_gradient_buffers) == (3.0, 2)
    model.set_reduce_scatter_unused_params(True, recurse=False)
    model.set_force_sum_reduction_for_comms(True)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_separate_reduce_scatter_group(False)
    share_comm_ctx([model])

    class Event:
        waited = 0

        def wait(self):
            self.waited += 1

    event = Event()
    model.set_post_optim_event(event)
    assert event.waited == 1
    with pytest.raises(FullyShardError, match="expected an event"):
        model.set_post_optim_event(None)
    with pytest.raises(FullyShardError, match="has not been through fully_shard"):
        share_comm_ctx([build(hp_platform, CASE)])


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("set_custom_all_gather", None),
        ("set_custom_reduce_scatter", None),
        ("set_allocate_memory_from_process_group_for_comm", True),
        ("set_symm_mem_for_comm", "NCCL"),
        ("set_separate_reduce_scatter_group", True),
    ],
)
def test_what_cannot_be_had_says_why_and_names_ours(hp_platform, method, argument):
    model = fully_shard(build(hp_platform, CASE), mesh_of(hp_platform, 1))
    with pytest.raises(CapabilityError, match=rf"^{method}: .*hp_fsdp\.Communication.*set_communication\("):
        getattr(model, method)(argument)


def test_a_state_of_an_iteration_is_reset(hp_platform):
    def rank():
        model = sharded(hp_platform, CASE)
        loss_of(hp_platform, model, CASE)
        model.reset_iter_state()
        assert not any(each._fsdp.group.held_bytes for each in (model, *model.blocks))
        step(hp_platform, model, CASE)

    run_ranks(rank, 2, hp_platform)


def test_methods_of_a_gather_on_the_weight_itself_are_refused(hp_platform):
    model = build(hp_platform, CASE)
    model.head.weight.fsdp_pre_all_gather = lambda mesh: ((), None)
    model.head.weight.fsdp_post_all_gather = lambda *_: None
    with pytest.raises(FullyShardError, match=r"head\.weight: fsdp_pre_all_gather / fsdp_post_all_gather .*fp8"):
        fully_shard(model, mesh_of(hp_platform, 1))


def test_a_slice_of_a_sharded_sequential_is_a_sequential_of_its_modules(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("cells are sliced by lists of MindSpore's own")
    import torch

    def rank():
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
        for layer in model:
            fully_shard(layer, mesh_of(hp_platform, 2))
        fully_shard(model, mesh_of(hp_platform, 2))
        first = model[:2]
        assert type(first) is torch.nn.Sequential
        assert [a is b for a, b in zip(first, model, strict=False)] == [True, True]
        x = torch.ones(1, 3)
        torch.testing.assert_close(model[2](first(x)), model(x))
        first(x).sum().backward()
        assert model[0].weight.grad is not None

    run_ranks(rank, 2, hp_platform)


def test_function_transforms_are_refused_by_name(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("torch.func")
    import torch

    def rank():
        model = fully_shard(torch.nn.Sequential(torch.nn.Linear(3, 2)), mesh_of(hp_platform, 2))
        x = torch.ones(4, 3)
        for transformed in (lambda: torch.func.jvp(model, (x,), (x,)), lambda: torch.func.vmap(model)(x)):
            with pytest.raises(CapabilityError, match=r"torch\.func .*through modules of fully_shard"):
                transformed()
        model(x).sum().backward()  # the model goes on
        assert model[0].weight.grad is not None

    run_ranks(rank, 2, hp_platform)
