"""Shards on the host: what is copied when, with host and device told apart by the test, as both are CPU memory here."""

from __future__ import annotations

import contextlib

import numpy
import pytest
from fsdp_training import AdamW, Case, build, micro_loss, shard, sharded_modules, whole

from hp_dtensor.mesh import init_device_mesh
from hp_dtensor.testing.simulated import run_ranks
from hp_dtensor.world import current_world
from hp_fsdp import CPUOffloadPolicy, FullyShardError, fully_shard, get_storage, summon_full_params

CASES = {
    "fsdp": Case((2,), num_blocks=2),
    "hsdp, accumulated": Case((2, 2), num_blocks=1, accumulate=2, sync="last"),
    "mixed precision": Case((2,), num_blocks=1, policy={"param_dtype": "float16", "reduce_dtype": "float32"}),
    "one rank": Case((1,), num_blocks=1),
}


class Counter:
    """A device whose memory is not the host's, in place of a storage's functions."""

    def __init__(self, storage):
        self.storage, self.log = storage, []
        self.is_beside = False

    def is_host(self, device_type):
        return False

    def check_offload(self, device_type):
        pass

    def host_buffer(self, numel, dtype, pin_memory):
        self.log.append(("host buffer", numel, pin_memory))
        return self.storage.platform.zeros((numel,), dtype)

    @contextlib.contextmanager
    def beside_computation(self):
        self.is_beside = True
        yield
        self.is_beside = False

    def to_device(self, target, host):
        self.log.append(("to device", target.shape[0], self.is_beside))
        self.storage.platform.copy_(target, host)

    def to_host(self, host, source):
        self.log.append(("to host", source.shape[0], None))
        counter = self

        class Late:
            def wait(self):
                counter.log.append(("waited", source.shape[0], None))
                counter.storage.platform.copy_(host, source)

        return Late()


@pytest.fixture
def counter(hp_platform, monkeypatch):
    storage = get_storage(hp_platform)
    counter = Counter(storage)
    for name in ("is_host", "check_offload", "host_buffer", "beside_computation", "to_device", "to_host"):
        monkeypatch.setattr(storage, name, getattr(counter, name), raising=True)
    return counter


def _train(platform, case, policy, counter=None):
    names = ("shard",) if len(case.mesh) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=names, platform=platform)
    used = Case(**{**vars(case), "options": {"offload_policy": policy}})
    model = shard(build(platform, used), mesh, used)
    step, rank = AdamW(platform), current_world(platform).rank
    for index in range(2):
        current_world(platform).all.barrier()
        if counter is not None:
            counter.log.clear()
        current_world(platform).all.barrier()
        for micro in range(case.accumulate):
            model.set_requires_gradient_sync(case.sync == "every" or micro == case.accumulate - 1)
            platform.backward(micro_loss(platform, model, case, rank, index, micro))
        current_world(platform).all.barrier()
        log = list(counter.log) if counter is not None else []
        current_world(platform).all.barrier()
        step(model)
    buffers = [b for module in sharded_modules(model) for b in module._fsdp.group.buffers]
    sizes = [b.layout.shard_numel for b in buffers]
    return {name: whole(platform, p) for name, p in platform.named_parameters(model)}, log, sizes


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_the_same_and_each_gather_and_reduction_copies_once(hp_platform, counter, name):
    case = CASES[name]
    expected = run_ranks(_train, case.size, hp_platform, hp_platform, case, None)[0][0]
    results = run_ranks(_train, case.size, hp_platform, hp_platform, case, CPUOffloadPolicy(pin_memory=True), counter)
    weights, log, sizes = results[0]
    for key, value in expected.items():
        numpy.testing.assert_array_equal(weights[key], value, err_msg=key)
    by_kind = {kind: [entry for entry in log if entry[0] == kind] for kind in ("to device", "to host", "host buffer")}
    assert sorted(n for _, n, _ in by_kind["to host"]) == sorted(sizes * case.size)
    assert all(pinned for *_, pinned in by_kind["host buffer"])
    # No copy to the host is waited for before all have begun: per rank, one batch of copies, one batch of waits.
    kinds = "".join({"to host": "c", "waited": "w"}.get(kind, "") for kind, *_ in log)
    assert kinds == ("c" * len(sizes) + "w" * len(sizes)) * case.size
    # Blocks are gathered for forward and backward, the root once; one rank's shard is copied into place directly.
    gathers = case.accumulate * (2 * (len(sizes) - 1) + 1) if case.mesh[-1] > 1 else 0
    assert len(by_kind["to device"]) == gathers * case.size
    assert all(beside for *_, beside in by_kind["to device"])


def test_where_the_device_is_the_host_nothing_is_copied(hp_platform, monkeypatch):
    storage = get_storage(hp_platform)
    for name in ("host_buffer", "to_device", "to_host"):
        monkeypatch.setattr(storage, name, lambda *args: pytest.fail("copied"))
    run_ranks(_train, 2, hp_platform, hp_platform, CASES["fsdp"], CPUOffloadPolicy())


def test_whole_parameters_are_gathered_from_the_host(hp_platform, counter):
    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), platform=hp_platform)
        model = fully_shard(build(hp_platform, CASES["fsdp"]), mesh, offload_policy=CPUOffloadPolicy())
        expected = whole(hp_platform, model.embed.weight)
        with summon_full_params(model):
            shown = hp_platform.to_numpy(hp_platform.ops.clone(hp_platform.detach(model.embed.weight)))
            numpy.testing.assert_array_equal(shown, expected)

    run_ranks(rank, 2, hp_platform)


def test_what_cannot_be_offloaded_is_refused(hp_platform):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",), platform=hp_platform)
    model = build(hp_platform, CASES["fsdp"])
    with pytest.raises(FullyShardError, match="expected zero_stage=3"):
        fully_shard(model, mesh, offload_policy=CPUOffloadPolicy(), zero_stage=2)
    with pytest.raises(FullyShardError, match="expected a CPUOffloadPolicy or None, got bool"):
        fully_shard(model, mesh, offload_policy=True)
