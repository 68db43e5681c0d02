"""How a store reaches one of its servers: a desk of its own process, or one behind a wire."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import Protocol

from shoal.comm.codec import decode, encode
from shoal.comm.security import RunKey
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import CommTimeout, ProtocolError, SpecError
from shoal.kv.desk import KvAnswer, KvDesk, KvRequest
from shoal.kv.messages import CLIENT_ID_BYTES, read_kv_answer, write_kv_request
from shoal.ps.plain.client import reply_address

_SERVER = 0
_LOOK_EVERY_S, _RECONNECT_AFTER_S = 0.1, 0.1
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 1.0, 8.0


class KvLine(Protocol):
    """To one server."""

    def ask(self, request: KvRequest) -> KvAnswer:
        """Ask and wait; raises where it was refused. Client and number are the line's own."""

    def close(self) -> None:
        """Leave."""


class HomeLine:
    """To a desk of this process."""

    def __init__(self, desk: KvDesk) -> None:
        self._desk, self._client, self._sequence = desk, secrets.token_bytes(CLIENT_ID_BYTES), 0

    def ask(self, request: KvRequest) -> KvAnswer:
        self._sequence += 1
        numbered = replace(request, client=self._client, sequence=self._sequence)
        ((_, answer),) = self._desk.take(numbered)  # one worker alone never waits
        return _good(answer)

    def close(self) -> None:
        return


class WireLine:
    """To a server that may die and come back; each change is made once."""

    def __init__(self, address: str, key: RunKey, timeout_s: float) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._client, self._sequence = secrets.token_bytes(CLIENT_ID_BYTES), 0
        self._wire = ZmqWire(reply_address(address), key=key, linger_s=0.0)
        self._wire.connect(_SERVER, address)

    def ask(self, request: KvRequest) -> KvAnswer:
        self._sequence += 1
        numbered = replace(request, client=self._client, sequence=self._sequence)
        packet = encode(write_kv_request(numbered, self._wire.address))
        now = ask_at = time.monotonic()
        deadline, patience_s = now + self._timeout_s, _LEAST_PATIENCE_S
        while now < deadline:
            if now >= ask_at:
                if _SERVER in self._wire.gone():
                    self._wire.connect(_SERVER, self._address)
                self._wire.transmit(_SERVER, packet)
                ask_at, patience_s = now + patience_s, min(2 * patience_s, _MOST_PATIENCE_S)
            elif _SERVER in self._wire.gone():
                ask_at = min(ask_at, now + _RECONNECT_AFTER_S)
            arrived = self._wire.poll(max(0.0, min(ask_at - now, deadline - now, _LOOK_EVERY_S)))
            if arrived is not None:
                try:
                    answer = read_kv_answer(decode(arrived))
                except ProtocolError:
                    continue  # damaged on the way: it will be asked for again
                if answer.sequence == self._sequence:
                    return _good(answer)
            now = time.monotonic()
        raise CommTimeout(f"The server at {self._address} has not answered within {self._timeout_s:g} s.")

    def close(self) -> None:
        self._wire.close()


def _good(answer: KvAnswer) -> KvAnswer:
    if answer.reason:
        raise SpecError(answer.reason)
    return answer
