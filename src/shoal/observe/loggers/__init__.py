"""Records of runs that others keep: CSV files, TensorBoard, Weights & Biases, MLflow, and those of other packages.

None of their packages is imported before a run begins that asks for it.
"""

from shoal.observe.loggers.base import LoggedRun, Logger, RunEnding, Scalar
from shoal.observe.loggers.named import Log, find_loggers, logger_sinks, several
from shoal.observe.loggers.sink import LoggerSink

__all__ = [
    "Log",
    "LoggedRun",
    "Logger",
    "LoggerSink",
    "RunEnding",
    "Scalar",
    "find_loggers",
    "logger_sinks",
    "several",
]
