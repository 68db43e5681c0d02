"""How much memory a worker needs under each strategy, as far as that follows from the model alone.

Counted are parameters, gradients and what the optimizer keeps; activations, data and messages come on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.layout.placement_table import binary_size
from shoal.spec import Data, Mesh, ModelParallel, ParameterServer, StrategySpec, as_mesh, parse_strategy

ADVISED = ("sharded", "pipeline")
"""What is named to those whose model does not fit: each cuts everything that a worker holds."""
ROOM = 0.75
"""How much of its memory a strategy that is advised may fill: the rest is for what is not counted."""
_MOST_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model and its optimizer, in bytes."""

    trained: tuple[int, ...]
    """Of each trained parameter, in the model's order."""
    fixed: int = 0
    """Of frozen parameters and buffers together."""
    kept: int = 0
    """How many values the optimizer keeps for each element of a trained parameter."""

    @property
    def parameters(self) -> int:
        """Of all trained parameters; gradients are as large again."""
        return sum(self.trained)

    @property
    def state(self) -> int:
        """Of what the optimizer keeps."""
        return self.kept * self.parameters


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A strategy whose workers can hold the model."""

    strategy: str
    workers: int
    num_bytes: int
    """That each of them needs."""

    def __str__(self) -> str:
        return f"{self.strategy} with {self.workers} workers needs {binary_size(self.num_bytes)} each"


def need(spec: StrategySpec, workers: int, size: ModelSize) -> int:
    """The bytes that the worker needs which needs most; 0 where the model's sizes do not say."""
    if isinstance(spec, ModelParallel):
        return _cut_need(as_mesh(spec, workers), size)
    if isinstance(spec, ParameterServer):
        return 2 * size.parameters + size.fixed  # servers keep the optimizer's state
    return 2 * size.parameters + size.state + size.fixed if isinstance(spec, Data) else 0


def _cut_need(mesh: Mesh, size: ModelSize) -> int:
    stages = cut_evenly(size.trained, mesh.pipeline)
    return size.fixed + max(stage_need(mesh, sum(stage), max(stage, default=0), size.kept) for stage in stages)


def stage_need(mesh: Mesh, trained: int, largest: int, kept: int) -> int:
    """Of one stage's parameters, as wide as the tensor axis leaves them at best; `largest`: of one of them."""
    whole = -(-trained // mesh.tensor)
    part = -(-whole // mesh.shard)
    if mesh.shard == 1:
        return (2 + kept) * whole
    largest = -(-largest // mesh.tensor)
    parameters = whole if mesh.stage < 3 else part + largest
    gradients = whole if mesh.stage < 2 else part + largest
    return parameters + gradients + kept * part


def cut_evenly(sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """A row of sizes in so many runs, the largest of which is as small as it can be; the last may be empty."""
    least, most = max(sizes, default=0), sum(sizes)
    while least < most:
        limit = (least + most) // 2
        least, most = (least, limit) if len(list(_runs(sizes, limit))) <= count else (limit + 1, most)
    runs = list(_runs(sizes, most))
    return runs + [()] * (count - len(runs))


def _runs(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, ...]]:
    """Runs of at most `limit` each, which no single size exceeds."""
    run: list[int] = []
    for size in sizes:
        if run and sum(run) + size > limit:
            yield tuple(run)
            run = []
        run.append(size)
    if run:
        yield tuple(run)


def fitting(size: ModelSize, limit: int, workers: int) -> list[Fit]:
    """Of the strategies that are advised, those that fit, each with the fewest workers, not below those given."""
    return [fit for name in ADVISED if (fit := _fewest(name, size, limit, max(2, workers))) is not None]


def _fewest(name: str, size: ModelSize, limit: int, workers: int) -> Fit | None:
    spec = parse_strategy(name)
    for count in range(workers, max(workers, _MOST_WORKERS) + 1):
        if (num_bytes := need(spec, count, size)) <= ROOM * limit:
            return Fit(strategy=name, workers=count, num_bytes=num_bytes)
    return None


def advice(size: ModelSize, limit: int, workers: int) -> str:
    """What to do where the model does not fit, as the end of a sentence."""
    if fits := fitting(size, limit, workers):
        return "; ".join(str(fit) for fit in fits)
    return f"no strategy fits so little with up to {_MOST_WORKERS} workers, so allow more memory"


def refusal(spec: StrategySpec, workers: int, size: ModelSize, limit: int) -> str:
    """Why a model cannot be trained so, in a sentence; empty where it can."""
    if (num_bytes := need(spec, workers, size)) <= limit:
        return ""
    return (
        f"Cluster: memory allows each worker {binary_size(limit)}, but with strategy={spec} and {workers} "
        f"worker{'s' * (workers > 1)} one needs {binary_size(num_bytes)} for parameters, gradients and optimizer "
        f"state ({binary_size(size.parameters)} of parameters in all); {advice(size, limit, workers)}."
    )
