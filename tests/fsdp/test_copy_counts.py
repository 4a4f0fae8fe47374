"""Nothing is copied on the way from shard to parameter, and each gradient is written once.

Collectives do nothing here, so that only the engine's own copies are counted.
"""

from __future__ import annotations

import numpy
import pytest
from fsdp_training import Case, build, mesh_of, micro_loss, shard, sharded_modules

from hp_dtensor.comm.process_group import DONE, ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import Communication, MixedPrecisionPolicy, fully_shard, get_storage

COPIES = ("clone", "cat", "stack", "split", "chunk", "cast", "where", "zeros_like")


class Silent(Communication):
    """Collectives that return at once; gathers must read a shard and write where its parameters are."""

    def __init__(self, platform, buffers):
        super().__init__(platform)
        self.buffers = buffers
        self.gathered = 0

    def all_gather(self, output, shard, group):
        buffer = next(buffer for buffer in self.buffers if buffer.shard is shard)
        begin = address(self.platform, output)
        assert begin != 0
        for parameter, offset in zip(buffer.parameters, buffer.layout.offsets, strict=True):
            assert address(self.platform, parameter.view) == begin + 4 * offset, parameter.name
        self.gathered += 1
        return DONE

    def reduce_scatter(self, output, gradients, group):
        return DONE

    def all_reduce(self, shard, group):
        return DONE


class Counter:
    """Records the engine's operations on full tensors on each rank: names in order, and targets of the copies."""

    def __init__(self, platform, monkeypatch):
        self._platform, self._running, self._targets = platform, {}, {}
        storage = get_storage(platform)
        for owner, name in [
            *((platform, name) for name in ("copy_", "contiguous")),
            *((storage, name) for name in ("add_", "scale_", "zero_")),
            *((platform.ops, name) for name in COPIES),
        ]:
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name, function):
        def counted(*args, **kwargs):
            if self._rank in self._running:
                self._running[self._rank].append(name)
                if name in ("copy_", "add_"):
                    self.targets.append(args[0])
            return function(*args, **kwargs)

        return counted

    @property
    def _rank(self):
        return current_world(self._platform).rank

    @property
    def targets(self):
        return self._targets[self._rank]

    def run(self, function, *args):
        """Run a function; return its result and the names of the operations on this rank."""
        names = self._running[self._rank] = []
        self._targets[self._rank] = []
        try:
            return function(*args), names
        finally:
            del self._running[self._rank]


def group_buffers(model):
    return [buffer for module in sharded_modules(model) for buffer in module._fsdp.group.buffers]


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=["sharded", "replicas of shards"])
def test_a_step_copies_nothing_but_each_gradient_once(hp_platform, monkeypatch, sizes):
    case = Case(sizes, num_blocks=3)

    def rank():
        model = shard(build(hp_platform, case), mesh_of(hp_platform, *sizes), case)
        silent = Silent(hp_platform, group_buffers(model))
        model.set_communication(silent)
        # What the model and the loss do themselves they do without sharding too.
        _, of_model = counter.run(micro_loss, hp_platform, build(hp_platform, case), case, 0, 0, 0)
        loss, names = counter.run(micro_loss, hp_platform, model, case, 0, 0, 0)
        assert names == of_model
        assert silent.gathered == 4
        _, names = counter.run(hp_platform.backward, loss)
        assert silent.gathered == 4 + 3
        used = [p for b in group_buffers(model) for p in b.parameters if "unused" not in p.name]
        assert names.count("copy_") == len({address(hp_platform, x) for x in counter.targets}) == len(used)
        # Each reduced shard is scaled once; gaps and what has no gradient are zeroed.
        assert names.count("scale_") == len(group_buffers(model))
        assert set(names) == {"copy_", "scale_", "zero_"}

    counter = Counter(hp_platform, monkeypatch)
    run_ranks(rank, int(numpy.prod(sizes)), hp_platform)


def test_accumulated_gradients_are_added_once_where_they_wait(hp_platform, monkeypatch):
    case = Case((2,))

    def rank():
        model = shard(build(hp_platform, case), mesh_of(hp_platform, 2), case)
        model.set_communication(Silent(hp_platform, group_buffers(model)))
        model.set_requires_gradient_sync(False)
        counts = []
        for _ in range(3):
            loss = micro_loss(hp_platform, model, case, 0, 0, 0)
            _, names = counter.run(hp_platform.backward, loss)
            counts.append((names.count("copy_"), names.count("add_"), names.count("scale_")))
        used = sum("unused" not in p.name for b in group_buffers(model) for p in b.parameters)
        assert counts == [(used, 0, 0), (0, used, 0), (0, used, 0)]

    counter = Counter(hp_platform, monkeypatch)
    run_ranks(rank, 2, hp_platform)


def test_mixed_precision_casts_each_shard_once_per_gather_and_each_reduced_shard_once(hp_platform, monkeypatch):
    """Only the engine casts: the input is float16 already."""
    for name in ("all_gather_into", "reduce_scatter_into"):
        monkeypatch.setattr(ProcessGroup, name, lambda self, output, x, *rest, **options: DONE)

    def rank():
        with nn.building(hp_platform):
            model = nn.Linear(3, 7)
        fully_shard(model, mesh_of(hp_platform, 2), mp_policy=MixedPrecisionPolicy("float16"))
        x = hp_platform.from_numpy(numpy.ones((1, 3), numpy.float16))
        loss, forward = counter.run(lambda: hp_platform.ops.sum(model(x)))
        _, backward = counter.run(hp_platform.backward, loss)
        assert forward.count("cast") == 1
        assert (backward.count("cast"), backward.count("copy_")) == (1, 1)

    counter = Counter(hp_platform, monkeypatch)
    run_ranks(rank, 2, hp_platform)


def address(platform, x):
    return platform.unwrap(x).data_ptr()
