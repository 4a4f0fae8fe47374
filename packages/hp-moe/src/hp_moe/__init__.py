"""Mixture of experts over a mesh: routing, dispatch, grouped experts, combine."""
