"""Which address and port of this host others are to call.

tcp://10.0.0.1:5000          that port
tcp://10.0.0.1:*             any free one
tcp://10.0.0.1:20000-20100   the first free one of these
tcp://[fd00::1]:5000         IPv6
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Any

import psutil

from shoal.errors import LaunchError, SpecError, unknown

TCP = "tcp://"
_ANY_PORT = "*"
_LAST_PORT = 65535
_ALL_INTERFACES = ("", "*", "0.0.0.0", "::")
_ANYWHERE = 9
"""Any port will do to ask the kernel for a route: nothing is sent."""


def split_address(address: str) -> tuple[str, str]:
    """Host and port, as texts, of a tcp address."""
    host, _, port = address.removeprefix(TCP).rpartition(":")
    if not address.startswith(TCP) or not host or not port:
        raise SpecError(f"{address!r} is no tcp address; write tcp://host:port, and IPv6 as tcp://[host]:port.")
    return host.strip("[]"), port


def listening_at(host: str, ports: str = "") -> str:
    """The address to listen at: any free port of this host's address, or one of a range."""
    return f"{TCP}{f'[{host}]' if ':' in host else host}:{ports or _ANY_PORT}"


def parse_ports(text: str) -> range:
    """The ports that `20000-20100` names, or `20000`."""
    found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text.strip(), re.ASCII)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < first <= last <= _LAST_PORT:
        raise SpecError(f"Ports are written as in 20000-20100, from 1 to {_LAST_PORT}, found {text!r}.")
    return range(first, last + 1)


def own_address(towards: str, interface: str = "") -> str:
    """This host's address that others are to call: on the way to the host `towards`, or that of an interface."""
    return address_of(interface) if interface else _address_on_route(towards)


def address_of(interface: str) -> str:
    """The address of an interface by its name; IPv4 where it has one."""
    known = psutil.net_if_addrs()
    if interface not in known:
        raise unknown("Interface", interface, known)
    found = [one.address for one in known[interface] if one.family in (socket.AF_INET, socket.AF_INET6)]
    found = [one for one in found if not ipaddress.ip_address(one.partition("%")[0]).is_link_local]
    if not found:
        raise SpecError(
            f"Interface {interface} has no address that others could call; give it one, or name another."
        )
    return min(found, key=lambda one: ":" in one)


def _address_on_route(towards: str) -> str:
    try:
        family, kind, _, _, target = socket.getaddrinfo(towards, _ANYWHERE, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError as error:
        raise LaunchError(
            f"This host finds no way to {towards} ({error.strerror}); check the name and the network, or name the "
            "interface with --interface."
        ) from None


def listen(address: str, *, backlog: int) -> socket.socket:
    """A socket that listens at one address of this host."""
    host, port = split_address(address)
    if host in _ALL_INTERFACES:
        raise SpecError(
            f"{address} listens on every network of this machine; name the one address that the others reach."
        )
    ports: Iterable[int] = [0] if port == _ANY_PORT else parse_ports(port)
    for number in ports:
        try:
            return _bound(host, number, backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise LaunchError(f"This process cannot listen on {address}: {error.strerror}.") from None
    if "-" in port:
        raise LaunchError(f"Ports {port} on {host} were asked for, but others use them all; name more of them.")
    raise LaunchError(
        f"Port {port} on {host} was asked for, but another process uses it; "
        "choose another port, or leave it out to get any free one."
    )


def bound_address(listener: socket.socket) -> str:
    """Where a socket listens."""
    host, port = listener.getsockname()[:2]
    return listening_at(host, str(port))


def target_of(address: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """What the kernel wants to know of an address that is to be called."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:
        raise SpecError(f"{address!r} cannot be called ({error}); write it as the listener does.") from None
    return found[0], found[4]


def _bound(host: str, port: int, backlog: int) -> socket.socket:
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port that only waits out its last connection is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
