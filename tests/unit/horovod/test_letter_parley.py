"""Rounds by letters, each process a thread: all hear all, and who has left is known in whichever round."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shoal.comm.memory_transport import MemoryNetwork, MemoryTransport
from shoal.comm.reliable import Reliability
from shoal.horovod.letter_parley import LetterParley

RANKS = (1, 2, 4)
SIZE = 5


class GivesUp(Exception):
    """Who is missed in vain."""


def among(work: Callable[[LetterParley, MemoryTransport], Any]) -> list[Any]:
    """What each of the ranks returns, in their order."""
    network = MemoryNetwork(SIZE, reliability=Reliability(linger_s=0.2))

    def live(rank: int) -> Any:
        transport = network.transport(rank)
        parley: LetterParley

        def look() -> None:
            if gone := parley.gone():
                raise GivesUp(gone, parley.missing())

        parley = LetterParley(transport, RANKS, look)
        return work(parley, transport)

    with ThreadPoolExecutor(len(RANKS)) as pool:
        return [one.result(60) for one in [pool.submit(live, rank) for rank in RANKS]]


def test_all_hear_what_all_say_however_long_it_is() -> None:
    def work(parley: LetterParley, transport: MemoryTransport) -> list[str]:
        heard = [parley.meet(f"{transport.rank}" * length) for length in (1, 0, 6_000_000)]
        assert parley.missing() == parley.gone() == ()
        parley.leave(is_aborted=False)
        return [each[0] for each in heard]

    assert {tuple(each) for each in among(work)} == {("1", "", "1" * 6_000_000)}


@pytest.mark.parametrize("ending", ["leaves", "aborts", "vanishes"])
def test_who_waits_for_one_that_has_ended_learns_it(ending: str) -> None:
    def work(parley: LetterParley, transport: MemoryTransport) -> Any:
        parley.meet("")
        if transport.rank == 4:
            transport.abort() if ending == "vanishes" else parley.leave(is_aborted=ending == "aborts")
            return None
        with pytest.raises(GivesUp) as caught:
            parley.meet("")
        return caught.value.args

    first, second, _ = among(work)
    for gone, missing in (first, second):
        assert 4 in gone and 4 in missing


def test_only_an_aborted_one_is_missed_by_those_who_have_met_it() -> None:
    def work(parley: LetterParley, transport: MemoryTransport) -> Any:
        parley.meet("")
        if transport.rank != 1:
            parley.leave(is_aborted=transport.rank == 4)
            return None
        while not parley.gone():  # as one that waits in what was agreed on
            pass
        return parley.gone()

    assert among(work)[0] == (4,)
