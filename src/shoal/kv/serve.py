"""One server's process, `python -m shoal.kv.serve`; `KvServers` starts it, and writes what it is to its input."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence

import torch

from shoal.arena.malloc import keep_freed_memory
from shoal.comm.codec import Message, encode
from shoal.comm.kernel import die_with_parent
from shoal.comm.security import RunKey
from shoal.errors import FAILED, ShoalError
from shoal.kv.holders import Seat, wish
from shoal.kv.messages import Letter, Ping, read_letter, write_letter
from shoal.kv.register import Register, open_register
from shoal.kv.requests import KvRequest
from shoal.kv.shard_copy import KvBacking, ShardCopy, elsewhere
from shoal.kv.vault import MOST_CLIENTS
from shoal.ps.plain.clientele import Caller
from shoal.ps.plain.loop import LOOK_EVERY_S, RequestLoop
from shoal.ps.plain.messages import DeskAnswer, WishOutcome

_SOON_S = 0.001
_PING_EVERY_S, _REPEAT_EVERY_S = 0.2, 0.5
DEAD_AFTER_S = 2.0
"""A server that was not heard of for so long has died, for all that the others know."""
_RECONNECT_S = 0.2
LISTENS = "listens"
"""What a server's process says once it does; where it cannot, it says why, and ends."""
_BACKED_FIRST = 2
"""The generation in which a shard has its first backup, where all goes well."""


class KvServer(RequestLoop[KvRequest]):
    """One of a store's servers, with a memory for each shard that it may come to hold."""

    def __init__(
        self,
        number: int,
        addresses: Sequence[str],
        memories: Sequence[int],
        key: RunKey,
        *,
        register: Register | None = None,
        holder: int = 0,
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        """`holder`: the process that has the memory as long as it lives, whoever serves it."""
        super().__init__(addresses[number], key, KvRequest, most_clients=MOST_CLIENTS, first_client=len(addresses))
        self.seat = Seat(number, secrets.token_hex(8))
        self._addresses, self._register = list(addresses), register
        self._holder = holder or os.getpid()
        shards = [number] if register is None else range(len(addresses))
        self._copies = {
            shard: ShardCopy(shard, self.seat, memory, is_alone=register is None)
            for shard, memory in zip(shards, memories, strict=True)
        }
        self._heard: dict[int, tuple[str, float]] = {}
        self._tried_at: dict[int, float] = {}
        self._dead_after_s = dead_after_s
        self._began = time.monotonic()
        self._ping_at = self._repeat_at = 0.0

    def run(self) -> None:
        """Serve without end."""
        while True:
            self.serve_once()

    def serve_once(self) -> None:
        """The next request, if one comes soon; and what has to be done in time."""
        waits = any(copy.has_waiting for copy in self._copies.values())
        # Processes that use the memory themselves say nothing to those who wait here.
        self.take_in(_SOON_S if waits and self._register is None else LOOK_EVERY_S)
        self._do_due(time.monotonic())
        self._send()

    def close(self) -> None:
        """Serve nobody any more."""
        self.wire.close()
        if self._register is not None:
            self._register.close()
        for copy in self._copies.values():
            copy.vault.close()

    def on_message(self, message: Message) -> None:
        letter = read_letter(message)
        if letter is None:
            super().on_message(message)
        elif isinstance(letter, Ping):
            self._heard[letter.server] = letter.life, time.monotonic()
        elif (copy := self._copies.get(letter.shard)) is not None:
            copy.on_letter(letter)

    def on_request(self, request: KvRequest, caller: Caller) -> None:
        copy = self._copies.get(request.shard)
        if copy is None:
            self.answer(caller, elsewhere(request, request.shard))
        elif request.ask == "hello" and copy.is_primary:
            self.answer(caller, self._greet(request, copy))
        else:
            copy.on_request(request)

    def _greet(self, request: KvRequest, copy: ShardCopy) -> DeskAnswer:
        """A new client begins once there is a copy of what it will push: the first ever waits for one, later ones
        where another server lives that is about to have it."""
        if self._register is not None:
            assert copy.holders is not None
            is_new = copy.holders.generation <= _BACKED_FIRST
            waits = not copy.holders.filled and (is_new or len(self._living(copy)) > 1)
            outcome = WishOutcome.WAITS if waits else WishOutcome.DONE
            return DeskAnswer(sequence=request.sequence, outcome=outcome)
        memory = f"{os.getpid()}:{copy.vault.fd}:{self._holder}:{copy.vault.token}"
        return DeskAnswer(sequence=request.sequence, memory=memory)

    def _do_due(self, now: float) -> None:
        if now >= self._repeat_at:
            self._repeat_at = now + _REPEAT_EVERY_S
            for copy in self._copies.values():
                copy.on_tick()
        if self._register is None:
            for copy in self._copies.values():
                copy.look_again()
        elif now >= self._ping_at:
            self._ping_at = now + _PING_EVERY_S
            for server in range(len(self._addresses)):
                if server != self.seat.server:
                    self._reach(server, Ping(server=self.seat.server, life=self.seat.life))
            for copy in self._copies.values():
                self._mind_holders(copy, self._register)

    def _mind_holders(self, copy: ShardCopy, register: Register) -> None:
        seen = register.seen(copy.shard)
        if register.is_wished(copy.shard):
            return
        if seen is not None:
            copy.on_holders(seen)
        wanted = wish(
            copy.shard,
            copy.holders,
            self.seat,
            self._living(copy),
            remembers=copy.vault.generation,
            has_synced=copy.backing is KvBacking.SYNCED,
        )
        if wanted is not None:
            copy.is_fenced = not copy.is_primary
            register.wish(copy.shard, copy.holders, wanted)

    def _living(self, copy: ShardCopy) -> dict[int, str]:
        """The servers that were heard of lately. At first those that hold the shard are thought to live."""
        now, holders, living = time.monotonic(), copy.holders, {self.seat.server: self.seat.life}
        if now < self._began + self._dead_after_s and holders is not None:
            seats = [seat for seat in (holders.primary, holders.backup) if seat is not None]
            living = {**{seat.server: seat.life for seat in seats}, **living}
        heard = {one: life for one, (life, when) in self._heard.items() if now < when + self._dead_after_s}
        return {**living, **heard}

    def _send(self) -> None:
        for copy in self._copies.values():
            while copy.letters:
                self._reach(*copy.letters.popleft())
            while copy.answers:
                client, answer = copy.answers.popleft()
                if (caller := self.clientele.known(client)) is not None:
                    self.answer(caller, answer)

    def _reach(self, server: int, letter: Letter) -> None:
        now = time.monotonic()
        if server not in self.wire.peers or server in self.wire.gone():
            if now < self._tried_at.get(server, 0.0) + _RECONNECT_S:
                return  # what matters is said again
            self._tried_at[server] = now
            self.wire.connect(server, self._addresses[server])
        self.wire.transmit(server, encode(write_letter(letter)))


def main() -> None:
    """Serve memory of these descriptors until whoever started this ends."""
    die_with_parent(os.getppid(), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the workers, and servers end with them
    torch.set_num_threads(1)
    keep_freed_memory()
    given = json.loads(sys.stdin.readline())
    try:
        server = KvServer(
            given["number"],
            given["addresses"],
            given["memories"],
            RunKey.from_text(given["key"]),
            register=Register(open_register(given["register"])) if given["register"] else None,
            holder=os.getppid(),
            dead_after_s=given["dead_after_s"],
        )
    except ShoalError as error:
        print(error, flush=True)
        sys.exit(FAILED)
    print(LISTENS, flush=True)
    server.run()


if __name__ == "__main__":
    main()
