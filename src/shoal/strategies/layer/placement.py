"""Who runs what: every step of a computation gets a worker, from the few that the user names, or from none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from shoal.errors import SpecError
from shoal.strategies.layer.graph import GraphNode, chains, sources_of


def home_of(module: str, homes: Mapping[str, int]) -> int | None:
    """Where a submodule is placed: by its own name, or by that of a module which it is part of."""
    parts = module.split(".") if module else []
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in homes:
            return homes[name]
    return None


def assign(nodes: Sequence[GraphNode], homes: Mapping[str, int]) -> dict[str, int]:
    """By step: its worker. Placed submodules are where they were placed, and the others follow.

    What reads results of one worker runs there. What joins those of several, or reads none, runs where the next
    placed submodule that depends on it does. A submodule that is called again is where it was.
    """
    homes = dict(homes)
    found: dict[str, int] = {}
    for index, node in enumerate(nodes):
        worker = home_of(node.module, homes)
        if worker is None:
            near = [found[source] for source in node.inputs]
            follows = near[0] if len(set(near)) == 1 else _next_placed(nodes[index:], homes)
            worker = follows if follows is not None else near[0] if near else 0
        found[node.name] = worker
        if node.module:
            homes.setdefault(node.module, worker)
    return found


def _next_placed(nodes: Sequence[GraphNode], homes: Mapping[str, int]) -> int | None:
    """The worker of the first placed submodule that depends on the first of these steps."""
    reached = {nodes[0].name}
    for node in nodes[1:]:
        if reached.intersection(node.inputs):
            if (worker := home_of(node.module, homes)) is not None:
                return worker
            reached.add(node.name)
    return None


def spread(nodes: Sequence[GraphNode], workers: int) -> dict[str, int]:
    """By submodule: a worker, so that lines of submodules that could run at the same time do."""
    before = sources_of(nodes)
    lines = [line for line in chains(nodes) if any(node.module for node in line)]
    if len(lines) < workers:
        raise SpecError(
            f"layer: {workers} workers, but the model's layers form {len(lines)} lines that could run on workers "
            "of their own; use as many workers, say where each layer runs with place=, or use pipeline."
        )

    def size(line: Sequence[GraphNode]) -> int:
        return 1 + sum(node.size for node in line)

    def together(line: Sequence[GraphNode], other: Sequence[GraphNode]) -> bool:
        return line[0].name not in before[other[0].name] and other[0].name not in before[line[0].name]

    taken: list[list[Sequence[GraphNode]]] = [[] for _ in range(workers)]

    def burden(line: Sequence[GraphNode], worker: int) -> tuple[int, int]:
        own = taken[worker]
        return sum(size(other) for other in own if together(line, other)), sum(map(size, own))

    for line in sorted(lines, key=size, reverse=True):
        taken[min(range(workers), key=partial(burden, line))].append(line)
    return {
        node.module: worker for worker, own in enumerate(taken) for line in own for node in line if node.module
    }


def check_homes(nodes: Sequence[GraphNode], homes: Mapping[str, int], workers: int) -> None:
    """Every name must be that of a submodule that the model calls, and every worker must have work."""
    called = list(dict.fromkeys(node.module for node in nodes if node.module))
    for name in homes:
        if all(home_of(module, {name: 0}) is None for module in called):
            raise SpecError(
                f"layer: place names {name!r}, which the model does not call; it calls {', '.join(called)}."
            )
    busy = set(assign(nodes, homes).values())
    if idle := [str(worker) for worker in range(workers) if worker not in busy]:
        raise SpecError(
            f"layer: with this placement nothing runs on worker {', '.join(idle)}; place a submodule there, or "
            "use fewer workers."
        )
