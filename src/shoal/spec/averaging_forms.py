"""What workers that average clip, and which of their forms go together: parts, groups, clients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.errors import SpecError
from shoal.spec.checks import require_count
from shoal.spec.clients import SPREAD, parse_partition
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


def check_clients(average: Average) -> None:
    """Refuse clients that there cannot be, and what does not go with them."""
    parse_partition(average.partition)
    require_count("average", "clients", average.clients, least=0)
    if not 0 < average.share <= 1:
        raise SpecError(f"average: share must be above 0 and at most 1, found {average.share!r}.")
    require_count("average", "buffer", average.buffer, least=0)
    require_count("average", "oldest", average.oldest)
    if not 0 <= average.held < 1:
        raise SpecError(f"average: held must be from 0 to below 1, found {average.held!r}.")
    if not average.clients:
        return
    if average.partition == SPREAD:
        raise SpecError(
            f"average: clients={average.clients} have samples of their own, but partition=spread mixes them; "
            "write partition=own or partition=dirichlet:0.5."
        )
    if average.begins_apart or average.is_ensemble:
        raise SpecError(
            f"average: clients={average.clients} begin every round from what was agreed on; leave init and "
            "combine out."
        )
    if average.inside != "none":
        raise SpecError(f"average: clients={average.clients} train by themselves; leave inside out.")
    if average.is_streamed:
        raise SpecError(f"average: clients={average.clients} agree on all at once; leave parts and delay out.")
    if not average.agrees_with_all or average.via not in ("auto", "memory") or average.after:
        raise SpecError(
            f"average: clients={average.clients} are simulated in the memory of one host, and all agree; leave "
            "with, after and via out."
        )
    if average.held and average.secure:
        raise SpecError(
            f"average: secure=on tells nobody more than the sum over all clients, but held={average.held:g} how "
            "each one fares; leave one of the two out."
        )
    if average.scaffold and (average.prox or average.secure):
        other = (
            f"prox={average.prox:g} draws steps back in another way"
            if average.prox
            else ("secure=on hides what a client has come to from the others")
        )
        raise SpecError(
            f"average: scaffold=on has all clients' mean gradients in the memory of the host, but {other}; "
            "leave one of the two out."
        )
    if average.buffer and (average.scaffold or average.secure):
        raise SpecError(
            f"average: buffer={average.buffer} takes clients as they come, but scaffold and secure are about all "
            "of a round; leave one of them out."
        )


def check_groups(average: Average, cluster: Cluster) -> None:
    """Refuse groups of workers that there cannot be."""
    if average.inside == "none":
        return
    if not average.groups and not cluster.is_spread and average.inside == "data":
        raise SpecError(
            f"Job: inside={average.inside} is for workers of each host, but on={cluster.on} is one host, "
            "which would have nobody to agree with; write groups=2, or use data."
        )
    if average.groups > cluster.places:
        raise SpecError(
            f"Job: groups={average.groups} of workers need at least one each, but there are {cluster.places}."
        )
