"""Real ranks: started here as local processes, or found in the environment that a launcher made."""

from hp_dtensor.launch.environment import (
    RankEnvironment,
    from_environment,
    is_launched,
    leave_launcher,
    rank_environment,
)
from hp_dtensor.launch.local_launch import RankPool, launch, serve_node
from hp_dtensor.launch.nodes import Nodes
from hp_dtensor.launch.rank_process import (
    Generation,
    current_generation,
    generation_has_ended,
    lasting_memory,
    next_generation,
)
from hp_dtensor.launch.replacement import Replacement

__all__ = [
    "Generation",
    "Nodes",
    "RankEnvironment",
    "RankPool",
    "Replacement",
    "current_generation",
    "from_environment",
    "generation_has_ended",
    "is_launched",
    "lasting_memory",
    "launch",
    "leave_launcher",
    "next_generation",
    "rank_environment",
    "serve_node",
]
