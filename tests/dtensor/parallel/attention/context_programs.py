"""Context parallel attention on ranks, forward and gradients, put together again to be compared with one device."""

from __future__ import annotations

import numpy as np
import pytest

from hp_dtensor import DeviceMesh, current_world, init_device_mesh
from hp_dtensor.parallel.attention import AttentionMask, SequenceSharding, context_parallel_attention, ring


def attend_on_ranks(
    platform, arrays, mask, options, ulysses=1, method="ring", balanced=True, dtype=None, sharding=None
):
    """Return this rank's part of the result, of the gradients of query, key and value, and its share of the sinks'."""
    world = current_world(platform)
    mesh = init_device_mesh("cpu", (world.size,), platform=platform)
    q, k, v, grad, *sinks = arrays
    if sharding is None:
        sharding = SequenceSharding(length=k.shape[2], ranks=world.size, ulysses_degree=ulysses, balanced=balanced)
    own = [sharding.shard(x, world.rank, 2) for x in (q, k, v)] + [x.copy() for x in sinks]
    inputs = [_cast(platform, platform.from_numpy(x), dtype) for x in own]
    for x in inputs:
        platform.set_requires_grad(x, True)
    given = dict(mask)
    if "positions" in given:
        given["positions"] = platform.from_numpy(sharding.shard(given["positions"], world.rank, 1))
    out = context_parallel_attention(
        *inputs[:3],
        mesh,
        mask=AttentionMask(**given),
        sharding=sharding,
        method=method,
        sinks=inputs[3] if sinks else None,
        **options,
    )
    platform.backward(out, _cast(platform, platform.from_numpy(sharding.shard(grad, world.rank, 2)), dtype))
    results = (out, *(platform.get_grad(x) for x in inputs))
    wide = None if dtype is None else "float32"
    return [platform.to_numpy(_cast(platform, platform.detach(x), wide)).copy() for x in results]


def attend_after_an_error(platform, arrays, sharding):
    """Raise in the second block of a ring on all ranks, then return the results of `attend_on_ranks`."""
    num_blocks = 0

    def fail_in_second(*args):
        nonlocal num_blocks
        num_blocks += 1
        if num_blocks == 2:
            raise ZeroDivisionError
        assert num_blocks < 2, "no block is computed after the error"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring.PartialAttention, "add", fail_in_second)
        with pytest.raises(ZeroDivisionError):
            attend_on_ranks(platform, arrays, {}, {}, sharding=sharding)
        # The rest of the messages arrives with another collective of the group.
        current_world(platform).all.all_reduce(platform.from_numpy(np.ones(1, np.float32)))
    return attend_on_ranks(platform, arrays, {}, {}, sharding=sharding)


def attend_alone(platform, arrays, method):
    """Attend over documents of which only ranks 0 and 1 share one, in a group that has not communicated before."""
    world = current_world(platform)
    mesh = DeviceMesh("cpu", np.arange(world.size)[::-1].copy(), platform=platform)
    sharding = SequenceSharding(length=12, ranks=3, balanced=False)
    rank = mesh.get_local_rank()
    q, k, v = (platform.from_numpy(sharding.shard(x, rank, 2)) for x in arrays[:3])
    positions = np.array([[*range(8), *range(4)]] * k.shape[0])
    mask = AttentionMask(positions=platform.from_numpy(sharding.shard(positions, rank, 1)))
    out = context_parallel_attention(q, k, v, mesh, mask=mask, sharding=sharding, method=method)
    # Of another group: nothing else connects the ranks of the mesh.
    world.all.all_reduce(platform.from_numpy(np.ones(1, np.float32)))
    return platform.to_numpy(out).copy()


def _cast(platform, x, dtype):
    return x if dtype is None else platform.ops.cast(x, platform.dtype(dtype))


def put_together(results, sharding):
    """Return result and gradients of the full sequence; those of the sinks are the ranks' sum."""
    parts = list(zip(*results, strict=True))
    full = [sharding.unshard(list(each), 2) for each in parts[:4]]
    return full + [np.sum(each, 0) for each in parts[4:]]
