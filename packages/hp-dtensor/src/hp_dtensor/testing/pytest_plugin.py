"""Pytest options and fixtures of the conformance suite of platforms."""
