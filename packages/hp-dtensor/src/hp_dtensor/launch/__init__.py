"""Real ranks: started here as local processes, or found in the environment that a launcher made."""

from hp_dtensor.launch.environment import RankEnvironment, from_environment, is_launched, rank_environment
from hp_dtensor.launch.local_launch import RankPool, launch

__all__ = ["RankEnvironment", "RankPool", "from_environment", "is_launched", "launch", "rank_environment"]
