"""Errors that concern several ranks: other orders, other models, collectives that fail or time out."""

from __future__ import annotations

import numpy
import pytest
from fsdp_errors import CASE, Either, check_next_step, expected_grads
from fsdp_training import (
    DIM,
    Case,
    build,
    held_bytes,
    mesh_of,
    micro_loss,
    sharded,
    step,
)

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import LaunchError, RankMismatchError
from hp_dtensor.parallel import nn
from hp_dtensor.spec.placements import Shard
from hp_dtensor.spec.rank_checks import check_mode
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    CallOrderError,
    Communication,
    CommunicationError,
    FSDPStateError,
    FullyShardError,
    MixedPrecisionPolicy,
    fully_shard,
)


def test_ranks_that_call_modules_in_different_orders_are_named(hp_platform):
    def rank():
        with nn.building(hp_platform):
            model = Either()
        for block in (model.first, model.second):
            fully_shard(block, mesh_of(hp_platform, 3))
        fully_shard(model, mesh_of(hp_platform, 3))
        x = hp_platform.from_numpy(numpy.ones((2, DIM), numpy.float32))
        with check_mode():
            hp_platform.backward(hp_platform.ops.sum(model(x, False)))
            model(x, current_world(hp_platform).rank == 1)

    with pytest.raises(LaunchError) as caught:
        run_ranks(rank, 3, hp_platform)
    cause = caught.value.__cause__
    assert isinstance(cause, CallOrderError)
    assert "ranks 0, 2 calls first (Block)" in str(cause)
    assert "rank 1 calls second (Block)" in str(cause)


class Broken(Communication):
    """Collectives of one kind never end."""

    def __init__(self, platform, kind):
        super().__init__(platform)
        self._kind = kind

    def wait(self):
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")

    def all_gather(self, output, shard, group):
        return self if self._kind == "gather" else super().all_gather(output, shard, group)

    def reduce_scatter(self, output, gradients, group):
        return self if self._kind == "reduce" else super().reduce_scatter(output, gradients, group)


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize(
    ("kind", "action"),
    [
        ("gather", "state 'gathering': could not gather parameters"),
        ("reduce", "state 'sharded': could not reduce grad"),
    ],
)
def test_a_collective_that_times_out_names_group_rank_and_state(hp_platform, kind, action):
    def rank():
        model = sharded(hp_platform, CASE)
        step(hp_platform, model, CASE)
        model.blocks[1].set_communication(Broken(hp_platform, kind))
        rank = current_world(hp_platform).rank
        where = rf"group blocks\.1 \(Block\) on rank {rank}, {action}.* with ranks \[0, 1\]: Timed out .*check_mode"
        with pytest.raises(Exception, match=where) as caught:
            step(hp_platform, model, CASE)
        error = caught.value
        while not isinstance(error, CommunicationError):
            error = error.__cause__ or error.__context__
        model.blocks[1].set_communication("default")
        model.reset()
        step(hp_platform, model, CASE)

    run_ranks(rank, 2, hp_platform)


class OutOfMemory(Communication):
    """One gather fails before it begins."""

    def __init__(self, platform, fails_at):
        super().__init__(platform)
        self._to_come = fails_at

    def all_gather(self, output, shard, group):
        self._to_come -= 1
        if self._to_come == 0:
            raise RuntimeError("no memory for this")
        return super().all_gather(output, shard, group)


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_gather_that_cannot_begin_leaves_nothing_behind(hp_platform, fails_at):
    expected = expected_grads(hp_platform)

    def rank():
        model = sharded(hp_platform, Case((2,), num_blocks=3, options={"bucket_size": 0}))
        parameters = [parameter for _, parameter in hp_platform.named_parameters(model)]
        step(hp_platform, model, CASE)
        model.blocks[1].set_communication(OutOfMemory(hp_platform, fails_at))
        with pytest.raises(CommunicationError, match=r"blocks\.1 .* could not gather .*: no memory for this"):
            step(hp_platform, model, CASE)
        assert held_bytes(model) == [0] * 4
        check_next_step(hp_platform, model, parameters, expected)

    run_ranks(rank, 2, hp_platform)


class Interrupted(Communication):
    """The first gathers fail on their way."""

    def __init__(self, platform, num_failures):
        super().__init__(platform)
        self._to_fail = num_failures

    def all_gather(self, output, shard, group):
        self._to_fail -= 1
        work = super().all_gather(output, shard, group)
        return _Lost(work) if self._to_fail >= 0 else work


class _Lost:
    def __init__(self, work):
        self._work = work

    def wait(self):
        self._work.wait()
        raise RuntimeError("connection lost")


def test_a_gather_that_has_failed_is_not_taken_for_done(hp_platform):
    """Whoever waits for it again has it begin again."""
    expected = expected_grads(hp_platform)

    def rank():
        model = sharded(hp_platform, CASE)
        parameters = [parameter for _, parameter in hp_platform.named_parameters(model)]
        step(hp_platform, model, CASE)
        model.blocks[1].set_communication(Interrupted(hp_platform, 2))
        handle = model.blocks[1].unshard(async_op=True)
        for _ in range(2):
            with pytest.raises(CommunicationError, match=r"blocks\.1 .*: connection lost"):
                handle.wait()
            assert not any(held_bytes(model))
        handle.wait()
        check_next_step(hp_platform, model, parameters, expected)

    run_ranks(rank, 2, hp_platform)


def write_uncounted(platform, module, ranks):
    """Add 1 to what these ranks hold, in memory, unseen by any framework."""
    for _, parameter in platform.named_parameters(module):
        if current_world(platform).rank in ranks and 0 not in parameter.spec.local_shape:
            memory = platform.to_numpy(platform.detach(platform.unwrap(parameter)))
            memory += 1


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize("stage", [1, 2])
def test_every_rank_notices_that_one_has_taken_a_step_without_the_gradients_that_wait(hp_platform, stage):
    """The write itself is not counted, and is on one rank only."""
    case = Case((2, 2), options={"zero_stage": stage})

    def rank():
        model = sharded(hp_platform, case)
        model.set_requires_gradient_sync(False)
        step(hp_platform, model, case)
        step(hp_platform, model, case, 1)
        write_uncounted(hp_platform, model.blocks[1], ranks=(1, 3))
        with pytest.raises(FSDPStateError, match=r"blocks\.1 \(Block\) were changed while .* by this rank or one with"):
            step(hp_platform, model, case)
        with hp_platform.no_grad():
            micro_loss(hp_platform, model, case, 0, 0, 0)
        model.reset()
        model.set_requires_gradient_sync(True)
        step(hp_platform, model, case)

    run_ranks(rank, 4, hp_platform)


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize("options", [{"zero_stage": 0}, {"zero_stage": 1}, {}], ids=str)
def test_in_check_mode_replicas_that_have_parted_are_named(hp_platform, options):
    case = Case((2, 2), options=options)

    def rank():
        model = sharded(hp_platform, case)
        with check_mode():
            step(hp_platform, model, case)
            write_uncounted(hp_platform, model.blocks[1].up, ranks=(2, 3))
            with pytest.raises(RankMismatchError) as caught:
                step(hp_platform, model, case)
        return str(caught.value)

    messages = run_ranks(rank, 4, hp_platform)
    assert all("group blocks.1 (Block): replicas differ: " in message for message in messages)
    if options.get("zero_stage") == 0:
        assert all("up.bias, up.weight on ranks 0, 1 than on ranks 2, 3. " in message for message in messages)
    else:
        assert all("up.weight on rank 0 than on rank 2" in message for message in messages)


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize(
    ("different", "reported"),
    [
        ("shape", r"fully_shard\(Linear\): ranks differ: rank 0: weight \[4, 5\].*; rank 1: weight \[3, 5\]"),
        ("more", r"ranks differ: rank 0: MixedPrecisionPolicy.*rank 1: .*bias"),
        ("frozen", r"ranks differ: rank 0: weight \[4, 5\][^;]*, frozen; rank 1"),
        ("shard dim", r"ranks differ: rank 0: .*sharded along 0; rank 1: .*sharded along 1"),
        ("shard dim of one row", r"ranks differ: rank 0: .*sharded along 0; rank 1: .*sharded along 1"),
        ("buckets", r"ranks differ: rank 0: .*bucket_size=None; rank 1: .*bucket_size=0"),
        ("dtype", r"ranks differ: rank 0: MixedPrecisionPolicy.*rank 1: MixedPrecisionPolicy"),
    ],
)
def test_ranks_that_shard_different_models_are_named(hp_platform, different, reported):
    def rank():
        mesh = mesh_of(hp_platform, 2)
        number = current_world(hp_platform).rank
        is_other = number == 1
        rows = 1 if different == "shard dim of one row" else 3 if different == "shape" and is_other else 4
        model = nn.Linear(5, rows, bias=different == "more" and is_other)
        if different == "frozen" and not is_other:
            hp_platform.set_requires_grad(model.weight, False)
        dtype = hp_platform.dtype("float16") if different == "dtype" and is_other else None
        fully_shard(
            model,
            mesh,
            shard_placement_fn=(lambda parameter: Shard(number)) if "shard dim" in different else None,
            bucket_size=0 if different == "buckets" and is_other else None,
            mp_policy=MixedPrecisionPolicy(output_dtype=dtype),
        )

    with pytest.raises(LaunchError, match=f"RankMismatchError: .*{reported}"):
        run_ranks(rank, 2, hp_platform)


def test_a_rank_outside_the_mesh_is_named(hp_platform):
    def rank():
        mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("shard",), ranks=[0, 1], platform=hp_platform)
        if current_world(hp_platform).rank == 2:
            with pytest.raises(FullyShardError, match=r"rank 2 is outside mesh \(shard=2\)"):
                fully_shard(build(hp_platform, CASE), mesh)

    run_ranks(rank, 3, hp_platform)


def test_loading_while_gradients_wait_is_noticed_on_ranks_without_a_shard(hp_platform):
    if hp_platform.name == "mindspore":
        pytest.skip("no versions of tensors without elements")

    def rank():
        with nn.building(hp_platform):
            model = nn.Linear(1, 1)
        fully_shard(model, mesh_of(hp_platform, 2))
        x = hp_platform.from_numpy(numpy.ones((2, 1), numpy.float32))
        model.set_requires_gradient_sync(False)
        hp_platform.backward(hp_platform.ops.sum(model(x)))
        model.load_state_dict({"weight": hp_platform.zeros((1, 1), hp_platform.dtype("float32"))})
        with pytest.raises(FSDPStateError, match="were changed while gradients"):
            model(x)
        return 0 in model.weight.spec.local_shape

    assert run_ranks(rank, 2, hp_platform) == [False, True]
