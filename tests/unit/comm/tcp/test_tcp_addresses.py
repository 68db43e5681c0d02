"""Which address and port others are to call."""

from __future__ import annotations

import socket

import psutil
import pytest

from shoal.comm.tcp.addresses import (
    address_of,
    bound_address,
    listen,
    listening_at,
    own_address,
    parse_ports,
    split_address,
    target_of,
)
from shoal.errors import LaunchError, SpecError


def test_addresses_are_taken_apart_and_put_together() -> None:
    assert split_address("tcp://10.0.0.1:5000") == ("10.0.0.1", "5000")
    assert split_address("tcp://[fd00::1]:20000-20100") == ("fd00::1", "20000-20100")
    assert listening_at("10.0.0.1") == "tcp://10.0.0.1:*"
    assert listening_at("fd00::1", "20000-20100") == "tcp://[fd00::1]:20000-20100"
    for address in ("10.0.0.1:5000", "ipc:///here", "tcp://:5000", "tcp://host", "tcp://host:"):
        with pytest.raises(SpecError, match=r"tcp://host:port"):
            split_address(address)


def test_ports_are_a_range_with_both_ends() -> None:
    assert parse_ports("20000-20100") == range(20000, 20101)
    assert list(parse_ports("5000")) == [5000]
    for text in ("", "0-5", "5-4", "70000", "1-70000", "a-b", "1-2-3", "²-3"):
        with pytest.raises(SpecError, match="20000-20100"):
            parse_ports(text)


def test_of_a_range_the_first_free_port_is_taken() -> None:
    with listen("tcp://127.0.0.1:*", backlog=1) as taken:
        port = taken.getsockname()[1]
        with listen(f"tcp://127.0.0.1:{port}-{port + 20}", backlog=1) as other:
            assert port < other.getsockname()[1] <= port + 20
        with pytest.raises(LaunchError, match=f"Ports {port}-{port} .* others use them all"):
            listen(f"tcp://127.0.0.1:{port}-{port}", backlog=1)


def test_ipv6_is_an_address_like_any_other() -> None:
    with listen("tcp://[::1]:*", backlog=1) as listener:
        address = bound_address(listener)
        assert address == f"tcp://[::1]:{listener.getsockname()[1]}"
        family, target = target_of(address)
        assert family == socket.AF_INET6 and target[0] == "::1"


def test_this_hosts_address_is_the_one_on_the_way_to_the_other() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("::1") == "::1"
    with pytest.raises(LaunchError, match=r"no way to no\.such\.host\.invalid .*--interface"):
        own_address("no.such.host.invalid")


def test_or_that_of_the_interface_that_was_named() -> None:
    loopback = next(
        name for name, found in psutil.net_if_addrs().items() if any(one.address == "127.0.0.1" for one in found)
    )
    assert own_address("10.0.0.1", loopback) == address_of(loopback) == "127.0.0.1"
    with pytest.raises(SpecError, match=rf"Interface 'eth99' is not known\..*{loopback}"):
        address_of("eth99")


def test_what_cannot_be_called_is_a_clear_error() -> None:
    for address in ("tcp://127.0.0.1:http-alt", "tcp://127.0.0.1:*", "tcp://no.such.host.invalid:5"):
        with pytest.raises(SpecError, match="cannot be called"):
            target_of(address)
