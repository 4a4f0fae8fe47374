"""From placements to placements: planning and running redistributions; see README.md."""

from hp_dtensor.redistribute.across_meshes import AcrossPlan, plan_across
from hp_dtensor.redistribute.costs import CostModel
from hp_dtensor.redistribute.plan import RedistributePlan, Step
from hp_dtensor.redistribute.planner import plan_between, plan_redistribute

__all__ = [
    "AcrossPlan",
    "CostModel",
    "RedistributePlan",
    "Step",
    "plan_across",
    "plan_between",
    "plan_redistribute",
]
