"""Simulated ranks and the conformance suite of platforms."""
