"""Bugs that were reported of other libraries' experts, and that these must not have; inputs saved as shards."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import numpy
import pytest

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.optim import clip_grad_norm_
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.offload import ActivationOffload
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.spec.placements import Shard
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_moe import ExpertParallel, ExpertTensorParallel, GroupedExperts, MoE, TensorParallel, update_expert_bias
from hp_moe.router import TokenChoiceTopKRouter

DIM, HIDDEN, EXPERTS = 8, 6, 4
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def built(platform, **options):
    with nn.building(platform):
        layer = MoE(DIM, HIDDEN, EXPERTS, 2, **options)
    init_parameters(layer, lambda name, shape: Normal(0.5), seed=4)
    return layer


def array(seed, rows=12):
    return numpy.random.default_rng(seed).normal(size=(rows, DIM)).astype(numpy.float32)


def full(platform, x):
    return platform.to_numpy(platform.detach(x.full_tensor() if isinstance(x, DTensor) else x)).copy()


def gradients(platform, layer, y):
    platform.backward(platform.ops.sum(platform.ops.mul(y, y)))
    return {name: full(platform, platform.get_grad(p)) for name, p in platform.named_parameters(layer)}


def test_a_recomputation_does_not_route_again_when_the_bias_has_moved_meanwhile(platform):
    """torchtitan 3336, NeMo Automodel 3325: other experts in backward than in forward."""

    def run(moved):
        layer = built(platform, load_balance_coeff=0.01)
        x = platform.from_numpy(array(1))
        platform.set_requires_grad(x, True)
        y = checkpoint(layer, x, platform=platform)
        if moved:
            platform.copy_(layer.expert_bias, platform.from_numpy(numpy.array([9, 0, 0, 9], numpy.float32)))
        return gradients(platform, layer, y)

    still, moved = run(False), run(True)
    for name, grad in still.items():
        numpy.testing.assert_array_equal(moved[name], grad, err_msg=name)


def test_a_recomputation_with_ties_routes_and_counts_once(platform, monkeypatch):
    """Scores of two values tie everywhere; counts that are added twice move biases by wrong loads."""
    chosen = []
    choose = TokenChoiceTopKRouter._choose
    monkeypatch.setattr(TokenChoiceTopKRouter, "_choose", lambda self, *args: chosen.append(1) or choose(self, *args))

    def run(recompute):
        chosen.clear()
        layer = built(platform, load_balance_coeff=0.01)
        gate = numpy.sign(platform.to_numpy(platform.detach(layer.router.gate.weight)))
        with platform.no_grad():
            platform.copy_(layer.router.gate.weight, platform.from_numpy(gate))
        x = platform.from_numpy(numpy.sign(array(1)))
        platform.set_requires_grad(x, True)
        y = checkpoint(layer, x, platform=platform) if recompute else layer(x)
        return gradients(platform, layer, y), platform.to_numpy(layer.totals.take()).tolist(), len(chosen)

    plain, again = run(False), run(True)
    for name, grad in plain[0].items():
        numpy.testing.assert_array_equal(again[0][name], grad, err_msg=name)
    assert again[1:] == plain[1:]
    assert plain[2] == 1


def test_the_bias_stays_float32_when_a_model_is_cast():
    """Megatron-LM 1482, prime-rl 3411: a bias in bfloat16 rounds its steps away."""
    torch = pytest.importorskip("torch")
    from hp_dtensor.platform.selection import get_platform

    if get_platform().name != "torch":
        pytest.skip("casting a full model is torch's")
    layer = built(get_platform(), load_balance_coeff=0.001)
    layer.expert_bias.fill_(1.0)
    parent = torch.nn.Sequential(layer).to(torch.bfloat16)
    assert layer.experts.w1.dtype == torch.bfloat16
    assert layer.expert_bias.dtype == torch.float32
    layer(torch.randn(5, DIM).to(layer.experts.w1))
    update_expert_bias(layer)
    assert 0 < abs(layer.expert_bias - 1).max() <= 0.002
    assert parent.state_dict()["0.expert_bias"].dtype == torch.float32
    assert layer.to("meta").expert_bias.is_meta


def test_experts_without_tokens_take_part_in_fsdp(platform):
    """PyTorch 170667: a rank whose experts got nothing has no gradients, and the sizes of its reduce-scatter differ."""
    fully_shard = pytest.importorskip("hp_fsdp").fully_shard
    rows = array(3, 6)
    counts = numpy.array([6, 0, 0, 0])

    def one(experts, times):
        x = platform.from_numpy(numpy.concatenate([rows] * times))
        return gradients(platform, experts, experts(x, platform.from_numpy(counts * times)))

    def made():
        with nn.building(platform):
            return GroupedExperts(DIM, HIDDEN, EXPERTS)

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2, 2), mesh_dim_names=("efsdp", "ep"), platform=platform)
        experts = ExpertParallel().apply(made(), mesh["ep"])
        fully_shard(experts, mesh["efsdp"])
        experts.set_reduce_op_type("sum", recurse=False)
        init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
        return one(experts, 1)

    single = made()
    init_parameters(single, lambda name, shape: Normal(0.5), seed=1)
    expected = one(single, 4)
    for grads in run_ranks(rank, 4, platform):
        for name, grad in grads.items():
            numpy.testing.assert_allclose(grad, expected[name], err_msg=name, **CLOSE)
            assert not grad[1:].any(), "exactly zero without tokens"


def test_the_norm_of_gradients_counts_experts_and_the_rest_once(platform):
    """Megatron-LM 5916, DeepSpeed 8613: experts missing from the norm, or counted by every rank; meshes that differ."""

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2, 2), mesh_dim_names=("dp", "ep"), platform=platform)
        layer = built(platform, num_shared_experts=1)
        ExpertParallel().apply(layer, mesh["ep"])
        init_parameters(layer, lambda name, shape: Normal(0.5), seed=4)
        # The same tokens everywhere: every rank has the same gradients of what all have.
        grads = gradients(platform, layer, layer(platform.from_numpy(array(5))))
        expected = float(numpy.sqrt(sum((grad.astype(numpy.float64) ** 2).sum() for grad in grads.values())))
        norm = clip_grad_norm_([p for _, p in platform.named_parameters(layer)], numpy.float64(expected / 2))
        assert float(platform.to_numpy(norm)) == pytest.approx(expected, rel=1e-5)
        for name, p in platform.named_parameters(layer):
            numpy.testing.assert_allclose(full(platform, platform.get_grad(p)), grads[name] / 2, err_msg=name, **CLOSE)

    run_ranks(rank, 4, platform)


def test_nothing_of_a_recomputed_step_stays_behind(platform):
    """PyTorch's all-to-all within a checkpoint held its input alive (torchtitan 1467)."""

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("ep",), platform=platform)
        layer = built(platform)
        ExpertParallel().apply(layer, mesh)
        x = platform.from_numpy(array(mesh.get_local_rank()))
        platform.set_requires_grad(x, True)
        rows = platform.ops.mul(x, 2.0)
        seen = weakref.ref(rows)
        y = checkpoint(layer, rows, platform=platform)
        platform.backward(platform.ops.sum(y))
        del rows, y
        return seen() is None

    gc.disable()
    try:
        assert run_ranks(rank, 2, platform) == [True, True]
    finally:
        gc.enable()


STYLES = {"hidden sharded": (TensorParallel, (2,), ("tp",)), "and spread": (ExpertTensorParallel, (2, 2), ("ep", "tp"))}


CALLS = {
    "saved": lambda platform, layer, x: layer(x),
    "recomputed": lambda platform, layer, x: checkpoint(layer, x, platform=platform),
    "offloaded": lambda platform, layer, x: ActivationOffload(platform, smallest=1)(layer, x),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("dtype", "length"), [("float32", 5), ("bfloat16", 6), ("float32", 1), ("float32", 0)])
def test_a_gathered_input_saved_as_its_shard(platform, style, dtype, length, call):
    """Gradients are bitwise those of a saved gathered input, for one more gather; a recomputation gathers anyway."""
    if dtype == "bfloat16" and platform.name != "torch":
        pytest.skip("MindSpore has no products of bfloat16 on the CPU")
    build, sizes, names = STYLES[style]

    def rank(reshards):
        mesh = init_device_mesh(platform.device_types[0], sizes, mesh_dim_names=names, platform=platform)
        layer = built(platform)
        build().apply(layer, mesh)
        init_parameters(layer, lambda name, shape: Normal(0.5), seed=4)
        layer.reshard_after_forward = reshards
        ops, kind = platform.ops, platform.dtype(dtype)
        for name, p in platform.named_parameters(layer.experts):
            weight = ops.cast(platform.detach(p), kind)
            platform.set_parameter(layer.experts, name, platform.Parameter(weight, requires_grad=True))
        values = array(mesh["ep"].get_local_rank() if "ep" in names else 0, 3 * length).reshape(3, length, DIM)
        x = distribute_tensor(platform.from_numpy(values), mesh["tp"], [Shard(1)], src_data_rank=None)
        platform.set_requires_grad(x, True)
        rows = ops.cast(ops.mul(x, 2.0), kind)
        y = CALLS[call](platform, layer, rows)
        with record_collectives() as log:
            platform.backward(ops.sum(ops.cast(ops.mul(y, y), platform.dtype("float32"))).full_tensor())
        named = [("x", x), *platform.named_parameters(layer)]
        grads = {name: platform.unwrap(platform.get_grad(each)) for name, each in named}
        as_float = {name: ops.cast(grad, platform.dtype("float32")) for name, grad in grads.items()}
        return {name: platform.to_numpy(grad).copy() for name, grad in as_float.items()}, len(log.records)

    size = int(numpy.prod(sizes))
    gathered, shards = (run_ranks(rank, size, platform, reshards) for reshards in (False, True))
    for (expected, before), (found, after) in zip(gathered, shards, strict=True):
        assert after == before + (length > 0 and call != "recomputed")
        for name, grad in expected.items():
            numpy.testing.assert_array_equal(found[name], grad, err_msg=name)


@pytest.mark.usefixtures("torch_suffices")
def test_what_experts_save_beside_their_input_is_offloaded(platform):
    """The hooks of a saved shard are inside of those of the offload, and get its tensors first."""

    def rank(reshards):
        mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("tp",), platform=platform)
        layer = built(platform)
        TensorParallel().apply(layer, mesh)
        init_parameters(layer, lambda name, shape: Normal(0.5), seed=4)
        layer.reshard_after_forward = reshards
        x = distribute_tensor(platform.from_numpy(array(0).reshape(2, 6, DIM)), mesh, [Shard(1)])
        platform.set_requires_grad(x, True)
        offload = ActivationOffload(platform, smallest=1)
        offload(layer, platform.ops.mul(x, 2.0))
        return offload._last.num_bytes

    input_bytes = 12 * DIM * 4
    for gathered, shard in zip(*(run_ranks(rank, 2, platform, each) for each in (False, True)), strict=True):
        assert gathered - shard == input_bytes / 2


_COMPILED = """
from torch import compile
import torch
from hp_dtensor import get_platform, nn
from hp_moe import MoE

with nn.building(get_platform("torch")):
    layer = MoE(4, 6, num_experts=4, top_k=2, num_shared_experts=1)
for index, parameter in enumerate(layer.parameters()):
    parameter.data.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape).sin() + index / 10)
rows, found = torch.linspace(-2, 2, 20, device=next(layer.parameters()).device).reshape(5, 4), []
for module in (compile(layer, backend="eager"), layer):
    x = rows.clone().requires_grad_()
    y = module(x)
    found.append([y.detach(), *torch.autograd.grad((y * rows).sum(), [x, *layer.parameters()])])
torch.testing.assert_close(*found)
"""


@pytest.mark.real_ranks
def test_a_compiled_layer_equals_the_layer(hp_platform):
    """By a `torch.compile` that was imported before the platform. `training.compile` uses another one."""
    if hp_platform.name != "torch":
        pytest.skip("torch compiles modules")
    subprocess.run([sys.executable, "-c", _COMPILED], check=True)
