"""What happens to a run: drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum


class Kind(Enum):
    """Faults, and wishes of the user."""

    KILL = "kill"
    STILLBORN = "stillborn"
    """A process dies while it loads, before anybody but the supervisor has heard of it."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after a while, unless it has been taken for hung by then."""
    LOSE_HOST = "lose host"
    """A host is gone for good, with all of its processes. Not where one machine's memory is what they share."""
    PAUSE_HOST = "pause host"
    """All processes of one host stand still for a moment."""
    BAD_DISK = "bad disk"
    """For a while writes report failure, whether or not they happened."""
    SCALE = "scale"
    INTERRUPT = "interrupt"
    RIVAL = "rival"
    """Another supervisor comes for the same run folder."""
    ORPHAN = "orphan"
    """The supervisor itself is killed, and all processes with it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One of them: it strikes some time after the cue was given for the so-manieth time."""

    kind: Kind
    role: str = ""
    rank: int = 0
    cue: str = "begin"
    """`begin`; what a process says (`done`, `order` …) or its state; `start` and the role of one that starts."""
    skip: int = 0
    delay_s: float = 0.0
    seconds: float = 0.0
    number: int = 0


SERVED_CUES = ("begin", "ready", "training", "order", "done", "done", "start coordinator", "start worker")
PLACED_CUES = ("begin", "training", "steps", "saved", "adopted", "released", "done", "start spare")


def draw_faults(dice: random.Random, *, served: bool, ranks: int, most: int) -> list[Fault]:
    """Some of them. Servers are struck once at most: nothing guards against the loss of both copies."""
    roles = ["worker", "worker", "coordinator", "server"] if served else ["worker", "worker", "spare"]
    kinds = [
        *(kind for kind in Kind if kind is not Kind.LOSE_HOST),
        *[Kind.KILL] * 6,
        *[Kind.STOP] * 2,
        *[Kind.SCALE] * 3,
        Kind.STILLBORN,
    ]
    faults: list[Fault] = []
    for _ in range(dice.randint(0, most)):
        kind, role = dice.choice(kinds), dice.choice(roles)
        soon, late = dice.uniform(0.0, 0.05), dice.uniform(0.0, 2.0)
        fault = Fault(
            kind=kind,
            role=role,
            rank=0 if role == "coordinator" else dice.randrange(2 if role == "server" else ranks),
            cue=dice.choice(SERVED_CUES if served else PLACED_CUES),
            skip=dice.choice((0, 0, 0, 1, 2, 5)),
            delay_s=dice.choice((0.0, soon, late / 4, late)),
            seconds=dice.choice((0.3, 0.9)) if kind is Kind.PAUSE_HOST else dice.choice((0.2, 0.8, 3.0, 8.0)),
            number=dice.randint(1, 3 if served else ranks),
        )
        if kind is Kind.STILLBORN:
            fault = replace(fault, cue="begin", skip=0, delay_s=dice.choice((0.0, late)))
        if not (_strikes_server(fault) and any(_strikes_server(one) for one in faults)):
            faults.append(fault)
    return faults


def draw_storm(dice: random.Random, *, ranks: int, rounds: int) -> list[Fault]:
    """Other numbers of workers are asked for again and again, and workers killed while they come and go."""
    faults: list[Fault] = []
    at = 0.0
    for _ in range(rounds):
        for kind in (Kind.SCALE, Kind.KILL):
            at += dice.uniform(0.0, 1.0)
            fault = Fault(
                kind=kind, role="worker", rank=dice.randrange(ranks), delay_s=at, number=dice.randint(1, ranks)
            )
            faults.append(fault)
    return faults


def draw_host_losses(dice: random.Random, *, hosts: int) -> list[Fault]:
    """All hosts but one may go, one after another, also the coordinator's."""
    gone = dice.sample(range(hosts), dice.randint(1, hosts - 1))
    return [
        Fault(
            kind=Kind.LOSE_HOST,
            cue=dice.choice(SERVED_CUES),
            skip=dice.choice((0, 0, 1, 2)),
            delay_s=dice.choice((0.0, dice.uniform(0.0, 0.5), dice.uniform(0.0, 2.0))),
            number=number,
        )
        for number in gone
    ]


def _strikes_server(fault: Fault) -> bool:
    return fault.role == "server" and fault.kind in (Kind.KILL, Kind.STOP, Kind.STILLBORN)
