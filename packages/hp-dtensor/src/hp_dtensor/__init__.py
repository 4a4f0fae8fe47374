"""Distributed tensors: a local shard and a spec, on any framework that has a platform package."""
