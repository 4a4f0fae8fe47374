"""Functions that tests run on real ranks; results are plain Python, every rank has other data."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.utils.flop_counter import FlopCounterMode

from hp_dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.selection import get_platform
from hp_platform_torch.comm.groups import StagedGroup, TorchGroup

PLATFORM = get_platform("torch")


def world_facts():
    world = current_world(PLATFORM)
    return world.rank, world.size, PLATFORM.world is world, world.all.ranks


def _values(dtype, count, rank):
    """Small integers, other ones on every rank, that no dtype rounds."""
    numbers = (torch.arange(count) * (rank + 2) + rank) % 5
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype)


def reduce_and_move(dtype_name, op, ranks):
    """all_reduce and reduce_scatter of the given members; None from the others."""
    world = current_world(PLATFORM)
    if world.rank not in ranks:
        return None
    group, dtype = world.group(ranks), PLATFORM.dtype(dtype_name)
    reduced = _values(dtype, 6 * group.size, group.rank)
    group.all_reduce(reduced, op)
    scattered = torch.empty(3, 2, dtype=dtype)
    group.reduce_scatter_into(scattered, _values(dtype, 6 * group.size, group.rank).view(-1, 2), op)
    return reduced.tolist(), scattered.flatten().tolist()


def expected_reduction(dtype_name, op, size):
    """What `reduce_and_move` must give, from all ranks' values at once; integers of any dtype are exact."""
    dtype = PLATFORM.dtype(dtype_name)
    rows = torch.stack([_values(dtype, 6 * size, rank) for rank in range(size)])
    if dtype == torch.bool:
        unsharded = rows.any(0) if op in ("sum", "max") else rows.all(0)
    else:
        unsharded = {
            "sum": lambda: rows.double().sum(0),
            "avg": lambda: rows.double().mean(0),
            "max": lambda: rows.double().amax(0),
            "min": lambda: rows.double().amin(0),
            "product": lambda: rows.double().prod(0),
        }[op]().to(dtype)
    return [(unsharded.tolist(), unsharded.view(size, 6)[rank].tolist()) for rank in range(size)]


def reduce_after_letting_go(count):
    """Of two reduce-scatters of one group no rank waits for the first; other collectives and sends come between."""
    group = current_world(PLATFORM).all
    rows = [torch.full((count * group.size,), float(value)) for value in (1, group.rank + 5)]
    group.reduce_scatter_into(torch.empty(count), rows[0], "sum", async_op=True)
    others = [None if j == group.rank else torch.empty(1) for j in range(group.size)]
    group.exchange([torch.full((1,), float(group.rank))] * group.size, others)
    work = group.reduce_scatter_into(torch.empty(count), rows[1], "sum", async_op=True)
    output = torch.empty(count)
    last = group.reduce_scatter_into(output, rows[1] * 2, "sum", async_op=True)
    group.all_reduce(rows[0])
    last.wait()
    work.wait()
    received = [j if x is None else x.item() for j, x in enumerate(others)]
    return output.unique().tolist(), rows[0].unique().tolist(), received


def average_of_integers():
    return _refusal_of_reduction(torch.ones(3, dtype=torch.int64), "avg")


def _refusal_of_reduction(x, op):
    try:
        current_world(PLATFORM).all.all_reduce(x, op)
    except CapabilityError as error:
        return str(error)
    return "done"


def gather(dtype_name, ranks):
    world = current_world(PLATFORM)
    if world.rank not in ranks:
        return None
    group, dtype = world.group(ranks), PLATFORM.dtype(dtype_name)
    output = torch.empty(2 * group.size, 3, dtype=dtype)
    group.all_gather_into(output, _values(dtype, 6, world.rank).view(2, 3))
    return output.flatten().tolist()


def expected_gather(dtype_name, ranks):
    dtype = PLATFORM.dtype(dtype_name)
    return torch.cat([_values(dtype, 6, rank) for rank in ranks]).tolist()


def uneven_all_to_all(dtype_name, ranks):
    """Member i sends (i + 2 j) % 3 rows of two, all equal to 10 i + j, to member j."""
    world = current_world(PLATFORM)
    if world.rank not in ranks:
        return None
    group, dtype = world.group(ranks), PLATFORM.dtype(dtype_name)
    me, all_ranks = group.rank, range(group.size)
    leaving = [(me + 2 * j) % 3 for j in all_ranks]
    arriving = [(j + 2 * me) % 3 for j in all_ranks]
    sent = torch.cat([torch.full((n, 2), 10 * me + j) for j, n in enumerate(leaving)]).to(dtype)
    received = torch.empty(sum(arriving), 2, dtype=dtype)
    group.all_to_all_into(received, sent, arriving, leaving)
    return received[:, 0].long().tolist(), [10 * j + me for j, n in enumerate(arriving) for _ in range(n)]


def exchange_ring(dtype_name):
    """Each rank sends `rank + 1` numbers to the next one, nothing to itself or backwards."""
    group, dtype = current_world(PLATFORM).all, PLATFORM.dtype(dtype_name)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sends, receives = [None] * group.size, [None] * group.size
    sends[after] = torch.full((group.rank + 1,), group.rank + 1).to(dtype)
    receives[before] = torch.zeros(before + 1).to(dtype)
    if group.size > 2:  # an empty tensor is nothing, on both sides
        sends[before], receives[after] = torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)
    group.exchange(sends, receives)
    return receives[before].long().tolist()


def broadcast(dtype_name, ranks, source):
    world = current_world(PLATFORM)
    if world.rank not in ranks:
        return None
    x = _values(PLATFORM.dtype(dtype_name), 4, world.rank)
    world.group(ranks).broadcast(x, source)
    return x.tolist()


def broadcast_strided(dtype_name):
    """Broadcasts of rank 1's values into views of other memory orders, each returned with the memory around it."""
    world = current_world(PLATFORM)
    found = []
    for view in (torch.t, lambda x: x[:, ::2], lambda x: x[1:, 1:3]):
        memory = _values(PLATFORM.dtype(dtype_name), 24, world.rank).view(4, 6)
        world.all.broadcast(view(memory), 1)
        expected = _values(memory.dtype, 24, world.rank).view(4, 6)
        view(expected).copy_(view(_values(memory.dtype, 24, 1).view(4, 6)))
        found.append(memory.tolist() == expected.tolist())
    return found


def all_reduce_strided(dtype_name, op):
    """Reductions of views of other memory orders, each returned with the memory around it."""
    group, dtype = current_world(PLATFORM).all, PLATFORM.dtype(dtype_name)
    found = []
    for view in (torch.t, lambda x: x[:, ::2], lambda x: x[1:, 1:3]):
        memory, expected = (_values(dtype, 24, group.rank).view(4, 6) for _ in range(2))
        group.all_reduce(view(memory), op)
        every = torch.stack([view(_values(dtype, 24, rank).view(4, 6)) for rank in range(group.size)])
        view(expected).copy_(every.sum(0) / (group.size if op == "avg" else 1))
        found.append(torch.allclose(memory, expected))
    return found


class _ReturnsNoWork:
    """A backend whose synchronous collectives return None, as those of NCCL since torch 2.8."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return lambda *arguments: getattr(self._backend, name)(*arguments).wait() and None


def synchronous_without_work():
    """A broadcast into a strided view, and the average of two ranks, by a backend that returns no work."""
    group, memory = current_world(PLATFORM).all, torch.full((2, 2), float(current_world(PLATFORM).rank))
    backend = group.connection("cpu")
    group._connections["cpu"] = _ReturnsNoWork(backend)
    try:
        group.broadcast(memory[:, 1], 1)
        mean = torch.tensor([float(group.rank)])
        group.all_reduce(mean, "avg")
    finally:
        group._connections["cpu"] = backend
    return memory.tolist(), mean.tolist()


def bytes_of_everyone(lengths, ranks, default_device):
    world = current_world(PLATFORM)
    if world.rank not in ranks:
        return None
    with torch.device(default_device):
        return world.group(ranks).all_gather_bytes(bytes([world.rank]) * lengths[world.rank])


def bytes_under_way(ranks):
    """The second of two is not there before the last rank has started it; a gather of tensors goes on meanwhile."""
    world = current_world(PLATFORM)
    if world.rank not in ranks:
        return None
    group = world.group(ranks)
    first = group.start_all_gather_bytes(bytes([world.rank]) * 3)
    group.barrier()
    early = None
    if group.rank == 0:
        second = group.start_all_gather_bytes(b"x")
        early = second.wait(0.01)
    gathered = torch.empty(group.size)
    group.all_gather_into(gathered, torch.tensor([float(world.rank)]))
    if group.rank != 0:
        second = group.start_all_gather_bytes(b"x")
    return first.wait(), early, second.wait(60.0), gathered.tolist()


def asynchronous():
    """Results are there after `wait`, and only a composed collective has work left for it."""
    group = current_world(PLATFORM).all
    x = torch.full((4,), float(group.rank + 1))
    scattered, gathered = torch.empty(4 // group.size), torch.empty(4 * group.size)
    average = x.clone()
    works = [
        group.all_gather_into(gathered, x, async_op=True),
        group.reduce_scatter_into(scattered, x.clone(), async_op=True),
        group.all_reduce(average, "avg", async_op=True),
    ]
    for work in works:
        work.wait()
        work.wait()
    return gathered.tolist(), scattered.tolist(), average.tolist()


def message_beside_collectives(by_torch):
    """Rank 0 sends a message before collectives, rank 1 receives it after them, through the group or through torch."""
    group = current_world(PLATFORM).all
    x, message = torch.full((2,), float(group.rank + 1)), torch.full((2,), 9.0)
    gathered, reduced, exchanged = torch.empty(4), torch.empty(1), torch.empty(2)
    other = 1 - group.rank
    if group.rank == 0:
        work = dist.isend(message, other) if by_torch else group.send(message, other, async_op=True)
    group.all_gather_into(gathered, x)
    group.reduce_scatter_into(reduced, x.clone())
    # Each rank exchanges with the other one.
    sends, receives = [None, None], [None, None]
    sends[other], receives[other] = x, exchanged
    group.exchange(sends, receives)
    if group.rank == 1:
        message.zero_()
        work = dist.irecv(message, other) if by_torch else group.receive(message, other, async_op=True)
    work.wait()
    return gathered.tolist(), reduced.tolist(), exchanged.tolist(), message.tolist()


def empty_tensors():
    group = current_world(PLATFORM).all
    nothing = torch.empty(0, 3)
    group.all_reduce(nothing)
    group.all_gather_into(torch.empty(0, 3), nothing)
    group.reduce_scatter_into(torch.empty(0, 3), nothing)
    group.all_to_all_into(torch.empty(0, 3), nothing, [0] * group.size, [0] * group.size)
    group.broadcast(nothing)
    group.barrier()
    return True


def repeated_reduction():
    """Bits of the same reduction done ten times."""
    group = current_world(PLATFORM).all
    torch.manual_seed(group.rank)
    x = torch.randn(3, 1001)
    results = set()
    for _ in range(10):
        output = torch.empty(1001 * 3 // group.size)
        group.reduce_scatter_into(output, x.clone())
        results.add(output.numpy().tobytes())
    return len(results)


def reduce_scatter_in_place(count):
    """The rows of this rank before and after, with `output` one of the rows of `x`."""
    group = current_world(PLATFORM).all
    x = _values(torch.float32, count * group.size, group.rank).view(group.size, count)
    before = x.tolist()
    group.reduce_scatter_into(x[group.rank], x)
    return before, x.tolist()


def group_of_all_is_the_default_one():
    group = current_world(PLATFORM).all
    return group.connection("cpu") is dist.group.WORLD._get_backend(torch.device("cpu"))


def die_or_wait(victim):
    """One rank vanishes; how long until another one's collective fails."""
    world = current_world(PLATFORM)
    if world.rank == victim:
        os._exit(17)
    start = time.monotonic()
    try:
        world.all.all_reduce(torch.ones(4))
    except RuntimeError as error:
        raise RuntimeError(f"failed after {time.monotonic() - start:.0f} s: {error}") from error


def wait_for_a_peer_that_hangs(given_up):
    """Rank 1 does not come before rank 0's collective has failed; how long that waited."""
    world = current_world(PLATFORM)
    world.all.barrier()
    if world.rank == 1:
        while not given_up.exists():
            time.sleep(0.05)
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        world.all.all_reduce(torch.ones(4))
    given_up.touch()
    return time.monotonic() - start


def differentiable_gather():
    """Gradients of an all-gather whose users differ per rank, through torch's autograd on real ranks."""
    from hp_dtensor.comm import collectives

    group = current_world(PLATFORM).all
    lengths = [rank + 1 for rank in range(group.size)]
    x = torch.full((group.rank + 1, 2), float(group.rank), requires_grad=True)
    unsharded = collectives.all_gather_varying(x, group, 0, lengths)
    (unsharded * (group.rank + 1)).sum().backward()
    return unsharded[:, 0].tolist(), x.grad.tolist()


def fail():
    raise ValueError("on purpose")


def complex_numbers(dtype_name):
    """Run gloo's collectives on complex numbers, some of them conjugates that are not computed yet."""
    group, dtype = current_world(PLATFORM).all, PLATFORM.dtype(dtype_name)
    unsharded = torch.complex(torch.arange(12.0), torch.arange(12.0) - 5).to(dtype).reshape(6, 2)
    mesh = DeviceMesh("cpu", (group.size,), platform=PLATFORM)
    z = distribute_tensor(unsharded, mesh, [Shard(0)]).conj()
    partial = DTensor.from_local(unsharded.conj() * group.rank, mesh, [Partial()])
    refused = [_refusal_of_reduction(unsharded.clone(), op) for op in ("avg", "max", "product")]
    results = [
        z.full_tensor(),
        z.imag.full_tensor(),
        z.redistribute(placements=[Shard(1)]).full_tensor(),
        partial.full_tensor(),
        partial.redistribute(placements=[Shard(0)]).full_tensor(),
        distribute_tensor(unsharded if group.rank == 0 else unsharded * 0, mesh, [Replicate()]).to_local(),
    ]
    return [x.tolist() for x in results], refused


def _line():
    return DeviceMesh("cpu", (current_world(PLATFORM).size,))


def zero_gradients():
    """The gradients of `sgn`, which torch gives as tensors without storage, sent by an all-gather and a reduction."""
    mesh = _line()
    found = []
    for source, target in ((Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(1))):
        w = distribute_tensor(torch.ones(4, 3), mesh, [source]).requires_grad_()
        torch.sgn(w.redistribute(placements=[target])).sum().backward()
        found.append(w.grad.full_tensor().tolist())
    return found


def communications_seen_by_torch(slow_rank):
    """The counts of torch's `CommDebugMode` in a few redistributions and their backward, and the gradient."""
    mesh = _line()
    x = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(torch.ones(3, 2), mesh, [Replicate()]).requires_grad_()
    with TorchCommDebugMode() as mode:
        if PLATFORM.world.rank == slow_rank:
            time.sleep(0.5)  # the others wait for a while
        gathered = x.redistribute(placements=[Replicate()])
        torch.tanh(x @ w).sum().backward()  # one reduction, of the gradient of `w`
        DTensor.from_local(torch.ones(4), mesh, [Partial()]).redistribute(placements=[Shard(0)])
    assert gathered.to_local().tolist() == torch.arange(12.0).reshape(4, 3).tolist()
    return {str(name): count for name, count in mode.get_comm_counts().items()}, w.grad.full_tensor().tolist()


def collectives_with_a_mode_on_one_rank():
    """A gather and a reduction of shards while rank 0 alone counts floating-point operations."""
    group, mode = current_world(PLATFORM).all, FlopCounterMode(display=False)
    gathered, reduced = torch.empty(4), torch.empty(2)
    with mode if group.rank == 0 else contextlib.nullcontext():
        group.all_gather_into(gathered, torch.full((2,), 1.0 + group.rank))
        group.reduce_scatter_into(reduced, torch.arange(4.0) * (1 + group.rank))
    return gathered.tolist(), reduced.tolist()


def staged_collectives():
    """Every collective of a group that goes by way of host memory, and of one that does not."""
    world = current_world(PLATFORM)
    return [
        _every_collective(
            kind(world.all.ranks, world.rank, PLATFORM, functools.partial(world.connect, world.all.ranks))
        )
        for kind in (StagedGroup, TorchGroup)
    ]


def _every_collective(group):
    rank, size = group.rank, group.size
    results = []

    def values(count, dtype=torch.float32):
        return _values(dtype, count, rank)

    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool):
        reduced, gathered, scattered = values(6, dtype), torch.empty(2 * size, dtype=dtype), torch.empty(2, dtype=dtype)
        group.all_reduce(reduced)
        group.all_gather_into(gathered, values(2, dtype), async_op=True).wait()
        group.reduce_scatter_into(scattered, values(2 * size, dtype))
        results += [reduced, gathered, scattered]
    message = values(3)
    group.broadcast(message, 1)
    # Rank r gives r + j rows to rank j.
    rows = [rank + j for j in range(size)]
    exchanged = torch.empty(sum(rows), 2)
    group.all_to_all_into(exchanged, values(2 * sum(rows)).view(-1, 2), rows, rows)
    arriving = [torch.empty(j + 1) for j in range(size)]
    group.exchange([values(rank + 1) + j for j in range(size)], arriving)
    read = [torch.empty(0)] * size
    pairs = [None if j == rank else (values(rank + 1) + j, values(1)) for j in range(size)]
    memory = [None if j == rank else torch.empty(j + 2) for j in range(size)]
    group.start_exchange(pairs, memory, lambda j, x: read.__setitem__(j, x.clone())).wait()
    assert [len(x) for x in read] == [0 if j == rank else j + 2 for j in range(size)]
    passed = torch.empty(4)
    if rank:
        group.receive(passed, rank - 1)
    if rank < size - 1:
        group.send(values(4), rank + 1)
    # All send before anybody receives.
    around = torch.empty(4)
    sending = group.send(values(4), (rank + 1) % size, async_op=True)
    group.receive(around, (rank - 1) % size, async_op=True).wait()
    sending.wait()
    results += [message, exchanged, *arriving, *read, passed if rank else message, around]
    return [x.float().tolist() for x in results]


def large_collectives(outbox_bytes):
    """Check asynchronous collectives whose messages go through shared memory, or with too little of it over gloo.

    Returns the number of messages to other ranks, and of those that had a place in memory.
    """
    world = current_world(PLATFORM)
    group, rank, size = world.all, world.rank, world.size
    memory, counts = world.memory, {"all": 0, "placed": 0}
    put, end = memory.put, memory._outbox._end

    def counted(x, peers):
        places = put(x, peers)
        counts["all"] += len(peers)
        counts["placed"] += len(places or ())
        return places

    memory.put = counted
    memory._outbox._end = memory._outbox._first + outbox_bytes if outbox_bytes else end
    try:
        for step in range(3):
            _large_round(group, rank, size, step)
    finally:
        del memory.put
        memory._outbox._end = end
    return counts


def _large_round(group, rank, size, step):
    n = 2**17 + step  # elements of 4 bytes
    base = torch.arange(float(n))
    gathered, reduced = torch.empty(size * n), torch.empty(n)
    rows = [20 + rank + j for j in range(size)]
    sent = torch.cat([torch.full((rows[j], 2**13), 10.0 * rank + j) for j in range(size)])
    exchanged = torch.empty_like(sent)
    sends = [None if j == rank else base + 100 * rank + j for j in range(size)]
    receives = [None if j == rank else torch.empty(n) for j in range(size)]
    backwards, pairs = torch.arange(len(sent) - 1, -1, -1), torch.arange(len(sent)) // 2
    added = torch.ones(int(pairs[-1]) + 1, 2**13)
    indices = {"input_index": backwards, "output_index": pairs}
    works = [
        group.all_gather_into(gathered, base + rank, async_op=True),
        group.reduce_scatter_into(reduced, torch.cat([base * (1 + rank) + j for j in range(size)]), async_op=True),
        group.all_to_all_into(exchanged, sent, rows, rows, async_op=True),
        group.all_to_all_into(added, sent.flip(0), rows, rows, async_op=True, **indices),
        group.start_exchange(sends, receives),
    ]
    # The last one first: it finishes those before it.
    for work in reversed(works):
        work.wait()
    total = sum(range(1, size + 1))
    assert torch.equal(gathered, torch.cat([base + j for j in range(size)]))
    assert torch.equal(reduced, base * total + size * rank)
    assert exchanged[:, 0].tolist() == [10.0 * j + rank for j in range(size) for _ in range(rows[j])]
    assert torch.equal(exchanged, exchanged[:, :1].expand_as(exchanged))
    assert torch.equal(added, torch.ones_like(added).index_add(0, pairs, exchanged))
    for j in range(size):
        assert j == rank or torch.equal(receives[j], base + 100 * j + rank)


def messages_read_in_place(outbox_bytes):
    """Check that a message keeps its values while it is read, whatever its sender sends and writes meanwhile.

    Returns the number of messages that were read in the memory that this rank gave for them.
    """
    world = current_world(PLATFORM)
    group, rank, size, n = world.all, world.rank, world.size, 2**17
    outbox, num_received, num_read = world.memory._outbox, 0, 0
    assert group.reads_in_place(torch.empty(n), 12 * n)
    end, outbox._end = outbox._end, outbox._first + outbox_bytes if outbox_bytes else outbox._end
    free = len(outbox._free_slots) + sum(len(block.slots) for block in outbox._blocks)
    try:
        works, randoms, wrong = deque(), random.Random(rank), []
        for step in range(60):
            first, second = torch.full((n,), float(100 * step + rank)), torch.full((2, n), -float(100 * step + rank))
            receives = [None if j == rank else torch.zeros(3 * n) for j in range(size)]
            sent = first, second.T  # one message for all ranks; the second tensor is not contiguous

            def read(j, message, step=step, receives=receives):
                nonlocal num_received, num_read
                expected = torch.full((3 * n,), float(100 * step + j))
                expected[n:].neg_()
                for _ in range(2):
                    if not torch.equal(message, expected):
                        wrong.append((step, j))
                    time.sleep(randoms.random() * 0.004)
                num_read += 1
                num_received += message.data_ptr() == receives[j].data_ptr()

            works.append(group.start_exchange([None if j == rank else sent for j in range(size)], receives, read))
            # Ranks are up to four exchanges apart, and their messages are read long after they were sent.
            while len(works) > randoms.randrange(1, 5):
                works.popleft().wait()
            del first, second, sent
        while works:
            works.popleft().wait()
    finally:
        outbox._end = end
    group.barrier()
    assert not wrong
    assert num_read == 60 * (size - 1)
    outbox._drop_received()
    assert not outbox._blocks
    assert len(outbox._free_slots) == free, "all places are released"
    return num_received


def messages_after_an_error_of_a_reader(n):
    """Return what is read in an exchange whose first message raises, in one that nothing waits for, and in later ones.

    And the number of places that other ranks have not released.
    """
    world = current_world(PLATFORM)
    group, rank, size, found = world.all, world.rank, world.size, []

    def start(value, read):
        sends = [None if j == rank else (torch.full((n,), value + rank),) for j in range(size)]
        receives = [None if j == rank else torch.empty(n) for j in range(size)]
        return group.start_exchange(sends, receives, read)

    def fail(j, message):
        found.append(message.unique().tolist())
        raise ZeroDivisionError(j)

    def note(j, message):
        found.append(message.unique().tolist())

    failing, forgotten = start(100.0, fail), start(200.0, note)
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    del failing, forgotten
    for value in (300.0, 400.0):
        start(value, note).wait()
    group.barrier()
    world.memory._outbox._drop_received()
    assert not group._exchanges
    return found, len(world.memory._outbox._blocks)


def exchange_without_one_rank():
    """The members of a new group exchange messages, but for the last one; then all of the job meet."""
    world = current_world(PLATFORM)
    # The order makes it another group than that of all ranks, which is connected from the start.
    group = world.group(tuple(reversed(world.all.ranks)))
    sends, receives = [None] * group.size, [None] * group.size
    # Of no use but for its device.
    receives[group.rank] = torch.empty(0)
    if group.rank < 2:
        sends[1 - group.rank], receives[1 - group.rank] = torch.ones(3), torch.zeros(3)
    group.exchange(sends, receives)
    world.all.all_reduce(torch.ones(1))
    return None if group.rank == 2 else receives[1 - group.rank].tolist()


def waits_in_different_orders():
    """Rank 0 waits for an all-gather before it sends what rank 1 receives before it waits, without room in memory."""
    world = current_world(PLATFORM)
    group, n = world.all, 2**20
    outbox, gathered, message = world.memory._outbox, torch.empty(2 * n), torch.ones(1)
    end, outbox._end = outbox._end, outbox._first
    try:
        work = group.all_gather_into(gathered, torch.full((n,), float(group.rank)), async_op=True)
        if group.rank == 0:
            work.wait()
            group.send(message, 1)
        else:
            group.receive(message, 0)
            work.wait()
    finally:
        outbox._end = end
    return torch.equal(gathered.view(2, n), torch.tensor([[0.0], [1.0]]).expand(2, n))


def exchange_of_different_sizes():
    """Rank 1 expects twice as much as rank 0 sends."""
    group = current_world(PLATFORM).all
    sends, receives = [None, None], [None, None]
    if group.rank == 0:
        sends[1] = torch.ones(2**17)
    else:
        receives[0] = torch.empty(2**18)
    group.exchange(sends, receives)
