"""Simulated ranks and the conformance suite of platforms."""

from hp_dtensor.testing.simulated import SimulatedGroup, SimulatedWorld, run_ranks

__all__ = ["SimulatedGroup", "SimulatedWorld", "run_ranks"]
