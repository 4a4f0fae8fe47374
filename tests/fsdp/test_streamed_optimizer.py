"""An optimizer's state on the host, alone or with parameters and gradients: results, devices, order of copies."""

from __future__ import annotations

import dataclasses
import functools
import os

import numpy
import offload_device
import pytest
from fsdp_training import Case, build, full_value, micro_loss, shard, shard_last_dim, sharded_modules

from hp_dtensor import clip_grad_norm_
from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    CPUOffloadPolicy,
    FullyShardError,
    GradScaler,
    StateDictOptions,
    fully_shard,
    get_optimizer_state_dict,
    get_storage,
    set_optimizer_state_dict,
    stream_optimizer,
)

CASES = {
    "fsdp": Case((2,), num_blocks=2),
    "accumulated": Case((2,), num_blocks=2, accumulate=3, frozen=("blocks.0.up",)),
    "hsdp, accumulated without communication": Case((2, 2), num_blocks=1, accumulate=3, sync="last"),
    "mixed precision": Case((2,), num_blocks=1, policy={"param_dtype": "float16", "reduce_dtype": "float32"}),
    "another dimension": Case((3,), num_blocks=1, options={"shard_placement_fn": shard_last_dim}),
    "one rank": Case((1,), num_blocks=1),
}
OPTIMIZERS = {
    "adamw": lambda optim, p: optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "fused": lambda optim, p: optim.AdamW(p, lr=0.02, fused=True),
    "one by one": lambda optim, p: optim.Adam(p, lr=0.02, foreach=False, amsgrad=True),
    "sgd": lambda optim, p: optim.SGD(p, lr=0.1, momentum=0.9),
    "groups": lambda optim, p: optim.AdamW(
        [
            {"params": [x for x in p if len(x.shape) > 1], "lr": 0.01},
            {"params": [x for x in p if len(x.shape) == 1], "lr": 0.03},
        ]
    ),
}
ON_TORCH = ("fused", "one by one")
STEPS = 3  # The second step uses state on the host, the third what the second copied back.


@dataclasses.dataclass(frozen=True)
class Offload:
    """The tensors that are stored on the host. None instead: not offloaded and not streamed."""

    parameters: bool = False
    gradients: bool = False
    state: bool = True

    @property
    def policy(self):
        some = self.parameters or self.gradients
        return CPUOffloadPolicy(parameters=self.parameters, gradients=self.gradients) if some else None


ALL = [Offload(p, g, s) for p in (False, True) for g in (False, True) for s in (False, True)]
# What runs in other cases than the first, and with other optimizers than AdamW, where a step takes ten times as long.
ON_SLOW_PLATFORMS = [Offload(False, True, True), Offload(True, False, True)]


@pytest.fixture
def device(hp_platform, monkeypatch):
    return offload_device.install(get_storage(hp_platform), monkeypatch)


def _make(platform, name, parameters):
    if platform.name == "torch":
        import torch.optim as optim
    else:
        from hp_platform_mindspore import optim as optim
    return OPTIMIZERS[name](optim, list(parameters))


def _parameters(platform, model):
    return [parameter for _, parameter in platform.named_parameters(model)]


def _weights(platform, model):
    return ({name: full_value(platform, p) for name, p in platform.named_parameters(model)},)


def _halving(platform, optimizer):
    """Return a function that halves the learning rate, on torch by a schedule."""
    if platform.name == "torch":
        from torch.optim.lr_scheduler import StepLR

        return StepLR(optimizer, 1, gamma=0.5).step

    def halve():
        optimizer.param_groups[0]["lr"] *= 0.5

    return halve


def _slots(platform, optimizer, parameter):
    """Return the state tensors that are as large as the parameter."""
    state = optimizer.state.get(parameter, {}).values()
    return [x for x in state if isinstance(x, platform.Tensor) and x.shape == parameter.shape]


def _model(platform, case, policy):
    names = ("shard",) if len(case.mesh) == 1 else ("replicate", "shard")
    mesh = init_device_mesh(platform.device_types[0], case.mesh, mesh_dim_names=names, platform=platform)
    return shard(
        build(platform, case), mesh, dataclasses.replace(case, options=case.options | {"offload_policy": policy})
    )


def _micro_batches(platform, model, case, index):
    for micro in range(case.accumulate):
        model.set_requires_gradient_sync(case.sync == "every" or micro == case.accumulate - 1)
        yield micro_loss(platform, model, case, current_world(platform).rank, index, micro)


def _train(platform, case, make, offload=None, clips=False):
    model = _model(platform, case, offload.policy if offload is not None else None)
    optimizer = _make(platform, make, _parameters(platform, model))
    if offload is not None:
        assert stream_optimizer(optimizer, model, offload_state=offload.state) is optimizer
    for index in range(STEPS):
        for loss in _micro_batches(platform, model, case, index):
            platform.backward(loss)
        if clips:
            clip_grad_norm_(_parameters(platform, model), 0.5)
        optimizer.step()
        grads = {n: full_value(platform, p.grad) for n, p in platform.named_parameters(model)}
        optimizer.zero_grad()
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    (weights,) = _weights(platform, model)
    slots = {f"{name}.{slot}": value for name, entry in state.items() for slot, value in entry.items()}
    tensors = {key: full_value(platform, x) for key, x in slots.items() if isinstance(x, platform.Tensor)}
    return weights, grads, tensors | {key: x for key, x in slots.items() if key not in tensors}


@functools.cache
def _expected(platform, case_name, make, clips=False):
    """Return every rank's results without offload and streaming."""
    case = CASES[case_name]
    return run_ranks(_train, case.size, platform, platform, case, make, None, clips)


def _assert_equal(results, expected):
    for got, wanted in zip(results, expected, strict=True):
        for found, right in zip(got, wanted, strict=True):
            assert found.keys() == right.keys()
            for name, value in right.items():
                numpy.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("offload", ALL, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_optimizer(torch_or, hp_platform, device, name, offload):
    torch_or(offload in ON_SLOW_PLATFORMS)
    # What is stored on the host and how gradients are made meet in one place: all of each with one of the other.
    if offload not in ON_SLOW_PLATFORMS and name != "accumulated" and "HP_ALL_CASES" not in os.environ:
        pytest.skip("all cases in the session `proof`")
    case, make = CASES[name], "adamw"
    results = run_ranks(_train, case.size, hp_platform, hp_platform, case, make, offload)
    _assert_equal(results, _expected(hp_platform, name, make))


@pytest.mark.parametrize(
    "offload", [Offload(), Offload(True, False), Offload(False, True), Offload(True, True)], ids=str
)
@pytest.mark.parametrize("placement", ["fsdp", "another dimension"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_and_clipping(torch_or, hp_platform, device, name, placement, offload):
    if hp_platform.name != "torch" and name in ON_TORCH:
        pytest.skip("on torch")
    torch_or((placement, offload) in zip(("fsdp", "another dimension"), ON_SLOW_PLATFORMS, strict=True))
    if offload.parameters == (placement == "fsdp") and "HP_ALL_CASES" not in os.environ:
        pytest.skip("all cases in the session `proof`")
    case = CASES[placement]
    results = run_ranks(_train, case.size, hp_platform, hp_platform, case, name, offload, True)
    _assert_equal(results, _expected(hp_platform, placement, name, clips=True))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages(torch_or, hp_platform, device, stage):
    torch_or(stage == 1)
    case = dataclasses.replace(CASES["accumulated"], options={"zero_stage": stage})
    expected = run_ranks(_train, 2, hp_platform, hp_platform, case, "adamw")
    offload = Offload(gradients=True)
    _assert_equal(run_ranks(_train, 2, hp_platform, hp_platform, case, "adamw", offload), expected)


@pytest.mark.parametrize("offload", ALL, ids=str)
def test_each_lies_where_it_should_between_steps(hp_platform, device, offload):
    case = CASES["fsdp"]

    def rank():
        model = _model(hp_platform, case, offload.policy)
        optimizer = stream_optimizer(
            _make(hp_platform, "adamw", _parameters(hp_platform, model)), model, offload_state=offload.state
        )
        in_step = set()

        def watch(optimizer, *args):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    in_step.update(device.lies_on_host(x) for x in (p, p.grad) if x is not None)

        inner = type(optimizer).__mro__[1]
        step = getattr(inner.step, "__wrapped__", inner.step)
        for index in range(2):
            for loss in _micro_batches(hp_platform, model, case, index):
                hp_platform.backward(loss)
            waiting = [b.gradients.deferred.flat for m in sharded_modules(model) for b in m._fsdp.group.buffers]
            assert all((x is not None) == (offload.parameters != offload.gradients) for x in waiting)
            optimizer._hp_fsdp_streamed_step.run(lambda o: (watch(o), step(o)))
            assert in_step == {False}  # the update is on the device
            for name, p in hp_platform.named_parameters(model):
                if min(p.spec.local_shape):
                    assert device.lies_on_host(p) == offload.parameters
                    slots = _slots(hp_platform, optimizer, p)
                    assert [device.lies_on_host(x) for x in slots] == [offload.state] * (0 if "unused" in name else 2)
            optimizer.zero_grad()

    run_ranks(rank, 2, hp_platform)


def test_state_is_copied_one_buffer_ahead_and_back_beside_the_updates(hp_platform, device):
    case = CASES["fsdp"]

    def rank():
        model = _model(hp_platform, case, None)
        optimizer = stream_optimizer(_make(hp_platform, "adamw", _parameters(hp_platform, model)), model)
        rank = current_world(hp_platform).rank
        for index in range(2):
            for loss in _micro_batches(hp_platform, model, case, index):
                hp_platform.backward(loss)
            begin = len(device.of_rank(rank))
            optimizer.step()
        return [kind for kind, _ in device.of_rank(rank)[begin:]]

    first, then = ["to device"] * 2, ["to device"] * 2 + ["on device"] * 2 + ["to host"] * 2
    last = ["on device"] * 2 + ["to host"] * 2
    assert run_ranks(rank, 2, hp_platform) == [first + then * 2 + last + ["on host"] * 6] * 2


def test_gradients_that_are_dropped_are_not_copied(hp_platform, device):
    def rank():
        model = _model(hp_platform, CASES["fsdp"], Offload(gradients=True).policy)
        parameters = _parameters(hp_platform, model)
        first, others = (
            stream_optimizer(_make(hp_platform, "sgd", p), model) for p in (parameters[:1], parameters[1:])
        )
        for loss in _micro_batches(hp_platform, model, CASES["fsdp"], 0):
            hp_platform.backward(loss)
        expected = device.of_rank(current_world(hp_platform).rank)
        first.zero_grad()
        buffers = [b for m in sharded_modules(model) for b in m._fsdp.group.buffers]
        assert [b.gradients.deferred.flat is None for b in buffers].count(True) == 0
        others.zero_grad()
        assert all(b.gradients.deferred.flat is None for b in buffers)
        assert all(p.grad is None for p in parameters)
        assert device.of_rank(current_world(hp_platform).rank) == expected

    run_ranks(rank, 2, hp_platform)


def test_two_optimizers_of_one_buffer(hp_platform, device):
    case = CASES["accumulated"]

    def rank(offload):
        model = _model(hp_platform, case, offload.policy if offload is not None else None)
        parameters = _parameters(hp_platform, model)
        optimizers = [_make(hp_platform, "adamw", parameters[::2]), _make(hp_platform, "sgd", parameters[1::2])]
        for optimizer in optimizers if offload is not None else ():
            stream_optimizer(optimizer, model)
        for index in range(3):
            for loss in _micro_batches(hp_platform, model, case, index):
                hp_platform.backward(loss)
            for optimizer in optimizers[: index + 1]:
                optimizer.step()
                optimizer.zero_grad()
        return _weights(hp_platform, model)

    expected = run_ranks(rank, 2, hp_platform, None)
    for offload in (Offload(), Offload(gradients=True), Offload(parameters=True), Offload(True, True)):
        _assert_equal(run_ranks(rank, 2, hp_platform, offload), expected)


def test_a_state_dict_is_loaded_to_where_state_is_stored(hp_platform, device):
    case = CASES["fsdp"]

    def rank(offload):
        model = _model(hp_platform, case, None)
        optimizer = _make(hp_platform, "adamw", _parameters(hp_platform, model))
        if offload:
            stream_optimizer(optimizer, model)
        for index in range(4):
            for loss in _micro_batches(hp_platform, model, case, index):
                hp_platform.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if index == 1:
                options = StateDictOptions(full_state_dict=True)
                saved = get_optimizer_state_dict(model, optimizer, options=options)
                optimizer = _make(hp_platform, "adamw", _parameters(hp_platform, model))
                if offload:
                    stream_optimizer(optimizer, model)
                set_optimizer_state_dict(model, optimizer, saved)
        if offload:
            held = [x for p in _parameters(hp_platform, model) for x in _slots(hp_platform, optimizer, p)]
            assert all(device.lies_on_host(x) for x in held if min(x.spec.local_shape))
        return _weights(hp_platform, model)

    _assert_equal(run_ranks(rank, 2, hp_platform, True), run_ranks(rank, 2, hp_platform, False))


@pytest.mark.parametrize("offload_state", [True, False])
@pytest.mark.parametrize("name", ["adamw", "fused"])
def test_loaded_state_is_on_the_device_when_the_update_wants_it_there(
    hp_platform, device, monkeypatch, name, offload_state
):
    """torch loads state to where the parameters are, which is the host; fused updates want `step` on the device too."""
    if hp_platform.name != "torch":
        pytest.skip("on torch")
    torch = pytest.importorskip("torch")
    case = CASES["fsdp"]
    on_host = {}
    elsewhere = torch.device("meta")
    monkeypatch.setattr(hp_platform, "device_of", lambda x: elsewhere if id(x) in on_host else x.device)

    def rank():
        model = _model(hp_platform, case, Offload(parameters=True, gradients=True).policy)
        optimizer = stream_optimizer(_make(hp_platform, name, model.parameters()), model, offload_state=offload_state)

        def update(index):
            for loss in _micro_batches(hp_platform, model, case, index):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        update(0)
        optimizer.load_state_dict(optimizer.state_dict())
        for entry in optimizer.state.values():
            on_host.update({id(x): x for slot, x in entry.items() if slot == "step" or not offload_state})
        update(1)
        for parameter, entry in optimizer.state.items():
            assert (id(entry["step"]) in on_host) == (name != "fused"), name
            assert id(entry["exp_avg"]) not in on_host or 0 in hp_platform.local_shape(parameter)
        return ({n: full_value(hp_platform, p) for n, p in model.named_parameters()},)

    def plain():
        model = _model(hp_platform, case, None)
        optimizer = _make(hp_platform, name, model.parameters())
        for index in range(2):
            for loss in _micro_batches(hp_platform, model, case, index):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return ({n: full_value(hp_platform, p) for n, p in model.named_parameters()},)

    expected = run_ranks(plain, 2, hp_platform)
    _assert_equal(run_ranks(rank, 2, hp_platform), expected)


@pytest.mark.parametrize("offload", [None, Offload(), Offload(True, False, False), Offload(False, True, True)], ids=str)
def test_loss_scaling_hooks_closures_and_schedules(hp_platform, device, offload):
    case = CASES["fsdp"]

    def rank(offload):
        model = _model(hp_platform, case, offload.policy if offload is not None else None)
        optimizer = _make(hp_platform, "adamw", _parameters(hp_platform, model))
        if offload is not None:
            stream_optimizer(optimizer, model, offload_state=offload.state)
        halve, calls = _halving(hp_platform, optimizer), []
        if hp_platform.name == "torch":
            optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
            optimizer.register_step_post_hook(lambda *args: calls.append("after"))
        scaler = GradScaler(init_scale=2.0**10, platform=hp_platform)
        for index in range(2):
            for loss in _micro_batches(hp_platform, model, case, index):
                hp_platform.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
            halve()
            optimizer.zero_grad()

        def closure():
            (loss,) = _micro_batches(hp_platform, model, case, 2)
            hp_platform.backward(loss)
            return loss

        with hp_platform.no_grad():
            assert float(hp_platform.to_numpy(hp_platform.detach(optimizer.step(closure)))) > 0
        assert calls == (["before", "after"] * 3 if hp_platform.name == "torch" else [])
        assert optimizer.param_groups[0]["lr"] == 0.005
        return _weights(hp_platform, model)

    _assert_equal(run_ranks(rank, 2, hp_platform, offload), run_ranks(rank, 2, hp_platform, None))


def test_a_step_that_fails_leaves_everything_where_it_was(hp_platform, device):
    case = CASES["one rank"]
    offload = Offload(True, False, True)

    def rank():
        model = _model(hp_platform, case, offload.policy)
        optimizer = stream_optimizer(_make(hp_platform, "adamw", _parameters(hp_platform, model)), model)
        for loss in _micro_batches(hp_platform, model, case, 0):
            hp_platform.backward(loss)
        optimizer.param_groups[0]["betas"] = None
        with pytest.raises(TypeError):
            optimizer.step()
        assert len(optimizer.param_groups[0]["params"]) == len(_parameters(hp_platform, model))
        assert all(device.lies_on_host(p) for p in _parameters(hp_platform, model))
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        optimizer.step()
        return _weights(hp_platform, model)

    def expected():
        model = _model(hp_platform, case, None)
        optimizer = _make(hp_platform, "adamw", _parameters(hp_platform, model))
        for loss in _micro_batches(hp_platform, model, case, 0):
            hp_platform.backward(loss)
        optimizer.step()
        return _weights(hp_platform, model)

    _assert_equal(run_ranks(rank, 1, hp_platform), run_ranks(expected, 1, hp_platform))


def test_where_the_device_is_the_host_the_step_is_the_optimizers(hp_platform):
    case, make = CASES["fsdp"], "adamw"
    expected = run_ranks(_train, 2, hp_platform, hp_platform, case, make)
    _assert_equal(run_ranks(_train, 2, hp_platform, hp_platform, case, make, Offload(True, True, True)), expected)


def test_what_cannot_be_streamed_is_refused(hp_platform, device):
    model = build(hp_platform, CASES["fsdp"])
    optimizer = _make(hp_platform, "sgd", _parameters(hp_platform, model))
    with pytest.raises(FullyShardError, match=r"nothing in Net has been through fully_shard"):
        stream_optimizer(optimizer, model)
    mesh = init_device_mesh(hp_platform.device_types[0], (1,), mesh_dim_names=("shard",), platform=hp_platform)
    fully_shard(model, mesh)
    with pytest.raises(
        FullyShardError, match=r"expected an optimizer with param_groups, state and step\(\), got FSDPNet"
    ):
        stream_optimizer(model, model)
    if hp_platform.name == "mindspore":
        from mindspore.experimental import optim

        with pytest.raises(FullyShardError, match=r"and step\(\), got SGD"):
            stream_optimizer(optim.SGD(_parameters(hp_platform, model)[:1], lr=0.1), model)
    if hp_platform.name == "torch":
        from torch import optim

        with pytest.raises(FullyShardError, match="got LBFGS, whose step needs closure"):
            stream_optimizer(optim.LBFGS(_parameters(hp_platform, model)), model)
    optimizer = _make(hp_platform, "sgd", _parameters(hp_platform, model))
    optimizer.step = optimizer.step
    with pytest.raises(FullyShardError, match="create them after stream_optimizer"):
        stream_optimizer(optimizer, model)
    optimizer = stream_optimizer(_make(hp_platform, "sgd", _parameters(hp_platform, model)), model)
    with pytest.raises(FullyShardError, match="StreamedSGD is streamed already"):
        stream_optimizer(optimizer, model)
