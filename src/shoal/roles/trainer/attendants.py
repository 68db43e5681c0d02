"""Coordinator and servers as threads of the first process, where nobody starts processes for them: under torchrun,
or in a process by itself. They end with `fit`, and with that process: whoever started it sees to both."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.arena import Segment
from shoal.comm.channel import Channel
from shoal.comm.words import Stop
from shoal.coordinator.store import MemoryStore
from shoal.errors import LaunchError, PeerLost, SpecError
from shoal.model.start import Start
from shoal.observe.happenings import Done
from shoal.roles.coordinator import coordinate, plan_training
from shoal.roles.process.joining import Fellows
from shoal.roles.process.reporter import Reporter
from shoal.roles.server import open_served, serve
from shoal.spec import Job, Task, World
from shoal.spec.vocabulary import Role

_SECRET_BYTES = 32
_NOTE = "key"
_AUDIT_S = 40.0
_LOOK_EVERY_S = 0.1


def check_attended(job: Job) -> None:
    """Refuse what threads of one process cannot do."""
    if job.conduct.standbys:
        raise SpecError(
            f"Trainer: strategy={job.strategy} keeps a process to follow a coordinator, but here that ends with "
            "the first process, and all with it; leave standby out, or use `shoal run`."
        )


def attended_world(world: World, job: Job, fellows: Fellows) -> World:
    """Where a worker of a run with servers stands. All processes of the world call this.

    The key by which members know each other lies in the folder of sockets, which no other user can enter, until
    all have read it: a launcher's store asks nobody who it is.
    """
    note = Path(world.sockets) / _NOTE
    if world.global_rank == 0:
        with open(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(_SECRET_BYTES))
    fellows.hear_first()
    secret = note.read_text()
    fellows.hear_first()  # until then the first keeps it
    if world.global_rank == 0:
        note.unlink()
    arena_fd = Segment().detach() if world.arena_fd is None else world.arena_fd
    node = 1 + job.conduct.servers + world.global_rank
    return replace(world, node=node, secret=secret, arena_fd=arena_fd, coordinator="", attempt="trainer")


class Attendants:
    """The threads; `look` raises what has ended one of them before its time."""

    def __init__(self, job: Job, task: Task, start: Start, world: World) -> None:
        self.audit: dict[str, Any] | None = None
        """What the coordinator has counted, once all is trained."""
        self._error: BaseException | None = None
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []
        for member, act in self._members(job, task, start, world):
            ours, theirs = Channel.pair()
            self._channels.append(ours)
            name = f"{member.role}-{member.global_rank}"
            arguments = (act, theirs, Reporter(member, theirs))
            self._threads.append(threading.Thread(target=self._live, args=arguments, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def look(self) -> None:
        """While the first process waits for others: take in what they say."""
        for channel in self._channels:
            try:
                while (message := channel.poll()) is not None:
                    if message.get("kind") == Done.kind_name:
                        self.audit = message["results"]
            except PeerLost:
                pass  # It says below why.
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """All workers have what they wanted: hear what was counted, and end."""
        deadline = time.monotonic() + _AUDIT_S
        while self.audit is None and time.monotonic() < deadline:
            self.look()
            time.sleep(_LOOK_EVERY_S)
        self.abandon()
        if self.audit is None:
            raise LaunchError(
                f"The coordinator did not say what it counted within {_AUDIT_S:.0f} s of the workers' end, so "
                "nobody knows whether each part of the data was applied once; train again."
            )

    def abandon(self) -> None:
        """End, whatever has come of it."""
        for channel in self._channels:
            try:
                channel.send(Stop().as_message())
            except PeerLost:
                pass  # It has ended already.
        for thread in self._threads:
            thread.join()
        for channel in self._channels:
            channel.close()

    def _members(
        self, job: Job, task: Task, start: Start, world: World
    ) -> Iterator[tuple[World, Callable[[Channel, Reporter], None]]]:
        # Models are built here, one after the other: that draws from the process's own random numbers.
        for number in range(job.conduct.servers):
            member = replace(world, role=Role.SERVER, global_rank=number, local_rank=0, node=1 + number, places=())
            yield member, partial(serve, open_served(job, task, start, member), member)
        member = replace(world, role=Role.COORDINATOR, global_rank=0, local_rank=0, node=0, places=())
        plan = plan_training(job, task, member, begun_at=start.step, facts=start.facts)
        yield member, partial(coordinate, plan, MemoryStore(), member)

    def _live(self, act: Callable[[Channel, Reporter], None], channel: Channel, reporter: Reporter) -> None:
        try:
            act(channel, reporter)
        except BaseException as error:
            self._error = self._error or error
        finally:
            channel.close()
