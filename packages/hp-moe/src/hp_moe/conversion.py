"""Weights of a layer from and to Hugging Face's layouts, and from a dense network (upcycling).

Everything here is NumPy arrays by name, on the host, without modules, frameworks or meshes. Values are moved, stacked
and transposed, never computed with (except by `upcycle`), so any dtype that NumPy can hold works, bfloat16 as `uint16`
bits too. Names are those within the layer; the caller removes the prefix of a checkpoint.

Checkpoints of a family have one tensor per expert, as in files, or all experts in one, as in `transformers` 5.
`from_huggingface` reads both; gpt-oss has only the second layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy

from hp_moe.exceptions import MoEConfigError
from hp_moe.experts import clamped_swiglu

Config = Mapping[str, Any]
_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
_GATED_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True)
class Family:
    """Tensor names and options of the MoE layer of one family of models.

    Attributes:
        read_options: maps a configuration to keyword arguments of `MoE`.
        gate: prefix of the gate's weight and bias.
        experts: names of `w1`, `w2` and `w3` in checkpoints with one tensor per expert; None if there are none.
        shared: prefix of the shared experts.
        plain: maps names of other tensors in `MoE` to those of the family.
        is_interleaved: whether the joint tensor of gate and up alternates their rows, and joint tensors are transposed.
    """

    read_options: Callable[[Config], dict[str, Any]]
    gate: str = "gate"
    experts: Mapping[str, str] | None = field(default_factory=lambda: _GATED_NAMES)
    shared: str | None = None
    plain: Mapping[str, str] = field(default_factory=dict)
    is_interleaved: bool = False

    def options(self, config: Config) -> dict[str, Any]:
        """Return the keyword arguments of `MoE` for a configuration; a missing or unsupported entry raises."""
        try:
            return self.read_options(config)
        except KeyError as error:
            raise MoEConfigError(f"config of a {config['model_type']} model: {error.args[0]} is missing") from None


def family_of(config: Config) -> Family:
    """Return the family of a Hugging Face configuration; an unknown `model_type` raises."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise MoEConfigError(f"model_type: expected one of {', '.join(sorted(FAMILIES))}, got {kind!r}")
    return FAMILIES[kind]


def _common(config: Config, hidden_dim: str, num_experts: str) -> dict[str, Any]:
    """Return the options that all families have, given the keys of two entries whose names differ."""
    # transformers 5 calls the number of experts num_local_experts in every family.
    experts = config[num_experts] if num_experts in config else config["num_local_experts"]
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise MoEConfigError(f"hidden_act: expected one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    return {
        "dim": config["hidden_size"],
        "hidden_dim": config[hidden_dim],
        "num_experts": experts,
        "top_k": config["num_experts_per_tok"],
        "activation": _ACTIVATIONS[activation],
    }


def _mixtral(config: Config) -> dict[str, Any]:
    return {**_common(config, "intermediate_size", "num_local_experts"), "route_norm": True}


def _qwen3(config: Config, hidden_dim: str = "moe_intermediate_size") -> dict[str, Any]:
    common = _common(config, hidden_dim, "num_experts")
    return {**common, "route_norm": bool(config.get("norm_topk_prob", False))}


def _qwen2(config: Config) -> dict[str, Any]:
    shared = config["shared_expert_intermediate_size"]
    return {**_qwen3(config), "shared_hidden_dim": shared, "shared_gate": True}


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
    "olmoe": Family(lambda config: _qwen3(config, "intermediate_size")),
    "deepseek_v3": Family(_deepseek_v3, shared="shared_experts", plain={"expert_bias": "gate.e_score_correction_bias"}),
    "gpt_oss": Family(_gpt_oss, gate="router", experts=None, is_interleaved=True),
}


Array = numpy.ndarray
_JOINT = ("experts.gate_up_proj", "experts.down_proj")
_SHARED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def moe_options(config: Config) -> dict[str, Any]:
    """Return the arguments of `MoE` for a Hugging Face configuration (the content of `config.json`).

    Args:
        config: configuration of a `mixtral`, `qwen2_moe`, `qwen3_moe`, `olmoe`, `deepseek_v3` or `gpt_oss` model.

    Raises:
        MoEConfigError: the model type or activation is not supported, or an entry is missing.

    Examples:
        >>> config = {"model_type": "mixtral", "hidden_size": 4, "intermediate_size": 8}
        >>> options = moe_options({**config, "num_local_experts": 4, "num_experts_per_tok": 2})
        >>> options["hidden_dim"], options["route_norm"]
        (8, True)
    """
    return family_of(config).options(config)


def from_huggingface(tensors: Mapping[str, Array], config: Config) -> dict[str, Array]:
    """Return the parameters and buffers of `MoE(**moe_options(config))` by name.

    Args:
        tensors: tensors of one layer by their names within it (`gate.weight`, `experts.0.gate_proj.weight`, ... or
            `experts.gate_up_proj`), one per expert or all experts in one.
        config: the model's configuration.

    Raises:
        MoEConfigError: tensors are missing or unexpected, or their shapes do not match the configuration.

    Examples:
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
    _check_names(
        f"tensors of a {config['model_type']} layer", left, {*names.values(), *_expert_names(family, options, joint)}
    )
    weights = {ours: left[theirs] for ours, theirs in names.items()}
    parts = _from_joint(left, family) if joint else _from_single(left, family, options["num_experts"])
    weights |= {f"experts.{name}": weight for name, weight in parts.items()}
    _check_shapes(weights, options, config)
    # Splits and transposes are views, which would share and retain the memory of the checkpoint.
    return {name: numpy.ascontiguousarray(weight) for name, weight in weights.items()}


def to_huggingface(weights: Mapping[str, Array], config: Config, *, joint: bool = False) -> dict[str, Array]:
    """Return the tensors of one layer by Hugging Face's names, from the parameters and buffers of `MoE`.

    Args:
        joint: all experts in one tensor, as `transformers` 5 holds them in memory, instead of one per expert.

    Raises:
        MoEConfigError: weights are missing or unexpected; the message lists them.

    Examples:
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
    _check_names(f"weights for a {config['model_type']} layer", weights, expected)
    tensors = {theirs: weights[ours] for ours, theirs in names.items()}
    experts = {part: weights[f"experts.{part}"] for part in parts}
    joint = joint or family.experts is None
    tensors |= _to_joint(experts, family) if joint else _to_single(experts, family)
    # Files are written from contiguous memory.
    return {name: numpy.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def _check_names(what: str, given: Collection[str], needed: set[str], optional: Collection[str] = ()) -> None:
    """Raise if needed names are missing, or names are given that are neither needed nor optional."""
    missing, others = sorted(needed - {*given}), sorted({*given} - needed - {*optional})
    if missing or others:
        # Names of quantized formats: the missing weights are there in a form that cannot be converted.
        is_quantized = any(re.search(r"(_blocks|_scales|_scale_inv|qweight)$", name) for name in others)
        hint = "; dequantize the checkpoint first" if is_quantized else ""
        raise MoEConfigError(f"{what}: missing {_some(missing)}; not expected {_some(others)}{hint}")


def _check_shapes(weights: Mapping[str, Array], options: Mapping[str, Any], config: Config) -> None:
    """Raise if the sizes of experts or gate do not match the configuration."""
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
    """Map names in `MoE` to those of the family, for all tensors but the routed experts."""
    names = {"router.gate.weight": f"{family.gate}.weight", **family.plain}
    if options.get("gate_bias"):
        names["router.gate.bias"] = f"{family.gate}.bias"
    if family.shared is not None and (options.get("num_shared_experts") or options.get("shared_hidden_dim")):
        names |= {f"shared_experts.{w}.weight": f"{family.shared}.{name}.weight" for w, name in _SHARED.items()}
    return names


def _expert_names(family: Family, options: Mapping[str, Any], joint: bool) -> list[str]:
    """Return the names of the tensors of single experts, or of those that hold all experts."""
    if joint:
        return [*_JOINT, *(f"{name}_bias" for name in _JOINT)] if options.get("bias") else [*_JOINT]
    assert family.experts is not None
    return [f"experts.{e}.{name}.weight" for e in range(options["num_experts"]) for name in family.experts.values()]


def _from_single(tensors: Mapping[str, Array], family: Family, num_experts: int) -> dict[str, Array]:
    """Stack tensors of single experts into weights `[experts, ...]` by their names in `GroupedExperts`."""
    assert family.experts is not None
    return {
        ours: numpy.stack([tensors[f"experts.{e}.{theirs}.weight"] for e in range(num_experts)])
        for ours, theirs in family.experts.items()
    }


def _to_single(experts: Mapping[str, Array], family: Family) -> dict[str, Array]:
    """Split weights of `GroupedExperts` into tensors of single experts; the inverse of `_from_single`."""
    assert family.experts is not None
    return {
        f"experts.{e}.{theirs}.weight": weight
        for ours, theirs in family.experts.items()
        for e, weight in enumerate(experts[ours])
    }


def _from_joint(tensors: Mapping[str, Array], family: Family) -> dict[str, Array]:
    """Split tensors that hold all experts into the weights of `GroupedExperts`."""
    gate_up, down = (tensors[name] for name in _JOINT)
    if not family.is_interleaved:
        # gate_up_proj `[experts, 2 * hidden, dim]`: the rows of gate, then those of up.
        w1, w3 = numpy.split(gate_up, 2, axis=1)
        return {"w1": w1, "w2": down, "w3": w3}
    biases, b2 = (tensors[f"{name}_bias"] for name in _JOINT)
    # gpt-oss: `[experts, dim, 2 * hidden]`, with gate and up in alternating columns.
    rows = gate_up.swapaxes(1, 2)
    w1, w3, w2 = rows[:, ::2], rows[:, 1::2], down.swapaxes(1, 2)
    return {"w1": w1, "w2": w2, "w3": w3, "b1": biases[:, ::2], "b2": b2, "b3": biases[:, 1::2]}


def _to_joint(experts: Mapping[str, Array], family: Family) -> dict[str, Array]:
    """Join weights of `GroupedExperts`; the inverse of `_from_joint`."""
    w1, w2, w3 = (experts[name] for name in ("w1", "w2", "w3"))
    if not family.is_interleaved:
        return {_JOINT[0]: numpy.concatenate([w1, w3], 1), _JOINT[1]: w2}
    num_experts, hidden_dim, dim = w1.shape
    # Stacked along a new axis after the rows, so that the reshape alternates them.
    rows = numpy.stack([w1, w3], 2).reshape(num_experts, 2 * hidden_dim, dim)
    biases = numpy.stack([experts["b1"], experts["b3"]], 2).reshape(num_experts, 2 * hidden_dim)
    return {
        _JOINT[0]: rows.swapaxes(1, 2),
        f"{_JOINT[0]}_bias": biases,
        _JOINT[1]: w2.swapaxes(1, 2),
        f"{_JOINT[1]}_bias": experts["b2"],
    }


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:6]) or "none"
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


def upcycle(
    dense: Mapping[str, Array],
    num_experts: int,
    gate: Array,
    *,
    granularity: int = 1,
    noise: float = 0.0,
    seed: int = 0,
) -> dict[str, Array]:
    """Return weights of a `MoE` initialized from a dense network (sparse upcycling, arXiv 2212.05055).

    Every expert is a copy of the network. With `granularity` above 1, each copy is split along the hidden dimension
    into that many consecutive experts, which share a row of the gate, so that a token selects all of them (arXiv
    2410.07524). The scores of the layer must sum to one (`route_norm=True` or `softmax_of_top_k`), and `top_k` must be
    a multiple of `granularity`. Without noise, the output of the layer then equals that of the dense network.

    Args:
        dense: `w1.weight`, `w3.weight` `[hidden, dim]` and `w2.weight` `[dim, hidden]`, as in `FeedForward`, and
            optional biases `w1.bias`, `w2.bias`, `w3.bias`; no `w3` without a gate.
        num_experts: number of experts of the layer, each with hidden width `hidden / granularity`.
        gate: one row for each copy, `[num_experts / granularity, dim]`, small and random.
        granularity: number of experts into which a copy is split.
        noise: standard deviation of noise added to the experts' weights, relative to that of each weight.
        seed: seed of the noise.

    Raises:
        MoEConfigError: weights are missing or unexpected, sizes are not divisible, or the gate has another shape.

    Examples:
        >>> dense = {"w1.weight": np.ones((8, 4)), "w2.weight": np.ones((4, 8)), "w3.weight": np.ones((8, 4))}
        >>> weights = upcycle(dense, num_experts=4, gate=np.ones((2, 4)), granularity=2)
        >>> weights["experts.w1"].shape, weights["router.gate.weight"].shape
        ((4, 4, 4), (4, 4))
    """
    optional = {f"{weight}.{kind}" for weight in ("w1", "w2", "w3") for kind in ("weight", "bias")}
    _check_names("weights of a dense network", dense, {"w1.weight", "w2.weight"}, optional)
    hidden = dense["w1.weight"].shape[0]
    _check(hidden, num_experts, granularity, gate.shape, dense["w1.weight"].shape[1])
    random = numpy.random.default_rng(seed)
    experts = {}
    # Sorted: the noise of a weight does not depend on the order of the mapping.
    for name, array in sorted(dense.items()):
        weight, _, kind = name.partition(".")
        experts_of_copy = _split(array, weight, kind, granularity)
        copies = numpy.concatenate([experts_of_copy] * (num_experts // granularity))
        if noise and kind == "weight":
            copies = copies + noise * array.std() * random.standard_normal(copies.shape)
        experts[f"experts.{weight if kind == 'weight' else 'b' + weight[1:]}"] = copies.astype(array.dtype)
    return {"router.gate.weight": numpy.repeat(gate, granularity, axis=0), **experts}


def _split(array: Array, weight: str, kind: str, granularity: int) -> Array:
    """Split a dense weight or bias along the hidden dimension: `[granularity, ...]`."""
    if weight == "w2" and kind == "bias":
        # Every expert of a copy adds the bias, multiplied by its share of the copy's score; the shares sum to one.
        return numpy.stack([array] * granularity)
    if weight == "w2":
        # An expert's result is a partial sum, multiplied by 1 / granularity of the copy's score: compensate for that.
        return numpy.stack(numpy.split(array * granularity, granularity, axis=1))
    return numpy.stack(numpy.split(array, granularity, axis=0))


def _check(hidden: int, num_experts: int, granularity: int, gate: tuple[int, ...], dim: int) -> None:
    """Raise if `granularity` or the shape of the gate does not fit the network."""
    if granularity < 1 or hidden % granularity or num_experts % granularity:
        raise MoEConfigError(
            f"granularity must divide the hidden width {hidden} and num_experts = {num_experts}, got {granularity}"
        )
    expected = (num_experts // granularity, dim)
    if tuple(gate) != expected:
        raise MoEConfigError(f"gate: expected one row for each copy, shape {list(expected)}, got {list(gate)}")
