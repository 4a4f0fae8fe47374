"""Mixture of experts alone: `python examples/notebooks/moe_alone.py`, or cell by cell in an editor.

Needs hp-moe and a platform. Four ranks are simulated in this process, each with two of eight experts.
"""

# %% A layer, on one device
from hp_dtensor import init_device_mesh
from hp_dtensor.parallel import nn
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_moe import ExpertParallel, MoE, update_expert_bias

platform = get_platform()


def build():
    with nn.building(platform):
        return MoE(dim=16, hidden_dim=32, num_experts=8, top_k=2, load_balance_coeff=1e-3)


def tokens():
    ids = platform.ops.arange(12 * 16, platform.dtype("float32"))
    return platform.ops.sin(platform.ops.reshape(ids, (12, 16)))


def alone():
    layer = build()
    init_parameters(layer, lambda name, shape: Normal(0.2), seed=0)
    return platform.to_numpy(platform.detach(layer(tokens())))


one_device = run_ranks(alone, 1, platform)[0]

# %% The same layer with its experts spread over four ranks: tokens are sent to them and back


def spread():
    layer = build()
    ExpertParallel().apply(layer, init_device_mesh(platform.device_types[0], (4,)))
    init_parameters(layer, lambda name, shape: Normal(0.2), seed=0)  # the same weights in any layout
    y = layer(tokens())
    platform.backward(platform.ops.sum(y))
    update_expert_bias(layer)  # once per optimizer step
    return platform.to_numpy(platform.detach(y)), tuple(platform.unwrap(layer.experts.w1).shape)


results = run_ranks(spread, 4, platform)
assert all(abs(result - one_device).max() < 1e-5 for result, _ in results)
print("every rank holds experts of shape", results[0][1], "and gets the output of one device")
