"""The zygote: a process that has imported what workers need, and forks them in milliseconds.

Run as `python -m shoal.launch.zygote` by `owner.start_zygote`. One zygote serves any number of supervisors.
It runs no op, asks about no device and imports no user code, for all of these would break its children;
it lives as long as its owner, and a supervisor's children live as long as their supervisor's connection.

A client sends `spawn` (with log, channel and perhaps arena and shelf as file descriptors, and the names of
modules of ours to import before the fork) and hears `spawned` (with a pidfd) or `refused`, and later `exited`; to
`ping` it hears `pong`. When it hangs up, its children are killed; once all are reaped, the zygote hangs up too.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import selectors
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.comm.channel import Channel
from shoal.comm.kernel import die_with_parent
from shoal.errors import CommError, PeerLost
from shoal.launch.child import Birth, live
from shoal.launch.preloading import preload

PRELOAD = ("numpy", "torch", "torch.distributed", "torch._dynamo", "shoal.roles.script", "shoal.roles.worker")
LIFELINE_FD = 0
"""Standard input is a pipe from the owner: it ends when the owner does, however the owner ends."""


@dataclass
class ZygoteClient:
    """A supervisor, and the children it asked for."""

    channel: Channel
    pids: set[int] = field(default_factory=set)
    gone: bool = False


class Zygote:
    """Answers spawn requests until the owner is gone."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: list[ZygoteClient] = []
        self._pidfds: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._watch(listener, self._accept)

    def serve(self) -> Birth | None:
        """Serve. Returns None when the owner is gone, and in each forked child what it was born for."""
        self._selector.register(LIFELINE_FD, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fd == LIFELINE_FD:
                    return None
                if (birth := key.data()) is not None:
                    return birth

    def end_all(self) -> None:
        """Kill and reap every child of every client."""
        for client in self._clients:
            _kill_all(client.pids)
        for pid in self._pidfds:
            os.waitpid(pid, 0)

    def _watch(self, source: Any, react: Callable[[], Birth | None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, react)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        client = ZygoteClient(Channel(sock, "a supervisor"))
        if client.channel.peer_uid() != os.getuid():
            client.channel.close()
            return
        self._clients.append(client)
        self._watch(client.channel, partial(self._hear, client))

    def _hear(self, client: ZygoteClient) -> Birth | None:
        try:
            received = client.channel.poll_with_fds()
        except CommError:
            self._hang_up(client)
            return None
        if received is None:
            return None
        request, fds = received
        if request.get("kind") == "ping":
            _tell(client, {"kind": "pong"})
            return None
        try:
            return self._spawn(client, request, fds)
        except OSError as error:
            _tell(client, {"kind": "refused", "id": request.get("id"), "text": str(error)})
        finally:
            if client in self._clients:  # Not so in the child, which owns them now.
                for fd in fds:
                    os.close(fd)
        return None

    def _spawn(self, client: ZygoteClient, request: dict[str, Any], fds: list[int]) -> Birth | None:
        preload(request.get("modules", ()))
        # A fork copies one thread; a lock that another one holds would stay locked for ever in the child.
        if (num_threads := len(os.listdir("/proc/self/task"))) != 1:
            raise OSError(f"the zygote has {num_threads} threads and cannot fork safely")
        zygote_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._forget()
            return Birth.from_request(request, fds, parent_pid=zygote_pid)
        client.pids.add(pid)
        pidfd = self._pidfds[pid] = os.pidfd_open(pid)
        self._watch(pidfd, partial(self._reap, client, pid))
        _tell(client, {"kind": "spawned", "id": request.get("id"), "pid": pid}, [pidfd])
        return None

    def _reap(self, client: ZygoteClient, pid: int) -> None:
        # While the dead child is not reaped its group's number cannot be given to others, so this is the
        # moment to end what it left behind, such as loader processes.
        _kill_all([pid])
        _, status = os.waitpid(pid, 0)
        client.pids.remove(pid)
        self._selector.unregister(self._pidfds[pid])
        os.close(self._pidfds.pop(pid))
        _tell(client, {"kind": "exited", "pid": pid, "code": os.waitstatus_to_exitcode(status)})
        self._let_go(client)

    def _hang_up(self, client: ZygoteClient) -> None:
        client.gone = True
        self._selector.unregister(client.channel)
        _kill_all(client.pids)
        self._let_go(client)

    def _let_go(self, client: ZygoteClient) -> None:
        if client.gone and not client.pids:
            client.channel.close()
            self._clients.remove(client)

    def _forget(self) -> None:
        """In a child: close all that belongs to the zygote, so that no connection outlives it in here."""
        self._selector.close()
        self._listener.close()
        for client in self._clients:
            client.channel.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._clients, self._pidfds = [], {}


def _kill_all(pids: set[int] | list[int]) -> None:
    for pid in pids:
        # The group may not exist yet: a newborn child makes it itself.
        for kill in (os.kill, os.killpg):
            try:
                kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _tell(client: ZygoteClient, message: dict[str, Any], fds: list[int] | None = None) -> None:
    try:
        client.channel.send(message, fds or [])
    except PeerLost:
        pass  # Its connection becomes readable, and is dealt with there.


def _leave(*_: object) -> None:
    # An owner that is killed closes the lifeline, too: who leaves already is not told again in the midst of it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit


def serve_until_told(zygote: Zygote) -> Birth | None:
    """Serve until SIGTERM, or until the owner is gone: None; in a child, who it is."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        birth = zygote.serve()
        if birth is None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except SystemExit:
        return None
    return birth


def main() -> None:
    """Preload, then serve the listening socket that the owner made."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", type=int, required=True, help="the listening socket, inherited")
    parser.add_argument("--owner", type=int, help="end with this process: the one that started us")
    arguments = parser.parse_args()
    if arguments.owner is not None:
        die_with_parent(arguments.owner, signal.SIGTERM)
    # Imports make millions of objects that all stay: looking for garbage among them is a quarter of the time.
    gc.disable()
    for module in PRELOAD:
        importlib.import_module(module)
    zygote = Zygote(socket.socket(fileno=arguments.listen))
    # What is frozen is never visited by a child's collector, so its pages stay shared.
    gc.freeze()
    birth = serve_until_told(zygote)
    if birth is not None:
        gc.enable()
        live(birth)
    zygote.end_all()


if __name__ == "__main__":
    main()
