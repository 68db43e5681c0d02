"""`Privacy`: what a model may tell of the data that it was trained on, as the user writes it."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from shoal.errors import SpecError, unknown
from shoal.spec.checks import knows_its_names
from shoal.spec.step_form import StepForm

if TYPE_CHECKING:
    from shoal.spec.job import Job

OFF = "none"
_FORMS = "write for instance epsilon=8,delta=1e-5 or noise=1.1,clip=1"
_KEY_BITS = 63


@knows_its_names
@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Differential privacy: what each has to say is clipped, and Gaussian noise is added to the sum."""

    epsilon: float | None = None
    """What may be spent at most. Without `noise`, that is found by it for the run's length."""
    delta: float = 1e-5
    """With which chance more than epsilon may be told; let it be far below 1 ÷ the samples or clients."""
    clip: float = 1.0
    """The longest that a sample's gradient, or a client's difference, may be: what is longer is made shorter."""
    noise: float | None = None
    """The noise's standard deviation, in multiples of `clip`. With `epsilon` as well, a run ends when that is
    spent."""
    key: int | None = None
    """Decides the noise, and which samples a step takes. Whoever knows it can take the noise off. Left out: drawn
    by chance when the job is made."""

    def __post_init__(self) -> None:
        for name in ("epsilon", "clip", "noise"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SpecError(f"Privacy: {name} must be a number above 0, found {value!r}; {_FORMS}.")
        if not 0 < self.delta < 1:
            raise SpecError(f"Privacy: delta must be between 0 and 1, as 1e-5, found {self.delta!r}.")
        if self.epsilon is None and self.noise is None:
            raise SpecError(f"Privacy: neither epsilon nor noise says how much noise there is to be; {_FORMS}.")
        if self.key is not None and not 0 <= self.key < 1 << _KEY_BITS:
            raise SpecError(f"Privacy: key must be a whole number below 2^{_KEY_BITS}, found {self.key!r}.")

    @classmethod
    def parse(cls, text: str) -> Privacy | None:
        """What the written form says; None for `none`."""
        if text == OFF:
            return None
        names, found = [each.name for each in fields(cls)], dict[str, Any]()
        for item in text.split(","):
            name, _, value = (part.strip() for part in item.partition("="))
            if name not in names:
                raise unknown("Privacy: key", name, names)
            if name in found:
                raise SpecError(f"Privacy: {name} is written twice in {text!r}; {_FORMS}.")
            try:
                found[name] = int(value) if name == "key" else float(value)
            except ValueError:
                raise SpecError(f"Privacy: {name} must be a number, found {value!r}; {_FORMS}.") from None
        return cls(**found)

    def __str__(self) -> str:
        """The written form; `parse` reads it."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        words = [f"{name}={_written(value)}" for name, value in given.items() if value is not None]
        return ",".join(words)

    @property
    def told(self) -> str:
        """The same without what nobody else is to know."""
        return str(replace(self, key=None))

    def with_key(self) -> Privacy:
        """The same, with a key of its own where it has none."""
        return self if self.key is not None else replace(self, key=secrets.randbits(_KEY_BITS))


def _written(value: float) -> str:
    return (
        str(value) if isinstance(value, int) else f"{value:.17g}" if float(f"{value:g}") != value else f"{value:g}"
    )


def check_privacy(job: Job) -> None:
    """Whether what the job asks for besides goes together with it."""
    if job.protection is None:
        return
    others = {
        "precision": job.precision if job.precision != "fp32" else "",
        "recompute": "on" if job.recompute else "",
        "fast": "on" if job.fast else "",
        "form": str(job.form) if job.form != StepForm() else "",
        "skip_loss_below": str(job.overrides.get("skip_loss_below") or ""),
        "skip_seen": "on" if job.options.get("skip_seen") else "",
    }
    for name, value in others.items():
        if value:
            raise SpecError(
                f"Job: privacy takes gradients sample by sample in full precision and draws the samples of each "
                f"step itself, which does not go together with {name}={value}; leave that out."
            )
