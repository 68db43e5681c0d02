"""The proof that both ends of a connection have the run's key."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

import pytest

from shoal.comm.security import RunKey
from shoal.comm.tcp.handshake import Guard, Steps, answer, call, read_exactly, write_all
from shoal.errors import CommError, PeerLost, ProtocolError

KEY, OTHER_KEY = RunKey.create(), RunKey.create()
HERE, THERE = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"
LONG = bytes(range(256)) * 4096

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


def meet(pair: Pair, calling: Guard, listening: Guard) -> tuple[object, object]:
    """What the two come to, each in its own time: a socket, or the error that it ended with."""
    return together(call(pair[0], calling), answer(pair[1], listening), pair)


def together(caller: Steps, listener: Steps, pair: Pair) -> tuple[object, object]:
    found: dict[int, object] = {}
    steps = (caller, listener)
    for _ in range(10_000):
        for number in {0, 1} - found.keys():
            try:
                next(steps[number])
            except StopIteration as over:
                found[number] = over.value
            except (OSError, CommError) as error:
                found[number] = error
                pair[number].close()
        if len(found) == 2:
            return found[0], found[1]
    raise AssertionError("they wait for each other")


def both(key: RunKey, *, encrypt: bool) -> Guard:
    return Guard.of(key, HERE, encrypt=encrypt)


@pytest.mark.parametrize("encrypt", [False, True])
def test_who_has_the_key_can_talk(pair: Pair, encrypt: bool) -> None:
    caller, listener = meet(pair, both(KEY, encrypt=encrypt), both(KEY, encrypt=encrypt))
    assert isinstance(caller, socket.socket) and isinstance(listener, socket.socket)
    assert isinstance(caller, ssl.SSLSocket) is encrypt
    if isinstance(caller, ssl.SSLSocket):
        name, version, _ = caller.cipher() or ("", "", 0)
        assert version == "TLSv1.3" and "AES" in name and "GCM" in name
    _, heard = together(write_all(caller, LONG), read_exactly(listener, len(LONG)), pair)
    assert heard == LONG
    caller.close()
    listener.close()


@pytest.mark.parametrize("encrypt", [False, True])
def test_another_key_is_refused_before_anything_is_proven_to_it(pair: Pair, encrypt: bool) -> None:
    caller, listener = meet(pair, both(OTHER_KEY, encrypt=encrypt), both(KEY, encrypt=encrypt))
    assert isinstance(caller, ProtocolError) and isinstance(listener, PeerLost | OSError)


def test_in_the_open_a_proof_is_good_at_one_address_only(pair: Pair) -> None:
    """Whoever takes a port and hands on what he hears gets nowhere."""
    caller, _ = meet(pair, Guard.of(KEY, THERE, encrypt=None), Guard.of(KEY, HERE, encrypt=None))
    assert isinstance(caller, ProtocolError)


def test_whoever_hands_on_the_proofs_of_others_cannot_encrypt(pair: Pair) -> None:
    """The proofs are right, as a relay's would be; the certificate is not."""
    caller, listener = meet(pair, Guard(_HalfKey(KEY.secret), HERE, True), both(KEY, encrypt=True))
    assert isinstance(caller, ssl.SSLError) or isinstance(listener, ssl.SSLError)
    assert isinstance(caller, Exception | ssl.SSLSocket) and isinstance(listener, Exception)
    if isinstance(caller, ssl.SSLSocket):
        caller.close()


class _HalfKey(RunKey):
    """Proves as its secret does, and has another certificate."""

    def certificate_seed(self) -> bytes:
        return b"x" * 32

    def __hash__(self) -> int:
        return 1


def test_both_must_agree_on_encryption(pair: Pair) -> None:
    caller, listener = meet(pair, both(KEY, encrypt=True), both(KEY, encrypt=False))
    assert isinstance(caller, CommError | OSError) and isinstance(listener, ProtocolError)


def test_another_language_is_refused_at_its_first_words(pair: Pair) -> None:
    listener = answer(pair[1], both(KEY, encrypt=False))
    pair[0].send(b"GET / HT")
    with pytest.raises(ProtocolError, match="language"):
        next(listener)


@pytest.mark.parametrize(
    ("address", "is_encrypted"),
    [(HERE, False), ("tcp://[::1]:5", False), ("tcp://10.0.0.1:5", True), ("tcp://host:5", True)],
)
def test_what_leaves_the_host_is_encrypted_unless_one_says_otherwise(address: str, is_encrypted: bool) -> None:
    assert Guard.of(KEY, address, encrypt=None).is_encrypted is is_encrypted
    assert Guard.of(KEY, address, encrypt=True).is_encrypted
    assert not Guard.of(KEY, address, encrypt=False).is_encrypted
