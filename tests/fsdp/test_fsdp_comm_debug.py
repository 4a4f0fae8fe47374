"""`CommDebugMode` lists gathers and reductions by the module whose parameters they are of, forward and backward."""

from __future__ import annotations

import pytest
from fsdp_training import Case, Net, build, mesh_of, shard, sharded_modules, step

from hp_dtensor import CommDebugMode
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import hsdp, hsdp_sync_stream

BLOCKS = ("blocks.0", "blocks.1")


class Recomputing(Net):
    def forward(self, ids, use_branch=True):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, platform=self.platform)
        return self.head(x)


def reported(comm):
    """Return (forward, backward) by module, each with (count, bytes) by collective."""
    return {
        module: tuple(
            {name: tuple(of[direction].values()) for name, of in collectives.items() if of[direction]["count"]}
            for direction in ("forward", "backward")
        )
        for module, collectives in comm.to_dict().items()
    }


def once(model):
    """Return one collective of its flat shard by the name of each group's module, the root's first."""
    sizes = [module._fsdp.group.buffers[0].layout.shard_numel * 4 for module in sharded_modules(model)]
    return [(name, (1, n)) for name, n in zip((type(model).__name__, *BLOCKS), sizes, strict=True)]


def followed(platform, case, model):
    """Record a step after the first one, in which the order of modules is not known yet."""
    step(platform, model, case)
    with CommDebugMode(model, platform) as comm:
        step(platform, model, case)
    return reported(comm), once(model)


@pytest.mark.parametrize("kind", [Net, Recomputing])
def test_gathers_and_reductions_belong_to_their_modules(hp_platform, kind):
    """The same holds if blocks are recomputed: their parameters are still unsharded then."""
    case = Case((2,))

    def rank():
        with nn.building(hp_platform):
            model = kind(2, False, False, None)
        return followed(hp_platform, case, shard(model, mesh_of(hp_platform, 2), case))

    for modules, (root, *blocks) in run_ranks(rank, 2, hp_platform):
        expected = {name: ({"all_gather": each}, {"all_gather": each, "reduce_scatter": each}) for name, each in blocks}
        name, each = root
        assert modules == {**expected, name: ({"all_gather": each}, {"reduce_scatter": each})}


def test_reductions_over_replicas_belong_to_their_modules(hp_platform):
    case = Case((2, 2), reshard_after_forward=False)

    def rank():
        return followed(hp_platform, case, shard(build(hp_platform, case), mesh_of(hp_platform, 2, 2), case))

    for modules, groups in run_ranks(rank, 4, hp_platform):
        assert modules == {
            name: ({"all_gather": each}, {"reduce_scatter": each, "all_reduce": each}) for name, each in groups
        }


def test_reductions_that_are_waited_for_later_belong_to_backward(hp_platform):
    case = Case((2,))

    def rank():
        model = build(hp_platform, case)
        for module in (*model.blocks, model):
            hsdp(module, shard_size=2, threshold=0, comm_async=True, comm_fusion=True)
        with CommDebugMode(model, hp_platform) as comm:
            step(hp_platform, model, case)
            hsdp_sync_stream()
        return reported(comm), type(model).__name__

    for modules, root in run_ranks(rank, 4, hp_platform):
        assert set(modules) == {root, *BLOCKS}
        for forward, backward in modules.values():
            assert set(forward) == {"all_gather"}
            assert set(backward) == {"reduce_scatter", "all_reduce"}


def test_modules_of_one_group_are_told_by_the_first(hp_platform):
    case = Case((2,), group_list=True)

    def rank():
        model = shard(build(hp_platform, case), mesh_of(hp_platform, 2), case)
        with CommDebugMode(model, hp_platform) as comm:
            step(hp_platform, model, case)
        return reported(comm), type(model).__name__

    for modules, root in run_ranks(rank, 2, hp_platform):
        assert set(modules) == {root, "blocks.0"}
