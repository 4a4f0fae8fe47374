"""Options of the decoder train as on one rank in the layouts that shard what they change, with other data on each rank.

Every kind of layout with the plain decoder is in the matrix of `training/test_trainer_combinations.py`.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, replace

import numpy
import pytest
from decoder_training import CONFIG, train_decoder

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.testing import run_ranks
from hp_trainer.parallel import ParallelDims

# float32, sums in another order, three steps.
CLOSE = {"rtol": 1e-4, "atol": 2e-6}


def experts_replicated_on_tp():
    """Return layouts with `etp` 1 and without `ep`, where `tp` shards everything but the experts."""
    for world_size, dp, expert_mesh in ((2, 1, "peer"), (4, 2, "folded"), (4, 2, "peer"), (4, 1, "folded")):
        dims = ParallelDims(dp_shard=dp, tp=world_size // dp, etp=1, world_size=world_size, expert_mesh=expert_mesh)
        yield asdict(dims)


def name_of(degrees):
    if not isinstance(degrees, dict):
        return None
    parts = [f"{key}{value}" for key, value in degrees.items() if isinstance(value, int) and value > 1]
    return "-".join([*parts, f"etp{degrees['etp']}", degrees["expert_mesh"]])


def on_ranks(degrees, **kwargs):
    world_size = 1 if degrees is None else degrees["world_size"]
    return run_ranks(functools.partial(train_decoder, degrees, **kwargs), world_size)


@functools.cache
def one_rank(**kwargs):
    (result,) = on_ranks(None, **kwargs)
    return result


def routing_of(metrics):
    """Metrics of a step that no layout changes; bytes are sent where ranks are."""
    return {name: value for name, value in metrics.items() if name != "expert_bytes_sent"}


def assert_same(results, expected):
    for rank, result in enumerate(results):
        numpy.testing.assert_allclose(result.losses, expected.losses, rtol=1e-5, err_msg=f"rank {rank}, losses")
        numpy.testing.assert_allclose(result.norms, expected.norms, rtol=1e-4, err_msg=f"rank {rank}, norms")
        for kind in ("grads", "weights"):
            got, wanted = getattr(result, kind), getattr(expected, kind)
            assert got.keys() == wanted.keys()
            for name, value in wanted.items():
                numpy.testing.assert_allclose(got[name], value, err_msg=f"rank {rank}, {kind} of {name}", **CLOSE)
        numpy.testing.assert_allclose(result.logits, expected.logits, rtol=1e-3, atol=1e-4)
        assert [routing_of(step) for step in result.metrics] == [routing_of(step) for step in expected.metrics]


def skip_if_slow(platform, degrees):
    """Skip four ranks on MindSpore, where a simulated run of four takes half a minute."""
    if platform.name != "torch" and degrees["world_size"] > 2:
        pytest.skip("layouts of four ranks on torch; elsewhere by the trainer")


@pytest.mark.parametrize("degrees", list(experts_replicated_on_tp()), ids=name_of)
def test_experts_replicated_beside_tensor_parallel(platform, degrees):
    skip_if_slow(platform, degrees)
    assert_same(on_ranks(degrees), one_rank())


FOUR = {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2, "world_size": 4}
FOLDED = {"dp_shard": 2, "tp": 2, "ep": 4, "world_size": 4}


@pytest.mark.parametrize("degrees", [FOUR, FOLDED], ids=["experts sharded", "experts folded"])
class TestFourRanks:
    @pytest.fixture(autouse=True)
    def _skip_if_slow(self, platform, degrees):
        skip_if_slow(platform, degrees)

    def test_weights_kept_after_forward_for_several_micro_batches(self, degrees):
        assert_same(on_ranks(degrees, reshard=False, accumulate=2), one_rank())

    def test_uneven_sequence_tied_head_and_grouped_heads(self, degrees):
        config = replace(CONFIG, tie_word_embeddings=True, num_key_value_heads=2, num_dense_layers=0)
        assert_same(on_ranks(degrees, config=config, length=7), one_rank(config=config, length=7))


@pytest.mark.parametrize("vocab_size", [100, 40], ids=["rows gathered", "head gathered"])
def test_inputs_saved_as_shards_are_those_saved_gathered(platform, vocab_size):
    """Of experts and of a tied head; a head with fewer classes than a rank has rows, 64, is gathered itself."""
    if platform.name != "torch" and vocab_size == 40:
        pytest.skip("on MindSpore the case in which more is resharded")
    options = {"num_hidden_layers": 1, "num_dense_layers": 0, "num_shared_experts": 0, "tie_word_embeddings": True}
    config = replace(CONFIG, vocab_size=vocab_size, **options)
    degrees = [{"tp": 2, "etp": 2, "world_size": 2, "tp_reshard_after_forward": each} for each in (True, False)]
    shards, gathered = (on_ranks(each, config=config) for each in degrees)
    assert_same(shards, one_rank(config=config))
    for one, other in zip(shards, gathered, strict=True):
        for name, grad in one.grads.items():
            numpy.testing.assert_array_equal(grad, other.grads[name], err_msg=name)


# Every kind of attention and norm, in the layouts that shard its projections.
KINDS = {
    "biases, sinks, sliding": {
        "num_experts": None,
        "qkv_bias": True,
        "output_bias": True,
        "attention_sinks": True,
        "sliding_window": 3,
        "layer_pattern": ("sliding", "full"),
        "num_key_value_heads": 2,
        "qk_norm": "none",
    },
    "norms over all heads, more norms, soft caps": {
        "num_experts": None,
        "qk_norm": "full",
        "norm_unit_offset": True,
        "post_norms": True,
        "scale_embeddings": True,
        "attention_soft_cap": 5.0,
        "logit_soft_cap": 5.0,
    },
    "latent": {
        "attention": "latent",
        "qk_norm": "none",
        "q_lora_rank": 6,
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "rope_interleaved": True,
        "initializer_range": 0.2,
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degrees", [{"tp": 2, "world_size": 2}, FOUR], ids=["tensor parallel", "four ranks"])
def test_kinds_of_attention(platform, kind, degrees):
    skip_if_slow(platform, degrees)
    config = replace(CONFIG, **KINDS[kind])
    if config.num_experts is None:
        degrees = {name: value for name, value in degrees.items() if name not in ("ep", "etp")}
    assert_same(on_ranks(degrees, config=config), one_rank(config=config))


def test_degrees_that_the_model_cannot_use_are_refused():
    with pytest.raises(LaunchError, match="num_experts = 4 cannot be split over ep = 3"):
        on_ranks({"dp_shard": 3, "ep": 3, "world_size": 3})
    with pytest.raises(
        LaunchError, match="there are only num_attention_heads / tp = 4 heads to exchange among 8 ranks"
    ):
        on_ranks({"cp": 8, "world_size": 8})


@pytest.mark.parametrize("degrees", [None, FOUR, FOLDED], ids=["one rank", "experts sharded", "experts folded"])
def test_low_precision_computes_nearly_the_same(platform, degrees):
    """bfloat16 (float16 on MindSpore's CPU, which has no bfloat16 products); weights stay float32."""
    dtype = "bfloat16" if platform.name == "torch" else "float16"
    degrees = degrees or {"world_size": 1}
    skip_if_slow(platform, degrees)
    expected = one_rank()
    for result in on_ranks(degrees, dtype=dtype):
        assert result.losses != expected.losses
        # A bfloat16 has 8 bits; losses are means over many tokens.
        numpy.testing.assert_allclose(result.losses, expected.losses, rtol=2e-2)
        assert all(weight.dtype == numpy.float32 for weight in result.weights.values())


DENSE = replace(CONFIG, num_experts=None, num_key_value_heads=2)
WINDOWS = replace(
    DENSE, sliding_window=3, layer_pattern=("sliding", "full"), attention_sinks=True, attention_soft_cap=2.0
)
LATENT = replace(
    CONFIG, attention="latent", q_lora_rank=6, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6
)

LAYOUTS = {
    # of two ranks
    "all-gather": ({"cp": 2, "cp_method": "all_gather"}, {"config": WINDOWS, "packed": True}),
    "experts in every rank": ({"cp": 2, "cp_method": "auto", "ep": 2}, {}),
    "uneven": ({"cp": 2, "cp_method": "ring"}, {"config": WINDOWS, "length": 7, "packed": True}),
    # of four
    "data and sequence": ({"dp_shard": 2, "cp": 2, "cp_method": "ring", "ep": 4}, {"packed": True, "accumulate": 2}),
    "replicas and sequence": ({"dp_replicate": 2, "cp": 2}, {"config": WINDOWS, "recompute": True}),
    "tensor and sequence": ({"tp": 2, "cp": 2, "cp_method": "ring"}, {"config": WINDOWS, "packed": True}),
    "both methods": ({"cp": 4, "ulysses_degree": 2, "ep": 2}, {"packed": True, "recompute": True}),
    "all four exchange heads": ({"cp": 4, "cp_method": "ulysses"}, {"config": WINDOWS, "packed": True}),
    "latent attention": ({"cp": 4, "cp_method": "ring"}, {"config": LATENT}),
    # of eight
    "uneven, eight ranks": ({"cp": 8, "cp_method": "ring"}, {"config": DENSE, "length": 13}),
    "tensor, both methods": ({"tp": 2, "cp": 4, "ulysses_degree": 2, "cp_method": "auto"}, {"config": DENSE}),
}
ON_SLOW_PLATFORMS = ("all-gather", "uneven")


def of_one_rank(options):
    """Train on one rank with those options that change what is computed."""
    return one_rank(**{key: value for key, value in options.items() if key not in ("recompute", "accumulate")})


def degrees_of(degrees):
    size = 1
    for name in ("dp_replicate", "dp_shard", "cp", "tp"):
        size *= degrees.get(name, 1)
    if degrees.get("expert_mesh") == "peer":
        size *= degrees.get("ep", 1)
    return {"etp": 1 if degrees.get("ep", 1) > 1 else degrees.get("tp", 1), **degrees, "world_size": size}


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_as_one_rank(platform, name):
    if platform.name != "torch" and name not in ON_SLOW_PLATFORMS:
        pytest.skip("more ranks: on torch")
    degrees, options = LAYOUTS[name]
    assert_same(on_ranks(degrees_of(degrees), **options), of_one_rank(options))
