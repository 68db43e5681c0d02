"""Whether a worker can have what a strategy's footprint says, and what to do where it cannot."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.layout.placement_table import binary_size
from shoal.spec import StrategySpec, parse_strategy
from shoal.spec.footprint import Footprint, told_of
from shoal.spec.model_size import ModelSize, RunSize

ADVISED = ("sharded", "pipeline")
"""What is named to those whose model does not fit: each cuts everything that a worker holds."""
ROOM = 0.75
"""How much of its memory a strategy that is advised may fill: how it cuts this model is not known from here."""
_MOST_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A strategy whose workers can hold the model."""

    strategy: str
    workers: int
    num_bytes: int
    """That each of them needs."""

    def __str__(self) -> str:
        return f"{self.strategy} with {self.workers} workers needs {binary_size(self.num_bytes)} each"


def fitting(model: ModelSize, run: RunSize, limit: int, workers: int) -> list[Fit]:
    """Of the strategies that are advised, those that fit, each with the fewest workers, not below those given."""
    return [fit for name in ADVISED if (fit := _fewest(name, model, run, limit, max(2, workers))) is not None]


def _fewest(name: str, model: ModelSize, run: RunSize, limit: int, workers: int) -> Fit | None:
    spec = parse_strategy(name)
    for count in range(workers, max(workers, _MOST_WORKERS) + 1):
        limited = replace(run, workers=count, slots=count, is_limited=True)
        num_bytes = spec.footprint(model, limited).worker_bytes
        if num_bytes <= ROOM * limit:
            return Fit(strategy=name, workers=count, num_bytes=num_bytes)
    return None


def advice(model: ModelSize, run: RunSize, limit: int, workers: int) -> str:
    """What to do where the model does not fit, as the end of a sentence."""
    if fits := fitting(model, run, limit, workers):
        return "; ".join(str(fit) for fit in fits)
    return f"no strategy fits so little with up to {_MOST_WORKERS} workers, so allow more memory"


def refusal(spec: StrategySpec, footprint: Footprint, model: ModelSize, run: RunSize, limit: int) -> str:
    """Why a model cannot be trained so, in a sentence; empty where it can."""
    if (num_bytes := footprint.worker_bytes) <= limit:
        return ""
    workers = run.workers
    return (
        f"Cluster: memory allows each worker {binary_size(limit)}, but with strategy={spec} and {workers} "
        f"worker{'s' * (workers > 1)} one needs {binary_size(num_bytes)}, {_largest(footprint)}; "
        f"{advice(model, run, limit, workers)}."
    )


def _largest(footprint: Footprint) -> str:
    """The three kinds of memory that take most, as part of a sentence."""
    told = sorted((*told_of(footprint.shared), *told_of(footprint.worker)), key=lambda one: -one.total)[:3]
    return "most of it for " + ", ".join(f"{one.what} ({binary_size(one.total)})" for one in told)
