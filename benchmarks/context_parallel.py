"""Causal attention of a sequence that ranks share, forward and backward, under hp_dtensor and torch, on gloo ranks.

    python benchmarks/context_parallel.py [--ranks 2 | --ranks 4] [--length 8192] [--kv-heads 8] [--rounds 7]

Torch is its own context parallel ring (`torch.distributed.tensor.experimental._context_parallel`), with both of its
ways to rotate keys and values. Its dispatcher knows no attention of the CPU, so its ring is given the same flash kernel
that ours runs on. Every contender takes each step in turn in the same processes, one thread each. Prints the median
step time, in brackets what it takes of torch's default; the bytes that a rank sends; and the memory that a step adds to
a rank, its largest resident memory less that before the step, measured in processes of its own. `--timeline` prints
for rank 0 when each hop of our ring was begun and waited for, and when each block was computed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from _torch_ranks import connected_platform, run_torch_ranks

WARM_UP = 2


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)


def flash_backward(**given: Any) -> Any:
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(given[name] for name in names), 0.0, given["is_causal"]
    )


class TorchRing(torch.autograd.Function):
    """Torch's ring over the default group, with the kernels of the CPU."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        out, lse = theirs._templated_ring_attention(dist.group.WORLD, 2, flash, query, key, value, is_causal=True)[:2]
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        query, key, value, out, lse = ctx.saved_tensors
        return theirs._templated_ring_attention_backward(
            dist.group.WORLD, 2, flash_backward, grad, "grad_out", query, key, value, out, lse, is_causal=True
        )[:3]


def torch_ring(method: str) -> Callable[[argparse.Namespace], Callable[..., torch.Tensor]]:
    def build(options: argparse.Namespace) -> Callable[..., torch.Tensor]:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            theirs.set_rotate_method(method)
            return TorchRing.apply(*tensors)

        return attend

    return build


def ours(method: str, ulysses: bool) -> Callable[[argparse.Namespace], Callable[..., torch.Tensor]]:
    def build(options: argparse.Namespace) -> Callable[..., torch.Tensor]:
        from hp_dtensor import AttentionMask, SequenceCut, context_parallel_attention, init_device_mesh

        mesh = init_device_mesh("cpu", (options.ranks,), platform=connected_platform())
        degree = options.ranks if ulysses else 1
        cut = SequenceCut(length=options.length, ranks=options.ranks, ulysses_degree=degree)

        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            return context_parallel_attention(*tensors, mesh, mask=AttentionMask(), cut=cut, method=method)

        return attend

    return build


CONTENDERS = {
    "torch, all-gather": torch_ring("allgather"),
    "torch, all-to-all": torch_ring("alltoall"),
    "our ring": ours("ring", False),
    "our all-gather": ours("all_gather", False),
    "our Ulysses": ours("ring", True),
}
DEFAULT = "torch, all-gather"


def inputs(options: argparse.Namespace, rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return this rank's queries, keys and values, leaves of autograd, and the gradient of the result."""
    generator = torch.Generator().manual_seed(rank)
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    shape = options.length // options.ranks, options.head_dim
    tensors = [torch.randn((1, each, *shape), generator=generator) for each in heads]
    return [x.requires_grad_() for x in tensors[:3]], tensors[3]


def measure(names: Sequence[str], options: argparse.Namespace) -> Any:
    """Return seconds of each step, bytes sent, bytes of memory added and the worst difference, of this rank."""
    rank = dist.get_rank()
    built = {name: CONTENDERS[name](options) for name in names}
    tensors, grad = inputs(options, rank)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    grads: dict[str, list[torch.Tensor]] = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for step in range(options.rounds + WARM_UP):
        for name, attend in built.items():
            for x in tensors:
                x.grad = None
            dist.barrier()
            start = time.perf_counter()
            out = attend(*tensors)
            out.backward(grad)
            dist.barrier()
            if step >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
            grads[name] = [out.detach(), *(x.grad for x in tensors)] if len(names) > 1 else []
            del out
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    # The Ulysses cut gives ranks other tokens: its numbers are those of another sequence.
    rings = [name for name in names if name != "our Ulysses" and grads[name]]
    worst = max(
        (float((x - y).abs().max()) for name in rings for x, y in zip(grads[name], grads[rings[0]], strict=True)),
        default=0.0,
    )
    if options.timeline and "our ring" in names:
        print_timeline(built["our ring"], tensors, grad, rank)
    return seconds, sent(built, tensors, grad), peak, worst


def sent(built: dict[str, Any], tensors: list[torch.Tensor], grad: torch.Tensor) -> dict[str, float]:
    """Return the bytes that this rank sends in one step of each of ours."""
    from hp_dtensor import record_collectives

    found = {}
    for name, attend in built.items():
        if name.startswith("our"):
            with record_collectives() as log:
                attend(*tensors).backward(grad)
            found[name] = log.wire_bytes()
    return found


def print_timeline(attend: Any, tensors: list[torch.Tensor], grad: torch.Tensor, rank: int) -> None:
    """Print what rank 0 did in one step of the ring: hops under way are drawn beside the blocks computed meanwhile."""
    from hp_dtensor.parallel.context_parallel import ring

    events: list[tuple[float, str]] = []
    start = time.perf_counter()

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begun = time.perf_counter() - start
            result = function(*args)
            events.append((begun, f"{name:8s} {begun * 1e3:8.1f} ... {(time.perf_counter() - start) * 1e3:8.1f} ms"))
            return result

        return call

    class Hop:
        def __init__(self, work: Any) -> None:
            self.work = work
            events.append((time.perf_counter() - start, f"hop begun  {(time.perf_counter() - start) * 1e3:6.1f} ms"))
            self.wait = noted("wait", work.wait)

    swap = ring._Ring.swap
    ring._Ring.swap = lambda self, *args: Hop(swap(self, *args))
    ring.attend, ring.attend_grad = noted("forward", ring.attend), noted("backward", ring.attend_grad)
    attend(*tensors).backward(grad)
    if rank == 0:
        print("timeline of rank 0:", *(text for _, text in sorted(events)), sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeline", action="store_true")
    options = parser.parse_args()
    if options.length % options.ranks:
        parser.error(f"--length must be a multiple of the {options.ranks} ranks, got {options.length}")
    names = list(CONTENDERS)
    seconds, wire, _, worst = run_torch_ranks(measure, options.ranks, names, options)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    options.rounds, options.timeline = 1, False
    peak = {name: run_torch_ranks(measure, options.ranks, [name], options)[2] for name in names}
    print(f"{options.length} tokens, {options.heads} heads over {options.kv_heads}, {options.ranks} ranks")
    for name in names:
        bytes_sent = f", {wire[name] / 2**20:6.1f} MiB sent" if name in wire else ""
        print(
            f"{name:18s} {median[name] * 1e3:8.1f} ms ({median[name] / median[DEFAULT]:4.2f}),"
            f" {peak[name] / 2**20:7.1f} MiB added ({peak[name] / peak[DEFAULT]:4.2f}){bytes_sent}"
        )
    print(f"largest difference of results and gradients from {DEFAULT}: {worst:.1e}")
    print(json.dumps({"seconds": median, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
