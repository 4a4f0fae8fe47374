"""Weights of a layer from and to other layouts, as arrays by name."""

from hp_moe.conversion.huggingface import from_huggingface, moe_options, to_huggingface
from hp_moe.conversion.upcycling import upcycle

__all__ = ["from_huggingface", "moe_options", "to_huggingface", "upcycle"]
