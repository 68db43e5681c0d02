"""What a strategy claims to compute, and so how it is judged.

| strategy                                             | claim  |
|------------------------------------------------------|--------|
| `data`, sums in shared memory                        | bits   |
| `data`, sums over sockets or by torch                | sums   |
| `sharded`, `tensor`, `pipeline`, `mesh`              | sums   |
| `layer`                                              | sums   |
| … `decoupled=on`                                     | result |
| `ps` in lockstep, direct pushes of gradients         | bits   |
| … `via=ring`, `via=router:N`, `servers=host`         | sums   |
| … `push=parameters`, plain SGD, `every=1`            | sums   |
| … `push=parameters` otherwise                        | result |
| … `compress` with loss, `shares=speed`, `pool`       | result |
| `ps` where timing decides, with several workers      | result |

Lockstep is `bsp`, `ssp:0`, a quorum of all, or a single worker, who has nobody to be ahead of.
"""

from __future__ import annotations

from enum import Enum

from shoal.ps.consistency import Mode, parse_sync
from shoal.spec import Data, Layer, LayerForm, ModelParallel, ParameterServer, StrategySpec

LOSSLESS = ("none", "zstd")


class Claim(Enum):
    """How close to one process a strategy says it is."""

    BITS = "bits"
    """Every bit is that of one process that runs the same slots."""
    SUMS = "sums"
    """The same sums in another order: close in the first step, and in all steps in double precision."""
    RESULT = "result"
    """Another way to train, which should end as well: judged over several seeds."""


def claim_of(spec: StrategySpec, workers: int, optimizer: str = "SGD") -> Claim:
    """What this strategy claims with so many workers and an optimizer of this class."""
    if isinstance(spec, ParameterServer):
        return _claim_of_served(spec, workers, optimizer)
    if isinstance(spec, ModelParallel):
        return Claim.SUMS
    if isinstance(spec, Layer):
        return Claim.RESULT if spec.form is LayerForm.DECOUPLED else Claim.SUMS
    assert isinstance(spec, Data)
    return Claim.BITS if spec.via in ("auto", "arena") else Claim.SUMS


def _claim_of_served(spec: ParameterServer, workers: int, optimizer: str) -> Claim:
    averages_otherwise = spec.push == "parameters" and (spec.every > 1 or optimizer != "SGD")
    copies_drift = spec.servers == "host" and spec.agree == "scatter-sum"
    by_timing = not _is_lockstep(spec, workers) or spec.shares == "speed" or spec.pool != "none"
    if by_timing or averages_otherwise or copies_drift or spec.compress not in LOSSLESS:
        return Claim.RESULT
    plain = (spec.push, spec.via) == ("gradients", "direct") and spec.servers != "host"
    return Claim.BITS if plain else Claim.SUMS


def _is_lockstep(spec: ParameterServer, workers: int) -> bool:
    rule = parse_sync(spec.sync)
    waits_for_all = rule.mode is Mode.QUORUM and rule.quorum[0] == rule.quorum[1]
    return spec.is_lockstep or waits_for_all or (workers == 1 and spec.ahead == 0)
