"""Compiled blocks train as they do without: the same loss curve, in every layout whose blocks see plain tensors."""

from __future__ import annotations

import numpy as np
import pytest
from training_runs import losses, train_rank

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.testing import run_ranks

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
