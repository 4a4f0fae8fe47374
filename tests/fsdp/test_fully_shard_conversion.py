"""Modules that are converted after `fully_shard`: `Module.to(dtype)`, `half`, `bfloat16`, `float`, `double`."""

from __future__ import annotations

import pytest

from hp_dtensor import ColwiseParallel, init_device_mesh, parallelize_module
from hp_dtensor.testing import run_ranks
from hp_fsdp import FSDPStateError, MixedPrecisionPolicy, fully_shard

torch = pytest.importorskip("torch")
pytest.importorskip("hp_platform_torch")

from torch import nn  # noqa: E402


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.LayerNorm(3))


def batch(step, rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def train(model, batches, dtype, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        inputs = [x.to(dtype) for x in batches(step)]
        (sum(model(x).square().sin().mean() for x in inputs) / len(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2,), {}),
        ((1,), {}),
        ((3,), {"zero_stage": 1}),
        ((2,), {"zero_stage": 0}),
        ((2, 2), {"reshard_after_forward": False}),
    ],
)
def test_a_sharded_model_is_converted_between_steps(shape, options, dtype):
    ranks = shape[0] * (shape[1] if len(shape) == 2 else 1)
    expected = build()
    train(expected, lambda step: [batch(step, rank) for rank in range(ranks)], torch.float32)
    expected.to(dtype)
    train(expected, lambda step: [batch(step, rank) for rank in range(ranks)], dtype)

    def rank():
        mesh = init_device_mesh("cpu", shape)
        model = build()
        fully_shard(model[0], mesh, **options)
        fully_shard(model, mesh, **options)
        before = dict(model.named_parameters())
        train(model, lambda step: [batch(step, mesh.world.rank)], torch.float32)
        model.to(dtype)
        train(model, lambda step: [batch(step, mesh.world.rank)], dtype)
        for name, parameter in model.named_parameters():
            assert parameter is before[name]
            assert parameter.dtype == parameter.to_local().dtype == dtype
            tolerance = 1e-5 if dtype is torch.float64 else 0.02  # float32 before; bfloat16 has 8 bits
            wanted = dict(expected.named_parameters())[name].detach()
            torch.testing.assert_close(parameter.full_tensor().detach(), wanted, rtol=tolerance, atol=tolerance)

    run_ranks(rank, ranks, "torch")


def test_the_short_names_and_back_and_empty_shards():
    def rank():
        model = build()
        fully_shard(model, init_device_mesh("cpu", (4,)))
        expected = {name: x.detach().half().float() for name, x in build().named_parameters()}
        assert model.half()(batch(0, 0).half()).dtype == torch.float16
        assert model.float()(batch(0, 0).float()).dtype == torch.float32
        model(batch(0, 0).float()).sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.full_tensor().detach(), expected[name])
            assert parameter.grad.dtype == torch.float32

    run_ranks(rank, 4, "torch")


def test_gradients_are_converted_too():
    def rank():
        model = build()
        fully_shard(model, init_device_mesh("cpu", (2,)))
        model(batch(0, 0).float()).square().sin().sum().backward()
        before = [parameter.grad.full_tensor() for parameter in model.parameters()]
        model.double()
        for parameter, grad in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), grad.double())
        model(batch(0, 0)).square().sin().sum().backward()
        for parameter, grad in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), 2 * grad.double(), rtol=1e-5, atol=1e-6)

    run_ranks(rank, 2, "torch")


def test_tensor_parallel_parameters_are_converted():
    def rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(build(), mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
        model = fully_shard(nn.Sequential(model[0]), mesh["dp"]).double()
        out = model(batch(0, 0))
        torch.testing.assert_close(out.full_tensor(), build()[0].double()(batch(0, 0)))
        out.full_tensor().sum().backward()
        assert model[0].weight.grad.dtype == torch.float64

    run_ranks(rank, 4, "torch")


def test_the_policy_goes_on():
    def rank():
        model = fully_shard(
            build(), init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy("float32", "float32")
        )
        model.double()
        assert model(batch(0, 0)).dtype == torch.float32
        model(batch(0, 0)).sum().backward()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float64}

    run_ranks(rank, 2, "torch")


def test_what_cannot_be_converted_is_told():
    def rank():
        model = fully_shard(build(), init_device_mesh("cpu", (2,)))
        model[0].double()
        with pytest.raises(
            FSDPStateError, match=r"0\.weight is torch.float64 .*Convert all parameters of a group to the same dtype"
        ):
            model(batch(0, 0).float())
        model.double()
        model(batch(0, 0)).sum().backward()
        model.set_requires_gradient_sync(False)
        model(batch(0, 0)).sum().backward()
        model.float()
        with pytest.raises(FSDPStateError, match=r"while gradients in torch\.float64 are pending for their reduction"):
            model(batch(0, 0).float())

    run_ranks(rank, 2, "torch")


@pytest.mark.parametrize("frozen", [(), (0,), (0, 2, 3)], ids=["all are trained", "one is frozen", "all are frozen"])
@pytest.mark.parametrize("runs_again", [True, False])
def test_a_backward_after_a_conversion_is_refused(frozen, runs_again):
    """Frozen parameters keep the memory of the forward until the next one."""

    def rank():
        mesh, model = init_device_mesh("cpu", (2,)), build()
        for index in frozen:
            model[index].requires_grad_(False)
        fully_shard(model[0], mesh)
        fully_shard(model, mesh)
        x = batch(0, mesh.world.rank).float().requires_grad_()
        loss = model(x).square().sin().sum()
        model.double()
        if runs_again:
            with torch.no_grad():
                model(batch(0, 0))
        if runs_again or len(frozen) < 3:
            with pytest.raises(FSDPStateError, match="converted to another dtype between a forward and its backward"):
                loss.backward()
            return
        loss.backward()
        expected = x.detach().clone().requires_grad_()
        build()(expected).square().sin().sum().backward()
        torch.testing.assert_close(x.grad, expected.grad)

    run_ranks(rank, 2, "torch")
