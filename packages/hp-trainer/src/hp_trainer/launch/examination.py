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

import numpy as np

from hp_dtensor.comm.links import Links, measure_group, measure_links
from hp_dtensor.comm.mesh import DeviceMesh, init_device_mesh
from hp_dtensor.comm.world import World, current_world
from hp_dtensor.exceptions import HPError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.spec.placements import Replicate, Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_trainer.launch.machine import Pair, RankFacts, find_facts, machines_of
from hp_trainer.models.decoder import DecoderConfig, build_decoder

# The format of measurements in device files. Since 2, the seconds of a collective are what it adds to a computation.
FILE_FORMAT = 2
# Rows, inner size and columns of products, by increasing work.
_SHAPES = ((256, 256, 256), (1024, 1024, 1024), (4096, 1024, 4096), (8192, 8192, 8192))
_DTYPES = ("float32", "bfloat16", "float16")
# A shape is left out if it would take longer than this at the rate of the shape before.
_LONGEST_PRODUCT = 0.25
# Width, samples and tokens of decoders with two blocks and a head: each pair of them differs in the share of products,
# attention, cheap operations and single operations in the time.
_BLOCKS = ((128, 4, 256), (256, 1, 256), (256, 4, 256), (256, 1, 1024), (512, 2, 256))
_COPIED_BYTES = 2**26
# Gathered, the largest is beyond what allocators of hosts reuse: a gather of 2**24 on 2 ranks got fresh memory in some
# processes only, and then took 38 ms instead of 27.
_COLLECTIVE_BYTES = (2**16, 2**20, 2**25)
# A gathered tensor has at most these bytes on any number of ranks.
_MOST_GATHERED_BYTES = 2**28
# Exchanges are measured in turns of about so many seconds, with products before or beside them, and all turns together
# for so many. Short turns: other programs disturb some of them, and the others count. In a step milliseconds of
# computation precede an exchange, in which ranks drift apart, and more so where they share processors.
_TURN_SECONDS, _TURNS_SECONDS, _LEAST_TURNS, _LEAST_PRODUCTS = 0.02, 0.4, 6, 5e-3
_SUITE = "hp_dtensor.testing.conformance"
_CHECKED_DTYPES = ("float32", "bfloat16", "int64")


@dataclass(frozen=True)
class Product:
    """The rate of matrix products `[rows, inner] @ [inner, columns]` on the slowest rank, in operations per second."""

    dtype: str
    shape: tuple[int, int, int]
    flops: float


@dataclass(frozen=True)
class Block:
    """Seconds of forward and backward of a decoder, on the slowest rank while all ranks compute.

    Attributes:
        hidden_size: width; the hidden width of a dense network is three times as large.
        batch, length: samples, and tokens of each.
    """

    hidden_size: int
    batch: int
    length: int
    seconds: float


@dataclass(frozen=True)
class Overlap:
    """Seconds of an all-gather of sequence shards along an axis, and of products of about its time.

    Attributes:
        ranks, nodes: ranks that take part, and the machines that they are on.
        bytes: bytes that each rank sends.
        seconds: what the all-gather adds to products before it; ranks arrive at different times.
        product_seconds, both_seconds: the products alone, and beside an all-gather of as many bytes of weights.
    """

    axis: str
    ranks: int
    nodes: int
    bytes: int
    seconds: float
    product_seconds: float
    both_seconds: float


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
        blocks: of decoders in float32, on CPUs only.
        copy_bandwidth: bytes read and written per second by copies in the memory of the device.
        host_bandwidth: bytes per second from the device to its host.
        axes: names and sizes of the axes of the mesh of all ranks.
        links: of these axes; that of axes with one rank was not measured.
    """

    platform: str
    facts: tuple[RankFacts, ...]
    products: tuple[Product, ...]
    rates: tuple[float, ...]
    blocks: tuple[Block, ...]
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
    """Measure and check on this rank of a job; every rank calls this, and gets the same figures of the slowest rank."""
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
        blocks=tuple(_blocks(platform, world)),
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
    """Return the time of the fastest of several runs, after one that compiles and allocates.

    On a CPU, processor time counts where it is less: ranks that share a processor, and other programs, do not lengthen
    it. A computation by several threads takes less time than processor time.
    """
    is_cpu = platform.device_types[0] == "cpu"
    return min(min(each) if is_cpu else each[0] for each in _timed(platform, run, repeats))


def _timed(platform: Platform, run: Callable[[], Any], repeats: int = 3) -> list[tuple[float, float]]:
    """Return the seconds and processor seconds of several runs, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        platform.synchronize()
        start = time.perf_counter(), time.process_time()
        run()
        platform.synchronize()
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return times[1:]


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


def _blocks(platform: Platform, world: World) -> Iterator[Block]:
    """Measure forward and backward of decoders of several sizes, on all ranks at once."""
    if platform.device_types[0] != "cpu":
        return
    for hidden_size, batch, length in _BLOCKS:
        model = build_decoder(block_options(hidden_size), platform)
        ids = platform.zeros((batch, length), platform.dtype("int64"))

        def run(model: Any = model, ids: Any = ids) -> None:
            platform.backward(model(ids, ids))

        world.all.barrier()
        yield Block(hidden_size, batch, length, _slowest(world, _seconds(platform, run, repeats=5)))


def block_options(hidden_size: int) -> DecoderConfig:
    """Return the options of the decoders that are measured."""
    heads = hidden_size // 64
    sizes: dict[str, Any] = {"vocab_size": 2048, "num_hidden_layers": 2, "hidden_size": hidden_size, "head_dim": 64}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 3 * hidden_size}
    return DecoderConfig(**sizes)


def _copy_bandwidths(platform: Platform) -> list[float]:
    """Return the bytes per second of copies in the device's memory, and from there to the host."""
    x, target = (platform.ops.ones((_COPIED_BYTES // 4,), platform.dtype("float32")) for _ in range(2))
    # Each byte is read and written.
    copied = 2 * _COPIED_BYTES / _seconds(platform, lambda: platform.copy_(target, x))
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
    """Measure exchanges of three sizes along each axis, and over pairs of ranks, with products beside them."""
    world = current_world(platform)
    axes = [mesh[name] for name in mesh.mesh_dim_names if mesh[name].size() > 1]
    if axes and axes[-1].size() > 2 and world.size % 2 == 0:
        names = ("pairs", "pair")
        axes.append(init_device_mesh(platform.device_types[0], (world.size // 2, 2), names, platform=platform)["pair"])
    product = _product(platform, "float32", _SHAPES[0])
    once = _slowest(world, _seconds(platform, product))
    for axis in axes:
        for num_bytes in _COLLECTIVE_BYTES:
            yield _overlap(axis, min(num_bytes, _MOST_GATHERED_BYTES // axis.size()), product, once, facts)


def _overlap(
    axis: DeviceMesh, num_bytes: int, product: Callable[[], Any], once: float, facts: Sequence[RankFacts]
) -> Overlap:
    """Measure exchanges of one size along an axis; `once` are the seconds of a product."""
    platform, world, group = axis.platform, axis.world, axis.group_along(0)
    flat = platform.zeros((num_bytes,), platform.dtype("uint8"))
    rows = platform.ops.ones((4, num_bytes // 2**12, 2**8), platform.dtype("float32"))
    sequences = DTensor.from_local(rows, axis, [Shard(1)])

    def exchange() -> None:
        sequences.redistribute(placements=[Replicate()])

    world.all.barrier()
    idle = _slowest(world, min(each for each, _ in _timed(platform, exchange, repeats=5)))
    longest = max(idle, _LEAST_PRODUCTS)
    repeats = max(1, min(1000, int(_LONGEST_PRODUCT / once), round(longest / once)))

    def compute() -> None:
        for _ in range(repeats):
            product()

    def wait() -> None:
        compute()
        exchange()

    def prefetch() -> None:
        # Into new memory, as weights are gathered.
        output = platform.empty((num_bytes * group.size,), flat.dtype)
        work = group.all_gather_into(output, flat, async_op=True)
        compute()
        work.wait()

    alone, after, both = _in_turns(platform, world, (compute, wait, prefetch), longest)
    machines = len({facts[rank].host for rank in group.ranks})
    # The difference of two measurements may vanish in noise, and a device file needs a time above 0.
    sent, waited = num_bytes * (group.size - 1), max(after - alone, idle / 10)
    return Overlap(axis.mesh_dim_names[0], group.size, machines, sent, waited, alone, both)


def _in_turns(platform: Platform, world: World, runs: Sequence[Callable[[], None]], seconds: float) -> list[float]:
    """Return the seconds of computations with exchanges, on the slowest rank of each turn; one is of about `seconds`.

    They run in turns, so that changes of a processor's speed concern all of them. Of each the faster half of its turns
    is averaged: ranks wait for each other in every step, while other programs disturb only some of them.
    """
    times: list[list[float]] = [[] for _ in runs]
    rounds = max(1, int(_TURN_SECONDS / seconds))
    turns = max(_LEAST_TURNS, int(_TURNS_SECONDS / (rounds * seconds)))
    # The first turn allocates memory.
    for _ in range(1 + turns):
        for found, run in zip(times, runs, strict=True):
            world.all.barrier()
            platform.synchronize()
            start = time.perf_counter()
            for _ in range(rounds):
                run()
            platform.synchronize()
            found.append((time.perf_counter() - start) / rounds)
    slowest = np.max(_gathered(world, times), axis=0)[:, 1:]
    return [float(each) for each in np.sort(slowest)[:, : turns // 2].mean(axis=1)]


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
