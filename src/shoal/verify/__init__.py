"""Does a strategy compute what one process computes? Measured, not believed.

Importing this does not import torch, so that a zygote can be started first.
"""

from shoal.verify.replay import replay_run
from shoal.verify.report import Row, Verdict, VerifyReport
from shoal.verify.result_report import ResultReport
from shoal.verify.strategy import verify_strategy

__all__ = ["ResultReport", "Row", "Verdict", "VerifyReport", "replay_run", "verify_strategy"]
