"""Rotary settings of a `config.json`: as `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""

from __future__ import annotations

from typing import Any

from hp_trainer.models.hugging_face.config_reader import ConfigReader

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
# What each kind says about itself.
_OF_KIND = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
}


def read_rotary(reader: ConfigReader, otherwise: float) -> dict[str, Any]:
    """Return the options `rope_theta` (`otherwise` where it is missing) and `rope_scaling` (as a mapping)."""
    given = reader.values.get("rope_parameters") or reader.values.get("rope_scaling") or {}
    inner = ConfigReader(given if isinstance(given, dict) else {}, f"{reader.where}: rope_scaling")
    kind = inner.take(str, "rope_type", "type", default="default")
    if kind not in _KINDS:
        inner.add("rope_type", "is not supported", expected=", ".join(_KINDS), got=repr(kind))
    scaling: dict[str, Any] = {"kind": kind}
    if kind != "default":
        numbers = {key: inner.take(float, key, default=None) for key in _NUMBERS}
        scaling |= {key: value for key, value in numbers.items() if value is not None}
        scaling["truncate"] = inner.take(bool, "truncate", default=True)
        original = inner.take(int, "original_max_position_embeddings", default=None)
        if original is None and kind != "linear":
            original = reader.take(int, "max_position_embeddings")
        scaling["original_max_position_embeddings"] = original
    theta = inner.take(float, "rope_theta", default=None) or reader.take(float, "rope_theta", default=otherwise)
    for each in (reader, inner):
        each.only("partial_rotary_factor", 1, 1.0)
    reader.problems += inner.problems
    return {"rope_theta": theta, "rope_scaling": scaling}


def write_rotary(config: Any) -> dict[str, Any]:
    """Return the rotary settings of a `config.json`, in the forms of transformers 4 and of 5."""
    scaling = config.rope_scaling
    told = {key: getattr(scaling, key) for key in _OF_KIND[scaling.kind]}
    optional = {key: getattr(scaling, key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
    told |= {key: value for key, value in optional.items() if value is not None and scaling.kind == "yarn"}
    scaled = {"rope_type": scaling.kind, **told}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling.kind == "default" else scaled,
        "rope_parameters": {"rope_theta": config.rope_theta, **scaled},
    }
