"""torch's optimizers on DTensors give what they give on plain tensors."""

from __future__ import annotations

import copy

import pytest
import torch

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.exceptions import MixedOperandsError, ShardingRuleError
from hp_dtensor.spec.placements import Partial, Replicate, Shard, StridedShard
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_dtensor.testing import run_ranks

SHAPES = [(5, 3), (4,), (2, 2, 3), (1,)]
PLACEMENTS = [Shard(0), Replicate(), Shard(2), Shard(0)]

OPTIMIZERS = {
    "adamw": lambda p, **kwargs: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, **kwargs),
    "sgd": lambda p, **kwargs: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **kwargs),
    "adam": lambda p, **kwargs: torch.optim.Adam(p, lr=0.1, amsgrad=True, **kwargs),
}
FLAVOURS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def _values(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _train(parameters, optimizer, grads_of):
    for step in range(1, 4):
        for parameter, grad in zip(parameters, grads_of(step), strict=True):
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return parameters


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps(name, flavour):
    plain = [torch.nn.Parameter(x) for x in _values(0)]
    expected = _train(plain, OPTIMIZERS[name](plain, **FLAVOURS[flavour]), _values)

    def run():
        mesh = init_device_mesh("cpu", (2,))

        def spread(tensors):
            return [
                distribute_tensor(x, mesh, [placement], src_data_rank=None)
                for x, placement in zip(tensors, PLACEMENTS, strict=True)
            ]

        parameters = [torch.nn.Parameter(x) for x in spread(_values(0))]
        optimizer = OPTIMIZERS[name](parameters, **FLAVOURS[flavour])
        trained = _train(parameters, optimizer, lambda step: spread(_values(step)))
        shapes = [
            state.local_shape == parameter.local_shape
            for parameter in parameters
            for state in optimizer.state[parameter].values()
            if isinstance(state, torch.Tensor) and state.dim()
        ]
        return [x.full_tensor().detach() for x in trained], all(shapes)

    for got, states_are_sharded in run_ranks(run, 2, "torch"):
        assert states_are_sharded
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y.detach(), rtol=1e-6, atol=1e-7)  # fused kernels round vector tails apart


def test_an_optimizer_continues_from_its_state(platform):
    mesh = init_device_mesh("cpu", (1,), platform=platform)
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None))

    def step(p, optimizer):
        (p * p).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = torch.optim.AdamW([parameter], lr=0.1, foreach=True)
    step(parameter, optimizer)
    twin = copy.deepcopy(parameter)
    other = torch.optim.AdamW([twin], lr=0.3, foreach=True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(parameter, optimizer)
    step(twin, other)
    assert torch.equal(parameter.full_tensor(), twin.full_tensor())


@pytest.fixture
def mesh(platform):
    return init_device_mesh("cpu", (1,), platform=platform)


def _on(mesh, placement, unsharded=None):
    return distribute_tensor(torch.ones(4) if unsharded is None else unsharded, mesh, [placement], src_data_rank=None)


def test_lists_of_other_placements_are_refused(mesh):
    with pytest.raises(MixedOperandsError, match=r"_foreach_add_ .* tensor 1: .*S\(0\).* and .*R\)"):
        torch._foreach_add_([_on(mesh, Shard(0))] * 2, [_on(mesh, Shard(0)), _on(mesh, Replicate())])
    with pytest.raises(MixedOperandsError, match=r"tensor 0: .*S\(0\).* and a plain tensor"):
        torch._foreach_mul_([_on(mesh, Shard(0))], [torch.ones(4)])


def test_lists_with_partial_tensors_stay_partial_where_the_operation_is_linear(mesh):
    partial, sharded = _on(mesh, Partial()), _on(mesh, Shard(0))
    added = torch._foreach_add([partial, sharded], [partial, sharded])
    assert [x.placements for x in added] == [(Partial(),), (Shard(0),)]
    (root,) = torch._foreach_sqrt([partial])
    assert root.tolist() == [1.0] * 4
    with pytest.raises(ShardingRuleError, match="_fused_adam_: tensor 0 is partial"):
        torch._fused_adam_(
            *[[partial]] * 6, lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=0.1, amsgrad=False, maximize=False
        )


def test_numbers_for_lists_that_differ_by_rank_are_refused(mesh):
    x, number = [_on(mesh, Shard(0))], torch.tensor(2.0)
    for call in (
        lambda: torch._foreach_div_(x, _on(mesh, Partial(), number)),
        lambda: torch._foreach_add(x, x, alpha=_on(mesh, Partial(), number)),
        lambda: torch._foreach_mul(x, _on(mesh, Replicate(), number).requires_grad_()),
    ):
        with pytest.raises(ShardingRuleError, match=r"_foreach_.*: a number that is partial or requires a gradient"):
            call()
    torch._foreach_mul_(x, _on(mesh, Replicate(), number).requires_grad_().detach())
    assert x[0].tolist() == [2.0] * 4


def test_reductions_of_lists_are_those_of_whole_tensors():
    values = [torch.arange(-6.0, 4.0).reshape(5, 2), torch.tensor([3.0, -4.0])]

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        lists = [distribute_tensor(values[0], mesh, [Shard(0)]), distribute_tensor(values[1], mesh)]
        for reduce in (
            torch._foreach_norm,
            lambda x: torch._foreach_norm(x, float("inf")),
            lambda x: torch._foreach_norm(x, ord=1, dtype=torch.float64),
            lambda x: torch._foreach_norm(x, 1, torch.float64),
            torch._foreach_max,
        ):
            torch.testing.assert_close([x.full_tensor() for x in reduce(lists)], list(reduce(values)))
        if not hasattr(torch, "_foreach_powsum"):  # torch 2.11
            return
        squares = [x.full_tensor() for x in torch._foreach_powsum(lists, 2)]
        torch.testing.assert_close(squares, [x.square().sum() for x in values])

    run_ranks(rank, 2, "torch")


@pytest.mark.parametrize("foreach", [None, False, True])
def test_clipping_of_torch_has_the_norm_of_the_full_tensor(mesh, foreach):
    parameter = torch.nn.Parameter(_on(mesh, Shard(0)))
    parameter.grad = _on(mesh, Shard(0))
    unsharded = parameter.grad.full_tensor().clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0, foreach=foreach)
    torch.testing.assert_close(norm.full_tensor(), unsharded.norm())
    torch.testing.assert_close(parameter.grad.full_tensor(), unsharded / (unsharded.norm() + 1e-6))


def test_lists_of_results_are_dtensors(mesh):
    roots = torch._foreach_sqrt([_on(mesh, Shard(0), torch.full((4,), 4.0)), _on(mesh, Replicate())])
    assert [x.placements for x in roots] == [(Shard(0),), (Replicate(),)]
    assert roots[0].tolist() == [2.0] * 4


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.AdamW, torch.optim.SGD])
def test_strided_parameters_are_clipped_and_trained(optimizer):
    """Row and column statistics of the gradient come back to the strided shards."""

    def train(parameter, distribute):
        steps = optimizer([parameter], lr=0.1)
        for step in range(1, 4):
            steps.zero_grad()
            (
                parameter * distribute(torch.randn(7, 4, generator=torch.Generator().manual_seed(step)))
            ).square().sum().backward()
            torch.nn.utils.clip_grad_norm_([parameter], 0.5)
            steps.step()
        return parameter.detach()

    unsharded = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    expected = train(torch.nn.Parameter(unsharded.clone()), lambda x: x)

    def run():
        mesh = init_device_mesh("cpu", (2, 2))
        parameter = torch.nn.Parameter(distribute_tensor(unsharded, mesh, [StridedShard(0, 2), Shard(0)]))
        return train(parameter, lambda x: distribute_tensor(x, mesh)).full_tensor()

    for trained in run_ranks(run, 4, "torch"):
        torch.testing.assert_close(trained, expected)
