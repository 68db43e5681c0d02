"""The desk: workers fetch what is to be predicted there, and bring what they made of it.

It alone knows which rows have been given on. So workers may come and go: each attempt begins with the first batch
whose rows are missing, and gets the same records for it.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.comm.channel import Channel
from shoal.comm.desk_words import FROM_WORKERS, BatchAsked, BatchGiven, NoMore, RowsMade, RowsTaken
from shoal.comm.parcel_lines import MemoryLine, ParcelLine, StreamLine
from shoal.comm.security import RunKey
from shoal.comm.socket_folder import SocketFolder
from shoal.comm.tcp.stream_channel import ChannelDoor
from shoal.errors import PeerLost, ProtocolError
from shoal.launch.prediction.inflow import Inflow
from shoal.spec.told import read_message

if TYPE_CHECKING:
    import numpy as np

Rows: TypeAlias = "Mapping[str, np.ndarray]"
"""By name: what the model returned for each sample of a batch."""
_LOOK_EVERY_S = 0.2
Deliver: TypeAlias = Callable[[Rows], None]
"""Takes the rows of the next batch; may take its time. What it raises ends the prediction."""


class RowOrder:
    """Rows by the number of their batch, given on in order."""

    def __init__(self) -> None:
        self.next = 0
        """The first batch whose rows are not there."""
        self._early: dict[int, Rows | None] = {}

    def put(self, number: int, rows: Rows | None) -> list[Rows]:
        """Take a batch's rows, if any; those that can be given on now. What comes again is passed over."""
        if number >= self.next:
            self._early.setdefault(number, rows)
        ready = []
        while self.next in self._early:
            if (found := self._early.pop(self.next)) is not None:
                ready.append(found)
            self.next += 1
        return ready


class PredictionDesk:
    """Listens at a socket of its own; each worker is served by a thread."""

    def __init__(
        self,
        deliver: Deliver,
        on_error: Callable[[], None],
        *,
        most_ahead: int,
        inflow: Inflow | None = None,
        reached_at: str = "",
    ) -> None:
        """`most_ahead`: batches whose rows are kept while those of another are waited for. `on_error` is called
        when `deliver` has raised. `reached_at`: where workers of other hosts call, as `tcp://10.0.0.1:*`; nothing
        where all are on this one."""
        self._deliver = deliver
        self._on_error = on_error
        self._most_ahead = most_ahead
        self._inflow = inflow
        self.error: BaseException | None = None
        """What `deliver` raised, or whoever makes a batch travel."""
        self.num_rows = 0
        """Rows that were given on."""
        self._order = RowOrder()
        self._attempt = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._entrance: _HostEntrance | _NetworkEntrance = (
            _NetworkEntrance(reached_at) if reached_at else _HostEntrance()
        )
        self.options = self._entrance.options
        """By which workers find the desk, and prove that they may."""
        self._threads = [threading.Thread(target=self._welcome, name="shoal-desk", daemon=True)]
        self._threads[0].start()

    def begin_attempt(self) -> int:
        """All workers are new from now on: what those before have brought and was not taken, is not.

        The first batch whose rows are missing: all of them begin there.
        """
        with self._changed:
            self._attempt += 1
            self._changed.notify_all()
            return self._order.next

    def close(self) -> None:
        """Serve nobody any more; all workers have ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._inflow is not None:
            self._inflow.close()
        self._entrance.stop()
        for thread in self._threads:  # the first one adds no more once it has ended
            thread.join()
        self._entrance.close()

    def _welcome(self) -> None:
        while (lines := self._entrance.wait()) is not None:
            for line in lines:
                name = f"shoal-desk-{len(self._threads)}"
                thread = threading.Thread(target=self._serve, args=(line, self._attempt), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, line: ParcelLine, attempt: int) -> None:
        """Answer one worker of an attempt until it ends."""
        try:
            while True:
                message, buffers = line.receive(lambda: self._is_closed or attempt != self._attempt)
                match word := read_message(message, FROM_WORKERS):
                    case BatchAsked():
                        self._give(line, word, attempt)
                    case RowsMade():
                        self._take(word.number, _rows_of(word, buffers), attempt)
                        line.send(RowsTaken())
        except (PeerLost, ProtocolError):
            pass  # Its end is told by whoever reaps it.
        except BaseException as error:
            self.error = self.error or error
            self._on_error()
        finally:
            line.close()

    def _give(self, line: ParcelLine, asked: BatchAsked, attempt: int) -> None:
        assert self._inflow is not None, "only where records come in are they asked for"
        batch = self._inflow.batch(asked.number, asked.most, waits=asked.waits)
        if batch is None:
            line.send(NoMore())
            return
        if not batch.records:
            self._take(asked.number, None, attempt)
        buffers = self._inflow.source.encode(batch.records)
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        given = BatchGiven(form=self._inflow.source.form, count=len(batch.records), start=batch.start, sizes=sizes)
        line.send(given, buffers)

    def _take(self, number: int, rows: Rows | None, attempt: int) -> None:
        """Give on what can be, and return once the others have caught up with this batch."""
        with self._changed:
            if attempt != self._attempt:
                return
            for ready in self._order.put(number, rows):
                if self.error is None:
                    self._deliver(ready)
                    self.num_rows += len(next(iter(ready.values())))
            if self._inflow is not None:
                self._inflow.forget(self._order.next)
            self._changed.notify_all()
            limit = number - self._most_ahead
            self._changed.wait_for(lambda: self._is_closed or attempt != self._attempt or self._order.next > limit)


class _HostEntrance:
    """Where workers of this host come in, and no other user."""

    def __init__(self) -> None:
        self._folder = SocketFolder()
        address = f"{self._folder.path}/desk"
        self.options = {"desk": address}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen()

    def wait(self) -> list[ParcelLine] | None:
        """Those who have come; None once stopped."""
        try:
            channel = Channel(self._listener.accept()[0], "a worker")
        except OSError:
            return None
        if channel.peer_uid() != os.getuid():
            channel.close()
            return []
        return [MemoryLine(channel)]

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self._folder.close()


class _NetworkEntrance:
    """Where workers of other hosts come in, who have the key of this desk."""

    def __init__(self, address: str) -> None:
        key = RunKey.create()
        self._door = ChannelDoor(address, key, encrypt=True)
        self.options = {"desk": self._door.address, "desk_key": key.text}
        self._is_stopped = False

    def wait(self) -> list[ParcelLine] | None:
        """Those who have come; None once stopped."""
        select.select([self._door], [], [], _LOOK_EVERY_S)
        return None if self._is_stopped else [StreamLine(channel) for channel in self._door.collect()]

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        self._door.close()


def _rows_of(made: RowsMade, buffers: list[memoryview]) -> Rows:
    import numpy as np

    parts: dict[str, Any] = {}
    for (name, dtype, shape), memory in zip(made.arrays, buffers, strict=True):
        parts[name] = np.frombuffer(memory, dtype=dtype, count=math.prod(shape)).reshape(shape)
    return parts
