"""What the user says, and where a process stands. Frozen data, checked when made; no torch at import."""

from shoal.spec.cluster import Cluster
from shoal.spec.job import Job
from shoal.spec.sampling import Fold, Stratified, Weighted
from shoal.spec.strategy import Data, ParameterServer, StrategySpec, parse_strategy
from shoal.spec.task import Plateau, Task
from shoal.spec.world import World

__all__ = [
    "Cluster",
    "Data",
    "Fold",
    "Job",
    "ParameterServer",
    "Plateau",
    "StrategySpec",
    "Stratified",
    "Task",
    "Weighted",
    "World",
    "parse_strategy",
]
