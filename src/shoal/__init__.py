"""Shoal trains one model with many processes: say what once, how and where in a word each."""

from shoal.errors import ShoalError
from shoal.spec import Cluster, Data, Job, Plateau, Task, World

__version__ = "0.1.0"

__all__ = ["Cluster", "Data", "Job", "Plateau", "ShoalError", "Task", "World", "__version__"]
