"""Names and options of the Hugging Face families that have routed experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hp_moe.activations import clamped_swiglu
from hp_moe.exceptions import MoEConfigError

Config = Mapping[str, Any]
_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
_GATED_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True)
class Family:
    """Names of a family's tensors within one layer, and the options of its layer.

    Attributes:
        read_options: from a configuration to keyword arguments of `MoE`.
        gate: name of the gate's weight; its bias, if any, is beside it.
        experts: names of `w1`, `w2` and `w3` in checkpoints with one tensor per expert; None: there are none such.
        shared: prefix of the shared experts.
        plain: other tensors by our names.
        is_interleaved: the joint tensor of gate and up alternates their rows, and is transposed, as `down_proj` is.
    """

    read_options: Callable[[Config], dict[str, Any]]
    gate: str = "gate"
    experts: Mapping[str, str] | None = field(default_factory=lambda: _GATED_NAMES)
    shared: str | None = None
    plain: Mapping[str, str] = field(default_factory=dict)
    is_interleaved: bool = False

    def options(self, config: Config) -> dict[str, Any]:
        """Return the keyword arguments of `MoE` for a configuration.

        Raises:
            MoEConfigError: an entry is missing, or asks for what no layer here computes.
        """
        try:
            return self.read_options(config)
        except KeyError as error:
            raise MoEConfigError(f"config of a {config['model_type']} model: {error.args[0]} is missing") from None


def family_of(config: Config) -> Family:
    """Return the family of a Hugging Face configuration.

    Raises:
        MoEConfigError: its `model_type` is not one of those known.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise MoEConfigError(f"model_type: expected one of {', '.join(sorted(FAMILIES))}, got {kind!r}")
    return FAMILIES[kind]


def _activation(config: Config) -> str:
    name = config.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise MoEConfigError(f"hidden_act: expected one of {', '.join(_ACTIVATIONS)}, got {name!r}")
    return _ACTIVATIONS[name]


def _common(config: Config, hidden_dim: str, num_experts: str) -> dict[str, Any]:
    # transformers 5 calls the number of experts num_local_experts in every family.
    experts = config[num_experts] if num_experts in config else config["num_local_experts"]
    return {
        "dim": config["hidden_size"],
        "hidden_dim": config[hidden_dim],
        "num_experts": experts,
        "top_k": config["num_experts_per_tok"],
        "activation": _activation(config),
    }


def _mixtral(config: Config) -> dict[str, Any]:
    return {**_common(config, "intermediate_size", "num_local_experts"), "route_norm": True}


def _qwen3(config: Config) -> dict[str, Any]:
    common = _common(config, "moe_intermediate_size", "num_experts")
    return {**common, "route_norm": bool(config.get("norm_topk_prob", False))}


def _qwen2(config: Config) -> dict[str, Any]:
    shared = config["shared_expert_intermediate_size"]
    return {**_qwen3(config), "shared_hidden_dim": shared, "shared_gate": True}


def _olmoe(config: Config) -> dict[str, Any]:
    common = _common(config, "intermediate_size", "num_experts")
    return {**common, "route_norm": bool(config.get("norm_topk_prob", False))}


def _deepseek_v3(config: Config) -> dict[str, Any]:
    return {
        **_common(config, "moe_intermediate_size", "n_routed_experts"),
        "score_func": "sigmoid",
        "num_expert_groups": config["n_group"],
        "num_limited_groups": config["topk_group"],
        "route_norm": bool(config.get("norm_topk_prob", True)),
        "route_scale": float(config.get("routed_scaling_factor", 1.0)),
        "num_shared_experts": config.get("n_shared_experts") or 0,
        # The step that the model was trained with, arXiv 2412.19437, section 4.2.
        "load_balance_coeff": 1e-3,
    }


def _gpt_oss(config: Config) -> dict[str, Any]:
    limit, alpha = config.get("swiglu_limit", 7.0), config.get("swiglu_alpha", 1.702)
    return {
        **_common(config, "intermediate_size", "num_local_experts"),
        "activation": clamped_swiglu(limit, alpha),
        "bias": True,
        "gate_bias": True,
        "score_func": "softmax_of_top_k",
    }


FAMILIES: dict[str, Family] = {
    "mixtral": Family(_mixtral, experts={"w1": "w1", "w2": "w2", "w3": "w3"}),
    "qwen2_moe": Family(_qwen2, shared="shared_expert", plain={"shared_gate.weight": "shared_expert_gate.weight"}),
    "qwen3_moe": Family(_qwen3),
    "olmoe": Family(_olmoe),
    "deepseek_v3": Family(_deepseek_v3, shared="shared_experts", plain={"expert_bias": "gate.e_score_correction_bias"}),
    "gpt_oss": Family(_gpt_oss, gate="router", experts=None, is_interleaved=True),
}
