"""ZeRO stages 0 to 3: what is gathered and reduced when, what is held, and that no parameter is ever stale."""

from __future__ import annotations

import numpy
import pytest
from fsdp_training import Case, build, full_value, held_bytes, loss_of, mesh_of, sharded, sharded_modules, step

from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.spec.placements import Replicate
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import FullyShardError, HSDPModule, fully_shard, get_storage


def change(platform, parameter, only_rank=None):
    """Add 1 to this rank's shard in memory, which no framework counts."""
    local = platform.unwrap(parameter)
    if only_rank not in (None, current_world(platform).rank) or 0 in tuple(local.shape):
        return
    if platform.name == "torch":
        memory = local.detach().numpy()  # torch does not count what is written there
        memory += 1
    else:
        platform.copy_(local, platform.from_numpy(platform.to_numpy(local) + numpy.float32(1)))


NUM_GROUPS = 3
# Stage: (gathers, reductions) of three micro-batches of which the last reduces, then of a fourth that reduces.
COLLECTIVES = {
    0: ((0, 0, NUM_GROUPS), (0, 0, NUM_GROUPS)),
    1: ((NUM_GROUPS, NUM_GROUPS, 0), (0, NUM_GROUPS, 0)),
    2: ((NUM_GROUPS, 3 * NUM_GROUPS, 0), (0, NUM_GROUPS, 0)),
    3: ((3 * 5, NUM_GROUPS, 0), (5, NUM_GROUPS, 0)),
}


@pytest.mark.parametrize("stage", COLLECTIVES)
def test_collectives_and_memory_of_each_stage(hp_platform, stage):
    """Full parameters are gathered once per change; full gradients that accumulate are reduced once."""
    case = Case((2,), options={"zero_stage": stage})

    def rank():
        model = sharded(hp_platform, case)
        assert isinstance(model, HSDPModule)
        of_steps = []
        for syncs in [(False, False, True), (True,)]:
            with record_collectives() as log:
                for sync in syncs:
                    model.set_requires_gradient_sync(sync)
                    step(hp_platform, model, case)
            of_steps.append((log.count("all_gather"), log.count("reduce_scatter"), log.count("all_reduce")))
        assert tuple(of_steps) == COLLECTIVES[stage]
        buffers = [module._fsdp.group.buffers for module in sharded_modules(model)]
        full = [4 * sum(buffer.layout.numel for buffer in group) for group in buffers]
        assert held_bytes(model) == (full if stage in (1, 2) else [0] * NUM_GROUPS)
        if stage == 0:
            assert all(p.placements == (Replicate(),) for _, p in hp_platform.named_parameters(model))

    run_ranks(rank, 2, hp_platform)


def test_gradients_that_accumulate_in_stage_2_are_never_unsharded(hp_platform):
    def held_gradients(stage):
        case = Case((2,), options={"zero_stage": stage})
        model = sharded(hp_platform, case)
        model.set_requires_gradient_sync(False)
        step(hp_platform, model, case)
        buffers = [buffer for module in sharded_modules(model) for buffer in module._fsdp.group.buffers]
        full_numel = sum(buffer.layout.numel for buffer in buffers if buffer.gradients.unreduced is not None)
        assert all(hp_platform.get_grad(p) is None for _, p in hp_platform.named_parameters(model))
        return full_numel / sum(buffer.layout.numel for buffer in buffers)

    assert run_ranks(held_gradients, 2, hp_platform, 1) == [1.0, 1.0]
    assert run_ranks(held_gradients, 2, hp_platform, 2) == [0.0, 0.0]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("only_rank", [None, 1])
def test_parameters_changed_behind_the_back_are_never_stale(hp_platform, stage, only_rank, low):
    """They are changed between two forwards, on all ranks or on one. Only their group is gathered again."""
    policy = {"param_dtype": "float16", "output_dtype": "float32"} if low else {}
    case = Case((2,), options={"zero_stage": stage}, policy=policy)

    def rank():
        if stage == 0 and only_rank is not None:
            return  # a replica that alone changes is no replica any more
        model, plain = sharded(hp_platform, case), build(hp_platform, case)
        loss_of(hp_platform, model, case)
        with record_collectives() as log:
            held = loss_of(hp_platform, model, case)
        assert log.count("all_gather") == 0
        for _, parameter in hp_platform.named_parameters(model.blocks[1]):
            change(hp_platform, parameter, only_rank)
        with record_collectives() as log:
            changed = loss_of(hp_platform, model, case)
        assert log.count("all_gather") == (1 if stage > 0 else 0)
        for name, parameter in hp_platform.named_parameters(model):
            value = hp_platform.from_numpy(full_value(hp_platform, parameter))
            hp_platform.copy_(dict(hp_platform.named_parameters(plain))[name], value)
        expected = loss_of(hp_platform, plain, case)
        numpy.testing.assert_allclose(
            hp_platform.to_numpy(changed), hp_platform.to_numpy(expected), rtol=2e-3 if low else 1e-6
        )
        assert abs(float(hp_platform.to_numpy(changed)) - float(hp_platform.to_numpy(held))) > 1e-2

    run_ranks(rank, 2, hp_platform)


def test_what_operations_have_written_is_not_compared(hp_platform, monkeypatch):
    """There is no wait for the device after an optimizer's step, and one if no write is known."""
    storage, compared = get_storage(hp_platform), []
    monkeypatch.setattr(storage, "differ", lambda pairs: compared.append(len(pairs)) or [False] * len(pairs))
    case = Case((1,), options={"zero_stage": 1}, policy={"param_dtype": "float16", "output_dtype": "float32"})

    def rank():
        model = sharded(hp_platform, case)
        loss_of(hp_platform, model, case)
        step(hp_platform, model, case)
        for _, parameter in hp_platform.named_parameters(model):
            hp_platform.copy_(parameter, hp_platform.zeros(hp_platform.local_shape(parameter), parameter.dtype))
        before = len(compared)
        loss_of(hp_platform, model, case)
        loss_of(hp_platform, model, case)
        return compared[before:]

    assert run_ranks(rank, 1, hp_platform) == [[0, NUM_GROUPS]]


def test_a_block_called_on_its_own_sees_changed_parameters(hp_platform):
    case = Case((2,), options={"zero_stage": 1})

    def rank():
        model = sharded(hp_platform, case)
        step(hp_platform, model, case)
        block = model.blocks[0]
        x = hp_platform.from_numpy(numpy.ones((2, 5), numpy.float32))
        before = hp_platform.to_numpy(block(x))
        with record_collectives() as log:
            numpy.testing.assert_array_equal(hp_platform.to_numpy(block(x)), before)
        assert log.count("all_gather") == 0
        change(hp_platform, block.scale)
        assert (hp_platform.to_numpy(block(x)) != before).any()

    run_ranks(rank, 2, hp_platform)


def test_replicated_parameters_take_one_reduction_per_group(hp_platform):
    case = Case((2, 2), num_blocks=1)

    def rank():
        model = build(hp_platform, case)
        held = [model.blocks[0].norm.weight, model.blocks[0].scale]
        fully_shard(model.blocks[0], mesh_of(hp_platform, 2, 2), replicate_params=held)
        fully_shard(model, mesh_of(hp_platform, 2, 2))
        for parameter in (model.blocks[0].norm.weight, model.blocks[0].scale):
            assert parameter.placements == (Replicate(), Replicate())
        with record_collectives() as log:
            step(hp_platform, model, case)
        world_wide = [record for record in log.records if record.group == (0, 1, 2, 3)]
        assert [record.name for record in world_wide] == ["all_reduce"]

    run_ranks(rank, 4, hp_platform)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_stage": 4}, "zero_stage: expected 0, 1, 2 or 3, got 4"),
        ({"zero_stage": True}, "zero_stage: expected 0, 1, 2 or 3, got True"),
        ({"zero_stage": 2, "reshard_after_forward": True}, "zero_stage=2 retains; use zero_stage=3"),
        ({"threshold": -1, "zero_stage": "2"}, "got '2'; threshold: expected a size in KB"),
    ],
)
def test_settings_that_do_not_fit(hp_platform, options, message):
    model = build(hp_platform, Case((1,)))
    with pytest.raises(FullyShardError, match=message):
        fully_shard(model, mesh_of(hp_platform, 1), **options)
    head = [model.head.weight]
    with pytest.raises(FullyShardError, match="1 parameters are in both"):
        fully_shard(model, mesh_of(hp_platform, 1), ignored_params=head, replicate_params=head)
    fully_shard(model, mesh_of(hp_platform, 1), zero_stage=1)
    with pytest.raises(FullyShardError, match="group Net of zero_stage=1 retains its full parameters"):
        model.set_reshard_after_forward(True)
