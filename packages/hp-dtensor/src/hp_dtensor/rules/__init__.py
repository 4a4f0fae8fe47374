"""Sharding rules: how each operation computes on sharded operands (see README.md)."""
