"""Changes of `config.json` files, each of which must give transformers' logits or be refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import transformers
from hugging_face_models import CONFIGS, SIZES

Config = dict[str, Any]
# Keys of every model of transformers that change no logits of a causal model.
_IRRELEVANT = {
    "transformers_version",
    "architectures",
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "id2label",
    "label2id",
    "problem_type",
    "_name_or_path",
    "dtype",
    "model_type",
    "pretraining_tp",
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LINEAR = {"rope_type": "linear", "factor": 2.0}
_MIXED = ["sliding_attention", "full_attention", "full_attention"]
# Keys added to every file, alone or together.
_ADDED: tuple[Config, ...] = (
    {"rope_scaling": _LINEAR, "rope_parameters": None},
    {"rope_scaling": _LINEAR},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 50.0},
    {"rope_scaling": _LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    {"rope_scaling": {**_YARN, "factor": 2.0}, "rope_parameters": {**_LINEAR, "rope_theta": 77.0}},
    {"rope_parameters": _LINEAR},
    {"rope_parameters": {"rope_theta": 77.0}},
    {"rope_parameters": _LINEAR, "rope_theta": 99.0},
    {"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}, "rope_theta": 99.0},
    {"rope_parameters": {**_YARN, "rope_theta": 77.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
    {"rope_parameters": {**_YARN, "factor": None}},
    {"rope_parameters": {**_YARN, "factor": None}, "max_position_embeddings": 128},
    {"rope_parameters": {**_YARN, "original_max_position_embeddings": None}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "yarn"}},
    {"rope_parameters": {**_YARN, "attention_factor": 1.3}},
    {"rope_parameters": {**_YARN, "mscale": 0.4, "mscale_all_dim": 0.7}},
    {"rope_parameters": {**_YARN, "mscale": 1, "mscale_all_dim": 0}},
    {"rope_parameters": {**_YARN, "truncate": False}},
    {"rope_parameters": {**_YARN, "truncate": None}},
    {"rope_parameters": {**_YARN, "beta_fast": 8, "beta_slow": 2}},
    {"rope_parameters": {**_YARN, "beta_fast": None, "beta_slow": 0}},
    {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 16}},
    {"rope_parameters": _LLAMA3},
    {"rope_parameters": _LLAMA3, "original_max_position_embeddings": 16},
    {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 8.0}},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"full_attention": {"rope_theta": 77.0}, "sliding_attention": {"rope_theta": 50.0}}},
    {"rope_parameters": {}},
    {"rope_parameters": None},
    {"partial_rotary_factor": 0.5},
    {"is_causal": False},
    {"use_bidirectional_attention": True},
    {"layer_types": _MIXED, "sliding_window": 3},
    {"layer_types": ["full_attention"] * 3},
    {"layer_types": ["chunked_attention"] * 3, "sliding_window": 3},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": 3},
    {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    {"use_sliding_window": True, "sliding_window": 3, "layer_types": _MIXED},
    {"use_sliding_window": False, "sliding_window": 3, "layer_types": _MIXED},
    {"sliding_window": 3},
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"rope_interleave": None},
    {"rope_interleave": False},
    {"hidden_act": "gelu_pytorch_tanh"},
    {"hidden_activation": "silu"},
    {"num_key_value_heads": None},
    {"head_dim": None},
    {"n_shared_experts": None},
    {"n_group": 1, "topk_group": 1},
    {"topk_method": "greedy"},
    {"scoring_func": "softmax"},
    {"moe_layer_freq": 2},
    {"decoder_sparse_step": 2},
    {"mlp_only_layers": [1]},
    {"num_experts": 4, "num_local_experts": 8},
    {"num_local_experts": 4, "num_experts": 8},
    {"router_jitter_noise": 0.3},
    {"attention_dropout": 0.5},
    {"clip_qkv": 0.3},
    {"norm_topk_prob": None},
    {"mlp_bias": True},
    {"attention_bias": True},
    {"swiglu_limit": None},
    {"swiglu_alpha": 1.5},
    {"query_pre_attn_scalar": 5},
    {"final_logit_softcapping": 3.0},
    {"attn_logit_softcapping": 3.0},
    {"max_position_embeddings": 8},
    {"rms_norm_eps": 0.1},
    {"initializer_range": 0.0},
)


def mutations(model_type: str) -> Iterator[tuple[str, Config]]:
    """Yield (description, `config.json`): each key deleted and changed, in the short and in the full form of a file."""
    short: Config = {"model_type": model_type, **SIZES, **CONFIGS[model_type]}
    saved = transformers.AutoConfig.for_model(**copy.deepcopy(short)).to_dict()
    full = {"model_type": model_type, **{key: value for key, value in saved.items() if key not in _IRRELEVANT}}
    seen = set()
    for form, config in (("short", short), ("full", full)):
        for what, changed in _mutations_of(config):
            text = json.dumps(changed, sort_keys=True)
            if text not in seen:
                seen.add(text)
                yield f"{form}: {what}", changed


def _mutations_of(config: Config) -> Iterator[tuple[str, Config]]:
    layers = config["num_hidden_layers"]
    for key, value in config.items():
        if key == "model_type":
            continue
        yield f"without {key}", {name: each for name, each in config.items() if name != key}
        for new in _other_values(value, layers):
            yield f"{key} = {json.dumps(new)}", {**config, key: new}
        for inner, old in value.items() if isinstance(value, dict) else ():
            rest = {name: each for name, each in value.items() if name != inner}
            yield f"{key} without {inner}", {**config, key: rest}
            for new in _other_values(old, layers):
                yield f"{key}.{inner} = {json.dumps(new)}", {**config, key: {**value, inner: new}}
    for added in _ADDED:
        yield json.dumps(added), {**config, **added}


def _other_values(value: Any, layers: int) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return None, not value
    if isinstance(value, int):
        return None, 0, 1, 3, value + 1, 2 * value
    if isinstance(value, float):
        return None, 0.0, 2 * value, value + 0.5, int(value) + 1
    if isinstance(value, str):
        return None, "gelu_pytorch_tanh" if value == "silu" else "silu"
    if isinstance(value, list):
        kinds = [["sliding_attention"] * layers, ["full_attention"] * layers] if isinstance(value[:1], str) else []
        return None, [], value[::-1], *kinds
    return (None,) if isinstance(value, dict) else (True, 2, 0.5)
