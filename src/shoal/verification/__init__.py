"""Does a strategy compute what one process computes? Measured, not believed.

Importing this does not import torch, so that a zygote can be started first.
"""

from shoal.verification.replay import replay_run
from shoal.verification.report import Row, Verdict, VerifyReport
from shoal.verification.result_report import ResultReport
from shoal.verification.strategy import verify

__all__ = ["ResultReport", "Row", "Verdict", "VerifyReport", "replay_run", "verify"]
