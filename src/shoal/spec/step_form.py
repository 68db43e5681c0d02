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
PRODUCTS = ("torch", "onednn")
CONVOLUTIONS = ("torch", "patches")
OFFLOADS = ("none", "optimizer")


@dataclass(frozen=True, kw_only=True)
class StepForm:
    """How the task's code is run: as it is, or in a way that computes the same faster."""

    compile: bool = False
    """Forward and backward passes are compiled, once for each shape of a batch."""
    graph: bool = False
    """The whole step is captured on the device, and replayed."""
    memory_format: str = "contiguous"
    """How images lie in memory: `contiguous`, or `channels_last`, pixel by pixel."""
    products: str = "torch"
    """Who multiplies what linear layers compute in float32 on a CPU: `torch`'s own choice, or `onednn`."""
    convolutions: str = "torch"
    """How gradients of convolutions' weights are made on a CPU: as `torch` does, or from `patches`."""
    loss_in_pieces: bool = False
    """The scores of a large vocabulary are made and used piece by piece, and never exist as a whole."""

    flat_update: bool = False
    """The weights of linear layers are updated in one kernel, from gradients in half precision."""
    offload: str = "none"
    """What lies in the host's memory: `none`, or `optimizer`, all that the optimizer keeps."""

    def __str__(self) -> str:
        words = [
            *["compile"] * self.compile,
            *["graph"] * self.graph,
            *[self.memory_format] * (self.memory_format != "contiguous"),
            *[self.products] * (self.products != "torch"),
            *[self.convolutions] * (self.convolutions != "torch"),
            *["loss in pieces"] * self.loss_in_pieces,
            *["flat update"] * self.flat_update,
            *[f"{self.offload} offloaded"] * (self.offload != "none"),
        ]
        return " + ".join(words) or "plain"


def check_form(job: Job) -> None:
    """Whether what the job asks for goes together."""
    require_choice("Job", "memory_format", job.memory_format, MEMORY_FORMATS)
    require_choice("Job", "products", job.products, PRODUCTS)
    require_choice("Job", "convolutions", job.convolutions, CONVOLUTIONS)
    require_choice("Job", "offload", job.offload, OFFLOADS)
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
    if job.sync_device and job.cluster.device == "cpu":
        raise SpecError("Job: sync_device lets a GPU do one thing after the other, but device=cpu; leave it out.")
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
    _check_products(job)
    _check_convolutions(job)
    _check_update(job)


def _check_products(job: Job) -> None:
    if job.products == "torch":
        return
    if job.cluster.device != "cpu" or job.precision not in ("fp32", "auto"):
        raise SpecError(
            f"Job: products={job.products} is about products in float32 on a CPU, but device={job.cluster.device} "
            f"and precision={job.precision}; leave it out."
        )
    if job.protection is not None:
        raise SpecError(
            f"Job: products={job.products} computes a batch at a time, but privacy wants gradients sample by "
            "sample; leave it out."
        )


def _check_convolutions(job: Job) -> None:
    if job.convolutions == "torch":
        return
    if job.cluster.device != "cpu":
        raise SpecError(
            f"Job: convolutions={job.convolutions} is about a CPU, but device={job.cluster.device}; leave it out."
        )
    if job.memory_format != "channels_last":
        raise SpecError(
            f"Job: convolutions={job.convolutions} reads images pixel by pixel, but "
            f"memory_format={job.memory_format}; add memory_format=channels_last, or leave it out."
        )
    if job.protection is not None:
        raise SpecError(
            f"Job: convolutions={job.convolutions} makes the gradient of a whole batch, but privacy wants "
            "gradients sample by sample; leave it out."
        )


def _check_update(job: Job) -> None:
    """What changes the update of one worker's GPU."""
    asked = "flat_update" if job.flat_update else f"offload={job.offload}" if job.offload != "none" else ""
    if not asked:
        return
    if job.cluster.device != "cuda":
        raise SpecError(
            f"Job: {asked} is about the memory of a GPU, but device={job.cluster.device}; leave it out, or use "
            "device=cuda."
        )
    if job.conduct.servers or job.cluster.places > 1 or job.conduct.open_commits == 1:
        raise SpecError(
            f"Job: {asked} changes the update of one worker that has the whole model to itself, but "
            f"workers={job.cluster.written_workers}, slots={job.num_slots} and strategy={job.strategy} were asked "
            "for; use one worker and strategy=data, or leave it out."
        )
    if job.flat_update and job.precision not in ("bf16", "auto"):
        raise SpecError(
            f"Job: flat_update reads gradients in bf16 as they are, but precision={job.precision}; add "
            "precision=bf16, or leave it out."
        )
    if job.flat_update and job.offload != "none":
        raise SpecError(
            f"Job: flat_update wants what the optimizer keeps on the GPU, but offload={job.offload}; use one of "
            "both."
        )
    if job.offload != "none" and job.graph:
        raise SpecError(
            f"Job: offload={job.offload} copies from the host's memory in the middle of an update, but graph "
            "replays one without the host; use one of both."
        )
