"""`Chaos`: faults that a user asks for, to see what a run makes of them.

Written as `kill worker:1 at step 50; slow worker:0 x4 for 3s`, or as `random:mtbf=10s`. No torch at import.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.errors import SpecError, unknown
from shoal.spec.checks import require_choice, require_count
from shoal.spec.vocabulary import Role

KINDS = ("kill", "hang", "slow", "raise")
ROLES = (Role.WORKER, Role.SERVER, Role.COORDINATOR)
COOPERATIVE = ("slow", "raise")
"""Kinds that a process does to itself, between reading and computing a part of a batch: workers alone do that."""
RANDOM_FACTOR, RANDOM_SLOW_S = 4.0, 3.0
"""How much, and for how long, a random fault slows a worker down."""

_SHAPE = "KIND ROLE:RANK [xFACTOR] [at step N] [for 3s] [always]"
_RANDOM_KEYS = ("mtbf", "every", "kinds", "targets", "seed")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong in one process."""

    kind: str
    """`kill` (SIGKILL), `hang` (SIGSTOP), `slow`, or `raise` (an exception in the middle of a step)."""
    role: str = Role.WORKER
    rank: int = 0
    """A worker's rank or a server's number; there is one coordinator."""
    step: int = 1
    """It comes in this step of the worker, or of the run where it is about another role."""
    seconds: float | None = None
    """How long it hangs or is slow; None: for ever."""
    factor: float = 1.0
    """How many times as long a slow worker takes."""
    always: bool = False
    """`raise`: in every process that computes this part of this step, as a bad sample would."""

    def __post_init__(self) -> None:
        require_choice("chaos: the fault", "kind", self.kind, KINDS)
        require_choice("chaos: the fault", "role", self.role, ROLES)
        require_count(f"chaos: {self.kind} {self.role}", "rank", self.rank, least=0)
        require_count(f"chaos: {self.kind} {self.target}", "step", self.step)
        if self.kind in COOPERATIVE and self.role != Role.WORKER:
            raise SpecError(
                f"chaos: {self.kind} is for workers, found {self.target}; a {self.role} can be killed, or hang."
            )
        if self.seconds is not None and (self.kind not in ("hang", "slow") or not 0 < self.seconds < math.inf):
            raise SpecError(
                f"chaos: {self.kind} {self.target} for {self.seconds:g}s cannot be; hang and slow may last for "
                "some seconds, more than none."
            )
        if self.kind == "slow" and not 1 < self.factor < math.inf:
            raise SpecError(f"chaos: slow {self.target} needs a factor above 1, found {self.factor:g}; write x4.")
        if self.kind != "slow" and self.factor != 1:
            raise SpecError(
                f"chaos: {self.kind} {self.target} takes no factor, found x{self.factor:g}; leave it out."
            )
        if self.always and self.kind != "raise":
            raise SpecError(f"chaos: always is for raise, found {self.kind} {self.target} always; leave it out.")

    @property
    def target(self) -> str:
        """`worker:1`, as it is written."""
        return self.role if self.role == Role.COORDINATOR else f"{self.role}:{self.rank}"

    def __str__(self) -> str:
        words = [self.kind, self.target]
        words += [f"x{self.factor:g}"] if self.kind == "slow" else []
        words += [f"at step {self.step}"]
        words += [f"for {self.seconds:g}s"] if self.seconds is not None else []
        return " ".join(words + (["always"] if self.always else []))


@dataclass(frozen=True, kw_only=True)
class RandomFaults:
    """Faults that go on coming; the same seed gives the same ones in the same order."""

    mean_s: float
    """The mean time from one to the next."""
    fixed: bool = False
    """Whether it is always that time; else it is drawn anew for each."""
    kinds: tuple[str, ...] = ("kill",)
    targets: tuple[str, ...] = (Role.WORKER,)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.mean_s < math.inf:
            raise SpecError(
                f"chaos: random faults need a time between them, found {self.mean_s:g}s; write mtbf=10s."
            )
        for kind in self.kinds:
            require_choice("chaos: random", "kinds", kind, KINDS)
        for role in self.targets:
            require_choice("chaos: random", "targets", role, ROLES)
        if Role.WORKER not in self.targets and not set(self.kinds) - set(COOPERATIVE):
            raise SpecError(
                f"chaos: random faults of kinds={'+'.join(self.kinds)} are for workers, but targets="
                f"{'+'.join(self.targets)}; add kill or hang, or the target worker."
            )

    def __str__(self) -> str:
        every = f"{'every' if self.fixed else 'mtbf'}={self.mean_s:g}s"
        kinds, targets = "+".join(self.kinds), "+".join(self.targets)
        return f"random:{every},kinds={kinds},targets={targets},seed={self.seed}"


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """All faults of a run."""

    faults: tuple[Fault, ...] = ()
    random: RandomFaults | None = None

    def __bool__(self) -> bool:
        return bool(self.faults) or self.random is not None

    def __str__(self) -> str:
        return "; ".join(str(one) for one in (*self.faults, *([self.random] if self.random else [])))

    @property
    def steps(self) -> frozenset[int]:
        """The steps in which something is to happen."""
        return frozenset(fault.step for fault in self.faults)

    def check_against(self, *, workers: int, servers: int) -> None:
        """Every target must be a process of a job of this size; only with servers is there a coordinator."""
        sizes: dict[str, int] = {Role.WORKER: workers, Role.SERVER: servers, Role.COORDINATOR: min(servers, 1)}
        present = ", ".join(
            f"{role}:0" + (f" to {role}:{size - 1}" if size > 1 else "") if role != Role.COORDINATOR else role
            for role, size in sizes.items()
            if size
        )
        for fault in self.faults:
            if fault.rank >= sizes[fault.role]:
                raise SpecError(
                    f"chaos: {fault} names {fault.target}, but this job has {present}; name one of these."
                )
        for role in self.random.targets if self.random else ():
            if not sizes[role]:
                raise SpecError(f"chaos: {self.random} names a {role}, but this job has {present}; leave it out.")


def parse_chaos(text: str) -> Chaos:
    """Read the written form: faults with `;` between them, at most one of them `random:…`."""
    faults: list[Fault] = []
    random: RandomFaults | None = None
    for item in (part.strip() for part in text.split(";")):
        if item.startswith("random"):
            if random is not None:
                raise SpecError(f"chaos: {item!r} is the second random: of this run; join them into one.")
            random = _parse_random(item)
        elif item:
            faults.append(_parse_fault(item))
    return Chaos(faults=tuple(faults), random=random)


def _parse_fault(item: str) -> Fault:
    kind, _, rest = item.partition(" ")
    target, *options = rest.split() or [""]
    if kind not in KINDS:
        raise unknown("chaos: fault", kind, (*KINDS, "random"))
    role, colon, rank = target.partition(":")
    if role not in ROLES:
        raise unknown(f"chaos: in {item!r}, the role", role, ROLES)
    if role != Role.COORDINATOR and not colon:
        raise SpecError(f"chaos: {item!r} names no rank; write {role}:0 for the first {role}.")
    values = dict(_options(iter(options), item))
    if "step" not in values and kind != "slow":
        raise SpecError(f"chaos: {item!r} does not say when; add at step 50, for instance.")
    return Fault(kind=kind, role=role, rank=_whole(rank or "0", item), **values)


def _options(words: Iterator[str], item: str) -> Iterator[tuple[str, Any]]:
    """What follows kind and target, as fields of a fault."""
    for word in words:
        if word == "at" and next(words, "") == "step":
            yield "step", _whole(next(words, ""), item)
        elif word == "for":
            yield "seconds", _seconds(next(words, ""), item)
        elif word.startswith("x"):
            yield "factor", _real(word[1:], item)
        elif word == "always":
            yield "always", True
        else:
            raise SpecError(f"chaos: {word!r} in {item!r} is not understood; write {_SHAPE}.")


def _parse_random(item: str) -> RandomFaults:
    name, _, settings = item.partition(":")
    if name.strip() != "random":
        raise unknown("chaos: fault", name, (*KINDS, "random"))
    given: dict[str, str] = {}
    for setting in filter(None, (part.strip() for part in settings.split(","))):
        key, _, value = setting.partition("=")
        if key not in _RANDOM_KEYS:
            raise unknown("chaos: random", key, _RANDOM_KEYS)
        given[key] = value
    if ("mtbf" in given) == ("every" in given):
        raise SpecError(
            f"chaos: {item!r} needs either mtbf or every; write random:mtbf=10s for a mean time between faults, "
            "or random:every=10s for a fixed one."
        )
    return RandomFaults(
        mean_s=_seconds(given.get("mtbf") or given.get("every") or "", item),
        fixed="every" in given,
        kinds=tuple(given.get("kinds", "kill").split("+")),
        targets=tuple(given.get("targets", Role.WORKER).split("+")),
        seed=_whole(given.get("seed", "0"), item),
    )


def _whole(text: str, item: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise SpecError(f"chaos: {text!r} in {item!r} is no whole number; write {_SHAPE}.")
    return int(text)


def _seconds(text: str, item: str) -> float:
    return _real(text.removesuffix("s"), item)


def _real(text: str, item: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SpecError(
            f"chaos: {text!r} in {item!r} is no number; write x4 for a factor, 3s for a time."
        ) from None
