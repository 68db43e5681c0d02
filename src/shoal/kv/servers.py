"""The processes that hold a store: started, watched, and started again over the memory that they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shoal.comm.security import RunKey
from shoal.comm.socket_folder import SocketFolder
from shoal.errors import LaunchError, SpecError
from shoal.kv.serve import DEAD_AFTER_S, LISTENS
from shoal.kv.vault import make_memory
from shoal.ps.plain.line import require_address

_LOOK_EVERY_S = 0.05
KEY_FILE, REGISTER_FILE = "key", "register.sqlite"
SERVERS_VARIABLE = "SHOAL_KV_SERVERS"
"""Where `shoal run --servers` leaves the place of the run's servers."""


@dataclass(frozen=True, kw_only=True)
class ServersPlace:
    """Where a store's servers are, as others are told: a file with the key, not the key itself."""

    key_file: str
    addresses: tuple[str, ...]

    @property
    def text(self) -> str:
        """What `parse` reads."""
        return " ".join([self.key_file, *self.addresses])

    @classmethod
    def parse(cls, text: str) -> ServersPlace:
        """What `text` was."""
        key_file, *addresses = text.split(" ")
        return cls(key_file=key_file, addresses=tuple(addresses))


class KvServers:
    """Servers of a store, or some of them, until it is closed. Whoever is killed is followed by another, which
    goes on with what it held.

    Args:
        addresses: Of all servers of the store.
        key: By which servers and workers know each other.
        numbers: Which of them are started here; default all.
        register: With copies of all shards on other servers: where servers agree on who holds what, a file or
            `etcd://…`. Without it each shard is held by one server.
        dead_after_s: A server that was not heard of for so long is followed by its backup.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        key: RunKey,
        *,
        numbers: Sequence[int] | None = None,
        register: str = "",
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        for address in addresses:
            require_address(address, "name each server as tcp://10.0.0.1:7000")
        self.addresses = list(addresses)
        self.restarts = 0
        """How often a server was followed by another."""
        self._key, self._register, self._dead_after_s = key, register, dead_after_s
        self._folder: SocketFolder | None = None
        self._numbers = list(range(len(addresses)) if numbers is None else numbers)
        num_memories = len(addresses) if register else 1
        self._memories = {number: [make_memory() for _ in range(num_memories)] for number in self._numbers}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="shoal-kv-servers", daemon=True)
        self._has_started, self._has_settled = threading.Event(), threading.Event()
        self._listening: set[int] = set()
        self._failure = ""
        self._thread.start()
        self._has_started.wait()

    @classmethod
    def of_this_host(cls, servers: int) -> Self:
        """So many at Unix sockets that no other user can reach, with a key of their own."""
        if servers < 1:
            raise SpecError(f"kv: a store has 1 or more servers, found {servers}; leave it out for one.")
        folder, key = SocketFolder(), RunKey.create()
        key.save(Path(folder.path) / KEY_FILE)
        made = cls([f"ipc://{folder.path}/server-{number}" for number in range(servers)], key)
        made._folder = folder
        return made

    @property
    def place(self) -> ServersPlace:
        """Where others find them, of servers of this host."""
        assert self._folder is not None
        key_file = str(Path(self._folder.path) / KEY_FILE)
        return ServersPlace(key_file=key_file, addresses=tuple(self.addresses))

    @property
    def pids(self) -> list[int]:
        """Of the servers as they are now."""
        return [self._processes[number].pid for number in self._numbers]

    def wait_until_listening(self) -> None:
        """Until all of them do; `LaunchError` where one cannot, and then none is left."""
        self._has_settled.wait()
        if self._failure:
            raise LaunchError(self._failure)

    def close(self) -> None:
        """End them; what they held is gone."""
        self._is_over.set()
        self._thread.join()
        if self._folder is not None:
            self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _live(self) -> None:
        # All in this thread: children end with the thread that started them.
        try:
            for number in self._numbers:
                self._processes[number] = self._start(number)
            self._has_started.set()
            while not (self._is_over.wait(_LOOK_EVERY_S) or self._failure):
                for number, process in self._processes.items():
                    has_ended = process.poll() is not None
                    self._hear(number, process)
                    if has_ended and not self._failure:
                        self.restarts += 1
                        self._end(process)
                        self._processes[number] = self._start(number)
        finally:
            self._has_started.set()
            self._has_settled.set()
            for process in self._processes.values():
                self._end(process)
            for fd in [one for memories in self._memories.values() for one in memories]:
                os.close(fd)

    def _hear(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """Whether it listens. Where it never has, nobody waits for it to be able to."""
        assert process.stdout is not None
        said = (process.stdout.read() or b"").decode().strip()
        if said == LISTENS:
            self._listening.add(number)
            if len(self._listening) == len(self._numbers):
                self._has_settled.set()
        elif said and number not in self._listening:
            self._failure = said

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        address, memories = self.addresses[number], self._memories[number]
        if address.startswith("ipc:///"):
            with suppress(FileNotFoundError):
                os.unlink(address.removeprefix("ipc://"))  # which a killed one has left
        given = {
            "number": number,
            "addresses": self.addresses,
            "memories": memories,
            "key": self._key.text,
            "register": self._register,
            "dead_after_s": self._dead_after_s,
        }
        command = [sys.executable, "-m", "shoal.kv.serve"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, pass_fds=memories
        )
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        with suppress(BrokenPipeError):
            process.stdin.write(f"{json.dumps(given)}\n".encode())
            process.stdin.close()
        return process
