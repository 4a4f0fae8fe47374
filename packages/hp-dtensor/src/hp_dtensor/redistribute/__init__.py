"""From placements to placements: planning (`planner`) and running (`steps`) redistributions."""

from hp_dtensor.redistribute.planner import plan_redistribute
from hp_dtensor.redistribute.steps import RedistributePlan, Step

__all__ = ["RedistributePlan", "Step", "plan_redistribute"]
