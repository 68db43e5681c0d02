"""Servers of a key-value store in threads of this process, which can die with all they had."""

from __future__ import annotations

import os
import threading
import time
from typing import Self

from shoal import kv
from shoal.comm.security import RunKey
from shoal.comm.socket_folder import SocketFolder
from shoal.coordinator.store import MemoryStore
from shoal.kv.lines import ShardLine
from shoal.kv.register import Register
from shoal.kv.serve import KvServer
from shoal.kv.vault import make_memory
from shoal.spec import World

DEAD_AFTER_S = 0.6


class ServerThreads:
    """So many, each with its own shard, or with copies on each other."""

    def __init__(
        self, count: int, *, copies: bool = False, key: RunKey | None = None, register: MemoryStore | None = None
    ) -> None:
        self._folder, self.key = SocketFolder(), key or RunKey.create()
        self.addresses = [f"ipc://{self._folder.path}/{number}" for number in range(count)]
        self.register = (register or MemoryStore()) if copies else None
        self._threads: dict[int, tuple[threading.Thread, threading.Event]] = {}
        self._lives: dict[int, list[object]] = {}
        self.servers: dict[int, KvServer] = {}
        for number in range(count):
            self.start(number)

    def start(self, number: int) -> None:
        """One of them, with memory that holds nothing."""
        memories = [make_memory() for _ in self.addresses] if self.register is not None else [make_memory()]
        over, register = threading.Event(), None if self.register is None else Register(self.register)
        server = KvServer(number, self.addresses, memories, self.key, register=register, dead_after_s=DEAD_AFTER_S)

        def serve() -> None:
            while not over.is_set():
                server.serve_once()
            server.close()
            for fd in memories:
                os.close(fd)

        thread = threading.Thread(target=serve)
        thread.start()
        self._threads[number], self.servers[number] = (thread, over), server
        self._lives[number] = [number, server.seat.life]

    def kill(self, number: int) -> None:
        """It is gone, and so is its memory."""
        thread, over = self._threads.pop(number)
        del self._lives[number]
        over.set()
        thread.join()

    def store(self, kind: str = "dist_async", *, through_memory: bool = True) -> kv.KVStore:
        """A store of one worker."""
        lines = [
            ShardLine(shard, self.addresses, self.key, 60.0, through_memory=through_memory)
            for shard in range(len(self.addresses))
        ]
        return kv.KVStore(kind, lines, World())

    def wait_for_copies(self, timeout_s: float = 30.0) -> None:
        """Until every shard has a backup that has everything."""
        assert self.register is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            _, state = self.register.load()
            holders = list((state or {}).get("shards", {}).values())
            lives = self._lives.values()
            if len(holders) == len(self.addresses) and all(
                primary in lives and backup in lives and filled for _, primary, backup, filled in holders
            ):
                return
            time.sleep(0.02)
        raise AssertionError(f"no copies after {timeout_s} s: {state}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._threads):
            self.kill(number)
        self._folder.close()
