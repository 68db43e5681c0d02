"""How a store reaches one of its shards: at a desk of its own process, in memory that it shares with a server of
its host, or over a wire."""

from __future__ import annotations

import os
import secrets
import select
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from shoal.comm.codec import decode, encode
from shoal.comm.security import RunKey
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import CommTimeout, ProtocolError, SpecError
from shoal.kv.desk import KvDesk
from shoal.kv.messages import CLIENT_ID_BYTES, read_kv_answer, write_kv_request
from shoal.kv.requests import KvAnswer, KvRequest
from shoal.kv.vault import MEMORY_NAME, Vault
from shoal.ps.plain.client import reply_address

_LOOK_EVERY_S, _RECONNECT_AFTER_S = 0.1, 0.1
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 1.0, 8.0
_SHORTEST_NAP_S, _LONGEST_NAP_S = 50e-6, 2e-3


class KvLine(Protocol):
    """To one shard."""

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
        answer = self._desk.take(replace(request, client=self._client, sequence=self._sequence))
        assert answer is not None, "one worker alone never waits"
        return _good(answer)

    def close(self) -> None:
        return


class SharedDesk:
    """A desk of this process over the memory of a server of this host, as long as somebody holds that."""

    def __init__(self, told: str) -> None:
        """Of what a server says; OSError or ValueError where that is not to be had here."""
        pid, fd, holder, token = map(int, told.split(":"))
        if not os.readlink(path := f"/proc/{pid}/fd/{fd}").startswith(f"/memfd:{MEMORY_NAME}"):
            raise ValueError("this is another host's process of the same number")
        self._watch = os.pidfd_open(holder)
        try:
            found = os.open(path, os.O_RDWR)
            try:
                self._vault = Vault(found)
            finally:
                os.close(found)
            if self._vault.token != token:
                raise ValueError("this is another store's memory")
        except BaseException:
            os.close(self._watch)
            raise
        self._desk = KvDesk(self._vault)
        self._end = select.poll()
        self._end.register(self._watch, select.POLLIN)

    def take(self, request: KvRequest) -> KvAnswer | None:
        """The answer, waited for; None where nobody holds the memory any more, and others may not see it."""
        nap_s = _SHORTEST_NAP_S
        while not self._end.poll(0):
            if (answer := self._desk.take(request)) is not None:
                return answer
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        return None

    def close(self) -> None:
        """Let go of it."""
        os.close(self._watch)
        self._vault.close()


class ShardLine:
    """To a shard whose server may die and come back, or be followed by another; each change is made once."""

    def __init__(
        self, shard: int, addresses: Sequence[str], key: RunKey, timeout_s: float, *, through_memory: bool = True
    ) -> None:
        self._shard, self._addresses, self._timeout_s = shard, list(addresses), timeout_s
        self._client, self._sequence = secrets.token_bytes(CLIENT_ID_BYTES), 0
        self._server = shard % len(self._addresses)
        self._wire = ZmqWire(reply_address(self._addresses[0]), key=key, linger_s=0.0)
        self._desk: SharedDesk | None = None
        try:
            told = self.ask(KvRequest(ask="hello")).memory
            if told and through_memory:
                self._desk = _shared(told)
        except BaseException:
            self._wire.close()
            raise

    def ask(self, request: KvRequest) -> KvAnswer:
        self._sequence += 1
        numbered = replace(request, shard=self._shard, client=self._client, sequence=self._sequence)
        answer = None if self._desk is None else self._desk.take(numbered)
        return _good(self._ask_server(numbered) if answer is None else answer)

    def close(self) -> None:
        self._wire.close()
        if self._desk is not None:
            self._desk.close()

    def _ask_server(self, request: KvRequest) -> KvAnswer:
        """Ask whoever has the shard, until an answer comes."""
        packet = encode(write_kv_request(request, self._wire.address))
        now = ask_at = time.monotonic()
        deadline, patience_s = now + self._timeout_s, _LEAST_PATIENCE_S
        is_first = True
        while now < deadline:
            if now >= ask_at:
                if not is_first:
                    self._server = (self._server + 1) % len(self._addresses)
                is_first = False
                self._transmit(packet)
                ask_at, patience_s = now + patience_s, min(2 * patience_s, _MOST_PATIENCE_S)
            elif self._server in self._wire.gone():
                ask_at = min(ask_at, now + _RECONNECT_AFTER_S)
            arrived = self._wire.poll(max(0.0, min(ask_at - now, deadline - now, _LOOK_EVERY_S)))
            now = time.monotonic()
            try:
                answer = None if arrived is None else read_kv_answer(decode(arrived))
            except ProtocolError:
                continue  # damaged on the way: it will be asked for again
            if answer is None or answer.sequence != request.sequence:
                continue
            if answer.moved_to is not None:
                if answer.moved_to >= 0:
                    self._server, is_first = answer.moved_to % len(self._addresses), True
                ask_at = now + (0.0 if answer.moved_to >= 0 else _RECONNECT_AFTER_S)
            elif answer.waits:
                deadline = now + self._timeout_s
                ask_at = now + _RECONNECT_AFTER_S if request.ask == "hello" else ask_at
                is_first = True
            else:
                return answer
        raise CommTimeout(
            f"The servers at {', '.join(self._addresses)} have not answered within {self._timeout_s:g} s: nothing "
            "listens there, or the key is not theirs."
        )

    def _transmit(self, packet: Sequence[bytes | bytearray | memoryview]) -> None:
        if self._server not in self._wire.peers or self._server in self._wire.gone():
            self._wire.connect(self._server, self._addresses[self._server])
        self._wire.transmit(self._server, list(packet))


def _shared(told: str) -> SharedDesk | None:
    try:
        return SharedDesk(told)
    except (OSError, ValueError):
        return None  # another host's, or of a user whose memory is not ours


def _good(answer: KvAnswer) -> KvAnswer:
    if answer.reason:
        raise SpecError(answer.reason)
    return answer
