"""Data as people have it, made into sets that every process reads by number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shoal.datasets.arrays import Arrays, is_arrays
from shoal.datasets.in_parts import InParts
from shoal.datasets.iterated import ByPosition, Iterated
from shoal.datasets.parted import Parted
from shoal.datasets.shipped import Shipped
from shoal.datasets.torch_loaders import check_no_loader, from_loaders
from shoal.errors import TaskError
from shoal.spec import Task
from shoal.spec.task import check_dataset, is_maker, reads_forward


def numbered(task: Task, overrides: Mapping[str, Any] | None = None) -> Task:
    """The task with these fields changed, and with data sets that are read by number, whatever was given.

    A `DataLoader` says more than its data: that holds as if the task had said it.
    """
    task = replace(from_loaders(task), **(overrides or {}))
    given = {part: getattr(task, part) for part in ("train", "test")}
    return replace(task, **{part: _numbered(task, part, one) for part, one in given.items() if one is not None})


def _numbered(task: Task, part: str, given: Any) -> Any:
    """A set now, or later where a function makes it."""
    if isinstance(given, Shipped):
        return Shipped(lambda: _by_number(task, part, _made_by(given)))
    if is_maker(given):
        return lambda: _by_number(task, part, _made_by(given))
    return _by_number(task, part, given)


def _made_by(make: Callable[[], Any]) -> Any:
    made = make()
    return Regenerated(make) if hasattr(made, "__next__") else made


class Regenerated:
    """What a generator function yields, from the beginning each time."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def _by_number(task: Task, part: str, given: Any) -> Any:
    check_no_loader(part, given)
    check_dataset(part, given)
    if is_arrays(given):
        return Arrays(given, part)
    if isinstance(given, dict) and all(isinstance(name, str) for name in given):
        raise TaskError(
            f"Task: the {part} set is a {type(given).__name__} of {', '.join(map(repr, given))}; give one of its "
            "values, or arrays with a row for every sample."
        )
    given = given if task.collate else _of_tensors(given)
    return _by_position(task, part, given) if reads_forward(given) else given


def _by_position(task: Task, part: str, source: Any) -> ByPosition:
    keep = 2 * task.batch_size  # who takes over a part of a step finds it at hand
    found: ByPosition
    if isinstance(source, InParts):
        found = Parted(source, seed=task.seed, keep=keep)
    else:
        found = Iterated(source, seed=task.seed, keep=keep)
    if not len(found) or (found.length is None and part == "test"):
        raise TaskError(
            f"Task: the {part} set ({type(source).__name__}) has "
            f"{'no length, so nobody could say when it is over' if len(found) else 'a length of 0'}; give it a "
            "__len__ that says how many samples a pass yields, as shoal.datasets.Counted(...) does."
        )
    return found


def _of_tensors(given: Any) -> Any:
    """The same; a Hugging Face data set whose rows would be lists gives tensors, which can be stacked."""
    if isinstance(given, InParts):
        return InParts(_of_tensors(given.source), given.count)
    if hasattr(given, "with_format") and hasattr(given, "column_names"):
        chosen = given.format["type"] if hasattr(given, "format") else getattr(given, "_formatting", None)
        return given.with_format("torch") if chosen is None else given
    return given
