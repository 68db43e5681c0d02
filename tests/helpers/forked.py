"""Run a function in several real processes that share a segment, and collect what each returns."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch._dynamo  # an optimizer's first step would import it in every child

from shoal.comm.socket_folder import SocketFolder
from shoal.spec import Conduct, World
from shoal.spec.conduct import even_fills
from shoal.strategies.base import Setting
from shoal.strategies.groups.meeting import SegmentMeeting

GUARD_S = 60.0
MOST_HOSTS = 3

Work = Callable[[World], Any]
_memory: list[int] = []
"""For processes that pretend to be on several hosts: a segment for each, and one in which they meet."""


class _Child(NamedTuple):
    pid: int
    pipe: int
    stacks: int
    """Where it writes what its threads are at, shortly before it is given up."""


def in_processes(size: int, work: Work) -> list[Any]:
    """What `work(world)` returns in each of `size` processes, by rank; it must be plain data."""
    arena_fd = os.memfd_create("shoal-arena")
    _memory[:] = [os.memfd_create("shoal-host") for _ in range(MOST_HOSTS + 1)]
    with SocketFolder() as folder:
        ground = World(world_size=size, local_size=size, arena_fd=arena_fd, sockets=folder.path)
        children = [
            _start(replace(ground, global_rank=rank, local_rank=rank, places=()), work) for rank in range(size)
        ]
        for fd in (arena_fd, *_memory):
            os.close(fd)
        try:
            answers = [_read(child) for child in children]
        finally:
            for child in children:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
                os.close(child.pipe)
                os.close(child.stacks)
    for rank, answer in enumerate(answers):
        errors = "\n".join(one["error"] for one in answers if "error" in one)
        assert "error" not in answer, f"rank {rank} failed:\n{errors}"
    return [answer["result"] for answer in answers]


def on_hosts(world: World, count: int) -> tuple[World, Callable[[str, str], dict[int, str]]]:
    """A process's world as if it were on one of so many hosts, and how it meets those on the others, once."""
    sizes = tuple(map(len, even_fills(world.world_size, count)))
    first, number = 0, 0
    while world.global_rank >= first + sizes[number]:
        first, number = first + sizes[number], number + 1
    spread = replace(
        world,
        hosts=sizes,
        host_number=number,
        local_rank=world.global_rank - first,
        local_size=sizes[number],
        arena_fd=_memory[number],
        secret="ab" * 32,
    )
    conduct = Conduct(fills=even_fills(world.world_size, world.world_size))
    meeting = SegmentMeeting(Setting(world=replace(world, arena_fd=_memory[MOST_HOSTS]), conduct=conduct))
    return spread, lambda name, text: meeting.exchange_addresses(text)


def _start(world: World, work: Work) -> _Child:
    reader, writer = os.pipe()
    stacks = os.memfd_create("shoal-stacks")
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Child(pid, reader, stacks)
    faulthandler.dump_traceback_later(GUARD_S - 5, file=stacks)
    try:
        torch.set_num_threads(1)
        answer = {"result": work(world)}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    with os.fdopen(writer, "w") as file:
        file.write(json.dumps(answer))
    # The parent ends this process: what it held stays open until all have answered.
    signal.pause()
    os._exit(0)


def _read(child: _Child) -> dict[str, Any]:
    deadline, text = time.monotonic() + GUARD_S, b""
    while True:
        ready, _, _ = select.select([child.pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            at_work = os.pread(child.stacks, 1 << 16, 0).decode()
            return {"error": f"no answer within {GUARD_S} s; it was at\n{at_work}"}
        if not (more := os.read(child.pipe, 1 << 16)):
            return json.loads(text)
        text += more
