"""A server's desk: keys, who may go on, and what pushes do. No sockets.

A client numbers its requests and repeats one until it is answered; a change is made once, whatever the wire does,
and though the server is killed in the middle of it: what was changed, and for whom, lies in its vault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import SpecError, unknown
from shoal.kv.rules import RULES, num_kept, settings_of
from shoal.kv.vault import Vault

_KINDS = ("dist_async", "dist_sync", "dist_ssp")


@dataclass(frozen=True, kw_only=True)
class StoreConsistency:
    """Who waits for whom."""

    kind: str
    slack: int = 0
    """With `dist_ssp`: how many pushes a worker may be ahead of the slowest."""

    @classmethod
    def parse(cls, text: str) -> StoreConsistency:
        """`dist_sync`, `dist_async` or `dist_ssp:3`."""
        kind, _, slack = text.partition(":")
        if kind not in _KINDS or (kind == "dist_ssp") != slack.isdecimal():
            raise unknown("kv: the kind of store", text, ("local", "dist_async", "dist_sync", "dist_ssp:3"))
        return cls(kind=kind, slack=int(slack or 0))


@dataclass(frozen=True, kw_only=True)
class KvRequest:
    """What a client asks of one server."""

    ask: str
    client: bytes
    sequence: int
    worker: int = 0
    key: str = ""
    start: int = 0
    """Of a run of rows; where `rows` are given, these count."""
    count: int = 0
    is_last: bool = True
    """Of several requests that make one push."""
    look: tuple[Any, ...] = ()
    """Of a new key: rows, columns, dtype."""
    rule: tuple[str, dict[str, Any]] | None = None
    rows: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class KvAnswer:
    """What came of it."""

    sequence: int
    reason: str = ""
    """Why it was refused; empty where it was done."""
    values: Tensor | None = None


Answers = list[tuple[bytes, KvAnswer]]
"""To whom."""


@dataclass(eq=False)
class _Entry:
    """A key, or the part of it that this server has."""

    values: Tensor
    kept: list[Tensor]
    pushes: Tensor
    """By worker, how many it has made; and behind them how many rounds were applied."""
    sums: Tensor | None
    """With `dist_sync`: what was pushed in this round."""
    touched: Tensor | None
    """And which rows."""


class KvDesk:
    """Of one server, for so many workers."""

    def __init__(self, vault: Vault, consistency: StoreConsistency, workers: int) -> None:
        self._vault, self._consistency, self._workers = vault, consistency, workers
        self._entries: dict[str, _Entry] = {}
        self._waiting: dict[bytes, KvRequest] = {}
        vault.directory.setdefault("keys", {})
        vault.directory.setdefault("rule", None)
        for key, plain in vault.directory["keys"].items():
            self._entries[key] = self._entry(plain)

    @torch.no_grad()
    def take(self, request: KvRequest) -> Answers:
        """The answers that may be given now: to this request, and to others that waited for it."""
        try:
            answers = self._take(request)
        except Exception as error:  # What one client sends must not end the service of all.
            return [(request.client, KvAnswer(sequence=request.sequence, reason=str(error) or repr(error)))]
        if answers is None:
            self._waiting[request.client] = request
            return []
        found: Answers = [(request.client, answers)]
        while (ready := self._next_ready()) is not None:
            found.append(ready)
        return found

    def _next_ready(self) -> tuple[bytes, KvAnswer] | None:
        for client, waiting in list(self._waiting.items()):
            if (answer := self._take(waiting)) is not None:
                del self._waiting[client]
                return client, answer
        return None

    def _take(self, request: KvRequest) -> KvAnswer | None:
        """None: it has to wait."""
        done = KvAnswer(sequence=request.sequence)
        match request.ask:
            case "hello":
                return done
            case "pull":
                return self._pull(request)
        if request.sequence <= self._vault.last_sequence(request.client):
            return done  # it was made, and the answer got lost
        match request.ask:
            case "init":
                self._init(request)
            case "optimizer":
                assert request.rule is not None
                self._set_rule(*request.rule)
                with self._vault.change(request.client, request.sequence, []):
                    pass
            case "push":
                return done if self._push(request) else None
            case _:
                raise SpecError(f"kv: {request.ask!r} is nothing that a server does.")
        return done

    def _set_rule(self, name: str, given: dict[str, Any]) -> None:
        settings = settings_of(name, given)
        self._vault.directory["rule"] = [name, settings]
        for plain in self._vault.directory["keys"].values():
            rows, columns, dtype = plain["look"]
            while len(plain["kept"]) < num_kept(name, settings):
                plain["kept"].append(self._vault.reserve(rows, columns * _dtype(dtype).itemsize))
        self._vault.write_directory()
        self._entries = {key: self._entry(plain) for key, plain in self._vault.directory["keys"].items()}

    def _init(self, request: KvRequest) -> None:
        rows, columns, dtype = request.look
        plain = self._vault.directory["keys"].get(request.key)
        if plain is None:
            plain = self._new_key(request.key, rows, columns, dtype, request.client)
        if plain["look"] != [rows, columns, dtype]:
            raise SpecError(
                f"kv: the key {request.key!r} is {plain['look']} here, and was sent as {list(request.look)}."
            )
        table, values = self._entries[request.key].values, request.values
        assert values is not None
        span = slice(request.start, request.start + len(values))
        # Who comes later finds it there.
        is_maker = plain["maker"] == request.client.hex()
        with self._vault.change(request.client, request.sequence, [(table, span)] if is_maker else []):
            if is_maker:
                table[span] = values

    def _new_key(self, key: str, rows: int, columns: int, dtype: str, client: bytes) -> dict[str, Any]:
        size, rule = _dtype(dtype).itemsize, self._vault.directory["rule"]
        is_sync = self._consistency.kind == "dist_sync"
        plain = {
            "look": [rows, columns, dtype],
            "maker": client.hex(),
            "values": self._vault.reserve(rows, columns * size),
            "kept": [self._vault.reserve(rows, columns * size) for _ in range(num_kept(*rule) if rule else 0)],
            "pushes": self._vault.reserve(self._workers + 1, 8),
            "sums": [self._vault.reserve(rows, columns * size), self._vault.reserve(rows, 1)] if is_sync else None,
        }
        self._vault.directory["keys"][key] = plain
        self._vault.write_directory()
        self._entries[key] = self._entry(plain)
        return plain

    def _entry(self, plain: dict[str, Any]) -> _Entry:
        (rows, columns, name), vault = plain["look"], self._vault
        dtype, sums = _dtype(name), plain["sums"]
        return _Entry(
            values=vault.table(plain["values"], rows, columns, dtype),
            kept=[vault.table(start, rows, columns, dtype) for start in plain["kept"]],
            pushes=vault.table(plain["pushes"], self._workers + 1, 1, torch.int64),
            sums=None if sums is None else vault.table(sums[0], rows, columns, dtype),
            touched=None if sums is None else vault.table(sums[1], rows, 1, torch.bool),
        )

    def _found(self, key: str) -> _Entry:
        if key not in self._entries:
            raise unknown("kv: the key", key, self._entries)
        return self._entries[key]

    def _pull(self, request: KvRequest) -> KvAnswer | None:
        entry = self._found(request.key)
        pushes, own = entry.pushes[: self._workers, 0], int(entry.pushes[request.worker, 0])
        if self._consistency.kind == "dist_sync" and int(entry.pushes[self._workers, 0]) < own:
            return None
        if self._consistency.kind == "dist_ssp" and int(pushes.min()) < own - self._consistency.slack:
            return None
        if request.rows is not None:
            values = entry.values.index_select(0, request.rows)
        else:
            values = entry.values[request.start : request.start + request.count].clone()
        return KvAnswer(sequence=request.sequence, values=values)

    def _push(self, request: KvRequest) -> bool:
        entry, values, rows = self._found(request.key), request.values, request.rows
        assert values is not None
        values = values.to(entry.values.dtype)
        if values.shape[1] != entry.values.shape[1] or (rows is not None and len(rows) != len(values)):
            raise SpecError(f"kv: rows of shape {list(values.shape)} do not fit the key {request.key!r}.")
        where = slice(request.start, request.start + len(values)) if rows is None else rows
        if self._consistency.kind == "dist_sync":
            return self._push_in_round(request, entry, where, values)
        rule = self._vault.directory["rule"]
        if rule is None:
            raise SpecError("kv: pushes that are not synchronised need an optimizer; call set_optimizer first.")
        changed = [entry.values, *entry.kept[: num_kept(*rule)]]
        parts: list[tuple[Tensor, Tensor | slice]] = [(table, where) for table in changed]
        worker = slice(request.worker, request.worker + 1)
        with self._vault.change(request.client, request.sequence, [*parts, (entry.pushes, worker)]):
            _apply(rule, entry, where, values)
            entry.pushes[request.worker] += int(request.is_last)
        return True

    def _push_in_round(self, request: KvRequest, entry: _Entry, where: Tensor | slice, values: Tensor) -> bool:
        assert entry.sums is not None and entry.touched is not None
        applied, own = int(entry.pushes[self._workers, 0]), int(entry.pushes[request.worker, 0])
        if own > applied:
            return False  # the next round begins when this one is over
        counts = entry.pushes[: self._workers, 0]
        others = torch.cat([counts[: request.worker], counts[request.worker + 1 :]])
        ends = request.is_last and bool((others > applied).all())
        rows = _marked(entry.touched, where) if ends else torch.empty(0, dtype=torch.int64)
        parts: list[tuple[Tensor, Tensor | slice]] = [(entry.sums, where), (entry.touched, where)]
        if ends:
            parts = [(table, rows) for table in (entry.sums, entry.touched, entry.values, *entry.kept)]
        with self._vault.change(
            request.client, request.sequence, [*parts, (entry.pushes, slice(0, self._workers + 1))]
        ):
            if isinstance(where, slice):
                entry.sums[where] += values
            else:
                entry.sums.index_add_(0, where, values)
            entry.touched[where] = True
            entry.pushes[request.worker] += int(request.is_last)
            if ends:
                self._end_round(entry, rows)
        return True

    def _end_round(self, entry: _Entry, rows: Tensor) -> None:
        """Apply what was pushed to these rows, which are all that were."""
        assert entry.sums is not None and entry.touched is not None
        pushed, rule = entry.sums.index_select(0, rows), self._vault.directory["rule"]
        if rule is None:
            entry.values[rows] = pushed
        else:
            _apply(rule, entry, rows, pushed)
        entry.sums.index_fill_(0, rows, 0)
        entry.touched.index_fill_(0, rows, False)
        entry.pushes[self._workers] += 1


def _marked(touched: Tensor, more: Tensor | slice) -> Tensor:
    """The rows that are marked, and these."""
    marks = touched[:, 0].clone()
    marks[more] = True
    return marks.nonzero()[:, 0]


def _apply(rule: list[Any], entry: _Entry, where: Tensor | slice, pushed: Tensor) -> None:
    name, settings = rule
    tables = entry.kept[: num_kept(name, settings)]
    if isinstance(where, slice):
        RULES[name].apply(entry.values[where], [table[where] for table in tables], pushed, settings)
        return
    rows, kept = entry.values.index_select(0, where), [table.index_select(0, where) for table in tables]
    RULES[name].apply(rows, kept, pushed, settings)
    entry.values.index_copy_(0, where, rows)
    for table, changed in zip(tables, kept, strict=True):
        table.index_copy_(0, where, changed)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise SpecError(f"kv: {name!r} is no type of torch's.")
    return found
