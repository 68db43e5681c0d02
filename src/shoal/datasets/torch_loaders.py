"""What a torch `DataLoader` says, as fields of a task."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate
from torch.utils.data.distributed import DistributedSampler

from shoal.errors import SpecError, TaskError
from shoal.spec import Task
from shoal.spec.task import Unsaid, reads_forward


def from_loaders(task: Task) -> Task:
    """The task with the data set of a `DataLoader` in its place, and with what the loader says besides.

    What is about torch's own processes alone (`pin_memory`, `prefetch_factor`, `persistent_workers`, `timeout`)
    changes no batch and is left out; what would change some, and cannot be kept, is refused.
    """
    if isinstance(task.train, DataLoader):
        task = replace(task, **_of_train(task, task.train))
    if isinstance(task.test, DataLoader):
        task = replace(task, **_of_test(task, task.test))
    return task


def check_no_loader(part: str, made: Any) -> None:
    """Refuse a `DataLoader` that a function has made: what it says must be known before."""
    if isinstance(made, DataLoader):
        raise TaskError(
            f"Task: {part}= is a function that makes a DataLoader, whose batch size and sampler must be known "
            "before; give the DataLoader itself, or let the function make its data set."
        )


def _of_train(task: Task, loader: DataLoader[Any]) -> dict[str, Any]:
    batches = _check_kept("train", loader)
    if type(task.batch_size) is not Unsaid and task.batch_size != batches.batch_size:
        raise _said_twice("batch_size", task.batch_size, "batch_size", batches.batch_size)
    if task.loaders and loader.num_workers not in (0, task.loaders):
        raise _said_twice("loaders", task.loaders, "num_workers", loader.num_workers)
    collate = _collate_of(loader) or task.collate
    if task.collate not in (None, collate):
        raise _said_twice("collate", task.collate, "collate_fn", collate)
    return {
        "train": loader.dataset,
        "batch_size": batches.batch_size,
        "drop_last": task.drop_last or batches.drop_last,
        "collate": collate,
        "loaders": task.loaders or loader.num_workers,
        **_order(task, loader.dataset, batches.sampler),
    }


def _of_test(task: Task, loader: DataLoader[Any]) -> dict[str, Any]:
    batches = _check_kept("test", loader)
    if batches.drop_last or not (reads_forward(loader.dataset) or _takes_each_once(batches.sampler)):
        raise TaskError(
            "Task: test= is evaluated whole, but its DataLoader leaves samples out or draws some twice (sampler, "
            "drop_last); give it a data set of the samples that are meant."
        )
    if _collate_of(loader) != task.collate:
        raise TaskError(
            "Task: the DataLoader of test= makes batches in another way (collate_fn) than those of train= are "
            "made, and a task has one collate; use one for both."
        )
    return {"test": loader.dataset}


def _check_kept(part: str, loader: DataLoader[Any]) -> BatchSampler:
    """How a loader cuts batches; refuses what nobody else could do for it."""
    batches = loader.batch_sampler
    if batches is None:
        raise TaskError(
            f"Task: the DataLoader of {part}= has batch_size=None, so its data set makes the batches, which could "
            "not be cut for several workers; let the data set give samples, and set batch_size."
        )
    if type(batches) is not BatchSampler:
        raise TaskError(
            f"Task: the DataLoader of {part}= has a batch_sampler of its own ({type(batches).__name__}), but "
            "batches are cut by position, the same for any number of workers; use a sampler, or "
            "Task(sampler=shoal.Stratified(labels))."
        )
    if loader.worker_init_fn is not None:
        raise TaskError(
            f"Task: the DataLoader of {part}= has a worker_init_fn, which would run in some of the processes that "
            "read; let the data set open what it needs when it is first read. Random numbers are seeded anyway."
        )
    if (loader.generator or getattr(batches.sampler, "generator", None)) is not None:
        raise TaskError(
            f"Task: the DataLoader of {part}= has a generator, but the order follows from Task(seed=...), the "
            "same in every process; leave generator out."
        )
    return batches


def _collate_of(loader: DataLoader[Any]) -> Callable[[list[Any]], Any] | None:
    return None if loader.collate_fn is default_collate else loader.collate_fn


def _takes_each_once(sampler: Any) -> bool:
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) in (SequentialSampler, DistributedSampler)


def _order(task: Task, dataset: Any, sampler: Any) -> dict[str, Any]:
    """In which order an epoch comes, as a task says it."""
    if reads_forward(dataset):
        return {}  # in its own
    if type(sampler) is SequentialSampler:  # also where nothing was said
        return {} if task.sampler is not None else {"shuffle": False}
    if task.sampler is not None or not task.shuffle:
        raise SpecError(
            f"Task: {'shuffle=False' if task.sampler is None else 'sampler='} and the DataLoader's "
            f"{type(sampler).__name__} both say which samples come when; set one of them."
        )
    if type(sampler) is DistributedSampler:  # shares are cut here; each epoch takes all
        return {"shuffle": sampler.shuffle}
    return {} if _takes_each_once(sampler) else {"sampler": _by_epoch_and_seed(sampler)}


def _by_epoch_and_seed(sampler: Any) -> Callable[[int, int], list[int]]:
    """A torch sampler as a function of epoch and seed, which those of torch are once their generator is."""

    def order(epoch: int, seed: int) -> list[int]:
        seeded = copy(sampler)
        if hasattr(seeded, "set_epoch"):
            seeded.set_epoch(epoch)
        if hasattr(seeded, "generator"):
            seeded.generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 63))
        return [int(number) for number in seeded]

    order.__name__ = type(sampler).__name__  # for sentences about it
    return order


def _said_twice(name: str, ours: Any, their_name: str, theirs: Any) -> SpecError:
    return SpecError(f"Task: {name}={ours}, but the DataLoader has {their_name}={theirs}; say it in one place.")
