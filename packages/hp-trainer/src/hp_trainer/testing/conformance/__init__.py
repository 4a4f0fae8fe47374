"""The conformance suite of hp-trainer: `pytest --pyargs hp_trainer.testing.conformance --hp-platform=NAME`.

Nothing of it must be implemented. It tests the composed optimizers, and those that a platform registers under the same
names, and short runs of the decoder in several layouts. Run the suites of hp-dtensor, hp-fsdp and hp-moe first.
"""
