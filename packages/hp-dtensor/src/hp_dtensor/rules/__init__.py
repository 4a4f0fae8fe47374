"""Sharding rules: tables of operations as factors, and the engine that reads them (see README.md)."""
