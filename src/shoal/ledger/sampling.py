"""From what a task says about sampling to the order of its epochs."""

from __future__ import annotations

from typing import Any

from shoal.datasets import Stream
from shoal.errors import TaskError
from shoal.ledger.order import EpochOrder, Order
from shoal.ledger.samplers import DrawnOrder, drawn_once, stratified, users_own
from shoal.ledger.streaming import StreamOrder
from shoal.spec import Stratified, Task, Weighted


def make_order(task: Task, train: Any, batch_size: int) -> EpochOrder:
    """In which order the epochs of a task take the samples of its train set."""
    sampler, seed, count = task.sampler, task.seed, len(train)
    if isinstance(sampler, (Weighted, Stratified)):
        _check_fit(sampler, train)
    if isinstance(sampler, Weighted):
        if sampler.replacement:
            return DrawnOrder(sampler.weights, sampler.num_samples or count, seed)
        return drawn_once(sampler.weights, sampler.num_samples or int((sampler.weights > 0).sum()), seed)
    if isinstance(sampler, Stratified):
        return stratified(sampler.labels, batch_size, seed)
    if sampler is not None:
        name = getattr(sampler, "__name__", type(sampler).__name__)
        ask = sampler.order if hasattr(sampler, "order") else lambda epoch: sampler(epoch, seed)
        return users_own(ask, count, name)
    if isinstance(train, Stream):
        return StreamOrder(train.lengths, train.buffer, seed, shuffle=task.shuffle)
    return Order(count, seed, shuffle=task.shuffle)


def _check_fit(sampler: Weighted | Stratified, train: Any) -> None:
    name = type(sampler).__name__
    if isinstance(train, Stream):
        raise TaskError(
            f"Task: sampler {name} takes samples from anywhere, but a Stream is read forward only; leave sampler "
            "out, or use a data set that is read by index."
        )
    if len(sampler) != len(train):
        what = "weights" if isinstance(sampler, Weighted) else "labels"
        raise TaskError(
            f"Task: sampler {name} has {len(sampler)} {what}, but the train set has {len(train)} samples; give "
            "one for each."
        )
