"""All samples of sharding rules."""

from __future__ import annotations

from hp_dtensor.testing import linear_algebra_samples, network_samples, operation_samples, rule_samples
from hp_dtensor.testing.rule_samples import Sample

OPERATIONS: tuple[Sample, ...] = (
    *operation_samples.POINTWISE_AND_REDUCTIONS,
    *operation_samples.DIMENSIONS,
    *network_samples.SAMPLES,
    *operation_samples.COMPLEX,
    *linear_algebra_samples.SAMPLES,
)
"""At least one sample of each operation."""

SAMPLES: tuple[Sample, ...] = (*rule_samples.SAMPLES, *OPERATIONS)
"""`OPERATIONS`, and calls in forms that a rule must distinguish."""
