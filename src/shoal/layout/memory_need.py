"""How much memory a worker needs under each strategy, as far as that follows from the model alone.

Counted are parameters, gradients and what the optimizer keeps; activations, data and messages come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.layout.placement_table import binary_size
from shoal.spec import StrategySpec, parse_strategy
from shoal.spec.model_size import ModelSize

ADVISED = ("sharded", "pipeline")
"""What is named to those whose model does not fit: each cuts everything that a worker holds."""
ROOM = 0.75
"""How much of its memory a strategy that is advised may fill: the rest is for what is not counted."""
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


def fitting(size: ModelSize, limit: int, workers: int) -> list[Fit]:
    """Of the strategies that are advised, those that fit, each with the fewest workers, not below those given."""
    return [fit for name in ADVISED if (fit := _fewest(name, size, limit, max(2, workers))) is not None]


def _fewest(name: str, size: ModelSize, limit: int, workers: int) -> Fit | None:
    spec = parse_strategy(name)
    for count in range(workers, max(workers, _MOST_WORKERS) + 1):
        if (num_bytes := spec.memory_need(count, size)) <= ROOM * limit:
            return Fit(strategy=name, workers=count, num_bytes=num_bytes)
    return None


def advice(size: ModelSize, limit: int, workers: int) -> str:
    """What to do where the model does not fit, as the end of a sentence."""
    if fits := fitting(size, limit, workers):
        return "; ".join(str(fit) for fit in fits)
    return f"no strategy fits so little with up to {_MOST_WORKERS} workers, so allow more memory"


def refusal(spec: StrategySpec, workers: int, size: ModelSize, limit: int) -> str:
    """Why a model cannot be trained so, in a sentence; empty where it can."""
    if (num_bytes := spec.memory_need(workers, size)) <= limit:
        return ""
    return (
        f"Cluster: memory allows each worker {binary_size(limit)}, but with strategy={spec} and {workers} "
        f"worker{'s' * (workers > 1)} one needs {binary_size(num_bytes)} for parameters, gradients and optimizer "
        f"state ({binary_size(size.parameters)} of parameters in all); {advice(size, limit, workers)}."
    )
