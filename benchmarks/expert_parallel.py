"""Token dispatchers of expert parallelism, compared in one run over real ranks.

    python benchmarks/expert_parallel.py                      # 2 gloo ranks
    python benchmarks/expert_parallel.py --ranks 4 --tokens 2048 --top-k 8

Each rank has its own tokens. Dispatch and combine are measured, forward and backward, without experts: median and best
over rounds of the slowest rank, with contenders in turns.

    MB a rank    bytes that a rank sends in forward
    of formula   these bytes over the formula: each token sent once to each other rank that has experts for it and
                 returned once, with its choices and the sizes, computed from the choices alone
    limit        even all-to-alls of as many bytes, in both directions, in forward and backward
    rows alone   the four exchanges of `all_to_all`'s rows, which gather a token's copies in the order of their ranks
                 and sum its rows, as every dispatcher must: no sizes, experts, scores or autograd
    least        the same with what no dispatcher can leave out, each by one call of the framework or the group: ranks
                 of choices, rows for each rank, exchange of sizes, sort of rows, the message of experts and scores,
                 numbers of received experts on their rank, and an autograd node for dispatch and one for combine
    its slots    the part of `all_to_all` that finds the ranks of each token, in O(top_k * ranks) or O(top_k ** 2)

With `--bytes-per-second` each rank waits after sending, to simulate a network link of this rate.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import numpy

from hp_dtensor.comm.collectives import all_to_all_rows_data
from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.launch.local_launch import RankPool
from hp_dtensor.platform.selection import get_platform
from hp_moe import Routing, TwoLevelDispatcher
from hp_moe.dispatch import dispatchers
from hp_moe.dispatch.row_exchange import RowExchange

NAMES = ("all_to_all", "all_to_all_int8", "copy_per_expert", "all_gather")


def choices(random, tokens, num_experts, top_k):
    """Return distinct random experts for each token, all equally likely."""
    return numpy.argsort(random.random((tokens, num_experts)), 1)[:, :top_k]


def deduplicated_bytes(sizes):
    """Return the mean bytes that a rank sends if each token is sent once to each rank that has experts for it."""
    ranks, top_k, row = sizes["ranks"], sizes["top_k"], 4 * sizes["dim"]
    chunk = -(-sizes["num_experts"] // ranks)
    rows = 0
    for rank in range(ranks):
        chosen = choices(numpy.random.default_rng(rank), sizes["tokens"], sizes["num_experts"], top_k)
        reached = (chosen[:, :, None] // chunk == numpy.arange(ranks)).any(1)
        rows += reached.sum() - reached[:, rank].sum()
    # Rows in both directions, experts and scores in one; before them the sizes, as int64.
    return rows * (2 * row + 8 * top_k) / ranks + (ranks - 1) * (1 + chunk) * 8


class Contender:
    """One dispatcher on this rank's tokens."""

    def __init__(self, platform, dispatcher, tokens, dim, num_experts, top_k, seed):
        random = numpy.random.default_rng(seed)
        self.platform, self.dispatcher = platform, dispatcher
        chosen = choices(random, tokens, num_experts, top_k)
        counts = numpy.bincount(chosen.reshape(-1), minlength=num_experts)
        scores = random.random((tokens, top_k)).astype(numpy.float32)
        self.x = platform.from_numpy(random.normal(size=(tokens, dim)).astype(numpy.float32))
        self.routing = Routing(*map(platform.from_numpy, (chosen, counts, scores)))
        platform.set_requires_grad(self.x, True)

    def step(self):
        sent = self.dispatcher.dispatch(self.x, self.routing)
        y = self.dispatcher.combine(sent.rows, sent)
        self.platform.grad([y], [self.x], [self.x])
        return sent.sent_bytes


def slot_searches(contender):
    """Return the two methods by which `all_to_all` finds the ranks of each token within its dispatch."""
    dispatcher, experts = contender.dispatcher, contender.routing.experts
    return {
        "its slots by rank": lambda: dispatcher._by_rank(experts),
        "its slots by pair": lambda: dispatcher._first_ones(experts),
    }


def limit(platform, group, num_bytes):
    """Return a function that runs four even all-to-alls: dispatch and combine, forward and backward."""
    rows = max(1, int(num_bytes / 2 / 4 / max(1, group.size - 1)))
    x = platform.from_numpy(numpy.zeros((rows * group.size, 1), numpy.float32))

    def run():
        for _ in range(4):
            all_to_all_rows_data(x, group, [rows] * group.size, [rows] * group.size)

    return run


def rows_alone(contender):
    """Return a function that gathers, sends, returns and sums the contender's rows, in forward and backward."""
    group, x = contender.dispatcher.group, contender.platform.detach(contender.x)
    route = contender.dispatcher.dispatch(contender.x, contender.routing).route

    def run():
        for _ in range(2):
            back = RowExchange(group, route, is_return=True)
            back.exchange(RowExchange(group, route).exchange(x))

    return run


def least(contender):
    """Return a function that does only the work which every dispatcher must do, on the contender's rows."""
    dispatcher, platform, routing = contender.dispatcher, contender.platform, contender.routing
    ops, group, x, each = platform.ops, dispatcher.group, contender.x, [1] * dispatcher.group.size
    sent = dispatcher.dispatch(x, routing)
    keys, received_experts = (ops.reshape(p.keys, (-1,)) for p in (sent.route.permutation, sent.permutation))
    experts = ops.reshape(routing.experts, (-1,))
    table = platform.from_numpy(numpy.arange(dispatcher.num_experts + 1))
    sizes = platform.from_numpy(numpy.zeros((group.size, 1 + dispatcher.chunk), numpy.int64))

    def run():
        ops.index_select(table, 0, experts)
        ops.bincount(keys, group.size + 1)
        received = ops.zeros_like(sizes)
        work = group.all_to_all_into(received, sizes, each, each, async_op=True)
        ops.argsort(keys, 0, stable=True)
        work.wait()
        platform.to_numpy(received)
        choices, back = RowExchange(group, sent.route), RowExchange(group, sent.route, is_return=True)
        handle = choices.start(ops.cat([ops.cast(routing.experts, routing.scores.dtype), routing.scores], 1))
        rows = RowExchange(group, sent.route).exchange(x)
        choices.wait(handle)
        ops.index_select(table, 0, received_experts)
        platform.grad([back.exchange(rows)], [x], [x])

    return run


def slowed(run, bytes_per_second):
    """Return `run`, followed by the time that its bytes would take at this rate."""
    if not bytes_per_second:
        return run

    def wrapped():
        with record_collectives() as log:
            run()
        time.sleep(log.wire_bytes() / bytes_per_second)

    return wrapped


def measure(sizes, rounds, bytes_per_second):
    """Return (bytes sent in forward, seconds of each round) of this rank for each contender."""
    platform = get_platform()
    mesh = init_device_mesh("cpu", (sizes["ranks"],), platform=platform)
    group, found = mesh.group_along(), {}
    builds = {name: dispatchers().get(name).build for name in NAMES}
    if sizes["ranks"] == 4:
        builds["two_level, 2 x 2"] = functools.partial(TwoLevelDispatcher, inner_size=2)
    layer = {name: sizes[name] for name in ("tokens", "dim", "num_experts", "top_k")}
    runs = {}
    for name, build in builds.items():
        contender = Contender(platform, build(group, sizes["num_experts"]), **layer, seed=group.rank)
        found[name] = (contender.step(), [])
        runs[name] = slowed(contender.step, bytes_per_second)
        if name == "all_to_all":
            searches, alone = slot_searches(contender), rows_alone(contender)
            bound = least(contender)
    sent = statistics.mean(float(each) for each in group.all_gather_bytes(str(found["all_to_all"][0]).encode()))
    found["limit"] = (sent, [])
    runs["limit"] = slowed(limit(platform, group, sent), bytes_per_second)
    for name, run in (("rows alone", alone), ("least", bound)):
        found[name], runs[name] = (sent, []), slowed(run, bytes_per_second)
    runs |= searches
    found |= {name: (0, []) for name in searches}
    for _ in range(rounds):
        for name, run in runs.items():
            # All ranks start together, so that waiting for a late rank is not measured.
            group.barrier()
            start = time.perf_counter()
            run()
            found[name][1].append(time.perf_counter() - start)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("tokens", 1024), ("dim", 512), ("num-experts", 64), ("top-k", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bytes-per-second", type=float, default=0.0, help="simulated rate of a rank's link; 0: none")
    options = vars(parser.parse_args())
    rounds, rate = options.pop("rounds"), options.pop("bytes_per_second")
    with RankPool(get_platform(), options["ranks"]) as pool:
        ranks = pool.run(measure, options, rounds, rate)
    print(", ".join(f"{name} {value}" for name, value in options.items()), f"float32, {get_platform().name}")
    formula = deduplicated_bytes(options)
    print(f"{'':20}{'MB a rank':>12}{'of formula':>12}{'ms':>9}{'best':>9}{'over limit':>12}{'best':>7}")
    slowest = {name: [max(each) for each in zip(*(rank[name][1] for rank in ranks), strict=True)] for name in ranks[0]}
    for name, seconds in slowest.items():
        sent = statistics.mean(rank[name][0] for rank in ranks)
        times = statistics.median(seconds), min(seconds)
        over = times[0] / statistics.median(slowest["limit"]), times[1] / min(slowest["limit"])
        print(f"{name:20}{sent / 1e6:12.4f}{sent / formula:12.6f}", end="")
        print(f"{times[0] * 1e3:9.2f}{times[1] * 1e3:9.2f}{over[0]:12.2f}{over[1]:7.2f}")


if __name__ == "__main__":
    main()
