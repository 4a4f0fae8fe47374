"""Prefetch, limits of buffers in flight, and resharding to fewer ranks: when gathers run, and how much is held."""

from __future__ import annotations

import numpy
import pytest
from fsdp_training import (
    DIM,
    Block,
    Case,
    build,
    held_bytes,
    loss_of,
    mesh_of,
    micro_loss,
    shard,
    sharded,
    sharded_modules,
    step,
)

from hp_dtensor.comm.process_group import DONE, ProcessGroup, record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.offload import ActivationOffload
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    Communication,
    FullyShardError,
    MemoryMeter,
    MixedPrecisionPolicy,
    fully_shard,
    get_storage,
    memory_use,
)


class Ordered(nn.Module):
    """Calls its blocks in a given order."""

    def __init__(self, num_blocks):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])

    def forward(self, x, order):
        for index in order:
            x = self.blocks[index](x)
        return x


def ordered(platform, num_blocks):
    with nn.building(platform):
        model = Ordered(num_blocks)
    for block in model.blocks:
        fully_shard(block, mesh_of(platform, 2))
    return fully_shard(model, mesh_of(platform, 2)), platform.from_numpy(numpy.ones((2, DIM), numpy.float32))


def count_held(platform, model, seen):
    """Record how many inner groups are unsharded whenever a block computes."""
    for block in model.blocks:
        platform.add_forward_hook(block.out, lambda *_: seen.append(sum(size > 0 for size in held_bytes(model)[1:])))


def test_gathers_when_the_order_of_calls_changes(hp_platform):
    """There is one unnecessary gather when the order changes. The next pass follows the new order."""

    def rank():
        model, x = ordered(hp_platform, 4)
        seen = []
        count_held(hp_platform, model, seen)
        gathers = []
        for order in [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3), (0, 2, 3), (3, 2, 0), (3, 2, 0)]:
            with record_collectives() as log:
                loss = hp_platform.ops.sum(model(x, order))
            gathers.append(log.count("all_gather") - len(order))
            hp_platform.backward(loss)
            assert held_bytes(model) == [0] * 5
            for index, block in enumerate(model.blocks):
                for name, parameter in hp_platform.named_parameters(block):
                    is_used = index in order and "unused" not in name
                    assert (hp_platform.get_grad(parameter) is not None) == is_used
                for _, parameter in hp_platform.named_parameters(block):
                    hp_platform.set_grad(parameter, None)
        assert gathers == [0, 0, 1, 0, 1, 0]
        assert max(seen) == 2

    run_ranks(rank, 2, hp_platform)


@pytest.mark.usefixtures("torch_suffices")
def test_forwards_that_take_turns_gather_ahead_each_in_its_own_order(hp_platform):
    """Orders have names: without them each forward would follow the order of the previous one."""

    def rank(named):
        model, x = ordered(hp_platform, 4)
        gathers = []
        for order in [(0, 1), (2, 3)] * 3:
            if named:
                model.set_prefetch_order(order[0])
            seen = []
            count_held(hp_platform, model, seen)
            with record_collectives() as log:
                loss = hp_platform.ops.sum(model(x, order))
            gathers.append((log.count("all_gather") - len(order), max(seen)))
            hp_platform.backward(loss)
        return gathers

    # The first forward of a name knows no order, so that one group at a time is unsharded; later ones gather one ahead.
    assert run_ranks(rank, 2, hp_platform, True) == [[(0, 1), (0, 1), (0, 2), (0, 2), (0, 2), (0, 2)]] * 2
    assert all((0, 2) not in gathers for gathers in run_ranks(rank, 2, hp_platform, False))


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_as_many_groups_are_gathered_ahead_as_asked_for(hp_platform, depth):
    def rank():
        model, x = ordered(hp_platform, 5)
        model.set_buffers_in_flight(gathered_ahead=depth)
        hp_platform.backward(hp_platform.ops.sum(model(x, range(5))))
        forward, backward = [], []
        count_held(hp_platform, model, forward)

        def note(module, args, kwargs, output):
            output.register_hook(lambda grad: backward.append(sum(size > 0 for size in held_bytes(model)[1:])))

        for block in model.blocks:
            hp_platform.add_forward_hook(block.up, note)
        hp_platform.backward(hp_platform.ops.sum(model(x, range(5))))
        assert forward == [min(1 + depth, 5 - index) for index in range(5)]
        assert backward == [min(1 + depth, 1 + index) for index in reversed(range(5))]

    run_ranks(rank, 2, hp_platform)


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize("limit", [1, 2])
def test_full_gradient_buffers_are_as_many_as_allowed(hp_platform, limit):
    case = Case((2,), num_blocks=4)

    def rank():
        model = sharded(hp_platform, case)
        model.set_buffers_in_flight(gradients=limit)
        block = max(4 * b.layout.numel for each in model.blocks for b in each._fsdp.group.buffers)
        seen = []

        def note():
            buffers = [b for module in sharded_modules(model) for b in module._fsdp.group.buffers]
            use = memory_use(model)
            shards = sum(4 * b.layout.shard_numel for b in buffers)
            seen.append((use.full_gradients, shards))

        for module in sharded_modules(model):
            for buffer in module._fsdp.group.buffers:
                buffer.on_allocation = note
        step(hp_platform, model, case)
        shards = seen[0][1]
        most = max(held for held, _ in seen)
        # Beside them only reduced shards.
        assert (limit - 1) * block < most <= limit * block + shards

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gathered_ahead": -1, "gradients": 0},
            "gathered_ahead: expected a number from 0, got -1; gradients: .* from 1",
        ),
        ({"gathered_ahead": 1.5}, "got 1.5"),
    ],
)
def test_limits_that_are_none(hp_platform, options, message):
    model = fully_shard(build(hp_platform, Case((1,))), mesh_of(hp_platform, 1))
    with pytest.raises(FullyShardError, match=message):
        model.set_buffers_in_flight(**options)


def test_peak_memory_is_the_shards_two_groups_and_one_gradient_buffer(hp_platform):
    """The README states this bound. It is tight."""
    case = Case((4,), num_blocks=6)

    def rank():
        model = sharded(hp_platform, case)
        for index in range(3):
            with MemoryMeter(model) as meter:
                step(hp_platform, model, case, index)
            sizes = [sum(4 * b.layout.numel for b in m._fsdp.group.buffers) for m in sharded_modules(model)]
            root, largest = sizes[0], max(sizes[1:])
            sharded_state = 2 * memory_use(model).shards
            assert meter.peak <= sharded_state + root + 2 * largest + max(root, largest)
            assert meter.peak >= memory_use(model).shards + root + 2 * largest
            rest = memory_use(model)
            assert (rest.full, rest.full_gradients) == (0, 0)
            for _, parameter in hp_platform.named_parameters(model):
                hp_platform.set_grad(parameter, None)
        assert memory_use(model).total == memory_use(model).shards

    run_ranks(rank, 4, hp_platform)


# Resharding to fewer ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [False, True])
def test_a_few_neighbours_keep_the_parameters_for_backward(torch_or, hp_platform, low):
    """Each rank retains half of the bytes of a group, and backward gathers from the neighbour only."""
    torch_or(low)
    policy = {"param_dtype": "float16", "output_dtype": "float32"} if low else {}
    case = Case((4,), num_blocks=2, reshard_after_forward=2, policy=policy)

    def rank():
        model = sharded(hp_platform, case)
        itemsize = 2 if low else 4
        full = [itemsize * b.layout.numel for m in sharded_modules(model) for b in m._fsdp.group.buffers]
        for index in range(2):
            loss = loss_of(hp_platform, model, case, index)
            assert held_bytes(model) == [size // 2 for size in full]
            with record_collectives() as log:
                hp_platform.backward(loss)
            gathers = [record for record in log.records if record.name == "all_gather"]
            neighbours = (0, 1) if current_world(hp_platform).rank < 2 else (2, 3)
            assert {record.group for record in gathers} == {neighbours}
            assert sorted(record.wire_bytes for record in gathers) == sorted(size // 2 for size in full)
            assert held_bytes(model) == [0] * 3
        loss_of(hp_platform, model, case)
        # What a forward without a backward has left unsharded is not used by the next.
        with record_collectives() as log:
            loss_of(hp_platform, model, case)
        assert {record.group for record in log.records} == {(0, 1, 2, 3)}

    run_ranks(rank, 4, hp_platform)


@pytest.mark.parametrize(("wanted", "expected"), [(1, False), (4, True), (2, 2), (None, None)])
def test_all_ranks_mean_true_and_one_rank_false(hp_platform, wanted, expected):
    def rank():
        model = fully_shard(build(hp_platform, Case((4,))), mesh_of(hp_platform, 4), reshard_after_forward=wanted)
        assert model._fsdp.group.settings.reshard_after_forward is expected
        model.set_reshard_after_forward(2)
        assert model._fsdp.group.settings.reshard_after_forward == 2
        with pytest.raises(FullyShardError, match=r"group Net: reshard_after_forward=3 .* expected one of 1, 2, 4"):
            model.set_reshard_after_forward(3)

    run_ranks(rank, 4, hp_platform)


@pytest.mark.parametrize(("wanted", "message"), [(2, "expected one of 1, 3, or a bool"), ("2", "a number of ranks")])
def test_groups_into_which_the_shard_axis_does_not_fall(hp_platform, wanted, message):
    def rank():
        with pytest.raises(FullyShardError, match=message):
            fully_shard(build(hp_platform, Case((3,))), mesh_of(hp_platform, 3), reshard_after_forward=wanted)

    run_ranks(rank, 3, hp_platform)


def test_accumulated_gradients_are_freed_as_the_last_backward_goes(hp_platform):
    num_blocks = 5

    def rank():
        model, x = ordered(hp_platform, num_blocks)
        found = []

        class Samples(MemoryMeter):
            def _sample(self):
                found.append(memory_use(model).full_gradients)

        model.set_requires_gradient_sync(False)
        hp_platform.backward(hp_platform.ops.sum(model(x, range(num_blocks))))
        everything = memory_use(model).full_gradients
        model.set_requires_gradient_sync(True)
        loss = hp_platform.ops.sum(model(x, range(num_blocks)))
        with Samples(model):
            hp_platform.backward(loss)
        one = everything / num_blocks
        assert one > 0
        # At the last block's reduction: its gradients, and of the others no more than the reduced halves.
        assert found[-1] <= one + num_blocks * one / 2
        assert memory_use(model).full_gradients == 0

    run_ranks(rank, 2, hp_platform)


def test_gathered_weights_are_not_offloaded_with_activations(hp_platform, monkeypatch):
    """Their memory is freed and refilled anyway: a copy on the host would be useless."""
    if hp_platform.name != "torch":
        pytest.skip("elsewhere each tensor is copied by itself, without the memory around it")
    kind, copied = type(hp_platform.host_copies()), []
    to_host = kind.to_host
    monkeypatch.setattr(kind, "to_host", lambda self, x: (copied.append(x.nbytes), to_host(self, x))[1])

    def rank():
        model, _ = ordered(hp_platform, 3)
        y = hp_platform.from_numpy(numpy.ones((64, DIM), numpy.float32))
        hp_platform.set_requires_grad(y, True)
        offload = ActivationOffload(hp_platform, smallest=1)
        for block in model.blocks:
            y = offload(lambda x, block=block: block(x), y)
        hp_platform.backward(hp_platform.ops.sum(y))
        return {4 * buffer.layout.numel for block in model.blocks for buffer in block._fsdp.group.buffers}

    gathered = run_ranks(rank, 2, hp_platform)[0]
    assert copied
    assert not gathered & set(copied)


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
        monkeypatch.setattr(storage, "write", self._counted_write(storage, storage.write))

    def _counted_write(self, storage, write):
        """Count a write as its copies and zeros, by whatever operations a platform does them."""

        def counted(buffer, places, tensors):
            names = self._running.pop(self._rank, None)
            write(buffer, places, tensors)
            if names is not None:
                self._running[self._rank] = names
                for (start, numel, _), x in zip(places, tensors, strict=True):
                    names.append("zero_" if x is None else "copy_")
                    self.targets.extend([] if x is None else [storage.part(buffer, start, (numel,))])

        return counted

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
