"""Processor time and state of a step of 8-bit AdamW compared with AdamW, on parameters of a small decoder.

    python benchmarks/optimizer_step.py [--hidden 128] [--layers 4]

Prints the milliseconds of a step on one thread, the ratio to `adamw`, and the bytes of state for each parameter, of
hp-trainer's `adamw` and `adamw_8bit` and of `torch.optim.AdamW`, unfused and fused.
"""

from __future__ import annotations

import argparse

import torch
from _timing import compare

from hp_dtensor import get_platform
from hp_trainer.config import AdamWConfig
from hp_trainer.optimizers import AdamW8bitConfig, state_bytes
from hp_trainer.plugins import registries


def shapes(hidden: int, layers: int) -> list[tuple[int, ...]]:
    """Return the shapes of a decoder's parameters: embedding, head, and per layer attention, feed-forward and norms."""
    one = [(hidden, hidden)] * 4 + [(4 * hidden, hidden)] * 2 + [(hidden, 4 * hidden)] + [(hidden,)] * 2
    return [(16 * hidden, hidden)] * 2 + one * layers


def parameters_of(sizes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    """Return parameters with gradients; all contestants have the same numbers."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


def main() -> None:
    """Let the optimizers take turns, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    platform, sizes = get_platform("torch"), shapes(options.hidden, options.layers)
    count = sum(torch.Size(size).numel() for size in sizes)
    steps, states = {}, {}
    for name, settings in (("adamw", AdamWConfig()), ("adamw_8bit", AdamW8bitConfig())):
        named = [(str(i), parameter) for i, parameter in enumerate(parameters_of(sizes))]
        optimizer = registries().optimizers.get(name, "torch").build(named, settings, platform)
        steps[name] = lambda optimizer=optimizer: optimizer.step(1e-3)
        states[name] = state_bytes(optimizer, platform)
    for name, fused in (("torch AdamW", None), ("torch AdamW, fused", True)):
        steps[name] = torch.optim.AdamW(parameters_of(sizes), lr=1e-3, fused=fused).step
        states[name] = 8 * count
    times = dict(zip(steps, compare(list(steps.values()), 4.0), strict=True))
    print(f"{count:,} parameters in {len(sizes)} tensors")
    for name, time in times.items():
        ratio, size = time / times["adamw"], states[name] / count
        print(f"{name:20}{time / 1e3:9.2f} ms{ratio:8.2f} times adamw{size:8.2f} bytes a parameter")


if __name__ == "__main__":
    main()
