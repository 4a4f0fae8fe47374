"""Attention of a sequence that ranks share, forward and backward, under hp_dtensor and torch, on gloo ranks.

    python benchmarks/context_parallel.py [--ranks 2 | --ranks 4] [--lengths 1024 4096 16384] [--masks causal full]
        [--kv-heads 8 2] [--contenders "our ring" ...] [--rounds 7] [--seconds 10] [--memory] [--timeline]

Torch is its own context parallel ring (`torch.distributed.tensor.experimental._context_parallel`), with both of its
ways to rotate keys and values. Its dispatcher knows no attention of the CPU, so its ring is given the same flash kernel
that ours runs on. Every contender takes each step in turn in the same processes, one thread each.

The first contender sends nothing: it is the kernel alone, forward and backward, on as many scores as fall to a rank, in
one call without a mask, in which the kernel is fastest; all ranks compute at once. It is the limit of what a rank can
reach. Of each other one the table has the median step time and the median processor time of a rank (the mean over
ranks; other work on the machine does not count in it), how much that is of torch's default, and which share of it the
limit takes. Under a causal mask the kernel itself does more than the limit: it computes full blocks of 512 keys. So the
second contender sends nothing either, and calls the kernels on the blocks of our ring, without merging their results:
what a ring on these kernels cannot go below. The third one also sends each block once in forward, and in backward once
more with its gradients, through the same shared memory, but reads no message: what a ring cannot go below that sends
its messages so.

A case ends after `--rounds` rounds, or with the round in which it reaches `--seconds`. The first round is a warm-up,
unless it is the only one.

With `--memory`, also the memory that a step adds to a rank, its largest resident memory less that before the step, in
processes of its own. With `--timeline`, when each hop of our ring was started and waited for, and when each block was
computed, for rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import operator
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _torch_ranks import connected_platform, run_torch_ranks


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)


def flash_backward(**given: Any) -> Any:
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(given[name] for name in names), 0.0, given["is_causal"]
    )


class TorchRing(torch.autograd.Function):
    """Torch's ring over the default group, with the kernels of the CPU; the last argument is whether it is causal."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        theirs._cp_options.enable_load_balance = causal
        out, lse = theirs._templated_ring_attention(dist.group.WORLD, 2, flash, query, key, value, is_causal=causal)[:2]
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        query, key, value, out, lse = ctx.saved_tensors
        theirs._cp_options.enable_load_balance = ctx.causal
        grads = theirs._templated_ring_attention_backward(
            dist.group.WORLD, 2, flash_backward, grad, "grad_out", query, key, value, out, lse, is_causal=ctx.causal
        )
        return *grads[:3], None


@dataclass(frozen=True)
class Case:
    """One size: tokens of the full sequence, the mask, and heads."""

    ranks: int
    length: int
    causal: bool
    heads: int
    kv_heads: int
    head_dim: int

    def inputs(self, rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return a rank's queries, keys and values, leaves of autograd, and the gradient of the result."""
        generator = torch.Generator().manual_seed(rank)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shape = self.length // self.ranks, self.head_dim
        tensors = [torch.randn((1, each, *shape), generator=generator) for each in heads]
        return [x.requires_grad_() for x in tensors[:3]], tensors[3]


Attend = Callable[..., torch.Tensor]


def products_alone(case: Case) -> Attend:
    """Return attention with as many keys for each query as the mean query sees."""
    keys = case.length // 2 if case.causal else case.length

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        repeated = [x.repeat(1, 1, -(-keys // x.shape[2]), 1)[:, :, :keys].detach() for x in (key, value)]
        return Kernel.apply(query, *(x.requires_grad_() for x in repeated))

    return attend


class Kernel(torch.autograd.Function):
    """One call of the kernel, forward and backward."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out, lse = flash(query, key, value, False)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        return flash_backward(grad_out=grad, query=query, key=key, value=value, out=out, logsumexp=lse, is_causal=False)


def torch_ring(method: str) -> Callable[[Case], Attend]:
    def build(case: Case) -> Attend:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            theirs.set_rotate_method(method)
            return TorchRing.apply(*tensors, case.causal)

        return attend

    return build


def ours(method: str, ulysses: bool) -> Callable[[Case], Attend]:
    def build(case: Case) -> Attend:
        from hp_dtensor import AttentionMask, SequenceSharding, context_parallel_attention, init_device_mesh

        mesh = init_device_mesh("cpu", (case.ranks,), platform=connected_platform())
        degree = case.ranks if ulysses else 1
        sharding = SequenceSharding(length=case.length, ranks=case.ranks, ulysses_degree=degree, balanced=case.causal)

        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            mask = AttentionMask(causal=case.causal)
            return context_parallel_attention(*tensors, mesh, mask=mask, sharding=sharding, method=method)

        return attend

    return build


def blocks_alone(case: Case) -> Attend:
    """Return a function that calls the kernels on the blocks of our ring."""
    return lambda *tensors: Blocks.apply(*tensors, ring_blocks(case), None)


def blocks_and_messages(case: Case) -> Attend:
    """Return a function that calls the kernels on the blocks of our ring, and exchanges its messages."""
    from hp_dtensor.comm.world import current_world

    group = current_world(connected_platform()).all
    return lambda *tensors: Blocks.apply(*tensors, ring_blocks(case), group)


@functools.cache
def ring_blocks(case: Case) -> list[Any]:
    """Return the blocks of our ring on this rank: queries, keys and scores."""
    from hp_dtensor import SequenceSharding
    from hp_dtensor.parallel.attention.masks import Tokens
    from hp_dtensor.parallel.attention.ring import plan_ring
    from hp_dtensor.platform.attention import BlockScores

    sharding = SequenceSharding(length=case.length, ranks=case.ranks, balanced=case.causal)
    tokens = [Tokens(sharding.indices(rank)) for rank in range(case.ranks)]
    plan = plan_ring(tokens, dist.get_rank(), case.causal, None, None)
    return [
        (slice(segment.start, segment.stop), slice(keys.start, keys.stop), BlockScores(case.head_dim**-0.5, **causal))
        for rows in plan.plans
        for segment in rows[0].segments
        for keys in segment.keys
        for causal in [{"is_causal": keys.is_causal}]
    ]


class Blocks(torch.autograd.Function):
    """Calls of the kernels on blocks, forward and backward. Their results are dropped.

    With a group, keys and values are sent to all ranks meanwhile, and after backward tensors like their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Any, group: Any
    ) -> torch.Tensor:
        ctx.group, work = group, start_messages(group, key, value)
        block = connected_platform().attention_block
        found = [block(query[:, :, q], key[:, :, k], value[:, :, k], scores) for q, k, scores in blocks]
        # The first is of the rank's own keys, and has all queries.
        ctx.save_for_backward(query, key, value, *found[0])
        ctx.blocks = blocks
        work.wait()
        return found[0][0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        work = start_messages(ctx.group, key, value)
        for q, k, scores in ctx.blocks:
            g, queries, of_queries, lse_of_queries = (x[:, :, q] for x in (grad, query, out, lse))
            connected_platform().attention_block_grad(
                g, queries, key[:, :, k], value[:, :, k], of_queries, lse_of_queries, scores
            )
        work.wait()
        start_messages(ctx.group, key, value).wait()
        return query, key, value, None, None


def start_messages(group: Any, *tensors: torch.Tensor) -> Any:
    """Start sending a message of these tensors to each other rank, which does not read it."""
    from hp_dtensor.comm.process_group import DONE

    if group is None:
        return DONE
    others = [rank != group.rank for rank in range(group.size)]
    memory = [torch.empty(sum(x.numel() for x in tensors)) if other else None for other in others]
    return group.start_exchange([tensors if other else None for other in others], memory, lambda rank, message: None)


CONTENDERS = {
    "products alone": products_alone,
    "blocks alone": blocks_alone,
    "blocks and messages": blocks_and_messages,
    "torch, all-gather": torch_ring("allgather"),
    "torch, all-to-all": torch_ring("alltoall"),
    "our ring": ours("ring", False),
    "our all-gather": ours("all_gather", False),
    "our Ulysses": ours("ring", True),
}
LIMIT, DEFAULT = "products alone", "torch, all-gather"
NOT_MERGED = (LIMIT, "blocks alone", "blocks and messages")


def measure(names: Sequence[str], cases: Sequence[Case], *settings: Any) -> list[dict[str, Any]]:
    return [measure_case(names, case, *settings) for case in cases]


def measure_case(names: Sequence[str], case: Case, rounds: int, max_seconds: float, timeline: bool) -> dict[str, Any]:
    """Return by contender the seconds of each step, the processor's seconds, and what else there is to print."""
    from hp_dtensor import record_collectives

    rank = dist.get_rank()
    built = {name: CONTENDERS[name](case) for name in names}
    tensors, grad = case.inputs(rank)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    found: dict[str, list[torch.Tensor]] = {}
    sent: dict[str, float] = {}
    begin = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for step in range(rounds + 1):
        for name, attend in built.items():
            for x in tensors:
                x.grad = None
            is_recorded = step == 0 and name.startswith("our")
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            with record_collectives() if is_recorded else contextlib.nullcontext() as log:
                out = attend(*tensors)
                out.backward(grad)
            spent = time.process_time() - start[1]
            dist.barrier()
            seconds[name].append((time.perf_counter() - start[0], spent))
            if is_recorded:
                sent[name] = log.wire_bytes()
            found[name] = [out.detach(), *(x.grad for x in tensors)] if len(names) > 1 else []
            del out
        # All ranks have to agree on the last round.
        if mean_over_ranks([time.perf_counter() - begin])[0] > max_seconds:
            break
    # The first round is a warm-up, but long steps have no other one.
    seconds = {name: each[1:] or each for name, each in seconds.items()}
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if timeline and "our ring" in names:
        for x in tensors:
            x.grad = None  # those found are compared below
        print_timeline(built["our ring"], tensors, grad, rank)
    return {
        "wall": {name: [wall for wall, _ in each] for name, each in seconds.items()},
        "processor": {name: mean_over_ranks([own for _, own in each]) for name, each in seconds.items()},
        "sent": sent,
        "peak": peak,
        "worst": worst_difference(found),
    }


def mean_over_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def worst_difference(found: dict[str, list[torch.Tensor]]) -> float:
    """Return the largest difference of the rings' results and gradients from torch's default."""
    # The Ulysses sharding gives ranks other tokens: another sequence.
    rings = [name for name, tensors in found.items() if tensors and name not in (*NOT_MERGED, "our Ulysses")]
    pairs = [pair for name in rings for pair in zip(found[name], found[rings[0]], strict=True)]
    return max((float((x - y).abs().max()) for x, y in pairs), default=0.0)


def print_timeline(attend: Any, tensors: list[torch.Tensor], grad: torch.Tensor, rank: int) -> None:
    """Print what rank 0 did in one step of the ring: hops under way are drawn beside the blocks computed meanwhile."""
    from hp_dtensor.parallel.attention import ring

    events: list[tuple[float, str]] = []
    start = time.perf_counter()

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter() - start
            result = function(*args)
            events.append(
                (started, f"{name:8s} {started * 1e3:8.1f} ... {(time.perf_counter() - start) * 1e3:8.1f} ms")
            )
            return result

        return call

    class Hop:
        def __init__(self, work: Any) -> None:
            self.work = work
            events.append((time.perf_counter() - start, f"hop started {(time.perf_counter() - start) * 1e3:6.1f} ms"))
            self.wait = noted("wait", work.wait)

    exchange = ring._Ring.exchange
    ring._Ring.exchange = lambda self, *args: Hop(exchange(self, *args))
    ring.PartialAttention.add = noted("forward", ring.PartialAttention.add)
    ring.AttentionGrads.add = noted("backward", ring.AttentionGrads.add)
    attend(*tensors).backward(grad)
    if rank == 0:
        print("timeline of rank 0:", *(text for _, text in sorted(events)), sep="\n  ")


def print_case(case: Case, result: dict[str, Any], peak: dict[str, float]) -> None:
    mask = "causal" if case.causal else "full"
    print(f"\n{case.length} tokens, {mask}, {case.heads} heads over {case.kv_heads}, {case.ranks} ranks")
    print(f"{'':19s} {'step ms':>9s} {'of torch':>9s} {'processor ms':>13s} {'of torch':>9s} {'limit takes':>12s}")
    wall, spent = result["wall"], result["processor"]
    for name in wall:
        # Ratios of steps that followed each other: what else runs on the machine falls on both.
        of_torch = [statistics.median(map(operator.truediv, each[name], each[DEFAULT])) for each in (wall, spent)]
        limit = statistics.median(map(operator.truediv, spent[LIMIT], spent[name]))
        text = f"{statistics.median(wall[name]) * 1e3:9.1f} {of_torch[0]:9.2f}"
        text += f" {statistics.median(spent[name]) * 1e3:13.1f} {of_torch[1]:9.2f} {limit:12.2f}"
        if name in peak:
            text += f", {peak[name] / 2**20:7.1f} MiB added ({peak[name] / peak[DEFAULT]:4.2f})"
        if name in result["sent"]:
            text += f", {result['sent'][name] / 2**20:6.1f} MiB sent"
        print(f"{name:19s} {text}")
    print(f"largest difference of the rings' results and gradients from {DEFAULT}: {result['worst']:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--masks", nargs="+", choices=("causal", "full"), default=["causal"])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8])
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    options = parser.parse_args()
    if wrong := [length for length in options.lengths if length % (2 * options.ranks)]:
        parser.error(f"--lengths must be multiples of two chunks for each of {options.ranks} ranks, got {wrong}")
    cases = [
        Case(options.ranks, length, mask == "causal", options.heads, kv_heads, options.head_dim)
        for mask in options.masks
        for kv_heads in options.kv_heads
        for length in options.lengths
    ]
    # The others are compared with these two.
    names = [name for name in CONTENDERS if name in (LIMIT, DEFAULT, *options.contenders)]
    results = run_torch_ranks(measure, options.ranks, names, cases, options.rounds, options.seconds, options.timeline)
    for case, result in zip(cases, results, strict=True):
        alone = [name for name in names if name not in NOT_MERGED] if options.memory else []
        peak = {name: run_torch_ranks(measure, case.ranks, [name], [case], 1, 0.0, False)[0]["peak"] for name in alone}
        print_case(case, result, peak)


if __name__ == "__main__":
    main()
