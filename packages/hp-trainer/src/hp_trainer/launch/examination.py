"""Measurements on the ranks of a job: products, copies, collectives, links, and checks of the platform's results."""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hp_dtensor.comm.links import Links, all_gather_seconds, measure_group, measure_links
from hp_dtensor.comm.mesh import DeviceMesh, init_device_mesh
from hp_dtensor.comm.world import World, current_world
from hp_dtensor.exceptions import HPError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_trainer.launch.machine import Pair, RankFacts, find_facts, machines_of

# Rows, inner size and columns of products, by increasing work.
_SHAPES = ((256, 256, 256), (1024, 1024, 1024), (4096, 1024, 4096), (8192, 8192, 8192))
_DTYPES = ("float32", "bfloat16", "float16")
# A shape is left out if it would take longer than this at the rate of the shape before.
_LONGEST_PRODUCT = 0.25
_COPIED_BYTES = 2**26
_COLLECTIVE_BYTES = (2**16, 2**20, 2**24)
_MOST_GATHERED_BYTES = 2**28
_SUITE = "hp_dtensor.testing.conformance"
_CHECKED_DTYPES = ("float32", "bfloat16", "int64")


@dataclass(frozen=True)
class Product:
    """The rate of matrix products `[rows, inner] @ [inner, columns]` on the slowest rank, in operations per second."""

    dtype: str
    shape: tuple[int, int, int]
    flops: float


@dataclass(frozen=True)
class Overlap:
    """Seconds of an all-gather along an axis, of products of about that time, and of both at the same time.

    Attributes:
        ranks, machines: ranks that take part, and the machines that they are on.
        num_bytes: bytes that each rank sends.
    """

    axis: str
    ranks: int
    machines: int
    num_bytes: int
    idle: float
    product: float
    both: float


@dataclass(frozen=True)
class Check:
    """A conformance check on the ranks: its seconds, and the error of the first rank where it failed."""

    name: str
    seconds: float
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Measurements of all ranks of a job.

    Attributes:
        facts: of each rank.
        rates: of each rank, its fastest product of the first dtype in operations per second.
        copy_bandwidth: bytes read and written per second by copies in the memory of the device.
        host_bandwidth: bytes per second from the device to its host.
        axes: names and sizes of the axes of the mesh of all ranks.
        links: of these axes; that of axes with one rank was not measured.
    """

    platform: str
    facts: tuple[RankFacts, ...]
    products: tuple[Product, ...]
    rates: tuple[float, ...]
    copy_bandwidth: float
    host_bandwidth: float
    axes: dict[str, int]
    links: Links
    pairs: tuple[Pair, ...]
    overlaps: tuple[Overlap, ...]
    checks: tuple[Check, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the figures without the names of the machines, which may be confidential."""
        numbers = {host: n for n, host in enumerate(dict.fromkeys(each.host for each in self.facts))}
        return {**asdict(self), "facts": [{**asdict(each), "host": numbers[each.host]} for each in self.facts]}


def examine(platform_name: str) -> Examination:
    """Measure and check on this rank of a job whose world is connected. All its ranks make the call.

    Every rank returns the same figures: of the slowest rank, each by its fastest repeat.
    """
    platform = get_platform(platform_name)
    world = current_world(platform)
    # The load that other programs cause, before the ranks compute.
    load = os.getloadavg()[0]
    checks = tuple(_run_checks(platform, world))
    products = list(_products(platform))
    # After an operation: some frameworks know the memory of a device only then.
    facts = [RankFacts.from_json(each) for each in _gathered(world, asdict(find_facts(platform, load)))]
    of_ranks = [{(dtype, *shape): flops for dtype, shape, flops in each} for each in _gathered(world, products)]
    first = products[0][0]
    copies = [min(each) for each in zip(*_gathered(world, _copy_bandwidths(platform)), strict=True)]
    mesh = init_device_mesh(platform.device_types[0], *_mesh_of(facts), platform=platform)
    num_bytes = min(_COLLECTIVE_BYTES[-1], _MOST_GATHERED_BYTES // world.size)
    return Examination(
        platform=platform.name,
        facts=tuple(facts),
        products=tuple(
            Product(dtype, (shape[0], shape[1], shape[2]), min(each[dtype, *shape] for each in of_ranks))
            for dtype, shape, _ in products
            if all((dtype, *shape) in each for each in of_ranks)
        ),
        rates=tuple(max(flops for (dtype, *_), flops in each.items() if dtype == first) for each in of_ranks),
        copy_bandwidth=copies[0],
        host_bandwidth=copies[1],
        axes=dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)),
        links=measure_links(mesh, num_bytes),
        pairs=tuple(_pairs(world, num_bytes)),
        overlaps=tuple(_overlaps(platform, mesh, facts)),
        checks=checks,
    )


def _gathered(world: World, value: Any) -> list[Any]:
    """Return the JSON values of all ranks."""
    return [json.loads(each) for each in world.all.all_gather_bytes(json.dumps(value).encode())]


def _seconds(platform: Platform, run: Callable[[], Any], repeats: int = 3) -> float:
    """Return the time of the fastest of several runs, after one that compiles and allocates."""
    times = []
    for _ in range(repeats + 1):
        platform.synchronize()
        start = time.perf_counter()
        run()
        platform.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _products(platform: Platform) -> Iterator[tuple[str, list[int], float]]:
    """Yield dtype, shape and rate of the products of this rank."""
    for name in _DTYPES:
        rate = math.inf
        for shape in _SHAPES:
            work = 2 * math.prod(shape)
            if work / rate > _LONGEST_PRODUCT:
                break
            try:
                rate = work / _seconds(platform, _product(platform, name, shape))
            # Frameworks lack some dtypes on some devices, and each reports it by an error of its own.
            except (HPError, RuntimeError, TypeError, ValueError):
                if name == _DTYPES[0]:
                    raise
                break
            yield name, list(shape), rate


def _product(platform: Platform, dtype_name: str, shape: Sequence[int]) -> Callable[[], Any]:
    ops, dtype, (rows, inner, columns) = platform.ops, platform.dtype(dtype_name), shape
    x, y = ops.ones((rows, inner), dtype), ops.ones((inner, columns), dtype)
    return lambda: ops.matmul(x, y)


def _copy_bandwidths(platform: Platform) -> list[float]:
    """Return the bytes per second of copies in the device's memory, and from there to the host."""
    x = platform.ops.ones((_COPIED_BYTES // 4,), platform.dtype("float32"))
    # Each byte is read and written.
    copied = 2 * _COPIED_BYTES / _seconds(platform, lambda: platform.ops.clone(x))
    if platform.device_types[0] == "cpu":
        return [copied, copied]
    return [copied, _COPIED_BYTES / _seconds(platform, lambda: platform.to_numpy(x))]


def _mesh_of(facts: Sequence[RankFacts]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return shape and axis names of the mesh of all ranks: machines and their ranks, or one axis."""
    machines = machines_of(facts)
    local = len(machines[0])
    # The ranks of a machine must be consecutive and equally many.
    if len(machines) > 1 and machines == [list(range(i, i + local)) for i in range(0, len(facts), local)]:
        return (len(machines), local), ("machine", "local")
    return (len(facts),), ("rank",)


def _pairs(world: World, num_bytes: int) -> Iterator[Pair]:
    """Measure the links between ranks whose numbers differ in one bit: log2(size) links of each rank."""
    found = []
    for bit in range((world.size - 1).bit_length()):
        other = world.rank ^ (1 << bit)
        if other < world.size:
            ranks = min(world.rank, other), max(world.rank, other)
            found.append((ranks, *measure_group(world.group(ranks), num_bytes, repeats=3)))
        # No pair is measured while another one still transfers the sizes before.
        world.all.barrier()
    for rank, links in enumerate(_gathered(world, found)):
        for ranks, latency, bandwidth in links:
            # Both ranks have measured it.
            if rank == ranks[0]:
                yield Pair((ranks[0], ranks[1]), latency, bandwidth)


def _overlaps(platform: Platform, mesh: DeviceMesh, facts: Sequence[RankFacts]) -> Iterator[Overlap]:
    """Measure all-gathers of three sizes along each axis, idle and while the device multiplies matrices."""
    world = current_world(platform)
    product = _product(platform, "float32", _SHAPES[0])
    once = _slowest(world, _seconds(platform, product))
    for axis, name in enumerate(mesh.mesh_dim_names):
        group = mesh.group_along(axis)
        machines = len({facts[rank].host for rank in group.ranks})
        for num_bytes in _COLLECTIVE_BYTES if group.size > 1 else ():
            size = min(num_bytes, _MOST_GATHERED_BYTES // group.size)
            idle = _slowest(world, all_gather_seconds(group, size, repeats=3))
            repeats = max(1, min(1000, int(_LONGEST_PRODUCT / once), round(idle / once)))

            def compute(repeats: int = repeats) -> None:
                for _ in range(repeats):
                    product()

            alone = _slowest(world, _seconds(platform, compute))
            both = _slowest(world, all_gather_seconds(group, size, repeats=3, meanwhile=compute))
            yield Overlap(name, group.size, machines, size * (group.size - 1), idle, alone, both)


def _slowest(world: World, seconds: float) -> float:
    return float(max(_gathered(world, seconds)))


def _run_checks(platform: Platform, world: World) -> Iterator[Check]:
    """Run the core of the conformance suite: collectives by dtype, and differentiable collectives."""
    # By name: tests are not typed as strictly as what is imported.
    collectives, duals = (importlib.import_module(f"{_SUITE}.test_{name}") for name in ("collectives", "duals"))
    reduced, moved = (platform.collective_dtypes(reducing) for reducing in (True, False))
    for dtype in _CHECKED_DTYPES:
        for check in collectives.REDUCTION_CHECKS if dtype in reduced else ():
            yield _checked(world, check, platform.name, dtype, "sum")
        for check in collectives.MOVE_CHECKS if dtype in moved else ():
            yield _checked(world, check, platform.name, dtype)
    for check in (collectives.check_bytes, collectives.check_many_at_once, *duals.DUAL_CHECKS):
        yield _checked(world, check, platform.name)


def _checked(world: World, check: Callable[..., None], *arguments: str) -> Check:
    start = time.perf_counter()
    error = None
    try:
        check(*arguments)
    except AssertionError as failure:
        # Other errors end the rank: it could not take part in the collectives that follow.
        error = " ".join(str(failure).split())[:300] or "an assertion failed"
    errors = _gathered(world, error)
    found = next((f"on rank {rank}: {each}" for rank, each in enumerate(errors) if each is not None), None)
    name = " ".join((check.__name__.removeprefix("check_"), *arguments[1:]))
    kind = "gradients" if check.__module__.endswith("duals") else "collectives"
    return Check(f"{kind}: {name}", time.perf_counter() - start, found)
