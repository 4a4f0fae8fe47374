"""For tests only: simulated ranks and links, a pytest plugin, and the conformance suite of platforms.

Nothing in hp_dtensor outside this folder imports it. `*_samples.py` and `*_proof.py` serve the conformance suite.
"""

from hp_dtensor.testing.simulated import SimulatedGroup, SimulatedWorld, Transfer, run_ranks, slow_link

__all__ = ["SimulatedGroup", "SimulatedWorld", "Transfer", "run_ranks", "slow_link"]
