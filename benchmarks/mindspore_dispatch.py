"""Host time that DTensors add to MindSpore's operations. One process, one CPU thread.

    python benchmarks/mindspore_dispatch.py [--seconds 0.3] [--only softmax]

MindSpore has no distributed tensor of its own to compare with, so each line compares with the same operation on plain
tensors of the shard's shape. The ranks are a world of eight that does not communicate; shards are tiny. Each number
is the best of several rounds in which both alternate, in microseconds of processor time.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_v", "3")

import mindspore
import numpy as np
from _timing import compare
from mindspore import mint

from hp_dtensor import DTensor, Partial, Replicate, Shard, get_platform, init_device_mesh
from hp_dtensor.comm.process_group import DONE
from hp_dtensor.comm.world import NoCommunicationGroup, World, use_world

RANKS = 8


class IdleGroup(NoCommunicationGroup):
    """A group whose all-reduce does nothing, so that only the host's overhead is measured."""

    def _all_reduce(self, x, op, async_op):
        return DONE


class IdleWorld(World):
    def _create_group(self, ranks):
        return IdleGroup(ranks, ranks.index(self.rank), self.platform)


def _tensor(*shape):
    return mindspore.Tensor(np.random.default_rng(0).normal(size=shape).astype(np.float32))


def operations(distribute):
    """Lines of (name, call); `distribute(local, placement)` makes an operand."""
    x, y = distribute(_tensor(8, 8), Shard(0)), distribute(_tensor(8, 8), Shard(0))
    w, partial = distribute(_tensor(8, 8), Replicate()), distribute(_tensor(8, 8), Partial())
    yield "add", lambda: x + y
    yield "add a number", lambda: x + 1.5
    yield "matmul", lambda: mint.matmul(x, w)
    yield "view", lambda: x.view(-1, 2, 4)
    yield "transpose", lambda: mint.transpose(x, 0, 1)
    yield "softmax", lambda: mint.softmax(x, 1)
    yield "sum over rows", lambda: mint.sum(x, 1)
    yield "cat", lambda: mint.cat([x, y], 1)
    yield "add of partials", lambda: partial + partial


def training(distribute):
    """Forward and backward: matmul, silu, sum."""
    platform = get_platform("mindspore")
    x = distribute(_tensor(4, 8), Shard(0))
    w = distribute(_tensor(8, 8), Replicate())
    platform.set_requires_grad(w, True)
    yield (
        "fwd+bwd: matmul, silu, sum",
        lambda: platform.grad([mint.sum(mint.nn.functional.silu(mint.matmul(x, w)))], [w]),
    )


def conversions(mesh):
    local = _tensor(8, 8)
    x = DTensor.from_local(local, mesh, (Shard(0),))
    yield "from_local", lambda: DTensor.from_local(local, mesh, (Shard(0),))
    yield "to_local", lambda: x.to_local()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="per line and contestant")
    parser.add_argument("--only", default="", help="lines whose name holds this")
    options = parser.parse_args()
    gc.disable()
    print(f"mindspore {mindspore.__version__}, microseconds of processor time per call")
    print(f"{'':32}{'plain':>9}{'ours':>9}{'added':>9}{'ours/plain':>12}")
    platform = get_platform("mindspore")
    with use_world(IdleWorld(0, RANKS, platform)):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",), platform=platform)
        distribute = functools.partial(_distribute, mesh)
        for group in (operations, training):
            for (name, plain), (_, ours) in zip(group(_plain), group(distribute), strict=True):
                if options.only in name:
                    before, after = compare([plain, ours], options.seconds)
                    print(f"{name:32}{before:9.1f}{after:9.1f}{after - before:9.1f}{after / before:12.2f}", flush=True)
                    gc.collect()
        for name, function in conversions(mesh):
            if options.only in name:
                [time_of_ours] = compare([function], options.seconds)
                print(f"{name:32}{'':9}{time_of_ours:9.1f}{time_of_ours:9.1f}", flush=True)


def _plain(local, placement):
    return local


def _distribute(mesh, local, placement):
    return DTensor.from_local(local, mesh, (placement,))


if __name__ == "__main__":
    main()
