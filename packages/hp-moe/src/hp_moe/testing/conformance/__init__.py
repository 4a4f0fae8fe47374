"""The conformance suite of hp-moe: `pytest --pyargs hp_moe.testing.conformance --hp-platform=NAME`.

Nothing of it must be implemented: experts are composed of the platform's operations and collectives. The suite also
tests a platform's own products (hook `hp_grouped_matmul`). Run the suite of hp-dtensor first.
"""
