"""`StepForm`: in which form a step's passes run, and what does not go together with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.errors import SpecError
from shoal.spec.checks import require_choice
from shoal.spec.vocabulary import Purpose

if TYPE_CHECKING:
    from shoal.spec.job import Job

MEMORY_FORMATS = ("contiguous", "channels_last")


@dataclass(frozen=True, kw_only=True)
class StepForm:
    """How the task's code is run: as it is, or in a way that computes the same faster."""

    compile: bool = False
    """Forward and backward passes are compiled, once for each shape of a batch."""
    graph: bool = False
    """The whole step is captured on the device, and replayed."""
    memory_format: str = "contiguous"
    """How images lie in memory: `contiguous`, or `channels_last`, pixel by pixel."""
    loss_in_pieces: bool = False
    """The scores of a large vocabulary are made and used piece by piece, and never exist as a whole."""

    def __str__(self) -> str:
        words = [
            *["compile"] * self.compile,
            *["graph"] * self.graph,
            *[self.memory_format] * (self.memory_format != "contiguous"),
            *["loss in pieces"] * self.loss_in_pieces,
        ]
        return " + ".join(words) or "plain"


def check_form(job: Job) -> None:
    """Whether what the job asks for goes together."""
    require_choice("Job", "memory_format", job.memory_format, MEMORY_FORMATS)
    if job.purpose != Purpose.TRAIN:  # what is saved can be used anywhere
        return
    if job.precision == "auto" and not job.fast:
        raise SpecError(
            "Job: precision=auto lets fast choose among fp32 and bf16, but fast was not asked for; add fast, or "
            "name a precision."
        )
    if job.graph and job.cluster.device == "cpu":
        raise SpecError(
            "Job: graph captures a step on a GPU, but device=cpu; leave it out, or use compile, which is for both."
        )
    if job.graph and job.precision == "adaptive":
        raise SpecError(
            "Job: graph replays one step again and again, but precision=adaptive has steps that measure gradients "
            "and layers that change to float32; use fp16 or bf16."
        )
    if job.graph and job.conduct.servers:
        raise SpecError(
            f"Job: graph captures a step with its update, but with strategy={job.strategy} servers make that; "
            "leave it out, or use compile."
        )
    if job.graph and (job.cluster.places > 1 or job.num_slots > 1):
        raise SpecError(
            f"Job: graph captures a whole step with its update, but workers={job.cluster.written_workers} and "
            f"slots={job.num_slots} have others to wait for in it; use one worker, or compile."
        )
