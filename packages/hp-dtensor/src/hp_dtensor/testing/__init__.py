"""Simulated ranks and links, and the conformance suite of platforms."""

from hp_dtensor.testing.simulated import SimulatedGroup, SimulatedWorld, run_ranks
from hp_dtensor.testing.simulated_collectives import Transfer, slow_link

__all__ = ["SimulatedGroup", "SimulatedWorld", "Transfer", "run_ranks", "slow_link"]
