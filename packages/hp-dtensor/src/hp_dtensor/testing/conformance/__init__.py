"""The conformance suite of platforms: `pytest --pyargs hp_dtensor.testing.conformance --hp-platform=NAME`.

The tests use nothing but `hp_dtensor.platform.interface.Platform`. The code that a test runs on several ranks is a
top-level function that takes the platform first and asserts on every rank; the fixture `ranks` runs it on simulated
ranks and, by name, in real processes. `--hp-ranks=simulated` leaves out real processes, for a platform without them.

Expected values come from NumPy. Gradients are compared with central differences of the NumPy reference in float64, and
collectives with the identity that defines their duals, `<A x, w> = <x, A* w>`. Data is integer-valued wherever that
makes the comparison exact.
"""
