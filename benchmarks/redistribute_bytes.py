"""Bytes on the wire of redistributions, per rank on average: this planner's, torch's, and an exhaustive search's.

torch's planner is asked for its plans in a fake process group, and the bytes of their collectives are counted
with the usual formulas: as torch runs them on CPU (all-to-all as all-gather and slice), on GPU, and on GPU
with every flattened submesh registered. Pairs that torch refuses are left out everywhere. Needs torch; without
it only the other columns are printed.
"""

import argparse
import importlib.util
import itertools
import logging
import math
import sys
from pathlib import Path

from hp_dtensor import DeviceMesh, fake_world, plan_redistribute
from hp_dtensor.testing.rule_proof import placement_options

sys.path.insert(0, str(Path(__file__).parents[1] / "packages/hp-dtensor/tests"))

from exhaustive_search import exhaustive_volumes, mean_bytes

MESHES = ((2, 2), (2, 4), (2, 2, 2))
SHAPE = (8, 8)
ITEMSIZE = 4


def our_bytes(mesh_shape, shape):
    with fake_world(math.prod(mesh_shape)):
        mesh = DeviceMesh("cpu", mesh_shape)
        states = list(itertools.product(placement_options(len(shape)), repeat=len(mesh_shape)))
        return {
            (source, target): plan_redistribute(mesh, source, target, shape, ITEMSIZE).wire_bytes
            for source in states
            for target in states
        }


def searched_bytes(mesh_shape, shape):
    volumes = exhaustive_volumes(mesh_shape, shape, placement_options(len(shape)))
    return {pair: mean_bytes(volume, mesh_shape, ITEMSIZE) for pair, volume in volumes.items()}


class TorchPlans:
    """torch's redistribution plans on a mesh, in a fake process group."""

    def __init__(self, mesh_shape, shape, flattened):
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        logging.getLogger("torch.distributed").setLevel(logging.ERROR)
        dist.init_process_group("fake", rank=0, world_size=math.prod(mesh_shape), store=FakeStore())
        self.dist = dist
        self.names = tuple(f"a{i}" for i in range(len(mesh_shape)))
        self.mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=self.names)
        self.mesh_shape, self.shape = mesh_shape, shape
        self.meta = torch.empty(shape, device="meta")
        if flattened:
            for n in range(2, len(mesh_shape) + 1):
                for names in itertools.combinations(self.names, n):
                    self.mesh[names]._flatten("_".join(names))

    def close(self):
        self.dist.destroy_process_group()

    def bytes(self, source, target, all_to_all):
        """Mean bytes per rank, or None where torch refuses."""
        from torch.distributed.tensor import _redistribute as planner

        specs = [self._spec(placements) for placements in (source, target)]
        infos = planner._gen_transform_infos_non_cached(*specs)
        infos = planner._optimize_transform_infos(infos, self.mesh, specs[0].placements, specs[1].placements)
        nbytes = math.prod(self.shape) * ITEMSIZE / self._parts(source)
        total = 0.0
        for info in infos:
            mesh = getattr(info, "mesh", self.mesh)
            sent, nbytes = _collective(*info.src_dst_placements, nbytes, mesh.size(info.mesh_dim), all_to_all)
            if sent is None:
                return None
            total += sent
        return total

    def _parts(self, placements):
        return math.prod(n for n, p in zip(self.mesh_shape, placements, strict=True) if p.is_shard())

    def _spec(self, placements):
        from torch.distributed.tensor import Partial, Replicate, Shard
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        converted = tuple(
            Shard(p.dim) if p.is_shard() else Partial() if p.is_partial() else Replicate() for p in placements
        )
        meta = TensorMeta(self.meta.shape, self.meta.stride(), self.meta.dtype)
        return DTensorSpec(self.mesh, converted, tensor_meta=meta)


def _collective(source, target, nbytes, ranks, all_to_all):
    """(bytes that a rank sends, its bytes afterwards) of one of torch's transforms; None: torch refuses it."""
    if source.is_partial() and target.is_replicate():
        return 2 * nbytes * (ranks - 1) / ranks, nbytes
    if source.is_partial() and target.is_shard():
        return nbytes * (ranks - 1) / ranks, nbytes / ranks
    if source.is_shard() and target.is_replicate():
        return nbytes * (ranks - 1), nbytes * ranks
    if source.is_shard() and target.is_shard():
        return nbytes * (ranks - 1) / (ranks if all_to_all else 1), nbytes
    if source.is_replicate() and target.is_shard():
        return 0.0, nbytes / ranks
    if source.is_replicate() and target.is_partial():
        return 0.0, nbytes
    return None, nbytes


def torch_bytes(mesh_shape, shape, pairs):
    """Columns by name, each {pair: bytes or None}."""
    columns = {"torch cpu": (False, False), "torch gpu": (False, True), "torch gpu flattened": (True, True)}
    result = {}
    for flattened in (False, True):
        plans = TorchPlans(mesh_shape, shape, flattened)
        for name, (needs_flattened, all_to_all) in columns.items():
            if needs_flattened == flattened:
                result[name] = {pair: plans.bytes(*pair, all_to_all) for pair in pairs}
        plans.close()
    return {name: result[name] for name in columns}


def columns_of(mesh_shape, shape):
    """{name: {pair: bytes}} over the pairs that torch can do."""
    ours = our_bytes(mesh_shape, shape)
    columns = {"ours": ours}
    if importlib.util.find_spec("torch"):
        columns |= torch_bytes(mesh_shape, shape, list(ours))
    columns["search"] = searched_bytes(mesh_shape, shape)
    done = [pair for pair in ours if all(column[pair] is not None for column in columns.values())]
    return {name: {pair: column[pair] for pair in done} for name, column in columns.items()}


def report(meshes, shape):
    """Print the table; the number of pairs for which ours needs more than another column."""
    sums, worse = {}, 0
    print(f"bytes per rank, summed over all pairs of placements of a {list(shape)} tensor of {ITEMSIZE}-byte elements")
    for mesh_shape in meshes:
        columns = columns_of(mesh_shape, shape)
        totals = {name: math.fsum(column.values()) for name, column in columns.items()}
        print_row(f"mesh {mesh_shape}", totals, len(columns["ours"]))
        for name, column in columns.items():
            more = [pair for pair, theirs in column.items() if columns["ours"][pair] > theirs + 1e-6]
            worse += len(more)
            for pair in more[:3]:
                print(f"    more than {name}: {pair}: {columns['ours'][pair]:g} > {column[pair]:g}")
            sums[name] = sums.get(name, 0.0) + totals[name]
    print_row("all", sums, "")
    return worse


def print_row(label, totals, count):
    cells = [f"{name} {total:.0f} ({totals['ours'] / total:.3f})" for name, total in totals.items()]
    print(f"{label:16} {count!s:5} pairs: " + ", ".join(cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=int, nargs="+", default=SHAPE)
    return 1 if report(MESHES, tuple(parser.parse_args().shape)) else 0


if __name__ == "__main__":
    sys.exit(main())
