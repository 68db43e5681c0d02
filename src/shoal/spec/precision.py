"""In which numbers a job computes, and what does not go together with that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import SpecError
from shoal.spec.checks import require_choice
from shoal.spec.model_parallel import Mesh, Pipeline
from shoal.spec.strategy import Data, StrategySpec

if TYPE_CHECKING:
    from shoal.spec.job import Job

PRECISIONS = ("fp32", "bf16", "fp16", "adaptive")
SCALED = ("fp16", "adaptive")
"""Those in which small gradients would be lost if the loss were not scaled up."""


def check_precision(spec: StrategySpec, job: Job) -> None:
    """Whether the strategy can compute as the job asks."""
    require_choice("Job", "precision", job.precision, PRECISIONS)
    if job.numerics == "float64" and job.precision != "fp32":
        raise SpecError(
            f"Job: numerics=float64 computes all in double precision, but precision={job.precision}; use fp32."
        )
    if isinstance(spec, Data) and spec.batchnorm == "sync" and job.recompute:
        raise SpecError(
            "Job: recompute runs layers twice, but batchnorm=sync exchanges sums each time they run; use "
            "batchnorm=local, or leave recompute out."
        )
    if isinstance(spec, Pipeline | Mesh) and spec.schedule == "zero-bubble" and job.recompute:
        raise SpecError(
            "Job: recompute computes a stage again in its backward pass, which schedule=zero-bubble takes in two "
            "parts; use schedule=1f1b, or leave recompute out."
        )
