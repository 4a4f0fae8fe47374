from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
from decoder_reference import summed_loss

from hp_dtensor.tensor.init import Normal, init_parameters
from hp_trainer.models import DecoderConfig, ModelPart, build_decoder
from hp_trainer.models.decoder.attention import RopeScalingConfig

SMALL = DecoderConfig(
    vocab_size=19,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=10,
    moe_intermediate_size=8,
    num_experts=5,
    num_shared_experts=1,
    qk_norm="head",
    rope_theta=50.0,
)
# Of three samples: one document; three documents; two, the second of one token.
POSITIONS = numpy.array([[0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 0]])
VARIANTS = {
    "default": {},
    "tied, first layer dense": {"tie_word_embeddings": True, "num_dense_layers": 1},
    "sigmoid, no shared expert": {
        "score_func": "sigmoid",
        "num_shared_experts": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.7,
    },
    "all heads alike": {"num_key_value_heads": 4, "num_shared_experts": 2, "load_balance_coeff": None},
    "biases, sinks, every other layer sliding": {
        "num_experts": None,
        "qk_norm": "none",
        "qkv_bias": True,
        "output_bias": True,
        "attention_sinks": True,
        "sliding_window": 3,
        "layer_pattern": ("sliding", "full"),
    },
    "soft caps, more norms, scaled embeddings": {
        "num_experts": None,
        "qk_norm": "full",
        "norm_unit_offset": True,
        "post_norms": True,
        "scale_embeddings": True,
        "attention_soft_cap": 2.0,
        "logit_soft_cap": 3.0,
        "attention_scale": 0.3,
    },
    "latent attention": {
        "attention": "latent",
        "qk_norm": "none",
        "q_lora_rank": 7,
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "rope_interleaved": True,
    },
    "latent attention, queries not compressed, sliding": {
        "attention": "latent",
        "qk_norm": "none",
        "sliding_window": 3,
        "num_experts": None,
    },
}


@pytest.fixture(params=list(VARIANTS))
def config(request):
    return replace(SMALL, **VARIANTS[request.param])


def build(platform, config):
    model = build_decoder(config, platform)
    # Large enough that every part of the model matters.
    init_parameters(model, lambda name, shape: Normal(0.4, mean=1.0 if len(shape) == 1 else 0.0), seed=2)
    return model


def tokens(config, batch=3, length=7, seed=0):
    return numpy.random.default_rng(seed).integers(0, config.vocab_size, (batch, length + 1))


def test_loss_is_that_of_the_formulas(platform, config):
    model, data = build(platform, config), tokens(config)
    weights = {name: platform.to_numpy(p) for name, p in platform.named_parameters(model)}
    ids, targets = data[:, :-1].copy(), data[:, 1:].copy()
    targets[0, 2] = targets[2, :3] = -100
    positions = POSITIONS.copy()
    loss = model(platform.from_numpy(ids), platform.from_numpy(targets), platform.from_numpy(positions))
    expected = summed_loss(config, weights, ids, targets, positions)
    # float32 through two blocks.
    numpy.testing.assert_allclose(platform.to_numpy(loss), expected, rtol=1e-5)


def test_positions_from_zero_on_are_those_of_one_document(platform):
    config = replace(SMALL, **VARIANTS["default"])
    model, ids = build(platform, config), platform.from_numpy(tokens(config)[:, :-1].copy())
    counted = platform.from_numpy(numpy.tile(numpy.arange(7), (3, 1)))
    expected = platform.to_numpy(model(ids))
    numpy.testing.assert_allclose(platform.to_numpy(model(ids, None, counted)), expected, rtol=1e-5, atol=1e-6)


def test_gradient_is_the_slope_of_the_loss(platform, config):
    """Along a random direction of all weights, by central differences in float64."""
    model, data = build(platform, config), tokens(config)
    ids, targets = data[:, :-1].copy(), data[:, 1:].copy()
    platform.backward(model(platform.from_numpy(ids), platform.from_numpy(targets)))
    rng, slope = numpy.random.default_rng(1), 0.0
    above, below = {}, {}
    for name, p in platform.named_parameters(model):
        value, grad = (platform.to_numpy(x).astype(numpy.float64) for x in (p, platform.get_grad(p)))
        direction = rng.normal(size=value.shape)
        slope += (grad * direction).sum()
        above[name], below[name] = value + 1e-6 * direction, value - 1e-6 * direction
    expected = (summed_loss(config, above, ids, targets) - summed_loss(config, below, ids, targets)) / 2e-6
    numpy.testing.assert_allclose(slope, expected, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_model_parts_one_after_the_other_are_the_full_model(platform, tied):
    config = replace(SMALL, tie_word_embeddings=tied, num_hidden_layers=3)
    model, data = build(platform, config), tokens(config)
    weights = {name: platform.to_numpy(p) for name, p in platform.named_parameters(model)}
    shardings = [(True, [0], False), (False, [1, 2], False), (False, [], True)]
    if tied:
        shardings = [(True, [0, 1, 2], True)]
    x, seen = platform.from_numpy(data), set()
    for embed, layers, head in shardings:
        part = build_decoder(config, platform, ModelPart(embed=embed, layers=layers, head=head))
        for name, p in platform.named_parameters(part):
            with platform.no_grad():
                platform.copy_(p, platform.from_numpy(weights[name]))
            seen.add(name)
        x = part(x)
    assert seen == set(weights)
    numpy.testing.assert_array_equal(platform.to_numpy(x), platform.to_numpy(model(platform.from_numpy(data))))


def test_a_tied_head_without_its_embedding_has_a_copy_of_the_table(platform):
    part = build_decoder(replace(SMALL, tie_word_embeddings=True), platform, ModelPart(embed=False, layers=()))
    assert {name for name, _ in platform.named_parameters(part)} == {"embed.weight", "norm.weight"}
    hidden = platform.zeros((1, 2, SMALL.hidden_size), platform.dtype("float32"))
    assert tuple(part(hidden).shape) == (1, 2, SMALL.vocab_size)


def test_parts_of_a_part_run_alone(platform):
    """A rank with several pipeline stages builds them all, and calls one at a time."""
    full_value, data = build(platform, SMALL), tokens(SMALL, batch=2)
    layers, x = range(SMALL.num_hidden_layers), platform.from_numpy(data)
    for part in [ModelPart(layers=layers[:1], head=False), ModelPart(embed=False, layers=layers[1:])]:
        x = full_value(x, part=part)
    expected = platform.to_numpy(full_value(platform.from_numpy(data)))
    numpy.testing.assert_array_equal(platform.to_numpy(x), expected)


def test_logits_of_a_prefix_do_not_depend_on_what_follows(platform):
    model, data = build(platform, SMALL), tokens(SMALL, batch=2)
    full_value = platform.to_numpy(model(platform.from_numpy(data)))
    assert full_value.shape == (2, 8, SMALL.vocab_size)
    prefix = platform.to_numpy(model(platform.from_numpy(data[:, :3].copy())))
    numpy.testing.assert_allclose(prefix, full_value[:, :3], rtol=1e-4, atol=1e-5)


def test_sizes_that_do_not_fit_are_told_all_at_once():
    wrong = replace(SMALL, num_key_value_heads=3, head_dim=5, num_experts_per_tok=6, n_group=2, num_dense_layers=9)
    problems = {problem.path: problem for problem in wrong.check()}
    assert set(problems) == {"num_key_value_heads", "head_dim", "num_experts_per_tok", "n_group", "num_dense_layers"}
    assert problems["num_key_value_heads"].expected == "a divisor of 4"
    assert problems["num_experts_per_tok"].got == "6"


@pytest.mark.parametrize(
    ("options", "path", "expected"),
    [
        ({"num_experts_per_tok": 1}, "norm_topk_prob", "false"),
        ({"n_group": 2, "topk_group": 1}, "n_group", "a divisor of 5"),
        ({"num_experts": 6, "n_group": 3, "topk_group": 4}, "topk_group", "1 to 3"),
        ({"num_experts": 6, "num_experts_per_tok": 4, "n_group": 3, "topk_group": 1}, "topk_group", "2 to 3"),
        ({"routing": "expert_choice"}, "norm_topk_prob", "false"),
        ({"routing": "sinkhorn", "sequence_aux_loss": 0.1}, "sequence_aux_loss", "0"),
        (
            {"num_shared_experts": 0, "shared_expert_gate": True},
            "shared_expert_gate",
            "false, or num_shared_experts of 1 or more",
        ),
    ],
)
def test_routing_that_cannot_be_is_refused(options, path, expected):
    (problem,) = replace(SMALL, **options).check()
    assert (problem.path, problem.expected) == (path, expected)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"attention": "latent", "attention_sinks": True}, "attention_sinks"),
        ({"attention": "latent", "qk_norm": "none", "qk_rope_head_dim": 3}, "qk_rope_head_dim"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"layer_pattern": ("sliding", "full")}, "layer_pattern"),
        ({"layer_pattern": ()}, "layer_pattern"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, path):
    given = {"qk_norm": "none"} | options
    assert [problem.path for problem in replace(SMALL, **given).check()] == [path]


def test_rotary_scaling_needs_the_length_of_the_first_training():
    (problem,) = RopeScalingConfig(kind="yarn", factor=4.0).check()
    assert problem.path == "original_max_position_embeddings"
    (problem,) = RopeScalingConfig(kind="llama3", original_max_position_embeddings=8, high_freq_factor=1.0).check()
    assert (problem.path, problem.expected) == ("high_freq_factor", "a number > 1.0")


def test_the_default_sizes_fit():
    assert not list(DecoderConfig().check())
