"""Peak load of a rank by expert placement: without balancing, with moved experts, with copies, and with both.

    python benchmarks/expert_placement.py            # on the host, in seconds

Loads are shares of tokens per expert from a Dirichlet distribution; a smaller concentration is more skewed. Each column
is the peak load of a rank over the mean load, the mean over draws: 1.00 is perfect balance, and the time of a layer's
experts is proportional to it. `moved` makes at most eight swaps (`place_experts`, as `move_experts` does), `copied`
gives each rank at most `--slots` copies (`place_copies`), `both` copies experts after they have been moved.
"""

from __future__ import annotations

import argparse

import numpy

from hp_moe import busiest_load, place_copies, place_experts

SIZES = ((2, 16), (4, 64), (8, 64), (8, 128), (32, 256), (64, 256))  # ranks, experts


def peaks(loads, ranks, slots):
    """Return the peak load of a rank over the mean, by kind of placement."""
    at = [0] * len(loads)
    for expert, position in enumerate(place_experts(loads, range(len(loads)), ranks)):
        at[position] = loads[expert]
    none = ((),) * ranks
    found = {
        "neither": busiest_load(loads, none),
        "moved": busiest_load(at, none),
        "copied": busiest_load(loads, place_copies(loads, ranks, slots)),
        "both": busiest_load(at, place_copies(at, ranks, slots)),
    }
    return {name: peak * ranks / sum(loads) for name, peak in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=1, help="copies of experts on a rank, at most")
    parser.add_argument("--concentration", type=float, default=0.3)
    parser.add_argument("--draws", type=int, default=5)
    options = parser.parse_args()
    random = numpy.random.default_rng(0)
    print(f"{'ranks':>6}{'experts':>9}{'neither':>10}{'moved':>8}{'copied':>8}{'both':>8}")
    for ranks, experts in SIZES:
        draws = random.dirichlet(numpy.full(experts, options.concentration), options.draws)
        every = [peaks([int(share * 1e6) for share in shares], ranks, options.slots) for shares in draws]
        means = {name: numpy.mean([each[name] for each in every]) for name in every[0]}
        print(f"{ranks:6}{experts:9}{means['neither']:10.2f}" + "".join(f"{means[n]:8.2f}" for n in (*means,)[1:]))


if __name__ == "__main__":
    main()
