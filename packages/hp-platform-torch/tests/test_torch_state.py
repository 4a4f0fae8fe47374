"""DTensor parameters in torch's own state dicts and files."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from hp_dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    init_device_mesh,
    shard_module,
)
from hp_dtensor.testing import run_ranks


def _model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def _sharded(seed, placement=None):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    place = (placement or Shard(0),)
    plan = {name: place for name, _ in _model(seed).named_parameters()}
    return shard_module(_model(seed), mesh, ShardingPlan(plan))


def test_a_state_dict_goes_into_a_module_placed_in_another_way():
    def run():
        source, target = _sharded(0), _sharded(1, Replicate())
        state = source.state_dict()
        assert all(isinstance(x, DTensor) for x in state.values())
        target.load_state_dict(state)
        assert [p.placements for p in target.parameters()] == [(Replicate(),)] * 4
        return [
            torch.equal(p.full_tensor(), q) for p, q in zip(target.parameters(), _model(0).parameters(), strict=True)
        ]

    assert run_ranks(run, 2, "torch") == [[True] * 4] * 2


def test_an_assigned_state_dict_keeps_its_own_placements():
    def run():
        target = _sharded(1, Replicate())
        target.load_state_dict(_sharded(0).state_dict(), assign=True)
        return [p.placements for p in target.parameters()], isinstance(target[0].weight, nn.Parameter)

    assert run_ranks(run, 2, "torch") == [([(Shard(0),)] * 4, True)] * 2


def test_a_plain_state_dict_is_refused_with_the_way_out():
    def run():
        with pytest.raises(RuntimeError, match=r"(?s)0\.weight.*distribute") as refusal:
            _sharded(0).load_state_dict(_model(1).state_dict())
        return str(refusal.value)

    message = run_ranks(run, 2, "torch")[0]
    assert "2.weight" not in message
    assert "A state dict of full tensors goes into a module by hp_fsdp.set_model_state_dict(module, state" in message


def test_saving_a_dtensor_is_refused_with_the_way_out(tmp_path):
    def run():
        buffer = io.BytesIO()
        way_out = r"Save a checkpoint \(on torch, torch.distributed.checkpoint accepts it\), or its full_tensor\(\)"
        with pytest.raises(TypeError, match=way_out):
            torch.save(_sharded(0).state_dict(), buffer)

    run_ranks(run, 2, "torch")


def test_comparisons_of_whole_tensors():
    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        full = torch.arange(5.0)
        x = distribute_tensor(full, mesh, [Shard(0)])
        y = distribute_tensor(full, mesh, [Replicate()])
        z = distribute_tensor(torch.tensor([0.0, 1, 2, 3, 5]), mesh, [Shard(0)])
        return torch.equal(x, y), torch.equal(x, z), torch.allclose(x, y), torch.allclose(x, z), (x == z).all().item()

    assert run_ranks(run, 2, "torch") == [(True, False, True, False, False)] * 2


def test_a_partial_result_prints_what_it_is():
    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return repr(distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]).sum())

    assert run_ranks(run, 2, "torch") == [
        "DTensor([], torch.float32, (tp:P(sum)) on mesh (tp=2), local=tensor(3.))",
        "DTensor([], torch.float32, (tp:P(sum)) on mesh (tp=2), local=tensor(7.))",
    ]
    assert Partial() == Partial("sum")
