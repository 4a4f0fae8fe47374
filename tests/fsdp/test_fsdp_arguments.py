"""Arguments of `fully_shard`: all wrong ones are reported at once, and nothing is changed; ignored ones stay."""

from __future__ import annotations

import pytest
from fsdp_training import (
    Case,
    build,
    mesh_of,
    step,
)

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.parallel import nn
from hp_dtensor.spec.placements import Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    FSDPModule,
    FullyShardError,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)


def test_all_problems_are_reported_and_nothing_is_changed(hp_platform):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.good = self.parameter((3,))
            self.scalar = self.parameter(())
            self.count = self.parameter((3,), dtype="int32", requires_grad=False)

    with nn.building(hp_platform):
        model = Odd()
    with pytest.raises(FullyShardError) as caught:
        fully_shard(model, mesh_of(hp_platform, 1))
    assert str(caught.value).startswith("Odd, rank 0: scalar is a scalar")
    assert "count is of" in str(caught.value)
    assert not isinstance(model, FSDPModule)
    assert not isinstance(model.good, DTensor)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p, m: fully_shard(object(), m), "expected a module of platform"),
        (lambda p, m: fully_shard([], m), "at least one module"),
        (lambda p, m: fully_shard(m, "cpu"), "expected a DeviceMesh, got str"),
        (lambda p, m: fully_shard(linear(p), m, mp_policy="bf16"), "expected a MixedPrecisionPolicy, got str"),
        (
            lambda p, m: fully_shard(
                linear(p), m, mp_policy=MixedPrecisionPolicy(param_dtype="float17", reduce_dtype="int8")
            ),
            "param_dtype: expected a dtype of platform .*; reduce_dtype: expected a floating-point dtype, got 'int8'",
        ),
        (lambda p, m: fully_shard(linear(p), m, ignored_params=["weight"]), "expected parameters.* got 'weight'"),
        (
            lambda p, m: fully_shard(model := linear(p), m, replicate_params=model.weight),
            "replicate_params: expected several parameters",
        ),
        (lambda p, m: fully_shard(linear(p), m, shard_placement_fn=Shard(0)), "expected a function of a parameter"),
        (lambda p, m: linear(p, m).set_requires_gradient_sync("no"), "set_requires_gradient_sync: expected a bool"),
        (lambda p, m: linear(p, m).set_requires_all_reduce(0), "set_requires_all_reduce: expected a bool"),
        (lambda p, m: linear(p, m).set_is_last_backward(None), "set_is_last_backward: expected a bool"),
        (lambda p, m: linear(p, m).set_reshard_after_backward(1), "set_reshard_after_backward: expected a bool"),
        (
            lambda p, m: (model := linear(p, m)).set_modules_to_forward_prefetch(model),
            "set_modules_to_forward_prefetch: expected a list of modules",
        ),
        (
            lambda p, m: fully_shard(
                object(), init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"), platform=p)
            ),
            "expected 1 axis",
        ),
    ],
)
def test_wrong_arguments(hp_platform, make, message):
    with pytest.raises(FullyShardError, match=message):
        make(hp_platform, mesh_of(hp_platform, 1))


def linear(platform, mesh=None):
    """Return a linear map, sharded if there is a mesh."""
    with nn.building(platform):
        model = nn.Linear(2, 2)
    return model if mesh is None else fully_shard(model, mesh)


def test_a_module_is_sharded_once(hp_platform):
    with nn.building(hp_platform):
        model = nn.Linear(2, 2)
    fully_shard(model, mesh_of(hp_platform, 1))
    with pytest.raises(FullyShardError, match="has been through fully_shard already"):
        fully_shard(model, mesh_of(hp_platform, 1))
    with pytest.raises(FullyShardError, match="has not been through fully_shard"):
        register_fsdp_forward_method(object(), "encode")


def test_parameters_may_be_given_by_a_generator(hp_platform):
    """`module.parameters()` is one."""
    with nn.building(hp_platform):
        model = nn.Linear(2, 2, bias=True)
    fully_shard(model, mesh_of(hp_platform, 1), ignored_params=(p for p in [model.weight]))
    assert not isinstance(model.weight, DTensor)
    assert isinstance(model.bias, DTensor)


def test_ignored_parameters_stay(hp_platform):
    case = Case((2,), num_blocks=1)

    def rank():
        model = build(hp_platform, case)
        ignored = model.head.weight
        fully_shard(model, mesh_of(hp_platform, 2), ignored_params=[ignored])
        step(hp_platform, model, case)
        assert model.head.weight is ignored
        assert not isinstance(hp_platform.get_grad(ignored), DTensor)
        assert isinstance(model.embed.weight, DTensor)

    run_ranks(rank, 2, hp_platform)
