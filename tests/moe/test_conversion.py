"""Layers of Hugging Face's families: options, names and layouts; and experts from dense networks."""

from __future__ import annotations

import numpy
import pytest

from hp_dtensor.parallel import nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_moe import FeedForward, MoE, MoEConfigError, from_huggingface, moe_options, to_huggingface, upcycle

SIZES = {"hidden_size": 16, "num_experts_per_tok": 2, "hidden_act": "silu"}
CONFIGS = {
    "mixtral": {**SIZES, "intermediate_size": 8, "num_local_experts": 5},
    "qwen2_moe": {
        **SIZES,
        "intermediate_size": 8,
        "moe_intermediate_size": 6,
        "num_experts": 5,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 10,
    },
    "qwen3_moe": {**SIZES, "moe_intermediate_size": 8, "num_experts": 5, "norm_topk_prob": True},
    "olmoe": {**SIZES, "intermediate_size": 8, "num_experts": 5, "norm_topk_prob": False},
    "deepseek_v3": {
        **SIZES,
        "moe_intermediate_size": 8,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 2,
    },
    "gpt_oss": {**SIZES, "intermediate_size": 8, "num_local_experts": 5, "swiglu_limit": 1.5},
}


def config_of(family):
    return {"model_type": family, **CONFIGS[family]}


def names_of(layer):
    """Names of parameters and buffers."""
    platform = layer.platform
    return [name for kind in (platform.named_parameters, platform.named_buffers) for name, _ in kind(layer)]


def built(platform, options, weights=None, seed=0):
    """A layer of small random weights, or of `weights`; the arrays of its parameters and buffers."""
    with nn.building(platform):
        layer = MoE(**options)
    init_parameters(layer, lambda name, shape: Normal(0.5), seed=seed)
    arrays = {}
    for kind in (platform.named_parameters, platform.named_buffers):
        for name, each in kind(layer):
            if weights is not None:
                platform.copy_(each, platform.from_numpy(weights[name].astype(numpy.float32)))
            elif name == "expert_bias":
                platform.copy_(each, platform.from_numpy(numpy.linspace(-0.2, 0.3, each.shape[0], dtype=numpy.float32)))
            arrays[name] = platform.to_numpy(platform.detach(each)).copy()
    return layer, arrays


@pytest.mark.parametrize("joint", [False, True], ids=["one per expert", "joint"])
@pytest.mark.parametrize("family", CONFIGS)
def test_weights_go_there_and_back(platform, family, joint):
    config = config_of(family)
    layer, weights = built(platform, moe_options(config))
    assert {*weights} == {*names_of(layer)}
    tensors = to_huggingface(weights, config, joint=joint)
    back = from_huggingface(tensors, config)
    assert {*back} == {*weights}
    for name, weight in weights.items():
        numpy.testing.assert_array_equal(back[name], weight, err_msg=name)


def their_layer(family, config):
    """The layer of `transformers` with small random weights, and a function from hidden states to its output."""
    import importlib

    import torch

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    prefix = {
        "mixtral": "Mixtral",
        "qwen2_moe": "Qwen2Moe",
        "qwen3_moe": "Qwen3Moe",
        "olmoe": "Olmoe",
        "deepseek_v3": "DeepseekV3",
        "gpt_oss": "GptOss",
    }[family]
    kind = {"deepseek_v3": "DeepseekV3MoE", "gpt_oss": "GptOssMLP"}.get(family, f"{prefix}SparseMoeBlock")
    options = {key: value for key, value in config.items() if key != "model_type"}
    their_config = getattr(module, f"{prefix}Config")(**options)
    their_config._experts_implementation = "eager"
    layer = getattr(module, kind)(their_config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for each in layer.state_dict().values():
            each.copy_(0.5 * torch.randn(each.shape))
    return layer, their_config.to_dict()


@pytest.mark.parametrize("family", CONFIGS)
def test_outputs_and_gradients_are_those_of_transformers(platform, family):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    layer, config = their_layer(family, config_of(family))
    assert moe_options(config).keys() == moe_options(config_of(family)).keys()
    tensors = {name: each.detach().numpy().copy() for name, each in layer.state_dict().items()}
    ours, _ = built(platform, moe_options(config), from_huggingface(tensors, config))
    data = numpy.random.default_rng(1).normal(size=(2, 9, 16)).astype(numpy.float32)
    grad = numpy.random.default_rng(2).normal(size=(2, 9, 16)).astype(numpy.float32)
    x = torch.tensor(data, requires_grad=True)
    expected = layer(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    expected.backward(torch.tensor(grad))
    mine = platform.from_numpy(data)
    platform.set_requires_grad(mine, True)
    y = ours(mine)
    platform.backward(y, platform.from_numpy(grad))
    # float32: products of 16 and 8 numbers of order one, in another order.
    close = {"rtol": 2e-5, "atol": 2e-5}
    numpy.testing.assert_allclose(platform.to_numpy(platform.detach(y)), expected.detach().numpy(), **close)
    numpy.testing.assert_allclose(platform.to_numpy(platform.get_grad(mine)), x.grad.numpy(), **close)
    named = {name: platform.to_numpy(platform.get_grad(p)) for name, p in platform.named_parameters(ours)}
    if family == "deepseek_v3":
        named["expert_bias"] = numpy.zeros(8, numpy.float32)
    theirs = to_huggingface(named, config, joint=True)
    for name, parameter in layer.named_parameters():
        numpy.testing.assert_allclose(theirs[name], parameter.grad.numpy(), err_msg=name, **close)


def test_names_are_those_of_files_with_one_tensor_per_expert(platform):
    _, weights = built(platform, moe_options(config_of("deepseek_v3")))
    names = {*to_huggingface(weights, config_of("deepseek_v3"))}
    assert {
        "gate.weight",
        "gate.e_score_correction_bias",
        "experts.7.gate_proj.weight",
        "experts.0.down_proj.weight",
        "shared_experts.up_proj.weight",
    } < names
    assert len(names) == 2 + 3 * 8 + 3
    names = {*to_huggingface(built(platform, moe_options(config_of("mixtral")))[1], config_of("mixtral"))}
    assert names == {"gate.weight", *(f"experts.{e}.w{i}.weight" for e in range(5) for i in (1, 2, 3))}


def test_bits_of_bfloat16_go_through(platform):
    config = config_of("gpt_oss")
    _, weights = built(platform, moe_options(config))
    bits = {name: weight.view(numpy.uint16)[..., ::2].copy() for name, weight in weights.items()}
    back = from_huggingface(to_huggingface(bits, config), config)
    for name, each in bits.items():
        assert back[name].dtype == numpy.uint16
        numpy.testing.assert_array_equal(back[name], each)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("gate.weight"), r"olmoe layer: missing gate.weight; not expected none"),
        (lambda t: t.pop("experts.3.up_proj.weight"), r"missing experts.3.up_proj.weight; not expected none"),
        (lambda t: t.update({"gate.bias": 0}), r"missing none; not expected gate.bias$"),
        (
            lambda t: t.update({"experts.0.up_proj.weight_scale_inv": 0}),
            r"not expected experts.0.up_proj.weight_scale_inv; dequantize the checkpoint first",
        ),
        (
            lambda t: t.update({"gate.weight": t["gate.weight"][:2]}),
            r"olmoe layer do not fit its config: router.gate.weight \[2, 16\] instead of \[5, 16\]$",
        ),
        (lambda t: t.clear(), r"missing experts.0.down_proj.weight, .* and 10 more; not expected none"),
    ],
)
def test_tensors_that_do_not_fit_are_listed(platform, change, message):
    config = config_of("olmoe")
    tensors = to_huggingface(built(platform, moe_options(config))[1], config)
    change(tensors)
    with pytest.raises(MoEConfigError, match=message):
        from_huggingface(tensors, config)


def test_what_no_layer_can_be_made_of_is_refused(platform):
    with pytest.raises(MoEConfigError, match=r"model_type: expected one of deepseek_v3, .*, got 'llama'"):
        moe_options({"model_type": "llama"})
    with pytest.raises(MoEConfigError, match=r"hidden_act: expected one of silu, .*, got 'relu6'"):
        moe_options({**config_of("olmoe"), "hidden_act": "relu6"})
    with pytest.raises(MoEConfigError, match="config of a mixtral model: num_local_experts is missing"):
        moe_options({"model_type": "mixtral", "hidden_size": 4})
    with pytest.raises(MoEConfigError, match=r"missing experts.w1, .*; not expected w1"):
        to_huggingface({"router.gate.weight": numpy.zeros(1), "w1": numpy.zeros(1)}, config_of("mixtral"))


@pytest.mark.parametrize(("granularity", "top_k"), [(1, 2), (2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("options", [{}, {"activation": "relu_squared", "bias": True}], ids=["swiglu", "biases"])
def test_an_upcycled_layer_begins_as_the_dense_network(platform, granularity, top_k, options):
    with nn.building(platform):
        dense = FeedForward(16, 8, options.get("activation", "swiglu"), bias=options.get("bias", False))
    init_parameters(dense, lambda name, shape: Normal(0.5), seed=3)
    weights = {name: platform.to_numpy(platform.detach(p)) for name, p in platform.named_parameters(dense)}
    random = numpy.random.default_rng(0)
    gate = random.normal(size=(8 // granularity, 16)).astype(numpy.float32)
    upcycled = upcycle(weights, 8, gate, granularity=granularity)
    layer_options = {"dim": 16, "hidden_dim": 8 // granularity, "num_experts": 8, "top_k": top_k, "route_norm": True}
    layer, _ = built(platform, {**layer_options, **options}, upcycled)
    x = platform.from_numpy(random.normal(size=(11, 16)).astype(numpy.float32))
    expected, got = (platform.to_numpy(platform.detach(each(x))) for each in (dense, layer))
    numpy.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_noise_tells_experts_apart_and_repeats(platform):
    random = numpy.random.default_rng(0)
    dense = {f"w{i}.weight": random.normal(size=(8, 8)).astype(numpy.float32) for i in (1, 2, 3)}
    gate = random.normal(size=(4, 8))
    first, again, other = (upcycle(dense, 4, gate, noise=0.1, seed=seed) for seed in (0, 0, 1))
    numpy.testing.assert_array_equal(first["experts.w1"], again["experts.w1"])
    assert (first["experts.w1"] != other["experts.w1"]).any()
    difference = first["experts.w1"] - dense["w1.weight"]
    assert abs(difference.std() / dense["w1.weight"].std() - 0.1) < 0.02
    assert first["experts.w1"].dtype == numpy.float32


def test_names_of_no_dense_network_are_refused():
    with pytest.raises(MoEConfigError, match=r"missing w2.weight; not expected down_proj.weight"):
        upcycle({"w1.weight": numpy.zeros((8, 8)), "down_proj.weight": numpy.zeros((8, 8))}, 4, numpy.zeros((4, 8)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": 3}, "must divide the hidden width 8 and num_experts = 4, got 3"),
        ({"granularity": 2}, r"gate: expected one row for each copy, shape \[2, 8\], got \[4, 8\]"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(options, message):
    dense = {f"w{i}.weight": numpy.zeros((8, 8)) for i in (1, 2, 3)}
    with pytest.raises(MoEConfigError, match=message):
        upcycle(dense, 4, numpy.zeros((4, 8)), **options)
