"""Which strategy is fastest on this task, here? Measured in turns, in fresh processes.

Importing this does not import torch, so that a zygote can be started first.
"""

from shoal.bench.comparison import BenchOrder, compare_strategies
from shoal.bench.laps import BenchRow, Course, Lap
from shoal.bench.report import BenchReport

__all__ = ["BenchOrder", "BenchReport", "BenchRow", "Course", "Lap", "compare_strategies"]
