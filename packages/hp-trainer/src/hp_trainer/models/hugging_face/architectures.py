"""Architectures of Hugging Face's transformers: their `config.json` as options of the decoder, and back.

An architecture is a table: which options it copies from which keys, which options are fixed, and which keys must have a
value that the decoder supports. What a table cannot express (layer patterns, factors) is a small function. Unsupported
values are refused, never ignored.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hp_trainer._files import read_plain_text
from hp_trainer.exceptions import Problem
from hp_trainer.models.decoder.options import MOST_LAYERS

Options = dict[str, Any]
# Options that affect how a model is trained, not what it computes.
TRAINING_ONLY = (
    "initializer_range",
    "load_balance_coeff",
    "micro_batch_aux_loss",
    "sequence_aux_loss",
    "global_batch_aux_loss",
    "router_z_loss",
    "capacity_factor",
    "drop_policy",
    "router_jitter",
    "routing",
    "lora",
)

# Options that every architecture has under the same key.
_SHARED_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "initializer_range",
    "tie_word_embeddings",
    "attention_dropout",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture:
    """One `model_type` of transformers.

    Attributes:
        model_type: name of the architecture in `config.json`.
        class_name: class in transformers, which `config.json` names too.
        copied: option of the decoder -> key of `config.json` and its type.
        fixed: options that this architecture always has.
        supported: key -> its supported values, besides null; any other value is a problem.
        tied, rope_theta, rms_norm_eps, num_key_value_heads, head_dim, rope_parameters: transformers' defaults for keys
            that are missing in `config.json`. Without a default there are as many key-value heads as heads, and heads
            divide the hidden size.
        read_more, write_more: functions that return further options from a `config.json`, and further keys from the
            options.
    """

    model_type: str
    class_name: str
    copied: Mapping[str, tuple[str, type]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tied: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    read_more: Callable[[ConfigReader], Options] = lambda reader: {}
    write_more: Callable[[Any], Options] = lambda config: {}

    def read(self, reader: ConfigReader) -> Options:
        """Return the options of the decoder; unsupported values become problems of the reader."""
        heads = reader.take(int, "num_attention_heads")
        hidden = reader.take(int, "hidden_size")
        options: Options = {
            "vocab_size": reader.take(int, "vocab_size"),
            "hidden_size": hidden,
            "num_hidden_layers": reader.take(int, "num_hidden_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": reader.take(
                int, "num_key_value_heads", missing=self.num_key_value_heads or heads, default=heads
            ),
            "intermediate_size": reader.take(int, "intermediate_size"),
            "rms_norm_eps": reader.take(float, "rms_norm_eps", default=self.rms_norm_eps),
            "initializer_range": reader.take(float, "initializer_range", default=0.02) or 0.02,
            "tie_word_embeddings": reader.take(bool, "tie_word_embeddings", default=self.tied),
            "attention_dropout": reader.take(float, "attention_dropout", default=0.0),
        }
        if self.fixed.get("attention") != "latent":
            # Latent attention has widths of its own for rotated and other elements.
            divided = (hidden or 0) // (heads or 1)
            options["head_dim"] = reader.take(int, "head_dim", missing=self.head_dim or divided, default=divided)
        options |= read_rotary(reader, self.rope_theta, self.rope_parameters)
        options |= {name: reader.take(kind, key) for name, (key, kind) in self.copied.items()}
        reader.only("is_causal", True)
        reader.only("quantization_config", hint="a copy of the model in bfloat16 or float32")
        for key, allowed in self.supported.items():
            reader.only(key, *allowed)
        return options | dict(self.fixed) | self.read_more(reader)

    def write(self, config: Any) -> Options:
        """Return the content of `config.json` for a decoder with these options."""
        keys: Options = {name: getattr(config, name) for name in _SHARED_KEYS}
        keys |= {key: getattr(config, name) for name, (key, _) in self.copied.items()}
        # `write_more` comes last and may replace these.
        keys |= write_rotary(config) | {"hidden_act": "silu"}
        return {"model_type": self.model_type, "architectures": [self.class_name], **keys, **self.write_more(config)}


# Sliding windows -------------------------------------------------------------------------------------------


def _pattern(kinds: list[str]) -> tuple[str, ...]:
    """Return the shortest pattern of kinds whose repetition is `kinds`."""
    short = ["sliding" if kind == "sliding_attention" else "full" for kind in kinds]
    for length in range(1, len(short)):
        if all(kind == short[i % length] for i, kind in enumerate(short)):
            return tuple(short[:length])
    return tuple(short)


def _layer_types(reader: ConfigReader, otherwise: Callable[[int], bool], window: int = 4096) -> Options:
    """Return the options of windows from `layer_types`; without it, layers with `otherwise(layer)` are sliding."""
    size, given = _window(reader, window), reader.take(list, "layer_types", default=None)
    if size is None:
        return {}
    layers = reader.take(int, "num_hidden_layers") or 1
    kinds = given or ["sliding_attention" if otherwise(layer) else "full_attention" for layer in range(layers)]
    unknown = sorted(set(map(str, kinds)) - {"sliding_attention", "full_attention"})
    if unknown or len(kinds) != layers:
        expected = f"{layers} times sliding_attention or full_attention"
        reader.add("layer_types", "is not supported", expected, ", ".join(unknown) or f"{len(kinds)} layers")
    pattern = _pattern(list(map(str, kinds)))
    # No layer has the window.
    return {} if pattern == ("full",) else {"sliding_window": size, "layer_pattern": pattern}


def _write_layer_types(config: Any) -> Options:
    layers = range(config.num_hidden_layers)
    kinds = ["full_attention" if config.window_of(layer) is None else "sliding_attention" for layer in layers]
    return {"sliding_window": config.sliding_window, "layer_types": kinds}


def _read_qwen_window(reader: ConfigReader) -> Options:
    # Qwen's files state a window even where this switch turns it off.
    if not reader.values.get("use_sliding_window"):
        return {}
    first = reader.take(int, "max_window_layers", default=28)
    return _layer_types(reader, lambda layer: layer >= first)


def _write_qwen_window(config: Any) -> Options:
    if config.sliding_window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "max_window_layers": 0, **_write_layer_types(config)}


def _window(reader: ConfigReader, missing: int | None) -> int | None:
    window: int | None = reader.take(int, "sliding_window", missing=missing, default=None)
    return window


def _write_window(config: Any) -> Options:
    return {"sliding_window": config.sliding_window}


# Biases, experts, factors ----------------------------------------------------------------------------------


def _read_biases(reader: ConfigReader) -> Options:
    bias = reader.take(bool, "attention_bias", default=False)
    return {"qkv_bias": bias, "output_bias": bias}


def _write_biases(config: Any) -> Options:
    return {"attention_bias": config.qkv_bias}


def _read_experts(reader: ConfigReader) -> Options:
    return {"num_experts": reader.take(int, "num_experts", "num_local_experts")}


def _read_qwen_moe(reader: ConfigReader) -> Options:
    # The decoder has dense layers only before the first layer of experts.
    dense = reader.take(list, "mlp_only_layers", default=[])
    if dense != list(range(len(dense))):
        reader.add("mlp_only_layers", "is not supported", expected="the first layers, or none", got=str(dense))
    more: Options = {"num_dense_layers": len(dense)}
    # Unlike dense Qwen3, all layers have the window: `max_window_layers` and `layer_types` are not read.
    if reader.values.get("use_sliding_window"):
        more["sliding_window"] = _window(reader, 4096)
    return _read_biases(reader) | _read_experts(reader) | more


def _write_qwen_moe(config: Any) -> Options:
    dense = {"mlp_only_layers": list(range(config.num_dense_layers)), "decoder_sparse_step": 1}
    window = {"use_sliding_window": config.sliding_window is not None, **_write_window(config)}
    return _write_biases(config) | window | dense | {"num_experts": config.num_experts}


def _read_gemma(reader: ConfigReader) -> Options:
    per_head = reader.take(float, "query_pre_attn_scalar", default=256.0)
    caps = {
        "attention_soft_cap": reader.take(float, "attn_logit_softcapping", missing=50.0, default=None),
        "logit_soft_cap": reader.take(float, "final_logit_softcapping", missing=30.0, default=None),
    }
    scale = {"attention_scale": None if not per_head else per_head**-0.5}
    return _read_biases(reader) | _layer_types(reader, lambda layer: layer % 2 == 0) | caps | scale


def _write_gemma(config: Any) -> Options:
    scale = config.attention_scale or config.head_dim**-0.5
    return {
        **_write_biases(config),
        **_write_layer_types(config),
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        # The inverse of what reading does. transformers 5 takes integers only; another scale is not restored, so such
        # a model is refused.
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
    }


def _read_moe_width(reader: ConfigReader) -> Options:
    return _read_experts(reader) | {"moe_intermediate_size": reader.take(int, "intermediate_size")}


def _write_moe_width(config: Any) -> Options:
    return {"num_local_experts": config.num_experts, "intermediate_size": config.moe_intermediate_size}


def _read_deepseek(reader: ConfigReader) -> Options:
    # transformers computes the rotary tables from `head_dim`.
    reader.only("head_dim", reader.take(int, "qk_rope_head_dim", missing=64))
    return {
        "q_lora_rank": reader.take(int, "q_lora_rank", missing=1536, default=None),
        # Latent attention expands keys and values for every head.
        "num_key_value_heads": reader.take(int, "num_attention_heads"),
        "rope_interleaved": reader.take(bool, "rope_interleave", missing=True, default=False),
        # The correction bias is updated in training, as in the paper (arXiv 2412.19437, section 4.2).
        "load_balance_coeff": 1e-3,
    }


def _write_deepseek(config: Any) -> Options:
    return {
        # transformers expands keys and values by this number; latent attention has them for every head.
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "rope_interleave": config.rope_interleaved,
        # transformers computes the rotary tables from this width.
        "head_dim": config.qk_rope_head_dim,
        "num_nextn_predict_layers": 0,
    }


def _read_gpt_oss(reader: ConfigReader) -> Options:
    more = {"swiglu_limit": reader.take(float, "swiglu_limit", default=7.0)}
    return _read_moe_width(reader) | _layer_types(reader, lambda layer: layer % 2 == 0, window=128) | more


def _write_gpt_oss(config: Any) -> Options:
    more = {"attention_bias": True, "swiglu_limit": config.swiglu_limit, "swiglu_alpha": 1.702}
    return _write_moe_width(config) | _write_layer_types(config) | more


_SILU: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
_TOP_K = {"num_experts_per_tok": ("num_experts_per_tok", int)}
_NORM_TOP_K = _TOP_K | {"norm_topk_prob": ("norm_topk_prob", bool)}

_ALL = (
    Architecture(
        model_type="llama",
        class_name="LlamaForCausalLM",
        supported=_SILU | {"mlp_bias": (False,)},
        read_more=_read_biases,
        write_more=_write_biases,
    ),
    Architecture(
        model_type="mistral",
        class_name="MistralForCausalLM",
        supported=_SILU,
        num_key_value_heads=8,
        read_more=lambda reader: {"sliding_window": _window(reader, 4096)},
        write_more=_write_window,
    ),
    Architecture(
        model_type="ministral",
        class_name="MinistralForCausalLM",
        supported=_SILU,
        num_key_value_heads=8,
        read_more=lambda reader: _layer_types(reader, lambda layer: True),
        write_more=_write_layer_types,
    ),
    Architecture(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        num_key_value_heads=32,
        fixed={"qkv_bias": True},
        supported=_SILU,
        read_more=_read_qwen_window,
        write_more=_write_qwen_window,
    ),
    Architecture(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        num_key_value_heads=32,
        head_dim=128,
        fixed={"qk_norm": "head"},
        supported=_SILU,
        read_more=lambda reader: _read_biases(reader) | _read_qwen_window(reader),
        write_more=lambda config: _write_biases(config) | _write_qwen_window(config),
    ),
    Architecture(
        model_type="gemma2",
        class_name="Gemma2ForCausalLM",
        num_key_value_heads=4,
        head_dim=256,
        fixed={
            "norm_unit_offset": True,
            "post_norms": True,
            "scale_embeddings": True,
            "hidden_act": "gelu_tanh",
        },
        supported={"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)},
        tied=True,
        read_more=_read_gemma,
        write_more=_write_gemma,
    ),
    Architecture(
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        num_key_value_heads=4,
        copied=_NORM_TOP_K | {"moe_intermediate_size": ("moe_intermediate_size", int)},
        fixed={"qk_norm": "head"},
        supported=_SILU | {"decoder_sparse_step": (1,)},
        read_more=_read_qwen_moe,
        write_more=_write_qwen_moe,
    ),
    Architecture(
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        copied=_TOP_K,
        fixed={"norm_topk_prob": True},
        supported=_SILU,
        num_key_value_heads=8,
        read_more=lambda reader: _read_moe_width(reader) | {"sliding_window": _window(reader, None)},
        write_more=lambda config: _write_moe_width(config) | _write_window(config),
    ),
    Architecture(
        model_type="olmoe",
        class_name="OlmoeForCausalLM",
        rms_norm_eps=1e-5,
        copied=_NORM_TOP_K,
        fixed={"qk_norm": "full"},
        supported=_SILU | {"clip_qkv": ()},
        read_more=lambda reader: _read_moe_width(reader) | _read_biases(reader),
        write_more=lambda config: (
            _write_moe_width(config) | _write_biases(config) | {"num_experts": config.num_experts}
        ),
    ),
    Architecture(
        model_type="deepseek_v3",
        class_name="DeepseekV3ForCausalLM",
        copied=_NORM_TOP_K
        | {
            "num_experts": ("n_routed_experts", int),
            "num_shared_experts": ("n_shared_experts", int),
            "num_dense_layers": ("first_k_dense_replace", int),
            "moe_intermediate_size": ("moe_intermediate_size", int),
            "routed_scaling_factor": ("routed_scaling_factor", float),
            "n_group": ("n_group", int),
            "topk_group": ("topk_group", int),
            "kv_lora_rank": ("kv_lora_rank", int),
            "qk_nope_head_dim": ("qk_nope_head_dim", int),
            "qk_rope_head_dim": ("qk_rope_head_dim", int),
            "v_head_dim": ("v_head_dim", int),
        },
        fixed={"attention": "latent", "score_func": "sigmoid"},
        supported=_SILU
        | {
            "attention_bias": (False,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
        read_more=_read_deepseek,
        write_more=_write_deepseek,
    ),
    Architecture(
        model_type="gpt_oss",
        class_name="GptOssForCausalLM",
        num_key_value_heads=8,
        head_dim=64,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        rope_theta=150000.0,
        rms_norm_eps=1e-5,
        copied=_TOP_K,
        fixed={
            "qkv_bias": True,
            "output_bias": True,
            "attention_sinks": True,
            "router_bias": True,
            "expert_bias": True,
            "score_func": "softmax_of_top_k",
            "norm_topk_prob": False,
        },
        supported=_SILU | {"attention_bias": (True,), "swiglu_alpha": (1.702,)},
        read_more=_read_gpt_oss,
        write_more=_write_gpt_oss,
    ),
)
ARCHITECTURES: dict[str, Architecture] = {each.model_type: each for each in _ALL}


def read_architecture(folder: Path) -> tuple[Architecture | None, Options, ConfigReader]:
    """Return the architecture of a directory, the decoder's options (of an unknown one none), and the reader."""
    reader = ConfigReader.open(folder)
    if reader.problems:
        return None, {}, reader
    name = reader.take(str, "model_type")
    if name == "mistral" and "layer_types" in reader.values:
        # transformers' AutoConfig does the same: only ministral has a window per layer.
        name = "ministral"
    if name is None or name not in ARCHITECTURES:
        # A typing error is meant, not another architecture with a similar name (gpt_neox, gpt_oss).
        near = next(iter(difflib.get_close_matches(str(name), ARCHITECTURES, n=1, cutoff=0.75)), "")
        if name is not None:
            reader.add("model_type", "unknown architecture", ", ".join(ARCHITECTURES), repr(name), near)
        return None, {}, reader
    layers = reader.values.get("num_hidden_layers")
    # Before the layers are listed.
    if isinstance(layers, int) and layers > MOST_LAYERS:
        reader.add("num_hidden_layers", "out of range", f"an integer <= {MOST_LAYERS}", str(layers))
        return None, {}, reader
    architecture = ARCHITECTURES[name]
    return architecture, architecture.read(reader), reader


_MISSING = object()
# Numbers of a `config.json` that may be zero; all others are sizes or factors.
_MAY_BE_ZERO = (
    "initializer_range",
    "attention_dropout",
    "first_k_dense_replace",
    "n_shared_experts",
    "max_window_layers",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


class ConfigReader:
    """The values of one `config.json`, and the problems found in them."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self.problems: list[Problem] = []

    @classmethod
    def open(cls, folder: Path) -> ConfigReader:
        """Read `config.json` of a directory. If that fails, the values are empty and there is a problem."""
        file = folder / "config.json"
        reader = cls({}, str(file))
        try:
            found = json.loads(read_plain_text(file))
        except OSError as error:
            reader.add("", f"cannot be read: {error.strerror or error}", expected="a directory of a Hugging Face model")
        except (ValueError, RecursionError) as error:
            reader.add("", f"is not JSON: {error}")
        else:
            if isinstance(found, dict):
                reader.values = found
            else:
                reader.add("", "is not a mapping", expected="{...}", got=type(found).__name__)
        return reader

    def add(self, key: str, what: str, expected: str = "", got: str = "", hint: str = "") -> None:
        """Add a problem with the value of a key."""
        text = f"{self.where}: {f'{key}: ' if key else ''}{what}"
        self.problems.append(Problem(path="", what=text, expected=expected, got=got, hint=hint))

    def take(self, kind: type, *keys: str, default: Any = _MISSING, missing: Any = _MISSING) -> Any:
        """Return the first key that is present and not null as `kind`, or `default` (if all are absent, `missing`).

        A wrong type, or no value without a default, adds a problem and gives None.
        """
        if missing is not _MISSING and not any(key in self.values for key in keys):
            return missing
        for key in keys:
            found = self.values.get(key)
            if found is None:
                continue
            # JSON writes 10000.0 as 10000 in some files. bool, a subclass of int, is refused by comparing types.
            if kind is float and type(found) is int:
                # An integer of hundreds of digits becomes infinite, which is out of range.
                found = float(found) if abs(found) < 10**300 else math.inf
            if type(found) is not kind:
                self.add(key, "wrong type", kind.__name__, repr(found))
                return None
            if kind in (int, float):
                self._check_sign(key, self.values[key])
            return found
        if default is _MISSING:
            self.add(keys[0], "missing", expected=kind.__name__)
            return None
        return default

    def _check_sign(self, key: str, number: float) -> None:
        """Add a problem if a number is negative, zero where it must not be, or not a number."""
        may_be_zero = key in _MAY_BE_ZERO
        if not (0 < number < math.inf or (number == 0 and may_be_zero)):
            self.add(key, "out of range", f"a number >{'=' if may_be_zero else ''} 0", repr(number))

    def only(self, key: str, *allowed: Any, hint: str = "") -> None:
        """Add a problem unless the key is missing, null, or has one of the supported values."""
        found = self.values.get(key)
        if found is not None and found not in allowed:
            expected = " or ".join(map(json.dumps, allowed)) or "null"
            self.add(key, "is not supported", expected=expected, got=json.dumps(found)[:200], hint=hint)


_KINDS = ("default", "linear", "llama3", "yarn")
_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
_DEFAULT_AT_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# Keys that `config.json` has for each kind.
_OF_KIND = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
}


def read_rotary(reader: ConfigReader, theta: float, otherwise: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` as transformers 5 does: `rope_scaling` replaces `rope_parameters`."""
    given = reader.values.get("rope_parameters")
    key = "rope_scaling" if reader.values.get("rope_scaling") or given is None else "rope_parameters"
    given = reader.values.get("rope_scaling") or (otherwise if given is None else given)
    inner = ConfigReader(dict(given) if isinstance(given, Mapping) else {}, f"{reader.where}: {key}")
    nested = sorted(key for key, value in inner.values.items() if isinstance(value, Mapping))
    if nested or not isinstance(given, Mapping):
        inner.add("", "is not supported", expected="one mapping for all layers", got=", ".join(nested) or repr(given))
    kind = inner.take(str, "rope_type", "type", default="default")
    if kind not in _KINDS:
        inner.add("rope_type", "is not supported", expected=", ".join(_KINDS), got=repr(kind))
    scaling: dict[str, Any] = {"kind": kind}
    if kind in _KINDS and kind != "default":
        scaling |= _read_scaling(reader, inner, kind)
    # transformers 5 has these keys within the rotary settings, transformers 4 at the top.
    base = inner.take(float, "rope_theta", default=None)
    if base is None:
        base = reader.take(float, "rope_theta", default=theta)
    for each in (reader, inner):
        each.only("partial_rotary_factor", 1, 1.0)
    reader.problems += inner.problems
    return {"rope_theta": base, "rope_scaling": scaling}


def _read_scaling(reader: ConfigReader, inner: ConfigReader, kind: str) -> dict[str, Any]:
    """Return the numbers of scaled rotary angles from the rotary settings `inner` of a `config.json`."""
    numbers = {key: inner.take(float, key, default=None) for key in _NUMBERS}
    original = None
    if kind != "linear":
        # A key at the top has priority. The last one is the length for which the model was trained.
        for each, key in (
            (reader, "original_max_position_embeddings"),
            (inner, "original_max_position_embeddings"),
            (reader, "max_position_embeddings"),
        ):
            original = original or each.take(int, key, default=None)
        if original is None:
            reader.add("max_position_embeddings", "missing", expected="int")
    if kind == "yarn":
        # transformers uses its defaults in place of zeros here.
        numbers |= {key: None for key in _DEFAULT_AT_ZERO if numbers[key] == 0}
        length = reader.take(int, "max_position_embeddings", default=None)
        if inner.values.get("factor", _MISSING) is None and original and length:
            numbers["factor"] = length / original
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        # A value of a wrong type is already a problem.
        if key in _OF_KIND[kind] and numbers[key] is None and inner.values.get(key) is None:
            inner.add(key, "missing", expected="float")
    if (numbers["factor"] or 1) < 1:
        inner.add("factor", "out of range", expected="a number >= 1", got=repr(numbers["factor"]))
    # Other missing numbers keep the defaults of `RopeScalingConfig`, which are those of transformers.
    scaling: dict[str, Any] = {key: value for key, value in numbers.items() if value is not None}
    # To transformers null is false.
    scaling["truncate"] = inner.take(bool, "truncate", missing=True, default=False)
    return scaling | {"original_max_position_embeddings": original}


def write_rotary(config: Any) -> dict[str, Any]:
    """Return the rotary settings of a `config.json`, in the formats of transformers 4 and 5."""
    scaling = config.rope_scaling
    keys = {key: getattr(scaling, key) for key in _OF_KIND[scaling.kind]}
    optional = {key: getattr(scaling, key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
    keys |= {key: value for key, value in optional.items() if value is not None and scaling.kind == "yarn"}
    scaled = {"rope_type": scaling.kind, **keys}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling.kind == "default" else scaled,
        "rope_parameters": {"rope_theta": config.rope_theta, **scaled},
    }
