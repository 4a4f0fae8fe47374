"""Planning for a million ranks in one process: time to build a mesh, place parameters and plan their moves.

No processes, no sockets, no framework: a fake world, seen from several ranks. Goal: under a second of process time
for a 4-D mesh of 1,048,576 ranks with all its sub-meshes, 1,000 parameters and their redistributions.
"""

import argparse
import itertools
import time

from hp_dtensor import DeviceMesh, Replicate, Shard, TensorSpec, fake_world, plan_redistribute
from hp_dtensor.redistribute import planner

NAMES = ("pp", "dp", "cp", "tp")
WORLDS = {8: (1, 2, 2, 2), 4096: (4, 16, 8, 8), 1_048_576: (16, 64, 32, 32)}
GOAL_SECONDS = 1.0
R, S0, S1 = Replicate(), Shard(0), Shard(1)

# At rest -> for the computation: a column- and a row-wise weight, experts, an embedding, a norm's scale; and moves
# of shards from one axis and dimension to another.
MOVES = [
    ((R, S0, R, S0), (R, R, R, S0)),
    ((R, S0, R, S1), (R, R, R, S1)),
    ((S0, S0, R, S1), (S0, R, R, S1)),
    ((R, S0, S0, S0), (R, R, R, S1)),
    ((R, S0, R, R), (R, R, R, R)),
    ((R, S0, R, S1), (R, S1, R, S0)),
    ((S0, R, S0, R), (R, S0, R, S0)),
]


def build_meshes(world_size: int) -> DeviceMesh:
    """The 4-D mesh, after every sub-mesh of it, every flattened one and this rank's place in them were asked for."""
    mesh = DeviceMesh("cpu", WORLDS[world_size], mesh_dim_names=NAMES)
    for length in range(1, len(NAMES) + 1):
        for names in itertools.combinations(NAMES, length):
            part = mesh[names]
            assert part.get_coordinate() is not None
            if length > 1:
                assert mesh.flatten("_".join(names), names).size() == part.size()
    return mesh


def parameters(world_size: int, count: int) -> list[tuple[int, int]]:
    """Shapes of 1,000 parameters, 250 different ones, some of them uneven."""
    unit = 64 if world_size < 10_000 else 4096
    return [(unit * (1 + i % 50) + (i % 5 == 0), unit * (1 + i % 7)) for i in range(count)]


def measure(world_size: int, rank: int, count: int = 1000) -> dict[str, float]:
    """Process seconds of the three parts, nothing cached before, and the number of steps planned."""
    for cached in vars(planner).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    with fake_world(world_size, rank):
        times = [time.process_time()]
        mesh = build_meshes(world_size)
        times.append(time.process_time())
        moves = list(itertools.islice(itertools.cycle(MOVES), count))
        shapes = parameters(world_size, count)
        specs = [
            (TensorSpec(mesh, at_rest, shape, None), TensorSpec(mesh, used, shape, None))
            for shape, (at_rest, used) in zip(shapes, moves, strict=True)
        ]
        times.append(time.process_time())
        plans = [plan_redistribute(mesh, a.placements, b.placements, a.shape, 2) for a, b in specs]
        num_steps = sum(len(plan.steps) for plan in plans)
        times.append(time.process_time())
    meshes, placing, planning = (after - before for before, after in itertools.pairwise(times))
    return {"meshes": meshes, "placing": placing, "planning": planning, "all": times[-1] - times[0], "steps": num_steps}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(
        f"{'ranks':>10} {'seen from':>10} {'meshes s':>9} {'placing s':>9} {'planning s':>10} {'all s':>7} {'steps':>6}"
    )
    worst = 0.0
    for world_size in WORLDS:
        for rank in (0, world_size // 3, world_size - 1):
            m = measure(world_size, rank)
            worst = max(worst, m["all"])
            print(
                f"{world_size:>10,} {rank:>10,} {m['meshes']:>9.4f} {m['placing']:>9.4f} {m['planning']:>10.4f} "
                f"{m['all']:>7.3f} {m['steps']:>6.0f}"
            )
    print(f"slowest: {worst:.3f} s, goal {GOAL_SECONDS} s: {'met' if worst < GOAL_SECONDS else 'MISSED'}")


if __name__ == "__main__":
    main()
