"""Rows for the program that asked for them, one after the other, while workers compute the next."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from queue import Full, Queue
from typing import Any

from shoal.launch.prediction.attempts import Prediction
from shoal.launch.prediction.desk import Rows
from shoal.launch.prediction.output import each_row

_MOST_WAITING = 2
"""Batches of rows that wait for their reader; all else waits with them."""
_LOOK_EVERY_S = 0.1


class ReaderLeft(Exception):
    """Nobody wants more rows."""


class RowQueue:
    """Hands batches of rows from the threads that get them to the one that reads."""

    def __init__(self) -> None:
        self._queue: Queue[Rows | None] = Queue(_MOST_WAITING)
        self._is_left = False

    def put(self, rows: Rows | None) -> None:
        """Wait until there is room. `None` after the last."""
        while not self._is_left:
            try:
                self._queue.put(rows, timeout=_LOOK_EVERY_S)
                return
            except Full:
                continue
        raise ReaderLeft

    def leave(self) -> None:
        """Nobody reads any more."""
        self._is_left = True

    def __iter__(self) -> Iterator[Rows]:
        while (rows := self._queue.get()) is not None:
            yield rows


def rows_as_they_come(prediction: Prediction) -> Generator[Any, None, None]:
    """Run it in a thread of its own; who stops reading ends it."""
    queue, errors = RowQueue(), list[BaseException]()

    def work() -> None:
        try:
            prediction.run(queue.put)
        except BaseException as error:
            errors.append(error)
        try:
            queue.put(None)
        except ReaderLeft:
            pass  # It knows.

    thread = threading.Thread(target=work, name="shoal-prediction", daemon=True)
    thread.start()
    try:
        for rows in queue:
            yield from each_row(rows)
        if errors:
            raise errors[0]
    finally:
        queue.leave()
        prediction.stop()
        thread.join()
