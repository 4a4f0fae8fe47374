"""Steps of torch's elementwise optimizers run on local data: the same numbers, no operation intercepted."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref

import pytest
import torch
from torch import optim

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.exceptions import MixedOperandsError, ShardingRuleError
from hp_dtensor.spec.placements import Partial, RaggedShard, Replicate, Shard
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_dtensor.testing import run_ranks
from hp_platform_torch.tensor.dtensor import TorchDTensor

SHAPES = [(5, 3), (1, 4), (4,), (7, 2), ()]
OPTIMIZERS = {
    "Adadelta": (optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "Adam": (optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "AdamW": (optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "Adamax": (optim.Adamax, {"lr": 0.1}),
    "ASGD": (optim.ASGD, {"lr": 0.1, "t0": 2}),
    "NAdam": (optim.NAdam, {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (optim.RAdam, {"lr": 0.1}),
    "RMSprop": (optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
    "Rprop": (optim.Rprop, {"lr": 0.1}),
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
FLAVOURS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
FUSED = {"Adagrad", "Adam", "AdamW", "SGD", "SGD with momentum"}
CASES = [(name, flavour) for name in OPTIMIZERS for flavour in FLAVOURS if flavour != "fused" or name in FUSED]


def intercepted(kind):
    """The optimizer as a class of a user's: it need not be elementwise, so its steps are intercepted."""
    return type(f"Intercepted{kind.__name__}", (kind,), {})


def placements_on(mesh):
    """Uneven, empty, replicated, ragged, and of a number."""
    ragged = RaggedShard(0, (6, 1) if mesh.size() == 2 else (7,))
    return [Shard(0), Shard(0), Replicate(), ragged, Replicate()]


def spread(mesh, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        distribute_tensor(torch.randn(shape, generator=generator), mesh, [placement], src_data_rank=None)
        for shape, placement in zip(SHAPES, placements_on(mesh), strict=True)
    ]


def parameters_on(mesh):
    return [torch.nn.Parameter(x) for x in spread(mesh, 0)]


def accumulate(parameters, seed):
    """Gradients as autograd makes them; every third time they are looked at, which makes DTensors of them."""
    for parameter, factor in zip(parameters, spread(parameters[0].device_mesh, seed), strict=True):
        (parameter * factor).sum().backward()
    return [parameter.grad for parameter in parameters] if seed % 3 == 0 else None


@contextlib.contextmanager
def interceptions(monkeypatch):
    """The names of functions intercepted within, in a list."""
    seen, real = [], TorchDTensor.__dict__["__torch_function__"].__func__

    def recorded(cls, func, types, args=(), kwargs=None):
        seen.append(getattr(func, "__name__", str(func)))
        return real(cls, func, types, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(TorchDTensor, "__torch_function__", classmethod(recorded))
        yield seen


@pytest.mark.parametrize(("name", "flavour"), CASES)
def test_five_steps_are_bit_for_bit_those_intercepted(name, flavour):
    kind, options = OPTIMIZERS[name]

    def train(mesh, kind):
        parameters = parameters_on(mesh)
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.2}]
        optimizer = kind(groups, **options, **FLAVOURS[flavour])
        for step in range(1, 6):
            accumulate(parameters, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        slots = [optimizer.state[x] for x in parameters]
        layouts = [
            type(x) is TorchDTensor and type(value) is TorchDTensor and value.spec is x.spec
            for x, own in zip(parameters, slots, strict=True)
            for key, value in own.items()
            if key not in ("step", "mu_product", "eta", "mu")
        ]
        values = [*parameters, *(value for own in slots for value in own.values())]
        return [x.full_tensor() if isinstance(x, TorchDTensor) else x for x in values], all(layouts)

    def run():
        mesh = init_device_mesh("cpu", (2,))
        return train(mesh, kind), train(mesh, intercepted(kind))

    for (got, placed), (expected, _) in run_ranks(run, 2, "torch"):
        assert placed
        assert len(got) == len(expected)
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.fixture
def mesh(platform):
    return init_device_mesh("cpu", (1,), platform=platform)


@pytest.mark.parametrize(("name", "flavour"), CASES)
def test_nothing_is_intercepted_from_the_second_step_on(mesh, monkeypatch, name, flavour):
    kind, options = OPTIMIZERS[name]
    parameters = parameters_on(mesh)
    optimizer = kind(parameters, **options, **FLAVOURS[flavour])
    accumulate(parameters, 1)
    optimizer.step()
    for seed in (2, 3):
        optimizer.zero_grad()
        accumulate(parameters, seed)
        with interceptions(monkeypatch) as seen:
            optimizer.step()
        assert seen == []
    accumulate(parameters, 4)
    other = intercepted(kind)(parameters, **options, **FLAVOURS[flavour])
    with interceptions(monkeypatch) as seen:
        other.step()
    assert seen != [], "a user's class may be no longer elementwise"


def _on(mesh, placement, unsharded=None):
    return distribute_tensor(torch.ones(4) if unsharded is None else unsharded, mesh, [placement], src_data_rank=None)


def one_step_on(mesh, kind=optim.AdamW, **options):
    """A parameter and its optimizer after a step, and with another gradient."""
    parameter = torch.nn.Parameter(_on(mesh, Shard(0), torch.arange(4.0)))
    optimizer = kind([parameter], lr=0.1, **options)
    for _ in range(2):
        optimizer.step()
        parameter.grad = _on(mesh, Shard(0))
    optimizer.step()
    return parameter, optimizer


def test_hooks_and_closure_see_dtensors_and_run_once(mesh):
    parameter, optimizer = one_step_on(mesh)
    seen = []

    def note(*what):
        seen.append(
            (*what, type(parameter) is TorchDTensor, type(optimizer.state[parameter]["exp_avg"]) is TorchDTensor)
        )

    def closure():
        note("closure")
        optimizer.zero_grad()
        loss = (parameter * parameter).sum()
        loss.backward()
        return loss

    optimizer.register_step_pre_hook(lambda *_: note("before"))
    optimizer.register_step_post_hook(lambda *_: note("after"))
    loss = optimizer.step(closure)
    assert isinstance(loss, TorchDTensor)
    assert seen == [("before", True, True), ("closure", True, True), ("after", True, True)]
    optimizer.step(closure=closure)
    assert len(seen) == 6


def test_a_hook_may_replace_gradients(mesh):
    parameter, optimizer = one_step_on(mesh, optim.SGD)
    before = parameter.full_tensor().detach().clone()

    def replace(*_):
        parameter.grad = _on(mesh, Shard(0), torch.full((4,), 5.0))

    optimizer.register_step_pre_hook(replace)
    optimizer.step()
    assert torch.equal(parameter.full_tensor(), before - 0.5)


def test_everything_is_as_before_after_an_error(mesh, monkeypatch):
    parameter, optimizer = one_step_on(mesh)

    def broken(*args, **kwargs):
        return args[0][0].no_such_attribute

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["torch.optim.adam"], "adam", broken)
        with pytest.raises(AttributeError, match="no_such_attribute"):
            optimizer.step()
    assert type(parameter) is TorchDTensor
    assert type(parameter.grad) is TorchDTensor
    assert type(optimizer.state[parameter]["exp_avg"]) is TorchDTensor
    assert parameter.grad is parameter.grad
    optimizer.step()


def test_a_step_that_raises_an_attribute_error_is_not_taken_again(mesh, monkeypatch):
    """Torch reads attributes of an object that forwards those it lacks, which would hide such an error."""
    parameters = [torch.nn.Parameter(_on(mesh, Shard(0))) for _ in range(2)]
    optimizer = optim.SGD([{"params": [x]} for x in parameters], lr=0.5, foreach=True)
    module, calls = sys.modules["torch.optim.sgd"], []
    update = module.sgd

    def broken(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise AttributeError("once")
        return update(*args, **kwargs)

    for x in parameters:
        x.grad = _on(mesh, Shard(0))
    with monkeypatch.context() as patch:
        patch.setattr(module, "sgd", broken)
        with pytest.raises(AttributeError, match="once"):
            optimizer.step()
    assert [x.tolist() for x in parameters] == [[0.5] * 4, [1.0] * 4]


def test_state_of_another_layout_is_refused_as_ever(mesh):
    for kind in (optim.AdamW, intercepted(optim.AdamW)):
        parameter, optimizer = one_step_on(mesh, kind, foreach=True)
        optimizer.state[parameter]["exp_avg"] = _on(mesh, Replicate())
        with pytest.raises(MixedOperandsError, match=r":R\).* and .*S\(0\)"):
            optimizer.step()
        optimizer.state[parameter]["exp_avg"] = torch.zeros(4)
        with pytest.raises(MixedOperandsError, match="a plain tensor"):
            optimizer.step()


def test_other_state_of_the_same_layout_is_taken(mesh, monkeypatch):
    parameter, optimizer = one_step_on(mesh)
    mine = optimizer.state[parameter]["exp_avg"] = _on(mesh, Shard(0), torch.zeros(4))
    with interceptions(monkeypatch) as seen:
        optimizer.step()
    assert seen == []
    assert type(mine) is TorchDTensor
    assert mine.tolist() == pytest.approx([0.1] * 4)


def test_a_parameter_of_another_layout_is_refused_as_ever(mesh):
    for kind in (optim.AdamW, intercepted(optim.AdamW)):
        parameter, optimizer = one_step_on(mesh, kind, foreach=True)
        parameter.grad = None
        parameter.data = _on(mesh, Replicate())
        parameter.grad = _on(mesh, Replicate())
        with pytest.raises(MixedOperandsError):
            optimizer.step()


def test_a_gradient_of_the_former_layout_is_refused_as_ever(mesh):
    for kind in (optim.SGD, intercepted(optim.SGD)):
        parameter, optimizer = one_step_on(mesh, kind, foreach=True)
        parameter.data = _on(mesh, Replicate())
        with pytest.raises(MixedOperandsError):
            optimizer.step()
        assert parameter.tolist() == [1.0] * 4


def test_partial_parameters_are_updated_by_sums_and_refused_by_moments(mesh):
    for kind in (optim.SGD, intercepted(optim.SGD)):
        parameter = torch.nn.Parameter(_on(mesh, Partial()))
        parameter.grad = _on(mesh, Replicate())
        kind([parameter], lr=0.5, foreach=True).step()
        assert torch.equal(parameter.detach().full_tensor(), torch.full((4,), 0.5))
    for kind in (optim.AdamW, intercepted(optim.AdamW)):
        parameter = torch.nn.Parameter(_on(mesh, Partial()))
        parameter.grad = _on(mesh, Replicate())
        with pytest.raises((MixedOperandsError, ShardingRuleError)):
            kind([parameter], foreach=True).step()


def test_state_that_appears_later_is_distributed(mesh):
    parameter, optimizer = one_step_on(mesh, optim.SGD)
    late = torch.nn.Parameter(_on(mesh, Replicate()))
    optimizer.add_param_group({"params": [late]})
    late.grad = _on(mesh, Replicate())
    optimizer.step()
    assert not optimizer.state
    for group in optimizer.param_groups:
        group["momentum"] = 0.9
    optimizer.step()
    optimizer.step()
    for x in (parameter, late):
        assert optimizer.state[x]["momentum_buffer"].spec is x.spec


def test_a_gradient_that_comes_late_makes_distributed_state(mesh):
    parameters = [torch.nn.Parameter(_on(mesh, Shard(0))) for _ in range(2)]
    optimizer = optim.AdamW(parameters, foreach=True)
    for step in range(4):
        for parameter in parameters[: 1 + (step == 2)]:
            parameter.grad = _on(mesh, Shard(0))
        optimizer.step()
    assert all(optimizer.state[x]["exp_avg"].spec is x.spec for x in parameters)
    assert optimizer.state[parameters[1]]["step"] == 2


def test_a_parameter_without_gradient_is_skipped(mesh, monkeypatch):
    parameters = [torch.nn.Parameter(_on(mesh, Shard(0))) for _ in range(2)]
    optimizer = optim.AdamW(parameters, lr=0.1)
    for absent in (False, False, False, True, False):
        for parameter in parameters:
            parameter.grad = _on(mesh, Shard(0))
        if absent:
            parameters[0].grad, before = None, parameters[0].full_tensor().detach().clone()
        with interceptions(monkeypatch) as seen:
            optimizer.step()
        if absent:
            assert seen == []
            assert torch.equal(parameters[0].full_tensor(), before)
    assert [int(optimizer.state[x]["step"]) for x in parameters] == [4, 5]


def test_a_sparse_gradient_is_refused_as_ever(mesh):
    parameter = torch.nn.Parameter(_on(mesh, Shard(0), torch.ones(4, 2)))
    optimizer = optim.AdamW([parameter], lr=0.1)
    for _ in range(3):
        parameter.grad = _on(mesh, Shard(0), torch.ones(4, 2))
        optimizer.step()
    parameter.grad, before = None, parameter.full_tensor().detach().clone()
    torch.nn.functional.embedding(torch.tensor([1]), parameter.to_local(), sparse=True).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert type(parameter) is TorchDTensor
    assert torch.equal(parameter.full_tensor(), before)


def test_options_may_change_between_steps(mesh):
    results = []
    for kind in (optim.SGD, intercepted(optim.SGD)):
        parameter, optimizer = one_step_on(mesh, kind, momentum=0.9)
        for change in ({}, {}, {"nesterov": True}, {"momentum": 0.5}, {"momentum": 0, "nesterov": False}, {"lr": 0.3}):
            optimizer.param_groups[0].update(change)
            optimizer.step()
        results.append(parameter.full_tensor())
    assert torch.equal(*results)


def _load_state(optimizer, parameters):
    optimizer.load_state_dict(optimizer.state_dict())


def _replace_a_parameter(optimizer, parameters):
    """By one of the same layout, at the same position, without state."""
    parameters[1] = torch.nn.Parameter(_on(parameters[1].device_mesh, Shard(0), torch.arange(4.0)))
    optimizer.param_groups[0]["params"][1] = parameters[1]


def _replace_data(optimizer, parameters):
    parameters[1].data = _on(parameters[1].device_mesh, Shard(0), torch.arange(4.0))


def _remove_a_state(optimizer, parameters):
    del optimizer.state[parameters[1]]


def _reverse_the_states(optimizer, parameters):
    state = dict(reversed(optimizer.state.items()))
    optimizer.state.clear()
    optimizer.state.update(state)


def _exchange_parameters(optimizer, parameters):
    optimizer.param_groups[0]["params"].reverse()


def _add_a_group_on_another_mesh(optimizer, parameters):
    other = init_device_mesh("cpu", (1, 1), platform=parameters[0].device_mesh.platform)
    late = distribute_tensor(torch.ones(4), other, [Shard(0), Replicate()], src_data_rank=None)
    parameters.append(torch.nn.Parameter(late))
    optimizer.add_param_group({"params": [parameters[-1]], "lr": 0.5})


CHANGES = [
    _load_state,
    _replace_a_parameter,
    _replace_data,
    _remove_a_state,
    _reverse_the_states,
    _exchange_parameters,
    _add_a_group_on_another_mesh,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda x: x.__name__[1:])
@pytest.mark.parametrize(("kind", "flags"), [(optim.AdamW, {"fused": True}), (optim.SGD, {"momentum": 0.9})])
@pytest.mark.parametrize("read", [False, True], ids=["gradients plain", "gradients read"])
def test_steps_after_a_change_are_bit_for_bit_those_intercepted(mesh, monkeypatch, change, kind, flags, read):
    results = []
    for each in (kind, intercepted(kind)):
        parameters = [torch.nn.Parameter(_on(mesh, Shard(0), torch.arange(4.0) + i)) for i in range(3)]
        optimizer = each(parameters, lr=0.1, **flags)
        for step in range(6):
            if step == 3:
                change(optimizer, parameters)
            for i, x in enumerate(parameters):
                x.grad = None
                (x * x * (step + i)).sum().backward()
                assert not read or type(x.grad) is TorchDTensor
            with interceptions(monkeypatch) as seen:
                optimizer.step()
        assert (seen == []) == (each is kind), "the last step is planned again"
        assert all(type(value) is TorchDTensor for x in parameters for value in _moments(optimizer, x))
        results.append(torch.stack([y.full_tensor() for x in parameters for y in (x, *_moments(optimizer, x))]))
    assert torch.equal(*results)


def _moments(optimizer, parameter):
    return [value for name, value in optimizer.state[parameter].items() if name != "step"]


def test_a_parameter_that_moves_to_a_group_with_momentum_gets_distributed_state(mesh):
    results = []
    for kind in (optim.SGD, intercepted(optim.SGD)):
        first, second, third = parameters = [torch.nn.Parameter(_on(mesh, Shard(0))) for _ in range(3)]
        optimizer = kind([{"params": [first], "momentum": 0.9}, {"params": [second, third]}], lr=0.1)
        for step in range(5):
            if step == 2:
                # The order of all parameters stays.
                optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(0))
            for x in parameters:
                x.grad = _on(mesh, Shard(0))
            optimizer.step()
        assert type(optimizer.state[second]["momentum_buffer"]) is TorchDTensor
        results.append(torch.stack([x.full_tensor() for x in parameters]))
    assert torch.equal(*results)


def test_plain_parameters_beside_dtensors(mesh, monkeypatch):
    plain, distributed = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(_on(mesh, Shard(0)))
    optimizer = optim.AdamW([{"params": [plain]}, {"params": [distributed]}], lr=0.1)
    for _ in range(3):
        plain.grad, distributed.grad = torch.ones(4), _on(mesh, Shard(0))
        with interceptions(monkeypatch) as seen:
            optimizer.step()
    assert seen == []
    assert torch.equal(distributed.full_tensor(), plain)
    assert type(optimizer.state[plain]["exp_avg"]) is torch.Tensor
    assert type(optimizer.state[distributed]["exp_avg"]) is TorchDTensor


def test_a_plain_parameter_with_empty_state_beside_dtensors(mesh):
    plain, distributed = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(_on(mesh, Shard(0)))
    optimizer = optim.AdamW([plain, distributed], lr=0.1)
    assert optimizer.state[plain] == {}
    for _ in range(3):
        distributed.grad = _on(mesh, Shard(0))
        optimizer.step()
    assert torch.equal(plain, torch.ones(4))
    for _ in range(3):
        distributed.grad, plain.grad = None, torch.ones(4)
        optimizer.step()
    assert torch.equal(distributed.full_tensor(), plain)


def test_another_subclass_beside_dtensors_still_intercepts_its_operations(mesh):
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs or {})

    watched = torch.ones(3).as_subclass(Watched).requires_grad_()
    optimizer = optim.SGD([*parameters_on(mesh), watched], lr=0.1, foreach=False)
    for step in range(3):
        accumulate(optimizer.param_groups[0]["params"][:-1], step)
        watched.grad = torch.ones(3)
        seen.clear()
        optimizer.step()
        assert "add_" in seen


def test_schedulers_take_part(mesh, monkeypatch):
    _, optimizer = one_step_on(mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        with interceptions(monkeypatch) as seen:
            optimizer.step()
        scheduler.step()
    assert seen == []
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_learning_rate_that_is_a_tensor(mesh, monkeypatch):
    parameter, optimizer = one_step_on(mesh)
    other, expected = one_step_on(mesh)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    expected.param_groups[0]["lr"] = 0.25
    with interceptions(monkeypatch) as seen:
        optimizer.step()
    expected.step()
    assert seen == []
    torch.testing.assert_close(parameter.full_tensor(), other.full_tensor(), rtol=1e-6, atol=0)  # 1 - lr * decay


def test_a_learning_rate_that_is_a_tensor_in_one_group_only(mesh, monkeypatch):
    parameters = parameters_on(mesh)
    groups = [{"params": parameters[:2], "lr": 1}, {"params": parameters[2:], "lr": torch.tensor(0.25)}]
    optimizer = optim.SGD(groups, momentum=0.9, foreach=False)
    expected = [x.detach().full_tensor() for x in parameters]
    moments = [torch.zeros_like(x) for x in expected]
    for seed in (1, 2, 3):
        optimizer.zero_grad()
        accumulate(parameters, seed)
        for i, x in enumerate(parameters):
            moments[i] = 0.9 * moments[i] + x.grad.full_tensor()
            expected[i] = expected[i] - (1 if i < 2 else 0.25) * moments[i]
        with interceptions(monkeypatch) as seen:
            optimizer.step()
        optimizer.param_groups[1]["lr"] = torch.tensor(0.25)  # another object of the same value
    assert seen == []
    torch.testing.assert_close([x.detach().full_tensor() for x in parameters], expected)


def test_a_differentiable_step_is_intercepted(mesh, monkeypatch):
    parameter = torch.nn.Parameter(_on(mesh, Shard(0)))
    optimizer = optim.SGD([parameter], lr=0.1, differentiable=True)
    parameter.grad = _on(mesh, Shard(0))
    with interceptions(monkeypatch) as seen, contextlib.suppress(RuntimeError):  # a leaf written in place
        optimizer.step()
    assert seen != []


def test_replaced_state_is_freed(mesh):
    parameter, optimizer = one_step_on(mesh)
    old = weakref.ref(optimizer.state[parameter]["exp_avg"])
    optimizer.state[parameter]["exp_avg"] = _on(mesh, Shard(0))
    assert old() is None


def test_optimizers_of_plain_tensors_are_left_alone():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = optim.AdamW([parameter])
    parameter.grad = torch.ones(4)
    arguments = []
    optimizer.register_step_pre_hook(lambda _, args, kwargs: arguments.append(args))
    optimizer.step()
    assert arguments == [(optimizer,)]
    assert "_local_step" not in vars(optimizer)
