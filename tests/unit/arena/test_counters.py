"""Counters between real processes: who waits is woken, and is asked now and then whether to go on."""

from __future__ import annotations

import os
import threading

import pytest

from helpers.forked import in_processes
from shoal.arena import Segment, counter_bytes, supported
from shoal.spec import World


def _counters(world: World, count: int, on_idle=None):
    segment = Segment(world.arena_fd)
    segment.reserve("counters", counter_bytes(count))
    segment.map()
    return segment.counters("counters", on_idle)


def test_processes_take_turns() -> None:
    """Each waits for the other two hundred times: a wake-up that got lost would end in the guard."""
    rounds = 200

    def play(world: World) -> list[int]:
        counters = _counters(world, 2)
        me, other = world.global_rank, 1 - world.global_rank
        seen = []
        for turn in range(1, rounds + 1):
            if me == 0:
                counters.publish(0, turn)
            counters.wait(other, turn)
            seen.append(counters[other])
            if me == 1:
                counters.publish(1, turn)
        return seen

    assert in_processes(2, play) == [list(range(1, rounds + 1))] * 2


def test_all_wait_for_all() -> None:
    def meet(world: World) -> list[int]:
        counters = _counters(world, 3)
        counters.publish(world.global_rank, 7 + world.global_rank)
        counters.wait_all(range(3), 7)
        return [counters[index] for index in range(3)]

    assert in_processes(3, meet) == [[7, 8, 9]] * 3


def test_a_sleeper_is_woken_by_a_publication_and_not_by_a_plain_write() -> None:
    segment = Segment()
    segment.reserve("counters", counter_bytes(2))
    segment.map()
    idle = threading.Semaphore(0)
    counters = segment.counters("counters", idle.release)
    thread = threading.Thread(target=counters.wait, args=(0, 5))
    thread.start()
    idle.acquire()  # it sleeps, and has looked around once
    counters[1] = 99
    assert (counters[0], counters[1]) == (0, 99)
    counters.publish(0, 5)
    thread.join(30)
    assert not thread.is_alive()
    segment.close()


def test_who_is_asked_may_give_up() -> None:
    class Gone(Exception):
        pass

    def give_up() -> None:
        raise Gone

    counters = _counters(World(arena_fd=os.memfd_create("shoal-arena")), 1, give_up)
    with pytest.raises(Gone):
        counters.wait(0, 1)
    counters[0] = 1
    counters.wait(0, 1)


def test_this_machine_has_what_it_takes() -> None:
    assert supported()
