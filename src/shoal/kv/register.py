"""Where all servers see who holds which shard, and one at a time changes it: the store that a coordinator of the
parameter server keeps its decisions in.

A change is the claim of the next term and what is saved under it. Two servers that begin from one state cannot
both succeed, and what a dead one has claimed without saving is nothing.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from shoal.coordinator.etcd_store import EtcdStore
from shoal.coordinator.store import DurableStore, SqliteStore, StoreError, Superseded
from shoal.errors import ProtocolError
from shoal.kv.holders import Holders
from shoal.spec.store import SCHEMES, StoreAddress

_LOOK_EVERY_S = 0.25
ATTEMPT = "kv"


def open_register(place: str) -> DurableStore:
    """`etcd://…` or `etcds://…`, or a file."""
    if place.partition("://")[0] in SCHEMES:
        return EtcdStore.at(StoreAddress.parse(place), ATTEMPT)
    return SqliteStore(Path(place), ATTEMPT)


class Register:
    """Looked at, and written to, by a thread of its own: a store may be slow, and a server must not be."""

    def __init__(self, store: DurableStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._wishes: dict[int, tuple[Holders | None, Holders]] = {}
        self._seen: dict[int, Holders] = {}
        self._complaint = ""
        self._called, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._live, name="shoal-kv-register", daemon=True)
        self._thread.start()

    def wish(self, shard: int, before: Holders | None, after: Holders) -> None:
        """Let a shard have other holders, unless it has others than before by then."""
        with self._lock:
            self._wishes[shard] = before, after
        self._called.set()

    def seen(self, shard: int) -> Holders | None:
        """Who holds a shard, as of a look that came after every wish about it; None where nobody does, or a wish
        is on its way."""
        with self._lock:
            return None if shard in self._wishes else self._seen.get(shard)

    def is_wished(self, shard: int) -> bool:
        """Whether a wish about a shard is on its way."""
        with self._lock:
            return shard in self._wishes

    def close(self) -> None:
        """Look no more."""
        self._is_over.set()
        self._called.set()
        self._thread.join()

    def _live(self) -> None:
        while not self._is_over.is_set():
            self._called.clear()
            with self._lock:
                wishes = dict(self._wishes)
            try:
                for shard, (before, after) in wishes.items():
                    self._change(shard, before, after)
                _, seen = self._read()
            except (StoreError, ProtocolError) as error:
                seen, wishes = None, {}  # it may have been made or not, and is tried until that is known
                self._complain(str(error))
            else:
                self._complaint = ""
            with self._lock:
                self._seen = self._seen if seen is None else seen
                for shard in wishes:
                    del self._wishes[shard]
            self._called.wait(_LOOK_EVERY_S)

    def _complain(self, complaint: str) -> None:
        """Nobody waits for this thread: who has started the server sees why it serves nothing."""
        if complaint != self._complaint:
            print(f"kv: nobody knows who holds what: {complaint} It is tried again.", file=sys.stderr, flush=True)
        self._complaint = complaint

    def _read(self) -> tuple[int, dict[int, Holders]]:
        term, state = self._store.load()
        plain = (state or {}).get("shards", {})
        return term, {int(shard): Holders.from_plain(holders) for shard, holders in plain.items()}

    def _change(self, shard: int, before: Holders | None, after: Holders) -> None:
        term, shards = self._read()
        if shards.get(shard) != before or not self._store.claim(term + 1):
            return
        # What the one who had claimed the last term may have saved meanwhile is the newest.
        _, shards = self._read()
        if shards.get(shard) != before:
            return
        plain = {str(number): holders.to_plain() for number, holders in {**shards, shard: after}.items()}
        try:
            self._store.save(term + 1, {"shards": plain})
        except Superseded:
            return
