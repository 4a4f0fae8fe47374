"""Models built without data, sharded, and materialised shard by shard."""

from __future__ import annotations

import gc
import re
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
from small_model import TwoLayers, loss_of, make_data

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    get_platform,
    init_empty_weights,
    init_on_device,
    init_parameters,
    materialize,
    nn,
    replicate_like,
    shard_module,
)
from hp_dtensor.exceptions import CapabilityError, MetaTensorError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.init import Distribution, Normal, meta_tensors
from hp_dtensor.testing import run_ranks

PLAN = ShardingPlan({"up.weight": (Shard(0),), "up.bias": (Shard(0),), "down.weight": (Shard(1),)})
NAMES = ["down.bias", "down.weight", "up.bias", "up.weight"]


def _initializer(name: str, shape: tuple[int, ...]) -> Distribution:
    return Normal(0.5, mean=float(len(name)))


@pytest.fixture
def meta_platform(hp_platform: Platform) -> Platform:
    try:
        with hp_platform.default_device("meta"):
            return hp_platform
    except CapabilityError:
        pytest.skip(f"{hp_platform.name} has no tensors without data")


def test_a_device_that_a_platform_lacks_is_refused_by_name(hp_platform: Platform) -> None:
    if hp_platform.name == "torch":
        pytest.skip("torch refuses devices itself")
    refusal = rf"platform '{hp_platform.name}' cannot make tensors on 'abacus'"
    with pytest.raises(CapabilityError, match=refusal), init_on_device("abacus", hp_platform):
        pass


def _mesh(platform: Platform) -> DeviceMesh:
    return DeviceMesh("cpu", (3,), mesh_dim_names=("tp",), platform=platform)


def _values(platform: Platform, module: Any) -> dict[str, np.ndarray]:
    return {
        name: platform.to_numpy(p.full_tensor() if isinstance(p, DTensor) else p)
        for name, p in platform.named_parameters(module)
    }


def _from_meta(platform: Platform) -> tuple[dict[str, np.ndarray], list[float]]:
    with nn.building(platform), init_empty_weights(platform):
        model = TwoLayers()
    assert sorted(meta_tensors(model)) == NAMES
    shard_module(model, _mesh(platform), PLAN)
    assert sorted(meta_tensors(model)) == NAMES
    with pytest.raises(MetaTensorError, match=r"have no data: .*up\.weight.*materialize"):
        init_parameters(model, _initializer, seed=3)
    assert materialize(model) is model
    init_parameters(model, _initializer, seed=3)
    x, weight = make_data(platform)
    output = model(distribute_tensor(x, _mesh(platform)))
    loss = loss_of(platform, output, replicate_like(weight, output)).full_tensor()
    platform.backward(loss)
    grads = [float(platform.to_numpy(platform.get_grad(p).full_tensor()).sum()) for p in (model.up.weight,)]
    return _values(platform, model), grads


def test_values_are_those_of_a_model_built_unsharded(meta_platform: Platform) -> None:
    with nn.building(meta_platform):
        full = TwoLayers()
    init_parameters(full, _initializer, seed=3)
    expected = _values(meta_platform, full)
    x, weight = make_data(meta_platform)
    meta_platform.backward(loss_of(meta_platform, full(x), weight))
    grad = meta_platform.to_numpy(meta_platform.get_grad(full.up.weight)).sum()
    for values, grads in run_ranks(_from_meta, 3, meta_platform, meta_platform):
        assert values.keys() == expected.keys()
        for name, value in values.items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
        assert grads[0] == pytest.approx(grad, rel=1e-4)


def from_meta_on_a_real_rank(name: str) -> tuple[dict[str, np.ndarray], list[float]]:
    return _from_meta(get_platform(name))


def test_values_on_real_ranks_are_those_of_simulated_ones(meta_platform: Platform, rank_pool: Any) -> None:
    """Tensors without data are not broadcast."""
    if meta_platform.name != "torch":
        pytest.skip("which rank broadcasts what is the same code on every platform")
    expected, _ = run_ranks(_from_meta, 3, meta_platform, meta_platform)[0]
    for values, _ in rank_pool(3).run("test_init:from_meta_on_a_real_rank", meta_platform.name):
        for name, value in values.items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


def _large(platform: Platform, size: int) -> tuple[int, list[int]]:
    """Peak bytes of host arrays while values are drawn, and the elements of every tensor that got memory."""
    made: list[int] = []
    mesh = DeviceMesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"), platform=platform)
    with nn.building(platform), init_empty_weights(platform):
        model = nn.Linear(size, size)
    shard_module(model, mesh, ShardingPlan({"weight": (Shard(0), Shard(1))}))
    empty = platform.empty

    def counted(shape: Any, dtype: Any, device: Any = None) -> Any:
        made.append(int(np.prod(shape)))
        return empty(shape, dtype, device)

    platform.empty = counted  # type: ignore[method-assign]
    try:
        materialize(model)
    finally:
        platform.empty = empty  # type: ignore[method-assign]
    tracemalloc.start()
    init_parameters(model, _initializer, seed=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, made


def test_no_rank_ever_holds_a_full_parameter(meta_platform: Platform) -> None:
    size = 1024
    for peak, made in run_ranks(_large, 8, meta_platform, meta_platform, size):
        assert made == [size * size // 8]
        assert peak < size * size * 4 / 2


class _WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.parameter((2,))
        self.register_buffer("table", self.ops.zeros((3,), self.platform.dtype("float32")))


def test_buffers_need_to_be_made(meta_platform: Platform) -> None:
    if meta_platform.name != "torch":
        pytest.skip("buffers have data there: only parameters are made without")
    with nn.building(meta_platform), init_on_device("meta", meta_platform):
        model = _WithBuffer()
    with pytest.raises(MetaTensorError, match="does not know their values: table"):
        materialize(model)
    with pytest.raises(MetaTensorError, match=re.escape("buffer table: expected shape [3], got [2]")):
        materialize(model, buffers=lambda name, shape, dtype: meta_platform.from_numpy(np.zeros(2, np.float32)))
    assert meta_tensors(model) == ["weight", "table"]
    materialize(model, buffers=lambda name, shape, dtype: meta_platform.from_numpy(np.arange(3, dtype=np.float32)))
    assert meta_tensors(model) == []
    assert meta_platform.to_numpy(model.table).tolist() == [0.0, 1.0, 2.0]


def test_a_shared_parameter_stays_one(meta_platform: Platform) -> None:
    with nn.building(meta_platform), init_empty_weights(meta_platform):
        model = TwoLayers()
        meta_platform.set_parameter(model.down, "weight", model.up.weight)
    materialize(model)
    assert model.down.weight is model.up.weight


def test_the_device_is_the_own_one_again_after_the_block(meta_platform: Platform) -> None:
    with pytest.raises(KeyError), init_empty_weights(meta_platform):
        raise KeyError
    with nn.building(meta_platform):
        assert meta_tensors(TwoLayers()) == []
    placed = distribute_tensor(meta_platform.zeros((2,), meta_platform.dtype("float32")), _alone(meta_platform))
    assert placed.placements == (Replicate(),)


def _alone(platform: Platform) -> DeviceMesh:
    return DeviceMesh("cpu", (1,), mesh_dim_names=("dp",), platform=platform)


def test_values_for_a_model_keep_nothing_of_it_alive(hp_platform: Platform) -> None:
    """Neither the model nor a class for each of its modules stays in a cache of the process."""
    with nn.building(hp_platform):
        models = [TwoLayers(), TwoLayers()]
    for model in models:
        init_parameters(model, _initializer, seed=0)
    assert len({type(model) for model in models}) == 1
    references = [weakref.ref(model) for model in models]
    del model, models
    gc.collect()
    assert [reference() for reference in references] == [None, None]
