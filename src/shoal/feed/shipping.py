"""Samples for workers that hold no copy of the data: the first worker reads them and sends them.

The holder listens in the host's folder of sockets under a name that all know, so nobody has to be told where it
is, and who takes the first worker's place takes the name, too. On several hosts it listens at a port of its host,
which all know, too: where the first worker is follows from who is where.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from shoal.comm.codec import Message, decode, encode
from shoal.comm.reliable import Packet
from shoal.comm.security import RunKey
from shoal.comm.zmq_wire import ZmqWire
from shoal.datasets import Shipped
from shoal.datasets.stream import ForwardOnly
from shoal.errors import CommTimeout, LaunchError, ProtocolError, SpecError, TaskError
from shoal.feed.sample_codec import pack, unpack
from shoal.spec import Task, World
from shoal.spec.vocabulary import Role

_HOLDER = 0
_LOOK_EVERY_S = 0.1
_ASK_AGAIN_S = 1.0
_PATIENCE_S = 600.0
"""Making the data set may take long; a holder that died is replaced."""
_LOST_AFTER_S = 5.0
"""Workers of one run do not all start at the same moment."""
_MOST_SAMPLES = 128
"""Samples of one message: each may have a few dozen tensors."""


def open_dataset(task: Task, part: str, world: Callable[[], World]) -> Any:
    """The `train` or `test` set as this process gets it; `world` tells where the process stands at any time."""
    given, here = getattr(task, part), world()
    if not isinstance(given, Shipped) or (here.world_size == 1 and not here.secret):
        return task.dataset(part)
    if not here.secret:
        raise SpecError(
            f"Task: the {part} set is Shipped, but these processes have no key of a run to send samples by; start "
            "them with `shoal train`, or let every process make the set."
        )
    return ShippedSet(given, part, world)


def read_samples(dataset: Any, numbers: Sequence[int]) -> list[Any]:
    """These samples, at once where the data set can."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(list(numbers))
    return [dataset[number] for number in numbers]


class ShippedSet:
    """A shipped data set: this process's own where it is the holder, else what the holder sends."""

    def __init__(self, shipped: Shipped, part: str, world: Callable[[], World]) -> None:
        if world().is_spread and world().coordinator:
            raise TaskError(
                "Shipped: with servers nobody knows where the first worker is, once it was followed by another on "
                "one of several hosts; use data, or let every worker read the set itself."
            )
        self._shipped = shipped
        self._world = world
        self._key = RunKey.from_text(world().secret)
        self._part = part
        self._one_at_a_time = threading.Lock()
        self._reading = threading.Lock()  # a data set need not stand two readers
        self._length: int | None = None
        self._held: Any = None
        self._server: SampleServer | None = None
        self._client: SampleClient | None = None
        self._is_closed = False

    def __len__(self) -> int:
        if self._length is None:
            self._length, _ = self._ask([])
        return self._length

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """These samples, from here or from the holder."""
        starts = range(0, len(numbers), _MOST_SAMPLES)
        return [sample for at in starts for sample in self._ask(numbers[at : at + _MOST_SAMPLES])[1]]

    def take_post(self) -> None:
        """Serve the others, where this process has become the holder and they may wait for it."""
        if self._world().is_first and self._server is None:
            self._ask([])

    def close(self) -> None:
        """Neither ask nor serve any more."""
        self._is_closed = True
        with self._one_at_a_time:
            for end in (self._server, self._client):
                if end is not None:
                    end.close()

    @property
    def _address(self) -> str:
        """Where the holder listens."""
        world = self._world()
        if not world.is_spread:
            return f"ipc://{world.sockets}/{self._part}"
        if (number := world.first_host) >= len(world.doors):
            raise TaskError(
                "Shipped: the first worker is on a host that came later, and nobody knows where it sends samples "
                "from; begin again with all hosts, from a checkpoint."
            )
        train, test = world.doors[number]
        return f"tcp://{train if self._part == 'train' else test}"

    def _ask(self, numbers: Sequence[int]) -> tuple[int, list[Any]]:
        """The length of the set, and these samples."""
        with self._one_at_a_time:
            begun = time.monotonic()
            while not self._is_closed and time.monotonic() - begun < _PATIENCE_S:
                if self._may_make():
                    return self._read_here(numbers)
                if self._client is not None and self._client.address != self._address:
                    self._client.close()  # The first worker is elsewhere now.
                    self._client = None
                if self._client is None:
                    world = self._world()
                    listens_at = world.any_port if world.is_spread else world.any_socket
                    self._client = SampleClient(self._address, self._key, listens_at, encrypt=world.encrypts)
                if (answer := self._client.ask(numbers)) is not None:
                    return answer
        raise CommTimeout(
            f"The worker that holds the data sent nothing for {time.monotonic() - begun:.0f} s; see where it is."
        )

    def _may_make(self) -> bool:
        """The first worker makes the set; so does a spare that finds nobody: it may be the first soon."""
        lost_s = 0.0 if self._client is None else self._client.lost_s
        return self._world().is_first or (self._world().role == Role.SPARE and lost_s > _LOST_AFTER_S)

    def _read_here(self, numbers: Sequence[int]) -> tuple[int, list[Any]]:
        with self._reading:
            if self._server is None and self._world().is_first:
                # Listen first: then the others see that there is a holder, however long it takes to make the set.
                with suppress(LaunchError):  # Who was the first before still serves; tried again next time.
                    encrypt = self._world().encrypts
                    self._server = SampleServer(
                        lambda: self._held, self._reading, self._address, self._key, encrypt=encrypt
                    )
            if self._held is None:
                self._held = self._shipped()
                if isinstance(self._held, ForwardOnly):
                    raise TaskError(
                        "Shipped: the data is read forward only, as streams are; let every worker read it itself."
                    )
            return len(self._held), read_samples(self._held, numbers)


class SampleServer:
    """Sends samples of a data set to those who have the run's key, from a thread of its own."""

    def __init__(
        self,
        held: Callable[[], Any],
        reading: threading.Lock,
        address: str,
        key: RunKey,
        *,
        encrypt: bool | None = None,
    ) -> None:
        self._held = held
        self._reading = reading
        self._wire = ZmqWire(address, key=key, encrypt=encrypt)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="shoal-samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no more."""
        self._is_closed.set()
        self._thread.join()

    def _serve(self) -> None:
        with self._wire:
            while not self._is_closed.is_set():
                packet = self._wire.poll(_LOOK_EVERY_S)
                for peer in self._wire.gone():
                    self._wire.disconnect(peer)
                if packet is not None:
                    self._answer(packet)

    def _answer(self, packet: Packet) -> None:
        try:
            fields = decode(packet).fields
            peer, reply_to, numbers = fields["peer"], fields["reply_to"], fields["numbers"]
            if peer not in self._wire.peers:
                self._wire.connect(peer, reply_to)
        except (ProtocolError, SpecError, KeyError, TypeError):
            return  # It will ask again, if it is one of ours.
        frames: list[Any] = []
        try:
            with self._reading:
                dataset = self._held()
                length, samples = len(dataset), read_samples(dataset, numbers)
            packed = [pack(sample, frames) for sample in samples]
            answer = {"sequence": fields.get("sequence"), "length": length, "samples": packed}
            message = encode(Message("samples", answer, frames))
        except Exception as error:
            told = {"sequence": fields.get("sequence"), "error": f"{type(error).__name__}: {error}"}
            message = encode(Message("samples", told))
        self._wire.transmit(peer, message)


class SampleClient:
    """Asks the holder for samples."""

    def __init__(self, address: str, key: RunKey, listens_at: str, *, encrypt: bool | None = None) -> None:
        self.address = address
        """Whom it asks."""
        self._peer = secrets.randbits(62)
        self._sequence = 0
        self._heard_at = time.monotonic()
        self._wire = ZmqWire(listens_at, key=key, linger_s=0.0, encrypt=encrypt)
        self._wire.connect(_HOLDER, address)

    @property
    def lost_s(self) -> float:
        """For how long there has been nobody to ask."""
        return time.monotonic() - self._heard_at

    def ask(self, numbers: Sequence[int]) -> tuple[int, list[Any]] | None:
        """The set's length and these samples; None where no answer came within a while, or the holder is gone."""
        self._sequence += 1
        if _HOLDER in self._wire.gone():
            self._wire.connect(_HOLDER, self.address)
        question = {
            "peer": self._peer,
            "reply_to": self._wire.address,
            "sequence": self._sequence,
            "numbers": [int(number) for number in numbers],
        }
        self._wire.transmit(_HOLDER, encode(Message("ask", question)))
        deadline = time.monotonic() + _ASK_AGAIN_S
        while time.monotonic() < deadline:
            packet = self._wire.poll(_LOOK_EVERY_S)
            if _HOLDER in self._wire.gone():
                return None
            if packet is not None and (answer := self._read(packet)) is not None:
                self._heard_at = time.monotonic()
                return answer
        self._heard_at = time.monotonic()  # It is there, and busy.
        return None

    def close(self) -> None:
        """Ask no more."""
        self._wire.close()

    def _read(self, packet: Packet) -> tuple[int, list[Any]] | None:
        try:
            message = decode(packet)
            fields = message.fields
            if fields.get("sequence") != self._sequence:
                return None
            if "error" in fields:
                raise TaskError(f"The worker that holds the data could not read it: {fields['error']}")
            frames = list(message.frames)
            return int(fields["length"]), [unpack(sample, frames) for sample in fields["samples"]]
        except (ProtocolError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, TaskError):
                raise
            return None  # Damaged on the way: it will be asked for again.
