"""The architecture that a decoder is: found by writing a `config.json` and reading it back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from hp_trainer.config import to_plain
from hp_trainer.exceptions import ExportError
from hp_trainer.models.hugging_face.architectures import ARCHITECTURES, TRAINING_ONLY, Architecture
from hp_trainer.models.hugging_face.config_reader import ConfigReader

_OF_EXPERTS = (
    "num_dense_layers",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "num_shared_experts",
    "norm_topk_prob",
    "score_func",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "router_bias",
    "expert_bias",
    "swiglu_limit",
)
_OF_LATENT = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleaved",
)
_OF_GROUPED = ("num_key_value_heads", "head_dim")


def find_architecture(config: Any) -> Architecture:
    """Return the architecture that computes what a decoder with these options does.

    Raises:
        ExportError: there is none in the table; tells which comes nearest, and by which options it differs.
    """
    wanted = meaning(to_plain(config), config.num_hidden_layers)
    differing = {each: _difference(each, config, wanted) for each in ARCHITECTURES.values()}
    best = min(differing, key=lambda each: len(differing[each]))
    if differing[best]:
        told = ", ".join(f"{name} is {got!r} there" for name, got in sorted(differing[best].items()))
        raise ExportError(
            f"no architecture of transformers that is known here ({', '.join(ARCHITECTURES)}) has the options of this "
            f"model together; {best.model_type} comes nearest: {told}"
        )
    return best


def meaning(options: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the options that decide what a model computes; those that do nothing beside the others are left out."""
    kept = {name: value for name, value in options.items() if name not in (*TRAINING_ONLY, "name", "from")}
    if kept["num_experts"] is None:
        unused: tuple[str, ...] = _OF_EXPERTS
    else:
        unused = ("intermediate_size",) if kept["num_dense_layers"] == 0 else ()
    unused += _OF_GROUPED if kept["attention"] == "latent" else _OF_LATENT
    pattern = kept.pop("layer_pattern")
    kinds = [pattern[layer % len(pattern)] for layer in range(layers)]
    if kept["sliding_window"] is None or "sliding" not in kinds:
        kept["sliding_window"], kinds = None, []
    if kept["attention"] == "grouped" and kept["attention_scale"] is None:
        kept["attention_scale"] = kept["head_dim"] ** -0.5
    scaling = kept["rope_scaling"]
    if scaling["kind"] == "default":
        kept["rope_scaling"] = {"kind": "default"}
    return {name: value for name, value in kept.items() if name not in unused} | {"layers": kinds}


def _difference(architecture: Architecture, config: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the options that come back otherwise from a `config.json` of this architecture."""
    reader = ConfigReader(architecture.write(config), architecture.model_type)
    options = architecture.read(reader)
    if reader.problems:
        return {problem.what: problem.got for problem in reader.problems}
    scaling = type(config.rope_scaling)(**options.pop("rope_scaling"))
    read = type(config)(**options, rope_scaling=scaling)
    return dict(_changed(wanted, meaning(to_plain(read), config.num_hidden_layers)))


def _changed(wanted: dict[str, Any], got: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in {**wanted, **got}:
        one, other = wanted.get(name), got.get(name)
        if isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=1e-9):
            # A factor that config.json keeps as its inverse, or the root of it.
            continue
        if one != other:
            yield name, other


def same_meaning(config: Any, options: dict[str, Any]) -> bool:
    """Return whether options read from a directory are those of a decoder, but for what only training needs."""
    read = dataclasses.replace(config, **options)
    layers = config.num_hidden_layers
    return meaning(to_plain(read), read.num_hidden_layers) == meaning(to_plain(config), layers)
