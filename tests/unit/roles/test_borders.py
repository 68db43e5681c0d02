"""A worker on its way to a border: when it has nothing left to do before it."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from shoal.ps.consistency import parse_sync
from shoal.ps.messages import View
from shoal.ps.worker import WorkerMachine
from shoal.roles.borders import Borders
from shoal.spec import ParameterServer, World
from shoal.strategies.ps.client import PsClient


class Client:
    """Hears one view after the other; after each the worker is asked whether it is at rest."""

    def __init__(self, *holds: list[Any] | None) -> None:
        self.machine = WorkerMachine(node=2, rank=1, num_shards=1, consistency=parse_sync("ssp:2"), now=0.0)
        self._holds = deque(holds)
        self.borders = Borders(
            cast(PsClient, self),
            ParameterServer(sync="ssp:2"),
            World(global_rank=1, world_size=2),
            slots=2,
            save=self.save,
        )
        self.at_rest: list[bool] = []
        self.hear(0.0)

    def hear(self, seconds: float) -> None:
        hold = self._holds.popleft()
        settings = {} if hold is None else {"hold": hold}
        self.machine.view = View(term=1, number=1, shards=[], addresses={}, workers={}, settings=settings)
        self.at_rest.append(self.borders.is_at_rest)

    def wait(self, is_done: Any) -> None:
        raise AssertionError("only the first worker waits for others at a border")

    def save(self, steps: int, waited_s: float) -> None:
        raise AssertionError("only the first worker saves")


def test_a_worker_that_has_still_to_come_to_the_border_is_not_at_rest() -> None:
    client = Client([1, None], [1, 10])
    client.borders.heed(8)
    assert client.at_rest == [False, False], (
        "it was held until it was known where the border is, and goes on to there"
    )


def test_a_worker_past_the_border_is_at_rest_until_all_go_on() -> None:
    client = Client([1, None], [1, 10], [1, 10], None)
    client.borders.heed(11)
    assert client.at_rest == [False, True, True, False]
    assert not client.borders.is_at_rest
