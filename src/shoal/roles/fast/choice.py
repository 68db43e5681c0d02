"""What to try, and what to take of it: pure decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from shoal.spec.step_form import StepForm

LEAST_GAIN = 1.03
"""What is not faster by so much may not be faster at all."""
TYPICAL_COMPILATION_S = 30.0
MOST_SAVED = 0.4
"""Of the time that a run takes, compiling is expected to save at most this much."""
LOADING = 0.3
"""Of the time that compiling took, workers need so much to find in the cache what was compiled."""
HOPELESS = 3.0
"""What takes so many times as long as plain steps is not measured any further."""


@dataclass(frozen=True, kw_only=True)
class StepWay:
    """One way to compute a step."""

    form: StepForm = field(default_factory=StepForm)
    precision: str = "fp32"

    def __str__(self) -> str:
        return str(self.form) if self.precision == "fp32" else f"{self.form}, {self.precision}"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What became of a way."""

    way: StepWay
    step_s: float = 0.0
    first_s: float = 0.0
    """The first step's time, in which it was compiled or captured."""
    why_not: str = ""
    """Why it cannot be taken; empty where it can."""

    def total_s(self, steps: int) -> float:
        """What so many steps take in all workers, when it has been compiled here."""
        return steps * self.step_s + (LOADING * self.first_s if self.way.form.compile else 0.0)


@dataclass(frozen=True, kw_only=True)
class Openings:
    """What there is to try for a task."""

    precisions: tuple[str, ...] = ("fp32",)
    """The first is what plain steps compute in."""
    has_images: bool = False
    can_multiply: bool = False
    """Whether oneDNN can multiply for its linear layers, in float32."""
    can_use_patches: bool = False
    """Whether gradients of its convolutions' weights can be made from patches."""
    has_vocabulary: bool = False
    """Whether a loss can be taken in pieces."""
    can_capture: bool = False
    can_update_flat: bool = False
    """Whether linear layers can be updated in one kernel, in bf16."""


def plain_way(openings: Openings) -> StepWay:
    """What everything is compared with."""
    return StepWay(precision=openings.precisions[0])


def quick_ways(openings: Openings) -> list[StepWay]:
    """Ways that take a few steps to try."""
    forms = [StepForm()]
    if openings.has_images:
        forms.append(StepForm(memory_format="channels_last"))
    if openings.can_use_patches:
        forms.append(StepForm(memory_format="channels_last", convolutions="patches"))
    ways = [
        StepWay(form=replace(form, products=products), precision=precision)
        for precision in openings.precisions
        for form in forms
        for products in (("torch", "onednn") if openings.can_multiply and precision == "fp32" else ("torch",))
    ]
    if openings.has_vocabulary:
        ways.append(StepWay(form=StepForm(loss_in_pieces=True), precision=openings.precisions[0]))
    if openings.can_update_flat and "bf16" in openings.precisions:
        ways.append(StepWay(form=StepForm(flat_update=True), precision="bf16"))
    return [way for way in ways if way != plain_way(openings)]


def compiled_ways(openings: Openings, tried: Sequence[Tried]) -> list[StepWay]:
    """Ways that take a compilation each: every precision, in the memory format that was faster, with what has
    made plain steps faster."""
    good = [one for one in tried if not one.why_not]
    best = min(good, key=lambda one: one.step_s).way.form
    pieces = best.loss_in_pieces or any(
        one.way.form.loss_in_pieces and one.step_s < LEAST_GAIN * plain_step(openings, good) for one in good
    )
    form = replace(best, compile=True, loss_in_pieces=pieces)
    ways = [
        StepWay(
            form=replace(
                form,
                flat_update=form.flat_update and precision == "bf16",
                products=form.products if precision == "fp32" else "torch",
            ),
            precision=precision,
        )
        for precision in openings.precisions
    ]
    if pieces and not best.loss_in_pieces:
        ways.append(StepWay(form=replace(form, loss_in_pieces=False), precision=openings.precisions[0]))
    return ways


def plain_step(openings: Openings, tried: Iterable[Tried]) -> float:
    """Seconds of a plain step."""
    return next(one.step_s for one in tried if one.way == plain_way(openings))


def captured_ways(openings: Openings, tried: Sequence[Tried]) -> list[StepWay]:
    """The fastest ways so far, captured: the best of those that are compiled, and of those that are not. In bf16
    each also with the update in one kernel, which may save what plain steps do not show: launches."""
    ways = []
    for is_compiled in (False, True):
        good = [one for one in tried if not one.why_not and one.way.form.compile == is_compiled]
        if good:
            best = min(good, key=lambda one: one.step_s).way
            ways.append(replace(best, form=replace(best.form, graph=True)))
            if openings.can_update_flat and best.precision == "bf16" and not best.form.flat_update:
                ways.append(replace(best, form=replace(best.form, graph=True, flat_update=True)))
    return ways


def pays_to_compile(steps: int, step_s: float, number: int) -> bool:
    """Whether a job is so long that trying so many compilations may pay."""
    return MOST_SAVED * steps * step_s > TYPICAL_COMPILATION_S * number


def best_of(plain: Tried, tried: Iterable[Tried], steps: int) -> Tried:
    """What a job of so many steps should take."""
    good = [one for one in tried if not one.why_not and plain.step_s >= LEAST_GAIN * one.step_s]
    return min([plain, *good], key=lambda one: one.total_s(steps))


def agree(found: Sequence[float], expected: Sequence[float], bound: float) -> bool:
    """Whether losses are the same, up to what rounding does to them."""
    return all(
        abs(one - other) <= bound * max(abs(other), 0.1) for one, other in zip(found, expected, strict=False)
    )


def bound_for(way: StepWay, device: str) -> float:
    """How far losses of the first steps may be from those of plain steps. What is compiled for a GPU draws other
    random numbers (dropout)."""
    if device != "cpu" and way.form.compile:
        return 0.1
    return 1e-3 if way.precision == "fp32" else 5e-2
