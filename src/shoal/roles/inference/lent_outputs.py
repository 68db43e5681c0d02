"""Kept outputs of other hosts: each worker lends those that lie on its own, and who computes the metrics fetches
what it lacks."""

from __future__ import annotations

import os
import select
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from shoal.comm.security import RunKey
from shoal.comm.tcp.stream_channel import ChannelDoor, StreamChannel
from shoal.errors import CommError, ProtocolError
from shoal.observe.disk import writing
from shoal.spec import World

_LOOK_EVERY_S = 0.1
_PIECE_BYTES = 4 << 20


class OutputLender:
    """Sends the files of a folder to those who have the run's key, from a thread of its own."""

    def __init__(self, folder: Path, world: World) -> None:
        self._folder = folder
        self._door = ChannelDoor(world.any_port, RunKey.from_text(world.secret), encrypt=world.encrypts)
        self.address = self._door.address
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="shoal-outputs", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self._thread.join()
        self._door.close()

    def _serve(self) -> None:
        lines: list[StreamChannel] = []
        while not self._is_closed.is_set():
            watched: list[ChannelDoor | StreamChannel] = [self._door, *lines]
            select.select(watched, [], [], _LOOK_EVERY_S)
            lines += self._door.collect()
            for line in list(lines):
                try:
                    while (asked := line.poll()) is not None:
                        line.send(self._answer(asked))
                except CommError:
                    lines.remove(line)
                    line.close()
        for line in lines:
            line.close()

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        there = sorted(os.listdir(self._folder)) if self._folder.is_dir() else []
        if (name := asked.get("name")) is None:
            return {"kind": "names", "names": there}
        if name not in there:
            raise ProtocolError(f"{name!r} is not among what is lent.")
        with (self._folder / name).open("rb") as file:
            file.seek(int(asked["at"]))
            return {"kind": "piece", "content": file.read(_PIECE_BYTES)}


def fetch_outputs(addresses: Iterable[str], folder: Path, world: World) -> None:
    """Have all that lies on other hosts here, too."""
    for address in addresses:
        line = StreamChannel.call(address, RunKey.from_text(world.secret), encrypt=world.encrypts)
        try:
            names = _ask(line, {})["names"]
            for name in names:
                # What is still being written has another form of name; what is here, is the same there.
                if _is_whole(name) and not (folder / name).exists():
                    _fetch(line, name, folder)
        finally:
            line.close()


def _fetch(line: StreamChannel, name: str, folder: Path) -> None:
    with writing(folder):
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            while content := _ask(line, {"name": name, "at": file.tell()})["content"]:
                file.write(content)
        os.replace(file.name, folder / name)


def _ask(line: StreamChannel, question: dict[str, Any]) -> dict[str, Any]:
    line.send({"kind": "lend", **question})
    answer = line.receive(None)
    assert answer is not None, "it waits for as long as it takes"
    return answer


def _is_whole(name: str) -> bool:
    metric, _, lane = name.partition("-")
    return metric.isdigit() and lane.isdigit()
