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

from shoal.comm.security import RunKey
from shoal.kv.desk import KvDesk
from shoal.kv.requests import KvRequest
from shoal.kv.vault import MEMORY_NAME, Vault
from shoal.ps.plain.line import RequestLine, done
from shoal.ps.plain.messages import CLIENT_ID_BYTES, DeskAnswer

_SHORTEST_NAP_S, _LONGEST_NAP_S = 50e-6, 2e-3


class KvLine(Protocol):
    """To one shard."""

    def ask(self, request: KvRequest) -> DeskAnswer:
        """Ask and wait; raises where it was refused. Client and number are the line's own."""

    def close(self) -> None:
        """Leave."""


class HomeLine:
    """To a desk of this process."""

    def __init__(self, desk: KvDesk) -> None:
        self._desk, self._client, self._sequence = desk, secrets.token_bytes(CLIENT_ID_BYTES), 0

    def ask(self, request: KvRequest) -> DeskAnswer:
        self._sequence += 1
        answer = self._desk.take(replace(request, client=self._client, sequence=self._sequence))
        assert answer is not None, "one worker alone never waits"
        return done(answer)

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

    def take(self, request: KvRequest) -> DeskAnswer | None:
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
        self._shard = shard
        self._line = RequestLine(addresses, key, first=shard % len(addresses), timeout_s=timeout_s)
        self._desk: SharedDesk | None = None
        try:
            told = self.ask(KvRequest(ask="hello")).memory
            if told and through_memory:
                self._desk = _shared(told)
        except BaseException:
            self._line.close()
            raise

    def ask(self, request: KvRequest) -> DeskAnswer:
        numbered = self._line.numbered(request, shard=self._shard)
        answer = None if self._desk is None else self._desk.take(numbered)
        return self._line.good(self._line.exchange(numbered) if answer is None else answer)

    def close(self) -> None:
        self._line.close()
        if self._desk is not None:
            self._desk.close()


def _shared(told: str) -> SharedDesk | None:
    try:
        return SharedDesk(told)
    except (OSError, ValueError):
        return None  # another host's, or of a user whose memory is not ours
