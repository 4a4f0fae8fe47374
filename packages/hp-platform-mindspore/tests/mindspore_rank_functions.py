"""Functions that tests run on real ranks; results are plain Python, every rank has other data."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import CapabilityError, CollectiveError, PlatformError
from hp_dtensor.platform.selection import get_platform

PLATFORM = get_platform("mindspore")
REDUCTIONS = {
    "sum": lambda rows: rows.sum(0),
    "avg": lambda rows: rows.mean(0),
    "max": lambda rows: rows.max(0),
    "min": lambda rows: rows.min(0),
    "product": lambda rows: rows.prod(0),
}


def world_facts():
    world = current_world(PLATFORM)
    return world.rank, world.size, PLATFORM.world is world, world.all.ranks


def _values(dtype_name, count, rank):
    """Small integers, other ones on every rank, that no dtype rounds."""
    numbers = (np.arange(count) * (rank + 2) + rank) % 5
    return (numbers % 2).astype(bool) if dtype_name == "bool" else numbers.astype(np.float64)


def _tensor(dtype_name, values):
    return PLATFORM.ops.cast(PLATFORM.from_numpy(np.ascontiguousarray(values)), PLATFORM.dtype(dtype_name))


def _list(x):
    full = PLATFORM.ops.cast(x, PLATFORM.dtype("float64"))
    return PLATFORM.to_numpy(full).reshape(-1).tolist()


def reduce_and_scatter(dtype_name, op, ranks):
    """all_reduce and reduce_scatter of the given members; None from the others."""
    world = current_world(PLATFORM)
    if world.rank not in ranks:
        return None
    group = world.group(ranks)
    reduced = _tensor(dtype_name, _values(dtype_name, 6 * group.size, group.rank))
    scattered = PLATFORM.empty((3, 2), PLATFORM.dtype(dtype_name))
    group.reduce_scatter_into(scattered, PLATFORM.ops.reshape(PLATFORM.ops.clone(reduced), (-1, 2)), op)
    group.all_reduce(reduced, op)
    return _list(reduced), _list(scattered)


def expected_reduction(dtype_name, op, size):
    """What `reduce_and_scatter` must give, from all ranks' values at once; integers are exact in any dtype."""
    rows = np.stack([_values(dtype_name, 6 * size, rank) for rank in range(size)])
    of_bool = {"sum": rows.any, "max": rows.any, "min": rows.all, "product": rows.all}
    full = of_bool[op](0) if dtype_name == "bool" else REDUCTIONS[op](rows)
    full = full.astype(np.float64)
    return [(full.tolist(), full.reshape(size, 6)[rank].tolist()) for rank in range(size)]


def average_of_integers():
    group = current_world(PLATFORM).all
    try:
        group.all_reduce(_tensor("int64", np.ones(2)), "avg")
    except CapabilityError as error:
        return str(error)
    return "not refused"


def order_of_a_sum(count):
    """Numbers whose float sum depends on the order; every rank must have it in rank order."""
    group = current_world(PLATFORM).all
    x = _tensor("float32", np.full(count, [1e8, 1.0, -1e8][group.rank]))
    group.all_reduce(x)
    return sorted(set(_list(x)))


def exact_float64():
    group = current_world(PLATFORM).all
    x = _tensor("float64", np.array([1.0 + group.rank * 2.0**-40]))
    group.all_reduce(x)
    return _list(x)


def large(count):
    """More than one message's worth, of a size that the ranks do not divide."""
    group = current_world(PLATFORM).all
    x = _tensor("int64", np.arange(count) * (group.rank + 1))
    group.all_reduce(x)
    factor = sum(range(1, group.size + 1))
    return bool((PLATFORM.to_numpy(x) == np.arange(count) * factor).all())


def move_everything(dtype_name, ranks):
    """all_gather, all_to_all (uneven, with zeros), broadcast and exchange of members; None from the others."""
    world = current_world(PLATFORM)
    if world.rank not in ranks:
        return None
    group, dtype = world.group(ranks), PLATFORM.dtype(dtype_name)
    size, rank = group.size, group.rank
    gathered = PLATFORM.empty((2 * size, 2), dtype)
    mine = PLATFORM.ops.reshape(_tensor(dtype_name, _values(dtype_name, 4, rank)), (2, 2))
    group.all_gather_into(gathered, mine)
    counts = [(rank + j) % 3 for j in range(size)]
    received = PLATFORM.empty((sum(counts), 1), dtype)
    rows = _tensor(dtype_name, _values(dtype_name, sum(counts), rank).reshape(-1, 1))
    group.all_to_all_into(received, rows, counts, counts)
    sent = _tensor(dtype_name, _values(dtype_name, 3, rank))
    group.broadcast(sent, size - 1)
    into = PLATFORM.empty((2,), dtype)
    sends, receives = [None] * size, [None] * size
    sends[(rank + 1) % size] = _tensor(dtype_name, _values(dtype_name, 2, rank))
    receives[(rank - 1) % size] = into
    group.exchange(sends, receives)
    return [_list(x) for x in (gathered, received, sent, into)]


def expected_moves(dtype_name, size):
    values = [_values(dtype_name, 40, rank) for rank in range(size)]
    results = []
    for rank in range(size):
        gathered = np.concatenate([_values(dtype_name, 4, j) for j in range(size)])
        received = []
        for j in range(size):
            start = sum((j + k) % 3 for k in range(rank))
            received.append(values[j][start : start + (rank + j) % 3])
        moves = [gathered, np.concatenate(received), values[size - 1][:3], values[(rank - 1) % size][:2]]
        results.append([part.astype(np.float64).tolist() for part in moves])
    return results


def collectives_on_views():
    """Views and transposed tensors as buffers: MindSpore's own collectives would do nothing."""
    group, ops = current_world(PLATFORM).all, PLATFORM.ops
    full = _tensor("float32", np.zeros((4, 3)))
    part = ops.narrow(full, 0, 1, 2)
    PLATFORM.copy_(part, _tensor("float32", np.full((2, 3), group.rank + 1.0)))
    group.all_reduce(part)
    column = ops.transpose(_tensor("float32", np.zeros((2, 2 * group.size))), 0, 1)
    group.all_gather_into(column, _tensor("float32", np.full((2, 2), float(group.rank))))
    return PLATFORM.to_numpy(full).tolist(), PLATFORM.to_numpy(column).tolist()


def empties():
    group = current_world(PLATFORM).all
    nothing = PLATFORM.empty((0, 3), PLATFORM.dtype("float32"))
    group.all_reduce(nothing)
    group.broadcast(nothing)
    group.all_gather_into(PLATFORM.empty((0, 3), PLATFORM.dtype("float32")), nothing)
    group.all_to_all_into(nothing, nothing, [0] * group.size, [0] * group.size)
    group.exchange([nothing] * group.size, [nothing] * group.size)
    scalar = _tensor("float32", np.float64(group.rank + 1).reshape(()))
    group.all_reduce(scalar)
    return nothing.shape, float(PLATFORM.to_numpy(scalar))


def gather_bytes(ranks):
    world = current_world(PLATFORM)
    if world.rank not in ranks:
        return None
    return world.group(ranks).all_gather_bytes(bytes(range(world.rank * 3)))


def start_gathering_bytes(ranks):
    world = current_world(PLATFORM)
    if world.rank not in ranks:
        return None
    return world.group(ranks).start_all_gather_bytes(bytes([world.rank]) * 3).wait(0)


def overlapping_groups(rounds):
    """Collectives of the world and of two groups that share rank 1, in the same order everywhere."""
    world = current_world(PLATFORM)
    found = []
    for step in range(rounds):
        for ranks in ((0, 1, 2), (0, 1), (1, 2)):
            if world.rank in ranks:
                x = _tensor("float32", np.full(3, 10.0**world.rank * (step + 1)))
                world.group(ranks).all_reduce(x)
                found.append(_list(x)[0])
    return found


def join_again():
    world, PLATFORM._world = PLATFORM._world, None
    try:
        PLATFORM.connect(0, 2, "127.0.0.1:1")
    except PlatformError as error:
        return str(error)
    finally:
        PLATFORM._world = world
    return "not refused"


def die_in_a_collective():
    """Rank 1 dies while the others wait for it."""
    world = current_world(PLATFORM)
    if world.rank == 1:
        time.sleep(0.2)
        os._exit(7)
    world.all.barrier()


def wait_for_a_peer_that_hangs(given_up):
    """Rank 1 does not come before rank 0's collective has failed."""
    world = current_world(PLATFORM)
    if world.rank == 1:
        while not given_up.exists():
            time.sleep(0.05)
        return
    with pytest.raises(RuntimeError):
        world.all.all_reduce(_tensor("float32", np.ones(4)))
    # Rank 1 may come now, and its message must not be taken for that of another call.
    for group in (world.all, world.group((1, 0))):
        with pytest.raises(CollectiveError, match="has failed before"):
            group.all_reduce(_tensor("float32", np.ones(4)))
    given_up.touch()


def train_tensor_parallel(steps):
    """A column- and a row-parallel product, trained; losses and the gathered weights."""
    from hp_dtensor.comm.mesh import init_device_mesh
    from hp_dtensor.spec.placements import Replicate, Shard
    from hp_dtensor.tensor.conversions import distribute_tensor

    mesh = init_device_mesh("cpu", (current_world(PLATFORM).size,), mesh_dim_names=("tp",), platform=PLATFORM)
    ops = PLATFORM.ops
    placed = zip(layers(), (Shard(0), Shard(1), Replicate()), strict=True)
    first, second, x = (distribute_tensor(_tensor("float32", a), mesh, [p], src_data_rank=None) for a, p in placed)
    first, second = PLATFORM.Parameter(first), PLATFORM.Parameter(second)
    losses = []
    for _ in range(steps):
        y = ops.linear(ops.silu(ops.linear(x, first)), second)
        loss = ops.mean(ops.square(y)).full_tensor()
        PLATFORM.backward(loss)
        for parameter in (first, second):
            PLATFORM.copy_(parameter, ops.sub(parameter.data, ops.mul(parameter.grad, 0.5)))
            PLATFORM.set_grad(parameter, None)
        losses.append(float(PLATFORM.to_numpy(loss)))
    return losses, PLATFORM.to_numpy(first.full_tensor()).tolist(), PLATFORM.to_numpy(second.full_tensor()).tolist()


def layers():
    rng = np.random.default_rng(5)
    return rng.normal(size=(5, 4)) * 0.5, rng.normal(size=(3, 5)) * 0.5, rng.normal(size=(6, 4))
