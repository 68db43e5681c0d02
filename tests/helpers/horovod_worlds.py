"""Processes that have called `hvd.init`, on this host or as if on two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shoal.horovod.torch as hvd
from helpers.forked import in_processes, on_hosts
from shoal.spec import World

Work = Callable[[], Any]


class OnTwoHosts(int):
    """So many processes, half of them on another host."""


def on_two_hosts(size: int) -> Any:
    return pytest.param(OnTwoHosts(size), id=f"{size} on 2 hosts", marks=pytest.mark.long)


each_size = pytest.mark.parametrize(
    "size", [2, pytest.param(4, marks=pytest.mark.long), on_two_hosts(2), on_two_hosts(4)]
)


def init_in(world: World, size: int) -> None:
    """`hvd.init` in a process of `in_processes`."""
    if not isinstance(size, OnTwoHosts):
        hvd.init(world=world)
        return
    spread, meet = on_hosts(world, 2)
    hvd.init(world=spread, meet=lambda text: meet("", text))


def among(size: int, work: Work) -> list[Any]:
    """What each of so many processes returns that has called `hvd.init`."""

    def live(world: World) -> Any:
        init_in(world, size)
        result = work()
        hvd.shutdown()
        return result

    return in_processes(size, live)
