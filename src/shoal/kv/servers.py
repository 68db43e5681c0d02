"""The processes that hold a store: started, watched, and started again over the memory that they left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from shoal.comm.security import RunKey
from shoal.comm.socket_folder import SocketFolder
from shoal.errors import SpecError
from shoal.kv.vault import make_memory

_LOOK_EVERY_S = 0.05
KEY_FILE = "key"


class KvServers:
    """So many servers of a store, for so many workers, until it is closed. Whoever is killed is followed by
    another, which goes on with what it held."""

    def __init__(self, kind: str, workers: int, servers: int = 1) -> None:
        if servers < 1:
            raise SpecError(f"kv: a store has 1 or more servers, found {servers}.")
        self._kind, self._workers = kind, workers
        self._folder = SocketFolder()
        self._key = RunKey.create()
        self._key.save(Path(self._folder.path) / KEY_FILE)
        self.addresses = [f"ipc://{self._folder.path}/server-{number}" for number in range(servers)]
        self.key_file = str(Path(self._folder.path) / KEY_FILE)
        self.restarts = 0
        """How often a server was followed by another."""
        self._memories = [make_memory() for _ in range(servers)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="shoal-kv-servers", daemon=True)
        self._has_started = threading.Event()
        self._thread.start()
        self._has_started.wait()

    @property
    def pids(self) -> list[int]:
        """Of the servers as they are now."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End them; what they held is gone."""
        self._is_over.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _live(self) -> None:
        # All in this thread: children end with the thread that started them.
        try:
            for number in range(len(self.addresses)):
                self._processes.append(self._start(number))
            self._has_started.set()
            while not self._is_over.wait(_LOOK_EVERY_S):
                for number, process in enumerate(self._processes):
                    if process.poll() is not None:
                        self.restarts += 1
                        self._processes[number] = self._start(number)
        finally:
            self._has_started.set()
            for process in self._processes:
                process.kill()
                process.wait()
            for fd in self._memories:
                os.close(fd)
            self._folder.close()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        with suppress(FileNotFoundError):
            os.unlink(self.addresses[number].removeprefix("ipc://"))  # which a killed one has left
        fd = self._memories[number]
        words = ["--fd", fd, "--address", self.addresses[number], "--kind", self._kind, "--workers", self._workers]
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal.kv.serve", *map(str, words)], stdin=subprocess.PIPE, pass_fds=[fd]
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(f"{self._key.text}\n".encode())
            process.stdin.close()
        return process
