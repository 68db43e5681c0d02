"""Read batches of samples by index."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset, TensorDataset, default_collate

from shoal.datasets.arrays import Arrays
from shoal.datasets.iterated import ByPosition
from shoal.feed.columns import inputs_and_target
from shoal.feed.loaders import Loaders, Prepared
from shoal.feed.parts import LoadedBatch, Part
from shoal.feed.prefetch import Ahead, Loaded, RandomWatch, WantedPart
from shoal.ledger import Cut
from shoal.ledger.order import mix
from shoal.spec import Task

SMALLEST_BESIDE = 1 << 20
"""Batches of so many bytes are copied to a GPU beside what it computes; smaller ones are there before a stream of
their own is set up."""


class Feed:
    """Turns sample numbers into batches of a task; loads ahead what it is told will be needed, in a thread or in
    so many `processes`.

    Feeds whose data is read in turns, as train and test sets are, load `beside` each other: one at a time, as
    they share Python's and numpy's random generators.

    `leaves_small`: small batches stay in the host's memory, for whoever sends them to a GPU together with other
    things.
    """

    def __init__(
        self,
        task: Task,
        dataset: Any,
        *,
        numerics: str = "task",
        device: str = "cpu",
        beside: Feed | None = None,
        processes: int = 0,
        leaves_small: bool = False,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._dataset = dataset
        self._collate = task.collate or default_collate
        self._weight = task.weight
        self._total_is_known = task.weight is None and task.skip_loss_below is None
        self._accumulate = task.accumulate
        self._double = numerics == "float64"
        self._device = device
        self._leaves_small = leaves_small
        self._has_target = task.loss is not None
        self._rows = None if task.collate else _rows_of(dataset)
        self._is_at_hand = self._rows is not None and not _is_mapped(dataset)
        if self._is_at_hand:
            processes = 0  # cutting rows costs less than handing them over
        # No thread beside the model may change torch's generator, as iterables do for what they draw themselves.
        stays_here = self._is_at_hand or isinstance(dataset, ByPosition)
        self._most_ahead = 0 if stays_here or processes else task.prefetch
        self._watch: RandomWatch | None = RandomWatch() if self._most_ahead else None
        self._ahead: Ahead | None = None
        self._one_at_a_time: threading.Lock = beside._one_at_a_time if beside else threading.Lock()
        self._loaders = Loaders(self._prepare, processes, self._one_at_a_time, warn) if processes else None
        self._copying: torch.cuda.Stream | None = None
        """Where batches are copied to a GPU, beside what it computes."""
        self.in_use: Cut | None = None
        """The part whose batches are read and computed now."""

    @property
    def waits(self) -> int:
        """How often a step had to wait for data that was to be loaded ahead."""
        return self._ahead.waits if self._ahead else 0

    @property
    def is_ahead(self) -> bool:
        """Whether parts are loaded before they are asked for."""
        return self._ahead is not None

    def batch(self, samples: np.ndarray) -> Any:
        """The batch of these samples."""
        return self._moved(self._made(samples))

    def keyed_batch(self, samples: np.ndarray, key: int) -> Any:
        """The batch of these samples, with what is drawn meanwhile keyed."""
        with self._one_at_a_time:
            self._seed(key)
            return self.batch(samples)

    def weigh_by(self, weight: Callable[[Any], float]) -> None:
        """From now on a batch counts this; before any was read."""
        self._weight, self._total_is_known = weight, False

    def weight(self, batch: Any, samples: np.ndarray) -> float:
        """What a batch counts in every mean."""
        return float(len(samples)) if self._weight is None else float(self._weight(batch))

    def part(self, cut: Cut, seed: int, step: int) -> Part:
        """One slot's part of a step, read only when it is needed, or before where it was foreseen."""
        total = float(cut.batch_samples) if self._total_is_known else None
        wanted = _wanted(cut, seed, step)

        def load() -> Iterator[LoadedBatch]:
            self.in_use = cut
            # Whoever takes the batches computes on each before it asks for the next, and for the end.
            if self._loaders is not None:
                yield from self._prepared(wanted, self._loaders)
            else:
                yield from self._batches(wanted) if self._ahead is None else self._ahead.take(wanted)
            self.in_use = None

        return Part(cut.slot, load, total)

    def foresee(self, coming: Iterable[tuple[int, Cut]], seed: int, since: int) -> None:
        """Load ahead the parts of these steps, where that gives the same bits and is worth it.

        Whether it is can be seen from the first loads; until then each is done when its step asks for it.
        """
        if self._loaders is not None:
            self._loaders.foresee((_wanted(cut, seed, step) for step, cut in coming), since)
            return
        if self._watch is not None and self._watch.is_done:
            if self._watch.allows_thread:
                self._ahead = Ahead(self._load_whole, self._most_ahead)
            self._watch = None
        if self._ahead is not None:
            self._ahead.foresee((_wanted(cut, seed, step) for step, cut in coming), since)

    def close(self) -> None:
        """Load nothing ahead any more."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._loaders is not None:
            self._loaders.close()
            self._loaders = None

    def _made(self, samples: np.ndarray) -> Any:
        if self._rows is not None:
            batch = self._rows(samples)
        else:
            batch = self._collate(_read(self._dataset, samples.tolist()))
        if self._has_target and isinstance(batch, Mapping):
            batch = inputs_and_target(batch)
        if self._double:
            batch = map_tensors(batch, lambda t: t.double() if t.is_floating_point() else t)
        return batch

    def _moved(self, batch: Any) -> Any:
        if self._device == "cpu":
            return batch
        if _num_bytes(batch) < SMALLEST_BESIDE:
            if self._leaves_small:
                return batch
            return map_tensors(batch, lambda t: t.pin_memory().to(self._device, non_blocking=True))
        if self._copying is None:
            self._copying = torch.cuda.Stream(self._device)
        # A GPU fetches what lies in pinned memory while it computes; what computes next waits for it.
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copying):
            moved = map_tensors(batch, lambda t: _sent_to(t, self._device, computing))
        computing.wait_stream(self._copying)
        return moved

    def _load_whole(self, wanted: WantedPart) -> Loaded:
        with self._one_at_a_time:
            return list(self._batches(wanted))

    def _batches(self, wanted: WantedPart) -> Iterator[LoadedBatch]:
        """The part's batches, one after the other."""
        watch = self._watch
        if watch is not None:
            watch.before_seeding()
        self._seed(wanted.key)
        for samples in self._cut(wanted.samples):
            if watch is None:
                batch = self.batch(samples)
            else:
                with watch.load():
                    batch = self.batch(samples)
            yield batch, self.weight(batch, samples), len(samples)

    def _cut(self, samples: np.ndarray) -> list[np.ndarray]:
        """The samples of each of a part's batches."""
        several = np.array_split(samples, self._accumulate) if self._accumulate > 1 else [samples]
        return [each for each in several if len(each)]

    def _prepare(self, wanted: WantedPart) -> Prepared:
        """In a process beside this one: the part's batches, drawn as they would be here."""
        generator = torch.default_generator
        generator.manual_seed(wanted.key >> 1)  # as strategies do before they load a part
        self._seed(wanted.key)
        prepared: Prepared = []
        for samples in self._cut(wanted.samples):
            before = generator.get_state()
            batch, after = self._made(samples), generator.get_state()
            prepared.append((batch, None if torch.equal(before, after) else after))
        return prepared

    def _prepared(self, wanted: WantedPart, loaders: Loaders) -> Iterator[LoadedBatch]:
        """The part's batches from a process beside this one; torch's generator is left as their loads leave it."""
        prepared = loaders.take(wanted)
        if prepared is None:  # where it failed there, the user's own error is raised here
            yield from self._batches(wanted)
            return
        self._seed(wanted.key)
        for samples, (made, state) in zip(self._cut(wanted.samples), prepared, strict=True):
            if state is not None:
                torch.default_generator.set_state(state)
            batch = self._moved(made)
            yield batch, self.weight(batch, samples), len(samples)

    def _seed(self, key: int) -> None:
        if not self._is_at_hand:  # augmentation may draw from these; torch's is keyed by the strategy
            random.seed(key)
            np.random.seed(key & 0xFFFFFFFF)


def _num_bytes(batch: Any) -> int:
    if type(batch) is tuple and all(type(part) is torch.Tensor for part in batch):  # as most are
        return sum([part.nbytes for part in batch])
    return sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, torch.Tensor))


def _sent_to(tensor: torch.Tensor, device: str, computing: torch.cuda.Stream) -> torch.Tensor:
    """A copy on a GPU, whose memory is given to nobody else before the stream that computes is done with it."""
    sent = tensor.pin_memory().to(device, non_blocking=True)
    sent.record_stream(computing)
    return sent


def _read(dataset: Any, numbers: list[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(numbers)
    return [dataset[number] for number in numbers]


def _wanted(cut: Cut, seed: int, step: int) -> WantedPart:
    return WantedPart(step, cut.slot, cut.samples, mix(seed, step, cut.slot))


def _rows_of(dataset: Any) -> Callable[[np.ndarray], Any] | None:
    """How rows of tensors and arrays are cut in one go, not sample by sample; also through a view of some rows."""
    if isinstance(dataset, Arrays):
        return dataset.rows
    if type(dataset) is TensorDataset:
        return partial(_rows_at, dataset.tensors)
    if type(dataset) is Subset and (rows := _rows_of(dataset.dataset)) is not None:
        return _through(np.asarray(dataset.indices, dtype=np.int64), rows)
    return None


def _rows_at(tensors: tuple[torch.Tensor, ...], samples: np.ndarray) -> tuple[torch.Tensor, ...]:
    numbers = torch.from_numpy(samples)
    # Whole rows are copied; indexing by a tensor goes element by element, four times slower.
    return tuple([tensor.index_select(0, numbers) for tensor in tensors])


def _through(view: np.ndarray, rows: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], Any]:
    return lambda samples: rows(view[samples])


def _is_mapped(dataset: Any) -> bool:
    """Whether rows come from a file."""
    if type(dataset) is Subset:
        return _is_mapped(dataset.dataset)
    return isinstance(dataset, Arrays) and dataset.is_mapped


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same batch with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, change) for item in value)
    return value
