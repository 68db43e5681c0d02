"""Which layers of a model are gathered and let go together, decided from its module tree alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

LEAST_NUMEL = 1024
LEAST_SHARE = 1 / 32
"""Smaller neighbours than both are gathered together: each gathering costs a round of messages."""
MOST_SHARE = 1 / 2
"""A larger block than this is looked into, where it has blocks of its own."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

_Count = Callable[[nn.Module], int]


@dataclass(frozen=True, kw_only=True)
class ShardedBlock:
    """Layers that follow each other, and the parameters that nobody else uses."""

    modules: tuple[nn.Module, ...]
    """In the order in which they run; none: the root, whose layers run all over the model."""
    names: tuple[str, ...]


def find_blocks(module: nn.Module, trained: Mapping[str, nn.Parameter]) -> list[ShardedBlock]:
    """The items of containers (`Sequential`, `ModuleList`, `ModuleDict`) are blocks; small neighbours are one. The
    root block, which comes last, has all other parameters: also those that several blocks share.
    """
    total = sum(p.numel() for p in trained.values())
    least = max(LEAST_NUMEL, LEAST_SHARE * total)
    num_owners = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
    counted = {id(p) for p in trained.values() if num_owners[id(p)] == 1}

    def count(part: nn.Module) -> int:
        return sum(p.numel() for p in part.parameters() if id(p) in counted)

    groups = [group for run in _runs(module, count, MOST_SHARE * total) for group in _merged(run, count, least)]
    users = _users(module, groups)
    names: dict[int, list[str]] = defaultdict(list)
    root = len(groups)
    for name, param in trained.items():
        used_by = users[id(param)]
        names[next(iter(used_by)) if len(used_by) == 1 else root].append(name)
    blocks = [
        ShardedBlock(modules=tuple(group), names=tuple(names[n])) for n, group in enumerate(groups) if names[n]
    ]
    return [*blocks, ShardedBlock(modules=(), names=tuple(names[root]))]


def _runs(module: nn.Module, count: _Count, most: float) -> Iterator[list[nn.Module]]:
    """Neighbours in a container that can be blocks."""
    if not isinstance(module, _CONTAINERS):
        for child in module.children():
            yield from _runs(child, count, most)
        return
    run: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, _CONTAINERS) or (count(child) > most and any(_runs(child, count, most))):
            yield run
            yield from _runs(child, count, most)
            run = []
        elif count(child):
            run.append(child)
    yield run


def _merged(run: Sequence[nn.Module], count: _Count, least: float) -> Iterator[list[nn.Module]]:
    """Neighbours together that are large enough; what is left over at the end is not."""
    group: list[nn.Module] = []
    for module in run:
        group.append(module)
        if sum(map(count, group)) >= least:
            yield group
            group = []


def _users(module: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> Mapping[int, set[int]]:
    """By parameter: the groups that use it, and `len(groups)` where the rest of the model does."""
    users: dict[int, set[int]] = defaultdict(set)
    inside: set[int] = set()
    for number, group in enumerate(groups):
        for part in (part for one in group for part in one.modules()):
            inside.add(id(part))
            for param in part.parameters(recurse=False):
                users[id(param)].add(number)
    for part in module.modules():
        if id(part) not in inside:
            for param in part.parameters(recurse=False):
                users[id(param)].add(len(groups))
    return users
