"""The state that optimizers say they keep against what they keep."""

from __future__ import annotations

import math

import pytest
from planned_runs import config_of, shape_of

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.parallel import nn
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.testing import run_ranks
from hp_fsdp import PlannedParameter, fully_shard, plan_group
from hp_trainer.planning import memory
from hp_trainer.planning.shapes import stage_buffers
from hp_trainer.plugins import registries

SHAPES = {"embed.weight": (64, 72), "0.weight": (8, 8), "0.bias": (8,), "experts": (2, 8, 4)}


def _kept(name):
    """Return the bytes of each parameter's state on this rank."""
    platform = get_platform()
    with nn.building(platform):
        model = nn.Module()
        parameters = {path: model.parameter(shape) for path, shape in SHAPES.items()}
        for index, parameter in enumerate(parameters.values()):
            setattr(model, f"p{index}", parameter)
    fully_shard(model, init_device_mesh("cpu", (2,)))
    named = dict(zip(SHAPES, (getattr(model, f"p{index}") for index in range(len(SHAPES))), strict=True))
    entry = registries().optimizers.get(name, platform.name)
    optimizer = entry.build(list(named.items()), _options(name), platform)
    if hasattr(optimizer, "state_bytes"):
        # Its state is made when it is asked for; it keeps less.
        one = {path: entry.build([(path, x)], _options(name), platform) for path, x in named.items()}
        return {path: each.state_bytes(platform) for path, each in one.items()}
    return {path: sum(_bytes(platform, each) for each in slots.values()) for path, slots in optimizer.state().items()}


def _options(name):
    return registries().optimizers.options(name)()


def _bytes(platform, tensor):
    local = local_of(platform, tensor)
    return math.prod(local.shape) * platform.itemsize(local.dtype)


@pytest.mark.parametrize("name", registries().optimizers.names())
def test_state_is_as_large_as_the_options_say(platform, name: str) -> None:
    (buffer,) = plan_group([PlannedParameter(path, shape) for path, shape in SHAPES.items()], num_shards=2)
    options, held = _options(name), buffer.largest_local_numels()
    expected = {path: options.state_bytes(path, shape, held[path], 4) for path, shape in SHAPES.items()}
    found = run_ranks(_kept, 2, platform, name)
    assert expected in found


def test_a_plan_has_three_buckets_of_the_parameters_at_a_place_of_a_pipeline(monkeypatch):
    monkeypatch.setattr(memory, "BUCKET_ELEMENTS", 1)
    config = config_of(model__num_hidden_layers=4, parallel__pp=2, training__offload_optimizer="true")
    shape = shape_of(config, 2)
    for parts in [stage_buffers(shape, rank) for rank in range(shape.dims.pp)]:
        sizes = [8 * math.prod(each.shape) for buffer in parts.buffers for each in buffer.parameters]
        state, _ = memory.optimizer_bytes(shape, parts)
        assert state == sum(sizes)
        plans = memory._GatheredForStep(shape, parts).moments()
        (update,) = [plan for plan in plans if plan.moment == "the update"]
        assert update.optimizer == pytest.approx(max(sum(sizes[i : i + 3]) for i in range(len(sizes))))
