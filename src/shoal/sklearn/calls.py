"""Processes that do calls, one at a time each. What one that died was doing, another does."""

from __future__ import annotations

import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self

import cloudpickle

from shoal.errors import PeerLost, SpecError, WorkerFailed
from shoal.sklearn.call_lines import CallLine, NetworkLine, UnixLine
from shoal.sklearn.staff import LOOK_EVERY_S, make_staff

MOST_DEATHS = 3
"""Of processes that did one call, after which it is taken to be what kills them."""


@dataclass(eq=False)
class _Call:
    content: bytes
    future: Future[Any] = field(default_factory=Future)
    deaths: int = 0


class CallPool:
    """So many processes, forked from zygotes of their hosts: torch is imported in all of them."""

    def __init__(self, workers: int, *, threads: int | None = None, on: str = "local") -> None:
        """`on`: where, as for `shoal train`: `ssh:a,b` and so on."""
        if workers < 1:
            raise SpecError(f"A pool has 1 or more workers, found {workers}.")
        self.workers = workers
        self._staff = make_staff(workers, threads, on)
        self._calls: deque[_Call] = deque()
        self._lines: dict[int, CallLine] = {}
        self._doing: dict[int, _Call] = {}
        self._num_started, self._is_over = 0, False
        self._lock = threading.Lock()
        self._wake_out, self._wake_in = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._selector.register(self._staff.door, selectors.EVENT_READ)
        for host in self._staff.hosts:
            self._selector.register(host, selectors.EVENT_READ)
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
                for key, _ in self._selector.select(LOOK_EVERY_S):
                    self._take(key.fileobj)
                for number, end in self._staff.collect(self._selector):
                    self._bury(number, end)
        except BaseException as error:
            self._failure = error
        finally:
            self._end()

    def _start(self) -> None:
        self._num_started += 1
        self._staff.start(self._num_started)

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
                self._lines[number].send(call.content)
            except PeerLost:
                pass  # It has died, of which its host will tell.

    def _take(self, source: object) -> None:
        if source == self._wake_out:
            os.read(self._wake_out, 4096)
        elif source is self._staff.door:
            for line in self._staff.door.collect():
                self._selector.register(line, selectors.EVENT_READ)
        elif isinstance(source, UnixLine | NetworkLine):
            self._hear(source)

    def _hear(self, line: CallLine) -> None:
        try:
            if (content := line.take()) is None:
                return
        except PeerLost:
            self._selector.unregister(line)  # its end is told by its host
            return
        number = next((one for one, known in self._lines.items() if known is line), None)
        if number is None:  # the first that it says is who it is
            self._lines[int(content)] = line
            return
        went_well, result = cloudpickle.loads(content)
        call = self._doing.pop(number)
        if went_well:
            call.future.set_result(result)
        else:
            call.future.set_exception(result)

    def _bury(self, number: int, how: str) -> None:
        line = self._lines.pop(number, None)
        if line is not None:
            if line.fileno() in self._selector.get_map():
                self._selector.unregister(line)
            line.close()
        call = self._doing.pop(number, None)
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
        self._selector.close()
        self._staff.close()
        os.close(self._wake_out)
        os.close(self._wake_in)
