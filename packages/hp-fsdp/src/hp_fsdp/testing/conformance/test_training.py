"""Training under `fully_shard` equals training on one device, on simulated ranks and on two real ones.

Pass `test_storage` first, then the case `default`, which only gathers and reduces, then the policies. Each rank has
other samples. The reference is the same model on one device with the samples of all ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_dtensor.comm.mesh import DeviceMesh, init_device_mesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    set_model_state_dict,
)
from hp_fsdp.memory import memory_use
from hp_fsdp.plugins import get_storage

Tensor = Any
DIM, STEPS, RATE = 5, 3, 0.1


class Block(nn.Module):
    """Weights of 7 and 5 rows, a bias, and a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 7, bias=True)
        self.down = nn.Linear(7, DIM)
        self.unused = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.add(x, self.down(self.ops.silu(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.RMSNorm(DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def build(platform: Platform) -> Any:
    """Return the model with the same values on every rank."""
    with nn.building(platform):
        model = Net()
    for number, (_, parameter) in enumerate(platform.named_parameters(model)):
        array = np.random.default_rng(number).uniform(-0.5, 0.5, tuple(parameter.shape)).astype(np.float32)
        platform.copy_(platform.detach(parameter), platform.from_numpy(array))
    return model


def loss_of(platform: Platform, model: Any, rank: int, step: int, micro: int = 0) -> Tensor:
    """Return a scalar loss of the samples of one rank."""
    ids = np.random.default_rng(100 * rank + 10 * step + micro).integers(0, 6, (2, 3))
    out, ops = model(platform.from_numpy(ids)), platform.ops
    return ops.mean(ops.square(ops.cast(out, platform.dtype("float32"))))


def update(platform: Platform, model: Any) -> None:
    """Descend, shard by shard, and clear the gradients."""
    for _, parameter in platform.named_parameters(model):
        grad = platform.get_grad(parameter)
        if grad is not None:
            x, step = (platform.unwrap(t) if isinstance(t, DTensor) else platform.detach(t) for t in (parameter, grad))
            with platform.no_grad():
                platform.copy_(x, platform.ops.sub(x, platform.ops.mul(step, RATE)))
            platform.set_grad(parameter, None)


def full(platform: Platform, x: Tensor) -> np.ndarray:
    unsharded = x.full_tensor() if isinstance(x, DTensor) else x
    return np.array(platform.to_numpy(platform.detach(unsharded)), np.float32)


def reference(platform: Platform, num_ranks: int, micros: int = 1) -> dict[str, np.ndarray]:
    """Return the weights after training on one device with the samples of all ranks."""
    model = build(platform)
    for step in range(STEPS):
        for micro in range(micros):
            for rank in range(num_ranks):
                # `fully_shard` averages over ranks and sums over micro-batches.
                loss = loss_of(platform, model, rank, step, micro)
                platform.backward(platform.ops.div(loss, num_ranks))
        update(platform, model)
    return {name: full(platform, x) for name, x in platform.named_parameters(model)}


def sharded(platform: Platform, mesh: DeviceMesh, **options: Any) -> Any:
    model = build(platform)
    for block in model.blocks:
        fully_shard(block, mesh, **options)
    fully_shard(model, mesh, **options)
    return model


def train(name: str | Platform, shape: tuple[int, ...], options: dict[str, Any], micros: int = 1) -> dict[str, Any]:
    """Train on this rank, and return the full weights."""
    platform = get_platform(name)
    axes = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(platform.device_types[0], shape, mesh_dim_names=axes, platform=platform)
    model, rank = sharded(platform, mesh, **options), current_world(platform).rank
    for step in range(STEPS):
        for micro in range(micros):
            model.set_requires_gradient_sync(micro == micros - 1)
            platform.backward(loss_of(platform, model, rank, step, micro))
        for path, parameter in platform.named_parameters(model):
            assert (platform.get_grad(parameter) is None) == ("unused" in path), path
        update(platform, model)
    return {path: full(platform, x) for path, x in platform.named_parameters(model)}


def assert_trained(found: list[dict[str, Any]], expected: dict[str, np.ndarray], tolerance: float = 2e-5) -> None:
    for weights in found:
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(weights[name], value, atol=tolerance, err_msg=name)


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "default": ((2,), {}),
    "uneven": ((3,), {}),
    "more ranks than rows": ((6,), {}),
    "retained after forward": ((2,), {"reshard_after_forward": False}),
    "replicas": ((2, 2), {}),
    "offloaded": ((2,), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_device(hp_platform: Platform, case: str) -> None:
    """Values, gathers, reductions and updates over several steps. Offload may be refused with a CapabilityError."""
    shape, options = CASES[case]
    size = int(np.prod(shape))
    try:
        found = run_ranks(train, size, hp_platform, hp_platform, shape, options)
    except CapabilityError:
        assert case == "offloaded"
        return
    assert_trained(found, reference(hp_platform, size))


def test_accumulated_gradients_are_reduced_once(hp_platform: Platform) -> None:
    """`add_` and `part` of the storage: micro-batches before the last one add to the flat gradient buffer."""
    assert_trained(run_ranks(train, 2, hp_platform, hp_platform, (2,), {}, 2), reference(hp_platform, 2, 2))


@pytest.mark.parametrize(
    "dtype", [pytest.param(name, marks=pytest.mark.dtypes(name)) for name in ("float16", "bfloat16")]
)
def test_mixed_precision_is_close_to_full_precision(hp_platform: Platform, dtype: str) -> None:
    """Parameters stay float32 and are gathered in a lower dtype. `check_dtype` refuses one that is not supported."""
    try:
        get_storage(hp_platform).check_dtype(hp_platform.dtype(dtype))
    except CapabilityError:
        return
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype="float32")
    found = run_ranks(train, 2, hp_platform, hp_platform, (2,), {"mp_policy": policy})
    # Three steps of products of numbers below one, with a rounding of 2 ** -8 in bfloat16.
    assert_trained(found, reference(hp_platform, 2), tolerance=2e-2)


@pytest.mark.real_ranks
def test_training_in_real_processes_equals_one_device(hp_platform: Platform, rank_pool: Any) -> None:
    """Left out with --hp-ranks=simulated, which a platform without `connect` passes."""
    found = rank_pool(2).run(train, hp_platform.name, (2,), {})
    assert_trained(found, reference(hp_platform, 2))


def gathered_bytes(platform: Platform) -> list[int]:
    mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=platform)
    model = sharded(platform, mesh)
    loss = loss_of(platform, model, mesh.get_local_rank(), 0)
    after_forward = memory_use(model).full
    platform.backward(loss)
    return [after_forward, memory_use(model).full]


def test_gathered_parameters_are_freed(hp_platform: Platform) -> None:
    """After a backward each rank holds its shards alone, if `release` frees memory."""
    for after_forward, after_backward in run_ranks(gathered_bytes, 2, hp_platform, hp_platform):
        if get_storage(hp_platform).frees_memory:
            # The root's own parameters stay gathered for backward.
            assert after_backward == 0 < after_forward


def restored(platform: Platform) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return full weights, and those of another model that has loaded them."""
    mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=platform)
    model, other = sharded(platform, mesh), sharded(platform, mesh)
    platform.backward(loss_of(platform, model, mesh.get_local_rank(), 0))
    update(platform, model)
    options = StateDictOptions(full_state_dict=True)
    saved = get_model_state_dict(model, options=options)
    set_model_state_dict(other, saved, options=options)
    return tuple({path: full(platform, x) for path, x in platform.named_parameters(m)} for m in (model, other))  # type: ignore[return-value]


def test_state_dicts_hold_full_values_and_load(hp_platform: Platform) -> None:
    """Writes into parameters from outside: the next forward gathers the loaded values."""
    for trained, loaded in run_ranks(restored, 2, hp_platform, hp_platform):
        assert_trained([loaded], trained, tolerance=0)
