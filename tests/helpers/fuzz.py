"""Damaged packets by seed, and a driver that sends them to a port together with bytes that are no packets."""

from __future__ import annotations

import random
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence

import msgpack
import torch

from shoal.comm.codec import Message, checksum, encode
from shoal.comm.envelope import Envelope, PacketKind
from shoal.comm.security import RunKey
from shoal.comm.zmq_wire import ZmqWire

LINGER_S = 60.0
GUARD_S = 20.0

Packet = list[bytes]


def valid_packets(sender: int = 1, rows: int = 32) -> list[Packet]:
    """A few genuine messages, as `sender` would put them on the wire; one has a table of so many rows."""
    messages = [
        Message("step", {"step": 7, "loss": 0.25, "who": [1, 2, None]}),
        # Large enough that memory would tell if damaged packets were kept.
        Message("push", {"block": "layer.0"}, [torch.arange(64.0 * rows).view(rows, 64), b"plain"]),
        Message("pull", {"blocks": list(range(40))}, [torch.zeros(3, 0), torch.ones(5, dtype=torch.int8)]),
    ]
    return [
        [_envelope(sender, sequence), *map(bytes, encode(message))]
        for sequence, message in enumerate(messages, start=2)
    ]


def damaged_packets(count: int, seed: int, valid: Sequence[Packet] = ()) -> Iterator[Packet]:
    """Packets made from valid ones, none of which may be accepted."""
    dice = random.Random(seed)
    packets = list(valid) or valid_packets()
    for _ in range(count):
        damage = dice.choice(_DAMAGES)
        yield damage(list(dice.choice(packets)), dice)


def fuzz_port(
    address: str,
    key: RunKey,
    frames: int,
    seed: int,
    *,
    valid: Sequence[Packet] = (),
    connections: int = 100,
    encrypt: bool = False,
) -> int:
    """Send so many damaged packets with the right key, then garbage on so many bare connections.

    The listener must be polled meanwhile by somebody else, or nobody is let in. Returns the packets' bytes.
    """
    sent_bytes = 0
    own_address = "tcp://127.0.0.1:*" if address.startswith("tcp") else f"ipc://@shoal-{secrets.token_hex(8)}"
    with ZmqWire(own_address, key=key, encrypt=encrypt or None, linger_s=LINGER_S) as peer:
        peer.connect(0, address)
        for packet in damaged_packets(frames, seed, valid):
            peer.transmit(0, list(packet))
            sent_bytes += sum(map(len, packet))
    dice = random.Random(seed)
    for _ in range(connections):
        send_garbage(address, dice.choice(_GARBAGE)(dice))
    return sent_bytes


def send_garbage(address: str, garbage: bytes) -> None:
    """Send bytes on a bare connection; the other side may hang up in the middle of them."""
    with bare_connection(address) as connection:
        try:
            connection.sendall(garbage)
        except (BrokenPipeError, ConnectionResetError):
            pass


def bare_connection(address: str) -> socket.socket:
    """A bare socket, connected to where a wire listens."""
    transport, _, where = address.partition("://")
    if transport == "tcp":
        host, _, port = where.rpartition(":")
        return socket.create_connection((host, int(port)), GUARD_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(GUARD_S)
    connection.connect(where.replace("@", "\0", 1))
    return connection


def greeting(mechanism: bytes) -> bytes:
    """The first 64 bytes of a ZeroMQ connection."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def announced_command(size: int) -> bytes:
    """The start of a handshake's command that announces so many bytes."""
    return b"\x06" + struct.pack(">Q", size)


def _envelope(sender: int, sequence: int) -> bytes:
    return Envelope(PacketKind.MESSAGE, sender, 0, sequence, 0).pack()


def _random_bytes(packet: Packet, dice: random.Random) -> Packet:
    return [dice.randbytes(dice.randrange(200)) for _ in range(dice.randint(1, 4))]


def _random_body(packet: Packet, dice: random.Random) -> Packet:
    return [packet[0], *_random_bytes(packet, dice)]


def _truncated(packet: Packet, dice: random.Random) -> Packet:
    victim = dice.choice([index for index, part in enumerate(packet) if part])
    packet[victim] = packet[victim][: dice.randrange(len(packet[victim]))]
    return packet


def _bit_flipped(packet: Packet, dice: random.Random) -> Packet:
    victim = dice.choice([index for index, part in enumerate(packet) if part])
    part = bytearray(packet[victim])
    part[dice.randrange(len(part))] ^= 1 << dice.randrange(8)
    packet[victim] = bytes(part)
    return packet


def _part_lost(packet: Packet, dice: random.Random) -> Packet:
    del packet[dice.randrange(len(packet))]
    return packet


def _part_added(packet: Packet, dice: random.Random) -> Packet:
    packet.insert(dice.randint(1, len(packet)), dice.randbytes(dice.randrange(64)))
    return packet


def _oversized(packet: Packet, dice: random.Random) -> Packet:
    """Right checksums, but the header announces what is not there."""
    header = dice.choice(_MONSTROUS_HEADERS)
    return [packet[0], checksum(header).to_bytes(8, "little") + header, *packet[2:]]


def _with_shape(*shape: object, dtype: str = "float32") -> bytes:
    return msgpack.packb(["push", {}, [[dtype, list(shape), checksum(b"")]]])


_MONSTROUS_HEADERS = [
    _with_shape(1 << 62),
    _with_shape(1 << 31, 1 << 31, 1 << 31),
    _with_shape(0, (1 << 64) - 1),
    _with_shape(-1),
    _with_shape(True),
    _with_shape(1.5),
    _with_shape(*[1] * 500),
    _with_shape(1 << 40, dtype=""),
    _with_shape(1, dtype="object"),
    msgpack.packb(["push", {}, [["float32", [1], 0]] * 50]),
    msgpack.packb(["push", [], {}]),
    b"\x93\xa4push\x80\xdd\xff\xff\xff\xff",  # a list of 4 thousand million entries
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xc6\xff\xff\xff\xffx",  # as many bytes
    b"\xdb\xff\xff\xff\xffx",  # as long a text
    b"\x91" * 5000,  # lists in lists
    b"\x93\xa1k\x81\x90\x90\x90",  # a list as the key of a map
    b"\x93\xa1k\x81\xa1\xff\x01\x90",  # no UTF-8
    b"\xc9\xff\xff\xff\xff\x05",  # an extension type
]
_DAMAGES: list[Callable[[Packet, random.Random], Packet]] = [
    *(_random_bytes, _random_body, _truncated, _bit_flipped, _bit_flipped, _part_lost, _part_added, _oversized),
]
_GARBAGE: list[Callable[[random.Random], bytes]] = [
    lambda dice: dice.randbytes(dice.randrange(1, 5000)),
    lambda dice: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    lambda dice: greeting(b"PLAIN")[: dice.randrange(64)],
    lambda dice: greeting(b"NULL") + b"\x04\x06\x05READY",
    lambda dice: greeting(dice.choice([b"PLAIN", b"CURVE"])) + dice.randbytes(dice.randrange(1, 400)),
    lambda dice: greeting(b"PLAIN") + b"\x04\x0c\x05HELLO\x05shoal" + dice.randbytes(50),
    lambda dice: greeting(b"PLAIN") + announced_command(1 << dice.randrange(10, 63)) + dice.randbytes(1000),
    lambda dice: b"\x01\x00" + b"\x7f" + dice.randbytes(100),  # as the first ZeroMQ spoke
]
