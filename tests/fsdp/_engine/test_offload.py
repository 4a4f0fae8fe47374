"""Shards and gradients on the host: what is copied when, and the same results as without offload."""

from __future__ import annotations

import dataclasses
import functools

import numpy
import offload_device
import pytest
from fsdp_training import AdamW, Case, build, full_value, micro_loss, shard, sharded_modules

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import Communication, CPUOffloadPolicy, FullyShardError, fully_shard, get_storage, summon_full_params
from hp_fsdp.storage import ParameterStorage

CASES = {
    "fsdp": Case((2,), num_blocks=3),
    "hsdp, accumulated": Case((2, 2), num_blocks=1, accumulate=3, sync="last"),
    "reduced each time": Case((2,), num_blocks=2, accumulate=3),
    "mixed precision": Case((2,), num_blocks=1, policy={"param_dtype": "float16", "reduce_dtype": "float32"}),
    "one rank": Case((1,), num_blocks=1),
}
FULL = CPUOffloadPolicy(pin_memory=True)
PARAMETERS, GRADIENTS = CPUOffloadPolicy(gradients=False), CPUOffloadPolicy(parameters=False)
STEPS = 5


@pytest.fixture
def device(hp_platform, monkeypatch):
    return offload_device.install(get_storage(hp_platform), monkeypatch)


class Logged(Communication):
    """Logs reductions between the copies."""

    def __init__(self, platform, device):
        super().__init__(platform)
        self._device = device

    def reduce_scatter(self, output, gradients, group):
        self._device.log("reduce", output.shape[0])
        return super().reduce_scatter(output, gradients, group)

    def all_reduce(self, shard, group):
        self._device.log("all-reduce", shard.shape[0])
        return super().all_reduce(shard, group)


def _model(platform, case, **options):
    names = ("shard",) if len(case.mesh) == 1 else ("replicate", "shard")
    mesh = init_device_mesh(platform.device_types[0], case.mesh, mesh_dim_names=names, platform=platform)
    used = dataclasses.replace(case, options={**case.options, **options})
    return shard(build(platform, used), mesh, used)


def _train(platform, case, policy, device=None):
    """Return weights, the log of the last step, elements of the shards, and where tensors were before the step."""
    options = {"communication": Logged(platform, device)} if device is not None else {}
    model = _model(platform, case, offload_policy=policy, **options)
    buffers = [b for module in sharded_modules(model) for b in module._fsdp.group.buffers]
    step, rank = AdamW(platform), current_world(platform).rank
    for index in range(STEPS):
        begin = len(device.of_rank(rank)) if device is not None else 0
        for micro in range(case.accumulate):
            model.set_requires_gradient_sync(case.sync == "every" or micro == case.accumulate - 1)
            platform.backward(micro_loss(platform, model, case, rank, index, micro))
        log = device.of_rank(rank)[begin:] if device is not None else []
        places = {
            (
                device.lies_on_host(b.shard),
                None if b.gradients.deferred.flat is None else device.lies_on_host(b.gradients.deferred.flat),
            )
            for b in (buffers if device is not None else ())
        }
        step(model)
    weights = {name: full_value(platform, p) for name, p in platform.named_parameters(model)}
    return weights, log, [b.layout.shard_numel for b in buffers], places


def _case(name, zero_stage):
    case = CASES[name]
    return case if zero_stage == 3 else dataclasses.replace(case, options={"zero_stage": zero_stage})


@functools.cache
def _expected(platform, name, zero_stage):
    """Return every rank's results without offload."""
    case = _case(name, zero_stage)
    return run_ranks(_train, case.size, platform, platform, case, None)


def _compare(platform, device, name, policy, zero_stage=3):
    case = _case(name, zero_stage)
    results = run_ranks(_train, case.size, platform, platform, case, policy, device)
    for got, wanted in zip(results, _expected(platform, name, zero_stage), strict=True):
        for key, value in wanted[0].items():
            numpy.testing.assert_array_equal(got[0][key], value, err_msg=key)
    return results[0][1:]


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_the_same_and_each_gather_and_reduction_copies_once(torch_or, hp_platform, device, name):
    torch_or(name in ("hsdp, accumulated", "mixed precision"))
    case = CASES[name]
    log, sizes, places = _compare(hp_platform, device, name, FULL)
    assert places == {(True, None)}
    assert all(device.pinned)
    reductions = case.accumulate if case.sync == "every" else 1
    copied = [numel for kind, numel in log if kind == "to host"]
    assert sorted(copied) == sorted(sizes * reductions)
    # Blocks are gathered for forward and backward, the root once.
    kinds = [kind for kind, _ in log]
    assert kinds.count("to device") == case.accumulate * (2 * (len(sizes) - 1) + 1)


@pytest.mark.parametrize("name", ["fsdp", "hsdp, accumulated"])
@pytest.mark.parametrize("policy", [FULL, GRADIENTS], ids=["everything", "gradients"])
def test_gradients_are_copied_while_the_backward_of_others_runs(torch_or, hp_platform, device, name, policy):
    torch_or(name == "fsdp" and policy is GRADIENTS)
    log, sizes, _ = _compare(hp_platform, device, name, policy)
    kinds = [kind for kind, _ in log if kind in ("reduce", "all-reduce", "to host", "on host")]
    count, last = len(sizes), len(kinds) - 1 - kinds[::-1].index("reduce")
    # All but those of the last group, whose reduction has just started, are on the way.
    assert kinds[:last].count("to host") == count - 1
    assert "on host" not in kinds[:last]
    assert kinds[-count:] == ["on host"] * count


def test_shards_are_copied_one_group_ahead(hp_platform, device):
    case = CASES["fsdp"]

    def rank():
        model = _model(hp_platform, case, offload_policy=FULL)
        world = current_world(hp_platform)
        for number, block in enumerate(model.blocks):
            hp_platform.add_forward_pre_hook(block.up, lambda *args, n=number: device.log("forward", n))
        for index in range(2):
            world.all.barrier()
            begin = len(device.of_rank(world.rank))
            loss = micro_loss(hp_platform, model, case, world.rank, index, 0)
            log = device.of_rank(world.rank)[begin:]
            hp_platform.backward(loss)
        return [kind for kind, _ in log]

    # The root's, then each block's before the forward of the one that comes before it.
    steps = ["to device", "to device", "to device", "forward", "to device", "forward", "forward"]
    assert run_ranks(rank, 2, hp_platform) == [steps] * 2


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("policy", [PARAMETERS, GRADIENTS], ids=["parameters", "gradients"])
def test_parameters_or_gradients_alone(torch_or, hp_platform, device, name, policy):
    torch_or(name == "fsdp")
    log, _, places = _compare(hp_platform, device, name, policy)
    assert places == {(policy.parameters, policy.gradients)}
    kinds = [kind for kind, _ in log]
    # Within forward and backward only what is on the host is copied; gradients come to their parameters in the step.
    assert ("to device" in kinds) == policy.parameters
    assert ("to host" in kinds) == policy.gradients


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_alone_in_other_stages(hp_platform, device, stage):
    _, _, places = _compare(hp_platform, device, "reduced each time", GRADIENTS, stage)
    assert places == ({(False, True)} if stage else {(False, None)})


def _assert_offload_changes_nothing(platform, rank):
    """Compare what `rank(policy)` returns with offload of parameters, and of gradients, with that without."""
    expected = run_ranks(rank, 2, platform, None)[0]
    for policy in (PARAMETERS, GRADIENTS):
        found = run_ranks(rank, 2, platform, policy)[0]
        for name, value in expected.items():
            numpy.testing.assert_array_equal(found[name], value, err_msg=name)


def test_gradients_apart_can_be_looked_at_replaced_and_dropped(hp_platform, device):
    case = CASES["fsdp"]

    def rank(policy):
        model = _model(hp_platform, case, offload_policy=policy)
        parameters = dict(hp_platform.named_parameters(model))
        hp_platform.backward(micro_loss(hp_platform, model, case, current_world(hp_platform).rank, 0, 0))
        first, second, *_ = (p for n, p in parameters.items() if n.startswith("blocks.0."))
        first.grad = None  # dropped before anybody has looked
        hp_platform.backward(micro_loss(hp_platform, model, case, current_world(hp_platform).rank, 1, 0))
        second.grad = second.grad * 2  # looked at and replaced: what comes is added to it
        hp_platform.backward(micro_loss(hp_platform, model, case, current_world(hp_platform).rank, 2, 0))
        found = {name: full_value(hp_platform, p.grad) for name, p in parameters.items()}
        for p in parameters.values():
            p.grad = None
        assert all(p.grad is None for p in parameters.values())
        return found

    _assert_offload_changes_nothing(hp_platform, rank)


def test_separate_gradients_of_a_parameter_frozen_since_are_retained(hp_platform, device):
    case = CASES["fsdp"]

    def rank(policy):
        model = _model(hp_platform, case, offload_policy=policy)
        parameters = dict(hp_platform.named_parameters(model))
        for index, frozen in enumerate(["", "up.weight", ""]):
            for name, parameter in parameters.items():
                hp_platform.set_requires_grad(parameter, not frozen or frozen not in name)
            hp_platform.backward(micro_loss(hp_platform, model, case, current_world(hp_platform).rank, index, 0))
        return {name: full_value(hp_platform, p.grad) for name, p in parameters.items()}

    _assert_offload_changes_nothing(hp_platform, rank)


def test_of_a_group_frozen_before_the_backward_nothing_is_kept_apart(hp_platform, device):
    case = CASES["fsdp"]

    def rank():
        model = _model(hp_platform, case, offload_policy=GRADIENTS)
        loss = micro_loss(hp_platform, model, case, current_world(hp_platform).rank, 0, 0)
        for _, parameter in hp_platform.named_parameters(model.blocks[0]):
            hp_platform.set_requires_grad(parameter, False)
        hp_platform.backward(loss)
        first, second, _ = (block._fsdp.group.buffers for block in model.blocks)
        return [any(buffer.gradients.deferred.flat is not None for buffer in buffers) for buffers in (first, second)]

    assert run_ranks(rank, 2, hp_platform) == [[False, True]] * 2


def test_where_the_device_is_the_host_nothing_is_copied(hp_platform, monkeypatch):
    storage = get_storage(hp_platform)
    for name in ("host_buffer", "to_device", "to_host", "defer_gradient"):
        monkeypatch.setattr(storage, name, lambda *args: pytest.fail("copied"))
    for policy in (FULL, PARAMETERS, GRADIENTS):
        run_ranks(_train, 2, hp_platform, hp_platform, CASES["fsdp"], policy)


def test_whole_parameters_are_gathered_from_the_host(hp_platform, device):
    def rank():
        mesh = init_device_mesh(hp_platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=hp_platform)
        model = fully_shard(build(hp_platform, CASES["fsdp"]), mesh, offload_policy=CPUOffloadPolicy())
        expected = full_value(hp_platform, model.embed.weight)
        with summon_full_params(model):
            shown = hp_platform.to_numpy(hp_platform.ops.clone(hp_platform.detach(model.embed.weight)))
            numpy.testing.assert_array_equal(shown, expected)

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize("mesh", [(2,), (1,)])
def test_nothing_still_reads_parameters_on_the_host_after_a_pass(hp_platform, device, mesh):
    """They may be written at once: by an optimizer, an average of weights, a loaded state dict."""
    case = Case(mesh, num_blocks=3)

    def rank():
        model, number = _model(hp_platform, case, offload_policy=FULL), current_world(hp_platform).rank
        sizes = [b.layout.shard_numel for module in sharded_modules(model) for b in module._fsdp.group.buffers]
        finished = []
        with hp_platform.no_grad():
            micro_loss(hp_platform, model, case, number, 0, 0)
        finished.append([numel for rank, numel in device.read if rank == number])
        loss = micro_loss(hp_platform, model, case, number, 0, 0)
        assert [numel for rank, numel in device.read if rank == number] == finished[0]
        hp_platform.backward(loss)
        finished.append([numel for rank, numel in device.read if rank == number][len(sizes) :])
        assert finished == [sizes, sizes]

    run_ranks(rank, case.size, hp_platform)


def test_what_cannot_be_offloaded_is_refused(hp_platform, device):
    mesh = init_device_mesh(hp_platform.device_types[0], (1,), mesh_dim_names=("shard",), platform=hp_platform)
    model = build(hp_platform, CASES["fsdp"])
    with pytest.raises(FullyShardError, match=r"expected zero_stage=3.*parameters=False"):
        fully_shard(model, mesh, offload_policy=CPUOffloadPolicy(), zero_stage=2)
    with pytest.raises(FullyShardError, match="expected a CPUOffloadPolicy or None, got bool"):
        fully_shard(model, mesh, offload_policy=True)


def test_a_platform_that_cannot_await_gradients_refuses_them_apart(hp_platform, device, monkeypatch):
    storage = get_storage(hp_platform)
    mesh = init_device_mesh(hp_platform.device_types[0], (1,), mesh_dim_names=("shard",), platform=hp_platform)
    monkeypatch.setattr(
        storage, "check_separate_gradients", functools.partial(ParameterStorage.check_separate_gradients, storage)
    )
    for policy in (PARAMETERS, GRADIENTS):
        with pytest.raises(
            CapabilityError, match="gradients are on the device of their parameters; offload both or none"
        ):
            fully_shard(build(hp_platform, CASES["fsdp"]), mesh, offload_policy=policy)
    fully_shard(build(hp_platform, CASES["fsdp"]), mesh, offload_policy=FULL)
