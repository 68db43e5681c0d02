"""Memory of a device that lies on a shelf; the host's stands for it here."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from helpers.host_driver import HostDriver
from shoal.arena.device import DeviceSegment
from shoal.arena.shelf import FdShelf
from shoal.errors import LaunchError


@pytest.fixture
def shelf() -> Iterator[FdShelf]:
    made = FdShelf.make()
    yield made
    made.close()


def segment_on(shelf: FdShelf, *, size: int = 6, name: str = "GPU 0") -> DeviceSegment:
    segment = DeviceSegment(HostDriver(name=name), FdShelf.of(shelf.fds))
    segment.reserve("first", 5)
    segment.reserve("second", 4 * size)
    return segment


def in_a_process(act: object) -> int:
    """The status with which a forked process ends that does this."""
    pid = os.fork()
    if pid == 0:
        act()  # type: ignore[operator]
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_lies_on_a_shelf_is_there_for_all_and_for_long(shelf: FdShelf) -> None:
    assert shelf.look() is None
    read, write = os.pipe()
    shelf.put("a pipe", read)
    os.close(read)
    os.write(write, b"abc")
    for letter in (b"a", b"b", b"c"):
        label, fd = FdShelf.of(shelf.fds).wait()
        assert label == "a pipe" and os.read(fd, 1) == letter
        os.close(fd)
    os.close(write)


def test_who_waits_at_an_empty_shelf_can_give_up(shelf: FdShelf) -> None:
    def give_up() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        shelf.wait(give_up)


def test_memory_outlives_who_made_it(shelf: FdShelf) -> None:
    def make_and_die() -> None:
        segment = segment_on(shelf)
        segment.map(makes=True)
        segment.tensor("second", torch.float32)[2:4] = 7.0
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_process(make_and_die) == -signal.SIGKILL
    heir = segment_on(shelf)
    heir.map(makes=False)
    assert heir.tensor("second", torch.float32).tolist() == [0.0, 0.0, 7.0, 7.0, 0.0, 0.0]
    assert heir.tensor("second", torch.float32, offset=8, count=2).tolist() == [7.0, 7.0]
    assert heir.tensor("first", torch.uint8).tolist() == [0] * 5


def test_who_comes_first_among_several_makes_it_once(shelf: FdShelf) -> None:
    one, other = segment_on(shelf), segment_on(shelf)
    one.map(makes=True)
    other.map(makes=True)
    one.tensor("first", torch.uint8)[0] = 3
    assert other.tensor("first", torch.uint8)[0] == 3


def test_another_model_and_another_gpu_are_refused(shelf: FdShelf) -> None:
    segment_on(shelf).map(makes=True)
    with pytest.raises(LaunchError, match="another model"):
        segment_on(shelf, size=10_000).map(makes=False)
    with pytest.raises(LaunchError, match=r"GPU 0 and GPU 1.*via=backend"):
        segment_on(shelf, name="GPU 1").map(makes=False)
