"""Small models in the files of Hugging Face: every architecture, with weights that a name and an index decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from hp_dtensor.tensor.init import Normal, draw, stream_key
from hp_trainer._coordination import Alone
from hp_trainer.config.load import parse_config
from hp_trainer.exceptions import ConfigError
from hp_trainer.models import DecoderConfig, build_decoder
from hp_trainer.models.hugging_face import ModelDirectory, read_architecture
from hp_trainer.models.hugging_face.export import export_weights
from hp_trainer.models.hugging_face.tensor_map import build_tensor_map
from hp_trainer.plugins import registries

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "intermediate_size": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}},
    "mistral": {"head_dim": 6, "sliding_window": 4, "rope_theta": 1000.0},
    "ministral": {
        "head_dim": 6,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "rope_theta": 1000.0,
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {"head_dim": 6},
    "gemma2": {
        "head_dim": 6,
        "sliding_window": 4,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 3.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "head_dim": 6,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 5,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_theta": 500.0,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    },
    "gpt_oss": {
        "head_dim": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "attention_bias": True,
        "swiglu_limit": 0.5,
        "rope_parameters": {**YARN, "rope_theta": 500.0, "truncate": False},
    },
}
# float32 through three blocks.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
IDS = (numpy.arange(20) * 7 % 40).reshape(2, 10)


def options_of(folder: Path) -> DecoderConfig:
    """The decoder's options for a directory, which has no problems."""
    options, problems = DecoderConfig.read_directory(folder)
    assert not problems, problems
    return DecoderConfig(**options)


def write_model(
    folder: Path, model_type: str, *, dtype: str = "float32", fused: bool = False, largest: int = 10**9, **keys
):
    """Write a model with weights of its own, with `keys` in its config.json; return the decoder's options for it."""
    folder.mkdir()
    config = {"model_type": model_type, **SIZES, **CONFIGS[model_type], "dtype": dtype, **keys}
    (folder / "config.json").write_text(json.dumps(config))
    options = options_of(folder)
    (folder / "config.json").unlink()
    tensors = build_tensor_map(options, model_type, fused=fused)

    def values(name, box):
        is_norm = name.endswith("norm.weight") and not options.norm_unit_offset
        distribution = Normal(0.3, mean=1.0 if is_norm else 0.0)
        return draw(distribution, stream_key(5, name), tensors[name].shape, box.offset, box.shape)

    export_weights(folder, tensors, values, config, Alone(), dtype=dtype, largest=largest)
    return options


def fill(platform: Any, model: Any, directory: ModelDirectory) -> None:
    """Give a plain or distributed model the weights of a directory."""
    from hp_trainer.training.setup import read_weights

    assert not list(directory.problems())
    read_weights(model, directory, platform)


def model_type_of(folder: Path) -> str:
    architecture, _, _ = read_architecture(folder)
    assert architecture is not None
    return architecture.model_type


def logits_of_trained(platform, folder):
    """The logits of the model that a run with `model.from` starts with.

    Raises:
        ConfigError: the run is refused.
    """
    text = f"model: {{from: {folder}}}\ntraining: {{steps: 1}}\n"
    config = parse_config(text, [], registered=registries()).config.model.options
    directory = ModelDirectory(folder, config)
    if problems := list(directory.problems()):
        raise ConfigError(problems, str(folder))
    model = build_decoder(config, platform)
    fill(platform, model, directory)
    with platform.no_grad():
        return platform.to_numpy(model(platform.from_numpy(IDS)))


def logits_of_transformers(folder):
    """transformers' logits, or None if it refuses the file or misses weights."""
    transformers = pytest.importorskip("transformers")
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager"
        )
        if found["missing_keys"] or found["mismatched_keys"]:
            return None
        return model(model.lm_head.weight.new_tensor(IDS).long()).logits.detach().numpy()
    except Exception:
        # Whatever it raises: a file that transformers cannot run has no right logits.
        return None
