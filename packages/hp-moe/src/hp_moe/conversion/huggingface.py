"""Options and weights of `MoE` from and to the layers of Hugging Face's families."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy

from hp_moe.conversion.families import Config, Family, family_of
from hp_moe.exceptions import MoEConfigError

Array = numpy.ndarray
_JOINT = ("experts.gate_up_proj", "experts.down_proj")
_SHARED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def moe_options(config: Config) -> dict[str, Any]:
    """Return the arguments of `MoE` for a Hugging Face configuration (the content of `config.json`).

    Args:
        config: of a model of type `mixtral`, `qwen2_moe`, `qwen3_moe`, `olmoe`, `deepseek_v3` or `gpt_oss`.

    Raises:
        MoEConfigError: another type, an activation that no expert has here, or a missing entry.

    Example:
        >>> config = {"model_type": "mixtral", "hidden_size": 4, "intermediate_size": 8}
        >>> options = moe_options({**config, "num_local_experts": 4, "num_experts_per_tok": 2})
        >>> options["hidden_dim"], options["route_norm"]
        (8, True)
    """
    return family_of(config).options(config)


def from_huggingface(tensors: Mapping[str, Array], config: Config) -> dict[str, Array]:
    """Return the parameters and buffers of `MoE(**moe_options(config))` by name.

    Args:
        tensors: of one layer, by their names within it (`gate.weight`, `experts.0.gate_proj.weight`, ... or
            `experts.gate_up_proj`), one per expert or all experts in one.
        config: the model's configuration.

    Raises:
        MoEConfigError: tensors are missing, or there are others, or their shapes are not the configuration's.

    Example:
        >>> config = {"model_type": "mixtral", "hidden_size": 4, "intermediate_size": 8}
        >>> config |= {"num_local_experts": 2, "num_experts_per_tok": 2}
        >>> gate_up, down = np.ones((2, 16, 4)), np.ones((2, 4, 8))  # of both experts
        >>> tensors = {"gate.weight": np.ones((2, 4)), "experts.gate_up_proj": gate_up, "experts.down_proj": down}
        >>> {name: weight.shape for name, weight in from_huggingface(tensors, config).items()}["experts.w3"]
        (2, 8, 4)
    """
    family, left = family_of(config), dict(tensors)
    options = family.options(config)
    joint = family.experts is None or _JOINT[0] in left
    names = _names(family, options)
    experts = _joint_names(options) if joint else _expert_names(family, options["num_experts"])
    expected = {*names.values(), *experts}
    missing, others = sorted(expected - {*left}), sorted({*left} - expected)
    if missing or others:
        hint = "; dequantize the checkpoint first" if any(_is_quantized(name) for name in others) else ""
        raise MoEConfigError(
            f"tensors of a {config['model_type']} layer: missing {_some(missing)}; not expected {_some(others)}{hint}"
        )
    weights = {ours: left[theirs] for ours, theirs in names.items()}
    parts = _from_joint(left, family) if joint else _from_single(left, family, options["num_experts"])
    weights |= {f"experts.{name}": weight for name, weight in parts.items()}
    _check_shapes(weights, options, config)
    return {name: numpy.ascontiguousarray(weight) for name, weight in weights.items()}


def to_huggingface(weights: Mapping[str, Array], config: Config, *, joint: bool = False) -> dict[str, Array]:
    """Return the tensors of one layer by Hugging Face's names, from the parameters and buffers of `MoE`.

    Args:
        joint: all experts in one tensor, as `transformers` 5 holds them; else one per expert, as its files do.

    Raises:
        MoEConfigError: weights are missing, or there are others; the message lists them.

    Example:
        >>> config = {"model_type": "mixtral", "hidden_size": 4, "intermediate_size": 8}
        >>> config |= {"num_local_experts": 2, "num_experts_per_tok": 2}
        >>> with nn.building(platform):
        ...     layer = MoE(**moe_options(config))
        >>> weights = {name: platform.to_numpy(p) for name, p in platform.named_parameters(layer)}
        >>> to_huggingface(weights, config)["experts.1.w1.weight"].shape
        (8, 4)
    """
    family = family_of(config)
    options = family.options(config)
    names = _names(family, options)
    parts = ("w1", "w2", "w3", "b1", "b2", "b3") if options.get("bias") else ("w1", "w2", "w3")
    expected = {*names, *(f"experts.{part}" for part in parts)}
    missing, others = sorted(expected - {*weights}), sorted({*weights} - expected)
    if missing or others:
        raise MoEConfigError(
            f"weights for a {config['model_type']} layer: missing {_some(missing)}; not expected {_some(others)}"
        )
    tensors = {theirs: weights[ours] for ours, theirs in names.items()}
    experts = {part: weights[f"experts.{part}"] for part in parts}
    joint = joint or family.experts is None
    tensors |= _to_joint(experts, family) if joint else _to_single(experts, family)
    return {name: numpy.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _check_shapes(weights: Mapping[str, Array], options: Mapping[str, Any], config: Config) -> None:
    """Refuse experts and gates of other sizes than the configuration's, which would be read as another layer's."""
    experts, hidden, dim = (options[name] for name in ("num_experts", "hidden_dim", "dim"))
    expected = {"router.gate.weight": (experts, dim), "experts.w2": (experts, dim, hidden)}
    expected |= dict.fromkeys(("experts.w1", "experts.w3"), (experts, hidden, dim))
    found = [
        f"{name} {list(weights[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if weights[name].shape != shape
    ]
    if found:
        raise MoEConfigError(f"tensors of a {config['model_type']} layer do not fit its config: {'; '.join(found)}")


def _names(family: Family, options: Mapping[str, Any]) -> dict[str, str]:
    """Map our names of everything but the routed experts to theirs."""
    names = {"router.gate.weight": f"{family.gate}.weight", **family.plain}
    if options.get("gate_bias"):
        names["router.gate.bias"] = f"{family.gate}.bias"
    if family.shared is not None and (options.get("num_shared_experts") or options.get("shared_hidden_dim")):
        names |= {f"shared_experts.{w}.weight": f"{family.shared}.{name}.weight" for w, name in _SHARED.items()}
    return names


def _expert_names(family: Family, num_experts: int) -> list[str]:
    assert family.experts is not None
    return [f"experts.{e}.{name}.weight" for e in range(num_experts) for name in family.experts.values()]


def _joint_names(options: Mapping[str, Any]) -> list[str]:
    return [*_JOINT, *(f"{name}_bias" for name in _JOINT)] if options.get("bias") else [*_JOINT]


def _from_single(tensors: Mapping[str, Array], family: Family, num_experts: int) -> dict[str, Array]:
    assert family.experts is not None
    return {
        ours: numpy.stack([tensors[f"experts.{e}.{theirs}.weight"] for e in range(num_experts)])
        for ours, theirs in family.experts.items()
    }


def _to_single(experts: Mapping[str, Array], family: Family) -> dict[str, Array]:
    assert family.experts is not None
    return {
        f"experts.{e}.{theirs}.weight": weight
        for ours, theirs in family.experts.items()
        for e, weight in enumerate(experts[ours])
    }


def _from_joint(tensors: Mapping[str, Array], family: Family) -> dict[str, Array]:
    gate_up, down = (tensors[name] for name in _JOINT)
    if not family.is_interleaved:
        w1, w3 = numpy.split(gate_up, 2, axis=1)
        return {"w1": w1, "w2": down, "w3": w3}
    biases, b2 = (tensors[f"{name}_bias"] for name in _JOINT)
    rows = gate_up.swapaxes(1, 2)
    w1, w3, w2 = rows[:, ::2], rows[:, 1::2], down.swapaxes(1, 2)
    return {"w1": w1, "w2": w2, "w3": w3, "b1": biases[:, ::2], "b2": b2, "b3": biases[:, 1::2]}


def _to_joint(experts: Mapping[str, Array], family: Family) -> dict[str, Array]:
    w1, w2, w3 = (experts[name] for name in ("w1", "w2", "w3"))
    if not family.is_interleaved:
        return {_JOINT[0]: numpy.concatenate([w1, w3], 1), _JOINT[1]: w2}
    num_experts, hidden_dim, dim = w1.shape
    rows = numpy.stack([w1, w3], 2).reshape(num_experts, 2 * hidden_dim, dim)
    biases = numpy.stack([experts["b1"], experts["b3"]], 2).reshape(num_experts, 2 * hidden_dim)
    return {
        _JOINT[0]: rows.swapaxes(1, 2),
        f"{_JOINT[0]}_bias": biases,
        _JOINT[1]: w2.swapaxes(1, 2),
        f"{_JOINT[1]}_bias": experts["b2"],
    }


def _is_quantized(name: str) -> bool:
    return re.search(r"(_blocks|_scales|_scale_inv|qweight)$", name) is not None


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:6]) or "none"
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"
