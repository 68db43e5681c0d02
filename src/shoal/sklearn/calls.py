"""Processes that do calls, one at a time each. What one that died was doing, another does."""

from __future__ import annotations

import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Self

import cloudpickle

from shoal.errors import SpecError, WorkerFailed
from shoal.launch.deaths import signal_name
from shoal.launch.local import LocalEngine, LocalHost
from shoal.launch.messages import Ended
from shoal.sklearn.call_worker import SOCKET
from shoal.spec import Cluster, Job, World
from shoal.spec.vocabulary import Purpose

MOST_DEATHS = 3
"""Of processes that did one call, after which it is taken to be what kills them."""
_MOST_STARTED = 1024


@dataclass(eq=False)
class _Call:
    content: bytes
    future: Future[Any] = field(default_factory=Future)
    deaths: int = 0


class CallPool:
    """So many processes, forked from a zygote: torch is imported in all of them."""

    def __init__(self, workers: int, *, threads: int | None = None) -> None:
        if workers < 1:
            raise SpecError(f"A pool has 1 or more workers, found {workers}.")
        job = Job(
            purpose=Purpose.SCRIPT,
            target=str(Path(__file__).with_name("call_worker.py")),
            strategy="data",
            cluster=Cluster(workers=workers, threads=threads),
        )
        self.workers = workers
        self._host: LocalHost = LocalEngine().open(job)
        # No other user can enter the folder, so whoever calls there is one of ours.
        self._listener = Listener(os.path.join(self._host.sockets.path, SOCKET), "AF_UNIX", backlog=workers)
        self._calls: deque[_Call] = deque()
        self._lines: dict[int, Connection[Any, Any]] = {}
        self._doing: dict[int, _Call] = {}
        self._num_started, self._is_over = 0, False
        self._lock = threading.Lock()
        self._wake_out, self._wake_in = os.pipe()
        self._selector = selectors.DefaultSelector()
        for source in (self._host.fileno(), self._listener._listener._socket.fileno(), self._wake_out):  # type: ignore[attr-defined]
            self._selector.register(source, selectors.EVENT_READ)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="shoal-calls", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Have it called in some process."""
        call = _Call(cloudpickle.dumps(function))
        with self._lock:
            if self._is_over:
                raise RuntimeError("This pool is closed.") from self._failure
            self._calls.append(call)
        os.write(self._wake_in, b".")
        return call.future

    def forget(self) -> None:
        """What nobody has begun is not done."""
        with self._lock:
            left, self._calls = self._calls, deque()
        for call in left:
            call.future.cancel()

    def close(self) -> None:
        """End all processes, whatever they do."""
        with self._lock:
            self._is_over = True
        os.write(self._wake_in, b".")
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _live(self) -> None:
        try:
            for _ in range(self.workers):
                self._start()
            while not self._is_over:
                self._deal()
                for key, _ in self._selector.select():
                    self._take(key.fileobj)
        except BaseException as error:
            self._failure = error
        finally:
            self._end()

    def _start(self) -> None:
        self._num_started += 1
        node = self._num_started
        self._host.start(node, World(global_rank=node, world_size=_MOST_STARTED, node=node))

    def _deal(self) -> None:
        """Give everybody who is free something to do."""
        for number in [one for one in self._lines if one not in self._doing]:
            with self._lock:
                call = self._calls.popleft() if self._calls else None
            if call is None:
                return
            if not call.future.running() and not call.future.set_running_or_notify_cancel():
                continue
            self._doing[number] = call
            try:
                self._lines[number].send_bytes(call.content)
            except OSError:
                pass  # It has died, of which the host will tell.

    def _take(self, source: object) -> None:
        if source == self._wake_out:
            os.read(self._wake_out, 4096)
        elif source == self._host.fileno():
            for news in self._host.collect():
                if isinstance(news, Ended):
                    self._bury(news.process, news.exit_code)
        elif isinstance(source, Connection):
            self._hear(source)
        else:
            line = self._listener.accept()
            self._lines[line.recv()] = line
            self._selector.register(line, selectors.EVENT_READ)

    def _hear(self, line: Connection[Any, Any]) -> None:
        number = next((one for one, known in self._lines.items() if known is line), None)
        if number is None:
            return  # buried since it was seen to have something to say
        try:
            went_well, result = cloudpickle.loads(line.recv_bytes())
        except (EOFError, OSError):
            self._selector.unregister(line)  # its end is told by the host
            return
        call = self._doing.pop(number)
        if went_well:
            call.future.set_result(result)
        else:
            call.future.set_exception(result)

    def _bury(self, number: int, code: int) -> None:
        line = self._lines.pop(number, None)
        if line is not None:
            if line.fileno() in self._selector.get_map():
                self._selector.unregister(line)
            line.close()
        call = self._doing.pop(number, None)
        how = signal_name(-code) if code < 0 else f"exit status {code}"
        if call is not None and call.deaths + 1 < MOST_DEATHS:
            call.deaths += 1
            with self._lock:
                self._calls.appendleft(call)
        elif call is not None:
            call.future.set_exception(
                WorkerFailed(f"{MOST_DEATHS} processes that did this call have died, the last by {how}.")
            )
        if self._num_started > 64 * self.workers + MOST_DEATHS * 64:
            raise WorkerFailed(f"{self._num_started} processes were started, and keep dying, the last by {how}.")
        self._start()

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
        for call in [*self._calls, *self._doing.values()]:
            if not call.future.cancel() and not call.future.done():
                call.future.set_exception(self._failure or RuntimeError("The pool was closed."))
        for line in self._lines.values():
            line.close()
        self._listener.close()
        self._selector.close()
        self._host.close()
        os.close(self._wake_out)
        os.close(self._wake_in)
