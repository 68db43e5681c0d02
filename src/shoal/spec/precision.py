"""In which numbers a job computes, and what does not go together with that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import SpecError
from shoal.spec.checks import require_choice

if TYPE_CHECKING:
    from shoal.spec.job import Job

PRECISIONS = ("fp32", "bf16", "fp16", "adaptive", "auto")
SCALED = ("fp16", "adaptive")
"""Those in which small gradients would be lost if the loss were not scaled up."""


def check_precision(job: Job) -> None:
    """Whether what the job asks for goes together."""
    require_choice("Job", "precision", job.precision, PRECISIONS)
    if job.numerics == "float64" and job.precision != "fp32":
        raise SpecError(
            f"Job: numerics=float64 computes all in double precision, but precision={job.precision}; use fp32."
        )
