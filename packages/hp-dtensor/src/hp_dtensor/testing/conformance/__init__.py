"""Tests that every platform must pass: `pytest --pyargs hp_dtensor.testing.conformance --hp-platform=NAME`.

`--hp-ranks=simulated` leaves out real processes, for a platform without them.
"""
