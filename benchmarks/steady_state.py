"""Memory and caches over ten thousand training steps, each with another shape.

    python benchmarks/steady_state.py [--steps 10000] [--platform torch]

Without arguments it runs on the installed platform. The caches fill up to their limits and stay there, and so do traced
Python memory and the number of live specs.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc

import numpy as np

from hp_dtensor import DeviceMesh, Replicate, Shard, distribute_tensor, get_platform
from hp_dtensor.dispatch.operation import count_plans
from hp_dtensor.redistribute import planner
from hp_dtensor.spec import tensor_spec as spec


def step(platform, mesh, weight, rows):
    ops = platform.ops
    data = platform.from_numpy(np.ones((rows, 4), np.float32))
    x = distribute_tensor(data, mesh, (Shard(0),), src_data_rank=None)
    y = ops.relu(ops.matmul(x, weight))
    platform.backward(ops.mean(y.redistribute(placements=(Replicate(),))).full_tensor())
    platform.set_grad(weight, None)


def entries():
    cached = [value.cache_info() for value in vars(planner).values() if hasattr(value, "cache_info")]
    return count_plans(), sum(info.currsize for info in cached), len(spec._interned)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--platform", default=None)
    options = parser.parse_args()
    platform = get_platform(options.platform)
    mesh = DeviceMesh("cpu", (1,), mesh_dim_names=("dp",), platform=platform)
    full = platform.from_numpy(np.ones((4, 4), np.float32))
    weight = platform.Parameter(distribute_tensor(full, mesh, (Replicate(),), src_data_rank=None))
    tracemalloc.start()
    print(
        f"{platform.name}: {'steps':>8}{'op plans':>12}{'redist. plans':>15}{'specs':>8}{'traced MB':>11}{'us/step':>9}"
    )
    since = time.perf_counter()
    for number in range(1, options.steps + 1):
        step(platform, mesh, weight, 1 + number)
        if number % (options.steps // 10) == 0:
            gc.collect()
            plans, redistributions, specs = entries()
            megabytes = tracemalloc.get_traced_memory()[0] / 1e6
            spent = (time.perf_counter() - since) / (options.steps // 10) * 1e6
            print(f"{number:17}{plans:12}{redistributions:15}{specs:8}{megabytes:11.1f}{spent:9.0f}", flush=True)
            since = time.perf_counter()


if __name__ == "__main__":
    main()
