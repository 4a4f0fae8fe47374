"""Fully sharded data parallelism: one differentiable all-gather per group of parameters."""
