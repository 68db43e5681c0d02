"""A model's computation as plain data: which step reads which, what hangs together, and where it can be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    """One step of a computation: a submodule that is called, or a function between them."""

    name: str
    inputs: tuple[str, ...] = ()
    """Steps whose results it reads, in order; the model's own inputs, which everybody has, are left out."""
    module: str = ""
    """The submodule that is called; empty for a function."""
    size: int = 0
    """Elements of the parameters that it uses."""
    has_weights: bool = False
    """Whether one of them is a matrix, or has more dimensions; activations and norms have none."""


def chains(nodes: Sequence[GraphNode]) -> list[list[GraphNode]]:
    """Lines of steps in which each reads the one before it and nothing else, and nobody else reads that.

    Joins begin one, and what several read ends one. In the order of their first steps.
    """
    readers = _readers(nodes)
    found: list[list[GraphNode]] = []
    by_last: dict[str, list[GraphNode]] = {}
    for node in nodes:
        sources = set(node.inputs)
        only = next(iter(sources)) if len(sources) == 1 else ""
        if only in by_last and readers[only] == {node.name}:
            line = by_last.pop(only)
        else:
            line = []
            found.append(line)
        line.append(node)
        by_last[node.name] = line
    return found


def _readers(nodes: Sequence[GraphNode]) -> dict[str, set[str]]:
    readers: dict[str, set[str]] = {node.name: set() for node in nodes}
    for node in nodes:
        for source in node.inputs:
            readers[source].add(node.name)
    return readers


def sources_of(nodes: Sequence[GraphNode]) -> dict[str, frozenset[str]]:
    """By step: all steps that it depends on."""
    found: dict[str, frozenset[str]] = {}
    for node in nodes:
        found[node.name] = frozenset(node.inputs).union(*(found[source] for source in node.inputs))
    return found


def groups_by_depth(nodes: Sequence[GraphNode], count: int) -> list[Sequence[GraphNode]]:
    """The whole computation in so many groups, one after the other, each of which reads only the last result of
    the one before; balanced by parameters. Fewer where the model has too few places to cut it."""
    cuts = [0, *_narrow_cuts(nodes), len(nodes)]
    pieces = [nodes[start:stop] for start, stop in pairwise(cuts)]
    blocks: list[list[GraphNode]] = []
    for piece in pieces:
        # Norms and activations stay with the layer before them: a head wants to see what the next layer will.
        if blocks and not (_has_weights(piece) and _has_weights(blocks[-1])):
            blocks[-1].extend(piece)
        else:
            blocks.append(list(piece))
    parts = divide([_size(block) for block in blocks], min(count, len(blocks)))
    return [[node for index in part for node in blocks[index]] for part in parts]


def _size(nodes: Sequence[GraphNode]) -> int:
    return sum(node.size for node in nodes)


def _has_weights(nodes: Sequence[GraphNode]) -> bool:
    return any(node.has_weights for node in nodes)


def _narrow_cuts(nodes: Sequence[GraphNode]) -> list[int]:
    """Where nothing but the result of the step before crosses."""
    last_use = {source: index for index, node in enumerate(nodes) for source in node.inputs}
    furthest = [0, *accumulate((last_use.get(node.name, 0) for node in nodes), max)]
    return [
        index
        for index in range(1, len(nodes))
        # `furthest[index - 1]`: the last reader of anything before the step that ends here.
        if furthest[index - 1] < index and last_use.get(nodes[index - 1].name, 0) >= index
    ]


def divide(sizes: Sequence[int], count: int) -> list[range]:
    """Cut a line into so many parts, none of them empty, so that the largest is as small as can be."""
    sums = [0, *accumulate(sizes)]
    best: Mapping[int, tuple[int, tuple[int, ...]]] = {stop: (sums[stop], (0,)) for stop in range(1, len(sums))}
    for _ in range(1, count):
        best = {
            stop: min(
                (max(best[start][0], sums[stop] - sums[start]), (*best[start][1], start))
                for start in best
                if start < stop
            )
            for stop in range(min(best) + 1, len(sums))
        }
    _, starts = best[len(sizes)]
    return [range(start, stop) for start, stop in pairwise((*starts, len(sizes)))]
