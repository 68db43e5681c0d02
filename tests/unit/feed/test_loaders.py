"""Processes that prepare parts of batches, and the memory in which they hand them over."""

from __future__ import annotations

import os
import signal
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shoal.errors import LaunchError, TaskError
from shoal.feed.batch_memory import lay_down, pick_up
from shoal.feed.feed import Feed
from shoal.ledger import Cut
from shoal.ledger.order import mix
from shoal.spec import Task


class Noisy:
    """Samples that torch and numpy draw, by the process that reads them; some cannot be read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> tuple[torch.Tensor, float, int]:
        if number == 13:
            raise ValueError("broken")
        return torch.rand(3) + number, float(np.random.rand()), os.getpid()


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@contextmanager
def feed_of(
    dataset: Any, processes: int, warn: Callable[[str], None] = lambda text: None, **fields: Any
) -> Iterator[Feed]:
    task = Task(model=lambda: None, optimizer=lambda params: None, loss=lambda a, b: a, train=dataset, **fields)
    feed = Feed(task, dataset, processes=processes, warn=warn)
    try:
        yield feed
    finally:
        feed.close()


def cut(step: int) -> Cut:
    return Cut(0, np.arange(6 * (step % 2), 6 * (step % 2) + 6), 6)


def load(feed: Feed, step: int) -> list[Any]:
    """A part as a strategy loads it, and what torch draws next."""
    torch.default_generator.manual_seed(mix(5, step, 0) >> 1)
    batches = [batch for batch, _, _ in feed.part(cut(step), 5, step).load()]
    return [*batches, torch.rand(2)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_parts_are_as_if_read_here_and_so_are_later_draws(accumulate: int) -> None:
    with feed_of(Noisy(), 2, accumulate=accumulate) as beside, feed_of(Noisy(), 0, accumulate=accumulate) as here:
        readers: set[int] = set()
        for step in range(1, 7):
            beside.foresee(((at, cut(at)) for at in range(step, 7)), 5, step)
            *ours, ours_next = load(here, step)
            *theirs, theirs_next = load(beside, step)
            assert torch.equal(ours_next, theirs_next) and len(ours) == len(theirs) == accumulate
            for (x, y, _), (other_x, other_y, pids) in zip(ours, theirs, strict=True):
                assert torch.equal(x, other_x) and torch.equal(y, other_y)
                readers |= set(pids.tolist())
        assert len(readers) == 2 and os.getpid() not in readers


def test_what_was_not_foreseen_is_read_here_and_what_is_not_asked_for_is_dropped() -> None:
    with feed_of(Noisy(), 1) as feed:
        (_, _, pids), _ = load(feed, 1)
        assert set(pids.tolist()) == {os.getpid()}
        feed.foresee(((at, cut(at)) for at in range(1, 9)), 5, 1)
        for since in range(4, 8):
            feed.foresee(((at, cut(at)) for at in range(since, 9)), 5, since)
        deadline, step, readers = time.monotonic() + 30.0, 8, {os.getpid()}
        while readers == {os.getpid()}:  # until it is through with what nobody takes
            assert time.monotonic() < deadline, "its room was never free again"
            step += 1
            feed.foresee([(step, cut(step))], 5, step)
            (_, _, pids), _ = load(feed, step)
            readers = set(pids.tolist())


def test_an_error_is_the_users_own() -> None:
    with feed_of(Noisy(), 1) as feed:
        wanted = Cut(0, np.array([12, 13]), 2)
        feed.foresee([(1, wanted), (2, cut(2))], 5, 1)
        with pytest.raises(ValueError, match="broken"):
            list(feed.part(wanted, 5, 1).load())
        assert len(load(feed, 2)) == 2, "the process goes on"


def test_a_killed_process_is_followed_by_another_that_prepares_the_same() -> None:
    told: list[str] = []
    with feed_of(Noisy(), 2, warn=told.append) as beside, feed_of(Noisy(), 0) as here:
        readers: list[int] = []
        killed: list[int] = []
        for step in range(1, 21):
            beside.foresee(((at, cut(at)) for at in range(step, 21)), 5, step)
            (x, y, pids), drawn_next = load(beside, step)
            (other_x, other_y, _), other_next = load(here, step)
            assert torch.equal(x, other_x) and torch.equal(y, other_y) and torch.equal(drawn_next, other_next)
            readers += set(pids.tolist())
            living = [pid for pid in readers if pid not in killed]  # what the dead one has read comes for a while
            if living and step >= (1, 5, 21)[len(killed)]:
                killed.append(living[-1])
                os.kill(killed[-1], signal.SIGKILL)
        assert len(killed) == 2
        # The last one that came may have found nothing left to read.
        assert os.getpid() not in readers and len(set(readers)) >= 3, "others come for those that are killed"
    assert len(told) == 2 and all("was killed by SIGKILL; another one reads on" in text for text in told)


def test_a_part_that_kills_two_processes_is_not_tried_again() -> None:
    class Deadly(Noisy):
        def __getitem__(self, number: int) -> Any:
            if os.getpid() != home:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(number)

    home = os.getpid()
    with feed_of(Deadly(), 2) as feed, pytest.raises(LaunchError, match="was killed by SIGKILL"):
        feed.foresee([(1, cut(1)), (2, cut(2))], 5, 1)
        load(feed, 1)


def test_batches_that_cannot_be_sent_are_refused() -> None:
    with feed_of([Pair(torch.ones(1), torch.ones(1))] * 40, 1) as feed:
        feed.foresee([(1, cut(1))], 5, 1)
        with pytest.raises(TaskError, match="loaders: a batch holds a Pair, which cannot be sent"):
            load(feed, 1)


def test_what_behaves_as_a_dict_arrives_as_one() -> None:
    assert pick_up(*lay_down({"a": UserDict(b=2)})) == {"a": {"b": 2}}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(24).view(4, 6)[:, ::2],
        torch.ones(3, 1).expand(3, 4),
        torch.empty(0, 3),
        torch.tensor(True),
        torch.randn(5).bfloat16(),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(3, requires_grad=True),
    ],
    ids=["channels last", "gaps", "expanded", "empty", "scalar", "bfloat16", "conjugate", "with gradient"],
)
def test_tensors_of_every_kind(tensor: torch.Tensor) -> None:
    found, (text, number) = pick_up(*lay_down([tensor, ("text", 1.5)]))
    assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    assert found.stride() == torch.empty_like(tensor.detach()).stride()
    assert (text, number) == ("text", 1.5) and not found.requires_grad


def test_tensors_that_are_not_dense_are_refused() -> None:
    with pytest.raises(TaskError, match="make dense tensors on the CPU"):
        lay_down(torch.eye(3).to_sparse())
