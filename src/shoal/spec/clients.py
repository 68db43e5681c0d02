"""Clients: parts of the data that are never mixed, each trained on by itself, some of them in every round."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.errors import SpecError

SPREAD = "spread"


@dataclass(frozen=True, kw_only=True)
class ClientRounds:
    """Which clients there are, and how many of them train in a round."""

    count: int
    per_round: int
    """Clients that train in a round."""
    every: int
    """Steps that each of them takes."""
    workers: int
    """Processes that simulate them, each one client at a time."""
    skew: float | None
    """How unlike the labels of clients are: the Dirichlet distribution's alpha; None: all have a part of the same
    kind."""
    held: float = 0.0
    """The share of a client's samples that it keeps to be evaluated on."""
    at_a_time: int = 0
    """Where nobody waits for clients, so many train at a time, and a round is what is merged at a time; 0: a round
    is over when all who train are back."""
    oldest: int = 0
    """Who is not back after so many merges is given up."""

    @property
    def per_worker(self) -> int:
        """Clients that a worker simulates in a round, one after the other."""
        return self.per_round // self.workers

    @property
    def steps(self) -> int:
        """Of a round."""
        return self.per_worker * self.every

    @classmethod
    def of(
        cls,
        *,
        count: int,
        share: float,
        partition: str,
        every: int,
        workers: int,
        held: float = 0.0,
        buffer: int = 0,
        oldest: int = 0,
    ) -> ClientRounds:
        """As they are written; refused where a round cannot be dealt to workers."""
        training = max(1, round(share * count))
        per_round = buffer or training
        if per_round > training:
            raise SpecError(
                f"average: clients={count},share={share:g} are {training} clients that train at a time, of which "
                f"buffer={buffer} cannot be back; use a larger share or a smaller buffer."
            )
        if per_round % workers:
            written = f"buffer={buffer}" if buffer else f"clients={count},share={share:g}"
            raise SpecError(
                f"average: {written} are {per_round} clients in a round, which {workers} workers cannot simulate "
                f"in turns of equal length; let it be a multiple of {workers}."
            )
        return cls(
            count=count,
            per_round=per_round,
            every=every,
            workers=workers,
            skew=parse_partition(partition),
            held=held,
            at_a_time=training if buffer else 0,
            oldest=oldest,
        )


def parse_partition(text: str) -> float | None:
    """The alpha of `dirichlet:0.5`; None for `own` and `spread`."""
    name, _, number = text.partition(":")
    if text in (SPREAD, "own"):
        return None
    try:
        alpha = float(number)
    except ValueError:
        alpha = math.nan
    if name != "dirichlet" or not 0 < alpha < math.inf:
        raise SpecError(
            f"average: partition must be spread, own or dirichlet:NUMBER, with a number above 0, found {text!r}; "
            "write for instance partition=dirichlet:0.5."
        )
    return alpha
