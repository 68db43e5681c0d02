"""Moving buffers: the mean of what the slots leave, the same for both ways of merging."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from shoal.arena import Segment
from shoal.model.buffers import LARGEST_MOVING, MovingBuffers


class Counting(nn.Module):
    """Moves a float buffer in place, rebinds another, counts in an integer, and keeps a large mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("rebound", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mask", torch.ones(LARGEST_MOVING + 1))
        self.register_buffer("nothing", None)

    def forward(self, value: float) -> None:
        self.mean.add_(value)
        self.rebound = self.rebound + 2 * value
        self.calls += 1


def segment_for(slots: int, nbytes: int) -> Segment:
    """As much of the arena as buffers need."""
    segment = Segment()
    for name in ("buffers", *(f"buffers/{slot}" for slot in range(slots))):
        segment.reserve(name, nbytes)
    segment.map()
    return segment


def test_a_model_without_buffers_leaves_nothing_to_look_at() -> None:
    assert not MovingBuffers(nn.Linear(2, 3)).are_there
    assert MovingBuffers(nn.BatchNorm1d(3)).are_there
    large = nn.Linear(2, 3)
    large.register_buffer("mask", torch.ones(LARGEST_MOVING + 1))
    assert MovingBuffers(large).are_there, "it must not change, and that is looked at"


Merge = Callable[[nn.Module, list[tuple[float, float]]], None]


def merge_in_arena(module: nn.Module, slots: list[tuple[float, float]]) -> None:
    buffers = MovingBuffers(module)
    segment = segment_for(len(slots), buffers.nbytes)
    buffers.bind(segment, len(slots))
    buffers.publish()
    for slot, (value, weight) in enumerate(slots):
        buffers.load()
        if weight:
            module(value)
        buffers.store(slot)
    buffers.commit(np.array([weight for _, weight in slots]))
    buffers.load()
    segment.close()


def merge_by_sum(module: nn.Module, slots: list[tuple[float, float]]) -> None:
    """One worker fills all slots, so there is nothing more to add."""
    buffers = MovingBuffers(module)
    moved = buffers.begin_mean()
    for value, weight in slots:
        moved.start()
        if weight:
            module(value)
        moved.add(weight)
    total = sum(weight for _, weight in slots)
    moved.finish(lambda values: None, total, counted=moved.counted, speaks=True)


@pytest.mark.parametrize("merge", [merge_in_arena, merge_by_sum])
def test_slots_are_averaged_by_weight(merge: Merge) -> None:
    module = Counting()
    merge(module, [(1.0, 3.0), (5.0, 1.0)])
    assert module.mean.tolist() == [2.0] * 3
    assert module.rebound.tolist() == [4.0] * 2
    assert int(module.calls) == 1, "every slot began from the committed count"


@pytest.mark.parametrize("merge", [merge_in_arena, merge_by_sum])
@pytest.mark.parametrize("slots", [[(9.0, 0.0), (5.0, 1.0)], [(5.0, 1.0), (9.0, 0.0)]], ids=["first", "last"])
def test_a_slot_without_samples_counts_nothing(merge: Merge, slots: list[tuple[float, float]]) -> None:
    module = Counting()
    merge(module, slots)
    assert module.mean.tolist() == [5.0] * 3
    assert int(module.calls) == 1


def test_large_masks_are_left_alone_but_batchnorm_never() -> None:
    module = nn.Sequential(Counting(), nn.BatchNorm1d(LARGEST_MOVING + 1))
    mask, mean = module[0].mask, module[1].running_mean
    buffers = MovingBuffers(module)
    assert module[0].mask is mask
    assert module[1].running_mean is not mean
    assert buffers.nbytes >= 2 * 4 * (LARGEST_MOVING + 1)


def test_a_buffer_under_two_names_stays_one() -> None:
    module = nn.Module()
    module.left, module.right = nn.Module(), nn.Module()
    shared = torch.zeros(4)
    module.left.register_buffer("state", shared)
    module.right.register_buffer("state", shared)
    MovingBuffers(module)
    assert module.left.state is module.right.state


def test_a_model_without_buffers() -> None:
    buffers = MovingBuffers(nn.Linear(2, 2))
    assert buffers.nbytes == 0
    buffers.commit(np.ones(1))


def test_whole_numbers_come_from_the_worker_that_speaks() -> None:
    module = Counting()
    module.calls = torch.tensor(2**62 + 3)  # more than a float holds
    moved = MovingBuffers(module).begin_mean()
    moved.start()
    moved.add(0.0)  # this worker had no samples
    assert not moved.counted

    def add_the_speaker(values: torch.Tensor) -> None:
        assert not values.any()
        if values.numel() == torch.tensor(0).element_size():
            values.add_(torch.tensor([2**62 + 4]).view(torch.uint8).double())
        else:
            values.add_(7.0)

    moved.finish(add_the_speaker, 1.0, counted=True, speaks=False)
    assert int(module.calls) == 2**62 + 4
    assert module.mean.tolist() == [7.0] * 3
