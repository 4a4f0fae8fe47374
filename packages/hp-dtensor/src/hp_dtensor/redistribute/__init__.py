"""Planning and running redistributions from one set of placements to another; see README.md."""

from hp_dtensor.redistribute.across_meshes import AcrossPlan, plan_across
from hp_dtensor.redistribute.plan import RedistributePlan, Step
from hp_dtensor.redistribute.planner import plan_between, plan_redistribute

__all__ = [
    "AcrossPlan",
    "RedistributePlan",
    "Step",
    "plan_across",
    "plan_between",
    "plan_redistribute",
]
