"""A rank that builds its model gets memory for its shards, never for the full model."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from training_runs import Lab, losses, train_rank

from hp_dtensor.comm import world
from hp_dtensor.comm.process_group import DONE
from hp_dtensor.comm.world import SilentWorld, use_world
from hp_dtensor.exceptions import LaunchError
from hp_dtensor.testing import run_ranks
from hp_trainer.parallel import ParallelDims
from hp_trainer.training.setup import build_model


def memory(name: str) -> float:
    """A figure of /proc/self/status in MiB: VmRSS, what the process holds now, or VmHWM, the most of it so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize("degrees", [{}, {"tp": 2}])
def test_a_rank_holds_its_part_of_the_model_at_most(lab: Lab, monkeypatch, degrees):
    # One of eight ranks, alone: what it gives the others is what they give it, and what they send is what it has.
    monkeypatch.setattr(world.NoCommunicationGroup, "_all_gather_bytes", lambda self, data: [data] * self.size)
    monkeypatch.setattr(world.NoCommunicationGroup, "_broadcast", lambda self, x, source, async_op: DONE)
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4, "num_experts": None}
    config = lab.config(degrees, model__num_dense_layers=0, **{f"model__{name}": size for name, size in sizes.items()})
    with use_world(SilentWorld(3, 8, lab.platform)):
        dims = ParallelDims.from_config(config.parallel, 8, None)
        mesh = dims.build_mesh(lab.platform.device_types[0], platform=lab.platform)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        before = memory("VmRSS")
        model = build_model(config, lab.platform, dims, mesh, weights=False)
        grown = memory("VmHWM") - before
    full_value = sum(math.prod(x.shape) for _, x in lab.platform.named_parameters(model)) * 4 / 2**20
    assert full_value > 90
    # Its shard is an eighth; buffers of a group and the allocator take some more.
    assert grown < full_value / 3


# Dynamo's graphs run as they are: seconds instead of minutes of code generation.
SETTINGS = {"training__steps": 3, "checkpoint__interval": None, "training__compile_backend": "eager"}


def test_the_loss_curve_stays(lab):
    if lab.platform.name != "torch":
        pytest.skip("the framework compiles no modules")
    degrees, settings = {"dp_shard": 2, "ep": 2}, SETTINGS | {"training__recompute": "full"}
    plain = lab.run("plain", degrees, 2, **settings)
    compiled = lab.run("compiled", degrees, 2, training__compile=True, **settings)
    np.testing.assert_allclose(losses(compiled), losses(plain), rtol=1e-5)


def test_blocks_are_compiled_but_for_attention(lab):
    if lab.platform.name != "torch":
        pytest.skip("the framework compiles no modules")
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    lab.run("compiled", {}, 1, training__compile=True, model__num_experts=None, **SETTINGS)
    assert counters["stats"]["calls_captured"] > 0
    # Graphs end at attention alone, which brings fused kernels of its own.
    (reason,) = counters["graph_break"]
    assert "qualname: attention," in reason


def test_what_cannot_be_compiled_is_told(lab):
    other = "no such compiler" if lab.platform.name == "torch" else "inductor"
    run = lab.start("other", training__compile=True, **SETTINGS | {"training__compile_backend": other})
    with pytest.raises(LaunchError, match=r"CapabilityError.*(no backend 'no such compiler'|does not compile modules)"):
        run_ranks(train_rank, 1, lab.platform, run, lab.platform)
