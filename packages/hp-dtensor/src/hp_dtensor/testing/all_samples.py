"""The samples of all sharding rules, from their tables."""

from __future__ import annotations

from hp_dtensor.testing import (
    complex_samples,
    dimension_samples,
    linear_algebra_samples,
    network_samples,
    operation_samples,
    rule_samples,
)
from hp_dtensor.testing.rule_samples import Sample

OPERATIONS: tuple[Sample, ...] = (
    *operation_samples.SAMPLES,
    *dimension_samples.SAMPLES,
    *network_samples.SAMPLES,
    *complex_samples.SAMPLES,
    *linear_algebra_samples.SAMPLES,
)
"""One or more per operation."""

SAMPLES: tuple[Sample, ...] = (*rule_samples.SAMPLES, *OPERATIONS)
"""Those, and the forms of calls that rules must tell apart."""
