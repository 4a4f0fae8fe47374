"""torch's own modules on the meta device: no tensor with data is larger than a shard until the end."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hp_dtensor import (
    DeviceMesh,
    Replicate,
    Shard,
    ShardingPlan,
    TensorSpec,
    distribute_tensor,
    init_device_mesh,
    init_empty_weights,
    init_parameters,
    materialize,
    shard_module,
)
from hp_dtensor.redistribute import collectives, plan_between
from hp_dtensor.tensor.init import Normal
from hp_dtensor.testing import run_ranks


class _Largest(TorchDispatchMode):
    """The most elements that any tensor with data had that an operation gave."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                self.numel = max(self.numel, x.numel())
        return result


def test_a_torch_module_gets_its_shards_only():
    def run():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        with _Largest() as seen:
            with init_empty_weights("torch"):
                model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64, dtype=torch.bfloat16))
            plan = {"0.weight": (Shard(0),), "0.bias": (Shard(0),), "2.weight": (Shard(1),)}
            shard_module(model, mesh, ShardingPlan(plan))
            materialize(model)
            init_parameters(model, lambda name, shape: Normal(0.02), seed=1)
        assert model[2].weight.dtype == torch.bfloat16
        return seen.numel, model[0].weight.full_tensor()

    results = run_ranks(run, 4, "torch")
    assert [numel for numel, _ in results] == [64 * 128 // 4] * 4
    assert all(torch.equal(full, results[0][1]) for _, full in results)
    assert results[0][1].std().item() > 0.018


def test_another_mesh_gets_no_data():
    def run():
        x = distribute_tensor(torch.empty(4, 3, device="meta"), init_device_mesh("cpu", (2,)), [Shard(0)])
        local = x.redistribute(DeviceMesh("cpu", (2,), ranks=(1, 0)), [Shard(1)]).to_local()
        return local.is_meta, tuple(local.shape)

    assert run_ranks(run, 2, "torch") == [(True, (4, 1)), (True, (4, 2))]


def test_a_rank_outside_the_mesh_has_no_data_either():
    def run():
        source, target = (DeviceMesh("cpu", (2,), ranks=ranks) for ranks in ((0, 1), (1, 2)))
        x = distribute_tensor(torch.empty(5, 3, device="meta"), source, [Shard(0)]).requires_grad_()
        y = x.redistribute(target, [Shard(1)]).to_local()
        y.sum().backward()
        return y.is_meta, tuple(y.shape), x.grad.to_local().is_meta, tuple(x.grad.to_local().shape)

    expected = [(True, (0, 0), True, (3, 3)), (True, (5, 2), True, (2, 3)), (True, (5, 1), True, (0, 0))]
    assert run_ranks(run, 3, "torch") == expected


def test_redistributions_without_data_are_recorded():
    def run():
        mesh = init_device_mesh("cpu", (2,))
        other = DeviceMesh("cpu", (2,), ranks=(1, 0))
        full = torch.empty(5, 3, device="meta")
        found = []
        for source, device_mesh, target, options in (
            ([Shard(0)], mesh, [Replicate()], {}),
            ([Replicate()], mesh, [Shard(1)], {}),
            ([Shard(0)], mesh, [Shard(1)], {"backward_dtype": torch.bfloat16}),
            ([Shard(0)], other, [Shard(1)], {}),
        ):
            x = distribute_tensor(full, mesh, source).requires_grad_()
            y = x.redistribute(device_mesh, target, **options)
            (2 * y.to_local()).sum().backward()
            local = x.grad.to_local()
            found.append((y.requires_grad, x.grad.placements == x.placements, local.is_meta, tuple(local.shape)))
        with torch.no_grad():
            found.append(x.redistribute(mesh, [Replicate()]).requires_grad)
        return found

    assert run_ranks(run, 2, "torch") == [
        [*((True, True, True, shape) for shape in ((n, 3), (5, 3), (n, 3), (n, 3))), False] for n in (3, 2)
    ]


def test_a_batch_keeps_devices_apart():
    """Meshes of two kinds of devices have the same ranks."""

    def run():
        mesh = init_device_mesh("cpu", (2,))
        sharded, full = (TensorSpec(mesh, [placement], (4,), torch.float32) for placement in (Shard(0), Replicate()))
        (step,) = plan_between(sharded, full, 4).steps
        tensors = [torch.empty(2, device=device) for device in ("cpu", "meta", "cpu")]
        return list(collectives._buckets(dict.fromkeys(range(3), step), tensors, collectives.BUCKET_BYTES))

    assert run_ranks(run, 2, "torch") == [[[1], [0, 2]]] * 2
