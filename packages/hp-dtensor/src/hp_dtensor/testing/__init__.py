"""For tests only: simulated ranks, a pytest plugin, and the conformance suite of platforms.

Nothing in hp_dtensor outside this folder imports it. `*_samples.py` and `*_proof.py` serve the conformance suite.
"""

from hp_dtensor.testing.simulated import SimulatedGroup, SimulatedWorld, run_ranks

__all__ = ["SimulatedGroup", "SimulatedWorld", "run_ranks"]
