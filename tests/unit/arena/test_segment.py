"""The segment: the same regions in every process, or a sentence that says why not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from helpers.forked import in_processes
from shoal.arena import Segment, keep_freed_memory, return_freed_memory, segment_bytes, use_small_stacks
from shoal.errors import LaunchError
from shoal.spec import World


def _mapped(nbytes: int, fd: int | None = None) -> Segment:
    segment = Segment(fd)
    segment.reserve("first", 100)
    segment.reserve("second", nbytes)
    segment.map()
    return segment


def test_regions_start_at_pages_and_keep_apart() -> None:
    segment = _mapped(5000)
    assert segment.nbytes == 4096 + 8192
    first, second = segment.tensor("first", torch.uint8), segment.tensor("second", torch.uint8)
    assert (first.numel(), second.numel()) == (100, 5000)
    assert first.data_ptr() % 4096 == second.data_ptr() % 4096 == 0
    first.fill_(255)
    assert not second.any()
    segment.close()


def test_the_size_is_known_before_it_is_mapped() -> None:
    assert segment_bytes([100, 5000]) == _mapped(5000).nbytes
    assert segment_bytes([]) == 0


def test_opened_by_its_handle() -> None:
    segment = _mapped(64)
    other = Segment.of(segment.handle)
    other.reserve("first", 100)
    other.reserve("second", 64)
    other.map()
    segment.tensor("second", torch.float32).fill_(2.5)
    other.close()
    segment.close()
    assert other.tensor("second", torch.float32).tolist() == [2.5] * 16


def test_parts_of_a_region() -> None:
    segment = _mapped(64)
    segment.tensor("second", torch.float32).copy_(torch.arange(16.0))
    assert segment.tensor("second", torch.float32, offset=8, count=3).tolist() == [2.0, 3.0, 4.0]
    assert segment.tensor("second", torch.float64, offset=64).numel() == 0
    with pytest.raises(AssertionError):
        segment.tensor("second", torch.float32, offset=60, count=2)
    segment.close()


def test_another_process_maps_the_same_memory() -> None:
    segment = _mapped(64)
    values = segment.tensor("second", torch.float32)
    pid = os.fork()
    if pid == 0:
        try:
            other = Segment()
            other.share_with(segment.handle)
            other.reserve("first", 100)
            other.reserve("second", 64)
            other.map()
            other.close()
            other.tensor("second", torch.float32).fill_(3.5)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert values.tolist() == [3.5] * 16
    segment.close()


def test_a_process_that_needs_another_size_is_told_why() -> None:
    segment = _mapped(64)
    with pytest.raises(LaunchError, match="has 8192 bytes, but this process needs 12288: the task builds another"):
        _mapped(5000, segment.detach())


def test_memory_that_is_not_there() -> None:
    with pytest.raises(LaunchError, match=r"could not share .* MiB between processes"):
        _mapped(1 << 62)


def test_views_outlive_the_descriptor_and_closing_twice_does_no_harm() -> None:
    segment = _mapped(64)
    values = segment.tensor("second", torch.float32)
    segment.close()
    segment.close()
    values.fill_(1.0)
    assert float(values.sum()) == 16.0
    fd = _mapped(64).detach()
    os.close(fd)  # nobody else did


def test_freed_memory_is_kept() -> None:
    assert keep_freed_memory()


def test_freed_memory_is_returned_and_threads_reserve_little() -> None:
    def work(world: World) -> tuple[int, int]:
        assert return_freed_memory() and use_small_stacks()
        before = _address_space()
        torch.empty(8 << 20, dtype=torch.uint8)
        kept = _address_space() - before
        done = threading.Event()
        threads = [threading.Thread(target=done.wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        reserved = _address_space() - before - kept
        done.set()
        return kept, reserved

    (kept, reserved), *_ = in_processes(1, work)
    assert kept < 4 << 20
    assert reserved < 4 * (4 << 20)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
