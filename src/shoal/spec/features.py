"""What a job or a task may ask for besides, and the facts that each takes: refusals follow from this table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from shoal.errors import SpecError
from shoal.spec.conduct import Conduct
from shoal.spec.step_form import StepForm
from shoal.spec.task import Task
from shoal.spec.vocabulary import Purpose

if TYPE_CHECKING:
    from shoal.spec.job import Job

Asker = TypeVar("Asker")


@dataclass(frozen=True, kw_only=True)
class Feature(Generic[Asker]):
    """One thing to ask for. Its refusal reads: `asked does, but (why the first fact is missing); remedy`."""

    name: str
    asked: Callable[[Asker], str]
    """As it was written; empty where it was not."""
    does: str = ""
    needs: tuple[str, ...]
    """Facts of the job's `Conduct`."""
    suffices: str = ""
    """A fact that is enough, whatever else is missing."""
    remedy: str = "leave it out"

    def is_possible(self, conduct: Conduct) -> bool:
        """Whether a job that behaves so can have it."""
        return self.lacking(conduct) is None

    def lacking(self, conduct: Conduct) -> str | None:
        """The first fact that is missing."""
        if self.suffices and getattr(conduct, self.suffices):
            return None
        return next((fact for fact in self.needs if not getattr(conduct, fact)), None)

    def refusal(self, asker: Asker, conduct: Conduct, strategy: str) -> str:
        """Why it cannot be, from "asked" on; empty where it can, or was not asked for."""
        asked, fact = self.asked(asker), self.lacking(conduct)
        if not asked or fact is None:
            return ""
        why = conduct.why.get(self.name) or conduct.why.get(fact) or _LACKS[fact].format(strategy=strategy)
        remedy = "" if ";" in why else f"; {self.remedy}"
        return f"{asked}{self.does and ' '}{self.does}, but {why}{remedy}."


_LACKS = {
    "spans_hosts": "strategy={strategy} works in memory or with GPUs of one host",
    "takes_hosts": "strategy={strategy} has the same workers from the first step to the last",
    "has_places": "strategy={strategy} does not use that",
    "has_journal": "strategy={strategy} keeps none",
    "hosts_several": "with strategy={strategy} each worker does its own work alone",
    "meets": "these are not computed at the same time",
    "repeats_passes": "strategy={strategy} cannot run a part of it twice",
    "has_whole_passes": "with strategy={strategy} no worker has a whole pass to itself",
    "slots_are_free": "strategy={strategy} cuts batches in its own way",
    "has_one_loss": "with strategy={strategy} each group of layers has a loss of its own",
    "can_skip": "strategy={strategy} cannot do without them",
    "protects": "with strategy={strategy} there is no one sum over samples or clients to add noise to",
    "has_one_state": "with strategy={strategy} each worker has an optimizer of its own",
}
"""By fact: why a job cannot have what needs it, where its strategy gives no words of its own."""

_ANOTHERS_WORK = "lets a worker do the work of another, in the host's shared memory and with its journal"

JOB_FEATURES: tuple[Feature[Job], ...] = (
    Feature(
        name="several hosts",
        asked=lambda job: f"on={job.cluster.on}" if job.cluster.is_spread else "",
        does="spreads processes over hosts",
        needs=("spans_hosts",),
        remedy="leave via out, use device=cpu, or one host",
    ),
    Feature(
        name="limits of hosts",
        asked=lambda job: f"hosts={job.cluster.hosts}" if job.cluster.hosts else "",
        does="lets hosts come and go",
        needs=("takes_hosts",),
        remedy="use data or ps:sync=asp, or leave hosts out",
    ),
    Feature(
        name="spares",
        asked=lambda job: f"spares={job.cluster.spares}" if job.cluster.spares else "",
        does="take a dead worker's place in the host's shared memory, with its journal",
        needs=("has_places", "has_journal"),
        remedy="use data:via=arena or average, or no spares",
    ),
    Feature(
        name="limits of workers",
        asked=lambda job: "" if job.cluster.max_workers is None else f"workers={job.cluster.written_workers}",
        does=_ANOTHERS_WORK,
        needs=("has_places", "has_journal", "hosts_several"),
        suffices="workers_vary",
        remedy="use data:via=arena or average, or a number",
    ),
    Feature(
        name="on_failure=shrink",
        asked=lambda job: "on_failure=shrink" if job.on_failure == "shrink" else "",
        does=_ANOTHERS_WORK,
        needs=("has_places", "has_journal", "hosts_several"),
        remedy="use data:via=arena or average, or another on_failure",
    ),
    Feature(
        name="slots",
        asked=lambda job: f"slots={job.slots}" if job.slots not in (None, job.own_slots) else "",
        needs=("slots_are_free",),
        remedy="leave slots out",
    ),
    Feature(
        name="privacy",
        asked=lambda job: "privacy" if job.protection is not None else "",
        does="adds noise once to a sum of clipped parts",
        needs=("protects",),
        remedy="use data, or average with clients",
    ),
    Feature(
        name="recompute",
        asked=lambda job: "recompute" if job.recompute else "",
        does="computes parts of the model again in the backward pass",
        needs=("repeats_passes",),
        remedy="leave recompute out",
    ),
    Feature(
        name="fast steps",
        asked=lambda job: _asked_form(job),
        does="changes how a pass is computed",
        needs=("has_whole_passes",),
        remedy="leave it out, or use data or ps",
    ),
)


def _asked_form(job: Job) -> str:
    """As it was written; for training alone."""
    if job.purpose != Purpose.TRAIN:
        return ""
    return "fast" if job.fast else "" if job.form == StepForm() else str(job.form)


TASK_FEATURES: tuple[Feature[Task], ...] = (
    Feature(
        name="objective",
        asked=lambda task: "objective=" if task.objective is not None else "",
        does="computes the loss from model and batch in one go",
        needs=("has_one_loss",),
        remedy="use loss=, or data, sharded or ps",
    ),
    Feature(
        name="skip_loss_below",
        asked=lambda task: "skip_loss_below" if task.skip_loss_below is not None else "",
        does="leaves parts of a batch out of its mean",
        needs=("can_skip",),
        remedy="use data",
    ),
    Feature(
        name="averages",
        asked=lambda task: f"ema={task.ema:g}" if task.ema else f"swa={task.swa}" if task.swa else "",
        does="keeps an average of the parameters with the optimizer's state",
        needs=("has_one_state",),
        remedy="use push=gradients",
    ),
)

GATHER = Feature[Task](
    name="shoal.gather",
    asked=lambda task: "shoal.gather",
    does="brings the rows of all parts of a batch together in the middle of a pass",
    needs=("meets",),
    remedy="use data, sharded or ps:sync=bsp",
)
"""Asked for by a call of the task's code, and so refused when it is called."""


def check_job(job: Job) -> None:
    """Refuse the first thing that a job asks for and its strategy cannot do."""
    for feature in JOB_FEATURES:
        if text := feature.refusal(job, job.conduct, job.strategy):
            raise SpecError(f"Job: {text}")


def check_task(task: Task, conduct: Conduct, strategy: str) -> None:
    """The same of a task."""
    for feature in TASK_FEATURES:
        if text := feature.refusal(task, conduct, strategy):
            raise SpecError(f"Task: {text}")
