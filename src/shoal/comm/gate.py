"""Who may come in through a ZeroMQ socket: those with the run's key.

At its Unix sockets a caller shows a password (ZeroMQ's PLAIN): bulk goes at full speed, and what is sent never
leaves the machine. Where that is not enough both sides prove themselves and all is encrypted (CURVE).
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import zmq
from zmq.utils import z85

from shoal.comm.security import RunKey

_USER = b"shoal"
# Where ZeroMQ looks for somebody to ask about a peer (its RFC 27, "ZAP"); one for each context.
_QUESTIONS = "inproc://zeromq.zap.01"
_REFUSALS = "inproc://shoal.refusals"
# The last where a caller found no common language with us and hung up first.
_REFUSAL_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_WELCOME, _REFUSED = (b"200", b"OK"), (b"400", b"The run's key is needed here.")
_MECHANISM = 5


def lock(listener: zmq.Socket[bytes], key: RunKey, *, encrypted: bool) -> None:
    """Make a socket that will be bound refuse whoever is not admitted by its context's `Gate`."""
    # With a domain, ZeroMQ admits nobody when there is no gate to ask.
    listener.set(zmq.ZAP_DOMAIN, _USER)
    if encrypted:
        listener.set(zmq.CURVE_SERVER, 1)
        listener.set(zmq.CURVE_SECRETKEY, key.listener_pair().secret)
    else:
        listener.set(zmq.PLAIN_SERVER, 1)


def unlock(caller: zmq.Socket[bytes], key: RunKey, address: str, *, encrypted: bool) -> None:
    """Give a socket what it needs to be admitted at `address`."""
    if encrypted:
        pair = key.caller_pair()
        caller.set(zmq.CURVE_SERVERKEY, key.listener_pair().public)
        caller.set(zmq.CURVE_PUBLICKEY, pair.public)
        caller.set(zmq.CURVE_SECRETKEY, pair.secret)
    else:
        caller.set(zmq.PLAIN_USERNAME, _USER)
        caller.set(zmq.PLAIN_PASSWORD, key.password(address))


class Gate:
    """Admits to the listener of a context those who have the key, and counts the others.

    ZeroMQ puts its questions, and the refusals it decided by itself, on two sockets inside the process. They
    are polled with the listener by the same thread, so that there is none to start, stop or wait for: a peer
    comes in when the listener's owner polls.
    """

    def __init__(self, listener: zmq.Socket[bytes]) -> None:
        self.strangers = 0
        """Connections that ended without having shown the run's key."""
        self._expected: tuple[bytes, ...] = ()
        self._questions = listener.context.socket(zmq.REP)
        self._questions.bind(_QUESTIONS)
        listener.monitor(_REFUSALS, _REFUSAL_EVENTS)
        self._refusals = listener.context.socket(zmq.PAIR)
        # Without this, refusals that nobody has read yet would one day hold up everything on the wire.
        self._refusals.set_hwm(0)
        self._refusals.connect(_REFUSALS)
        self.sockets = self._questions, self._refusals
        """What to poll; call `attend` when there is something."""

    def admit(self, key: RunKey, address: str, *, encrypted: bool) -> None:
        """Admit from now on who can open `address` with this key; until then nobody."""
        if encrypted:
            self._expected = (b"CURVE", z85.decode(key.caller_pair().public))
        else:
            self._expected = (b"PLAIN", _USER, key.password(address))

    def attend(self) -> None:
        """Answer all questions that wait, and count the refusals."""
        while (question := _next(self._questions)) is not None:
            version, request, *_ = question
            verdict = _WELCOME if self._admits(question[_MECHANISM:]) else _REFUSED
            self._questions.send_multipart([version, request, *verdict, b"", b""])
        while _next(self._refusals) is not None:
            self.strangers += 1

    def close(self) -> None:
        """Close after the listener: until then ZeroMQ may ask."""
        for socket in self.sockets:
            socket.close(linger=0)

    def _admits(self, shown: Sequence[bytes]) -> bool:
        *public, secret = self._expected or (b"",)
        # In constant time: how long it takes tells nothing about what is right.
        return bool(public) and list(shown[:-1]) == public and hmac.compare_digest(shown[-1], secret)


def _next(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
