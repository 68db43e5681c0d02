"""Pushes that wait to be sent, of one worker: which goes first."""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class PushQueue:
    """Sends one after the other, in a thread of its own.

    A key's pushes keep their order, and no second one goes before the first of another key that waits, and so on:
    workers that wait for each other's rounds could not go on otherwise. Of those that may go, the higher priority
    goes first, and then who came first.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shoal-kv")
        self._lock = threading.Lock()
        self._heap: list[tuple[tuple[int, int, int], Callable[[], None], Future[None]]] = []
        self._counts: Counter[str] = Counter()
        self._came = 0

    def add(self, key: str, priority: int, send: Callable[[], None]) -> Future[None]:
        """Send this when it is its turn."""
        future: Future[None] = Future()
        with self._lock:
            self._came += 1
            heapq.heappush(self._heap, ((self._counts[key], -priority, self._came), send, future))
            self._counts[key] += 1
        self._pool.submit(self._send_first)
        return future

    def close(self) -> None:
        """Send what waits, and end."""
        self._pool.shutdown()

    def _send_first(self) -> None:
        with self._lock:
            _, send, future = heapq.heappop(self._heap)
        try:
            send()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
