"""What workers that average clip, and which of their forms go together: parts, groups, own beginnings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.errors import SpecError
from shoal.spec.cluster import Cluster

if TYPE_CHECKING:
    from shoal.spec.averaging import Average


@dataclass(frozen=True, kw_only=True)
class Clip:
    """What is cut off a worker's difference before it is sent, or off its parameters before that is computed."""

    kind: str
    """`norm`: all of it is made shorter; `value`: each element."""
    most: float
    is_of_difference: bool = True

    @classmethod
    def parse(cls, text: str, of: str = "differences") -> Clip | None:
        """`norm:1`, `value:0.1`, or `none`; `of`: what is clipped."""
        kind, _, number = text.partition(":")
        if text == "none":
            return None
        try:
            most = float(number)
        except ValueError:
            most = math.nan
        if kind not in ("norm", "value") or not 0 < most < math.inf:
            raise SpecError(
                f"average: clip must be none, norm:NUMBER or value:NUMBER, with a number above 0, found {text!r}; "
                "write for instance clip=norm:1."
            )
        return cls(kind=kind, most=most, is_of_difference=of == "differences")


def check_forms(average: Average) -> None:
    """Refuse keys that contradict each other."""
    if average.parts > average.every or average.delay >= average.every:
        raise SpecError(
            f"average: within every={average.every} steps each part is sent and taken in once, so there are at "
            f"most so many parts, and delay is less; found parts={average.parts} and delay={average.delay}."
        )
    if average.is_streamed and average.via == "backend":
        raise SpecError("average: parts and delay are for what we send ourselves; leave via=backend out.")
    if average.inside != "none" and average.with_ != "all":
        raise SpecError(
            f"average: with={average.with_} is between single workers, but inside={average.inside} makes groups; "
            "leave one of the two out."
        )
    if average.begins_apart and average.after:
        raise SpecError(
            f"average: init=own has replicas begin apart, but after={average.after} has the first steps be taken "
            "together; leave one of them out."
        )


def check_groups(average: Average, cluster: Cluster) -> None:
    """Refuse groups of workers that there cannot be."""
    if average.inside == "none":
        return
    if not average.groups and not cluster.is_spread:
        raise SpecError(
            f"Job: inside={average.inside} is for workers of each host, but on={cluster.on} is one host, "
            "which would have nobody to agree with; write groups=2, or use data."
        )
    if average.groups > cluster.places:
        raise SpecError(
            f"Job: groups={average.groups} of workers need at least one each, but there are {cluster.places}."
        )
