"""Both ends of a bandwidth measurement: senders, and a process that only acknowledges what it is sent.

`python -m benchmarks.receiver shoal` speaks Shoal's protocol and checks every checksum; `bare` is a ZeroMQ loop
as short as it can be. Both read where the sender listens from standard input and print where they listen.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import zmq

from benchmarks.fresh import module_command, surroundings
from shoal.arena.malloc import keep_freed_memory
from shoal.comm.codec import Buffer
from shoal.comm.security import RunKey
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import CommTimeout, LaunchError, PeerLost
from shoal.ps.messages import Ack, PsMessage, Push, PushOutcome
from shoal.ps.node import decode_bundle, encode_bundle

SENDER, RECEIVER = 1, 2
ANY_PORT = "tcp://127.0.0.1:*"
BUFFER_BYTES = 1 << 20
"""As Shoal's own sockets have."""
LOOK_EVERY_S = 0.5
PATIENCE_S = 60


class ShoalSender:
    """Pushes over Shoal's wire, to a receiver that it starts."""

    def __init__(self) -> None:
        key = RunKey.create()
        self._wire = ZmqWire(ANY_PORT, key=key)
        self._process, address = _start("shoal", f"{key.text} {self._wire.address}")
        self._wire.connect(RECEIVER, address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_receiver()
        self._wire.close()

    def kill_receiver(self) -> None:
        """End the other process."""
        _stop(self._process)

    def send(self, pushes: Sequence[Push]) -> None:
        """Each as a packet of its own; returns when all are acknowledged."""
        for push in pushes:
            self._wire.transmit(RECEIVER, encode_bundle(SENDER, [push]))
        missing = len(pushes)
        while missing:
            if (packet := self._wire.poll(LOOK_EVERY_S)) is not None:
                missing -= len(decode_bundle(packet)[1])
            elif RECEIVER in self._wire.gone():
                raise PeerLost("bench: the receiver of a bandwidth measurement ended; what it said is above.")


class BareSender:
    """The same frames over bare sockets, to a receiver that it starts."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._pull = _bare_socket(self._context, zmq.PULL)
        self._pull.bind(ANY_PORT)
        self._process, address = _start("bare", self._pull.get_string(zmq.LAST_ENDPOINT))
        self._push = _bare_socket(self._context, zmq.PUSH)
        self._push.connect(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _stop(self._process)
        self._context.destroy(linger=0)

    def send(self, packets: Sequence[Sequence[Buffer]]) -> None:
        """Returns when each packet has been answered by one byte."""
        for packet in packets:
            self._push.send_multipart(packet, copy=False)
        for _ in packets:
            if not self._pull.poll(PATIENCE_S * 1000):
                raise CommTimeout(f"bench: the bare ZeroMQ loop did not answer within {PATIENCE_S} s.")
            self._pull.recv()


def _start(kind: str, words: str) -> tuple[subprocess.Popen[str], str]:
    command = module_command("receiver", kind)
    process = subprocess.Popen(
        command, env=surroundings(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(words + "\n")
    process.stdin.flush()
    if not (address := process.stdout.readline().strip()):
        _stop(process)
        raise LaunchError(f"bench: `{' '.join(command)}` ended before it listened; what it said is above.")
    return process, address


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _bare_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.set(zmq.SNDBUF, BUFFER_BYTES)
    socket.set(zmq.RCVBUF, BUFFER_BYTES)
    return socket


def receive_shoal(words: str) -> None:
    """Acknowledge pushes until killed."""
    secret, sender = words.split()
    with ZmqWire(ANY_PORT, key=RunKey.from_text(secret)) as wire:
        wire.connect(SENDER, sender)
        print(wire.address, flush=True)
        while SENDER not in wire.gone():
            _answer_next(wire)


def _answer_next(wire: ZmqWire) -> None:
    """Acknowledge one packet. As on a server nothing of it is left afterwards: its memory serves the next one."""
    if (packet := wire.poll(LOOK_EVERY_S)) is not None:
        _, messages = decode_bundle(packet)
        wire.transmit(SENDER, encode_bundle(RECEIVER, [_acknowledge(message) for message in messages]))


def _acknowledge(message: PsMessage) -> Ack:
    assert isinstance(message, Push)
    return Ack(
        shard=message.shard,
        generation=message.generation,
        sequence=message.sequence,
        outcome=PushOutcome.APPLIED.value,
        version=message.sequence,
        floor=0,
        rounds=0,
    )


def receive_bare(words: str) -> None:
    """Answer every packet with one byte until killed."""
    context = zmq.Context()
    pull, push = _bare_socket(context, zmq.PULL), _bare_socket(context, zmq.PUSH)
    pull.bind(ANY_PORT)
    push.connect(words)
    print(pull.get_string(zmq.LAST_ENDPOINT), flush=True)
    while True:
        pull.recv_multipart(copy=False)
        push.send(b"!")


if __name__ == "__main__":
    keep_freed_memory()  # As servers do; both of them, so that a difference comes from nothing else.
    {"shoal": receive_shoal, "bare": receive_bare}[sys.argv[1]](sys.stdin.readline().strip())
