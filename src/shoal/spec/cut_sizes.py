"""How much memory workers need that hold parts of a model: parameters, gradients and what the optimizer keeps.

Activations, data and messages come on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shoal.spec.model_size import ModelSize

if TYPE_CHECKING:
    from shoal.spec.model_parallel import Mesh


def cut_need(mesh: Mesh, size: ModelSize) -> int:
    """The bytes that the worker needs which needs most."""
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
