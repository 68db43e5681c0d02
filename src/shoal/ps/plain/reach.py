"""Where a client has to listen so that its server can answer."""

from __future__ import annotations

import os
import secrets
import socket

from shoal.comm.security import host_of
from shoal.errors import LaunchError, SpecError


def reply_address(server: str) -> str:
    """A place to listen on the network through which the server is reached."""
    if server.startswith("ipc://@"):
        return f"ipc://@shoal-{os.getpid()}-{secrets.token_hex(8)}"
    if server.startswith("ipc:///"):
        return f"{server.rpartition('/')[0]}/*"
    host, port = _split(server)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, there = found[0]
        # Connecting a datagram socket sends nothing; it only asks the system for the way.
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)
            here = probe.getsockname()[0]
    except OSError as error:
        raise LaunchError(f"There is no way to the server's address {server} ({error.strerror}).") from None
    return f"tcp://[{here}]:*" if ":" in here else f"tcp://{here}:*"


def _split(address: str) -> tuple[str, int]:
    transport, _, host_and_port = address.partition("://")
    port = host_and_port.rpartition(":")[2]
    if transport != "tcp" or not host_of(host_and_port) or not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise SpecError(
            f"A server's address is tcp://ADDRESS:PORT, ipc:///FOLDER/NAME or ipc://@NAME, found {address!r}; "
            "copy what the server shows as its address."
        )
    return host_of(host_and_port), int(port)
