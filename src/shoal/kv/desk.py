"""A server's desk: keys, who may go on, and what pushes do. No sockets, and nothing that is not in its vault.

A client numbers its requests and repeats one until it is answered; a change is made once, whatever the wire does,
and though the process is killed in the middle of it: what was changed, and for whom, lies in the vault. So several
processes of a host may each have a desk over one vault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import SpecError, unknown
from shoal.kv.requests import KvRequest, StoreConsistency
from shoal.kv.rules import RULES, num_kept, settings_of
from shoal.kv.vault import Rows, Vault, VaultChange
from shoal.ps.plain.messages import DeskAnswer, WishOutcome
from shoal.ps.plain.tensors import PlainBulk


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
    """Of one shard of a store."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._edition = -1
        self._entries: dict[str, _Entry] = {}
        self._consistency = StoreConsistency(kind="dist_async")
        self._workers = 0
        self._arrivals = torch.empty(0, 1, dtype=torch.int64)
        """By worker: how many barriers it has come to; and behind them how many workers have left for good."""

    @torch.no_grad()
    def take(self, request: KvRequest) -> DeskAnswer | None:
        """The answer; None where it has to wait for what others do, and to be asked again."""
        try:
            if request.reads:
                with self._vault.reading():
                    self._refresh()
                    return self._pull(request) if request.ask == "pull" else self._gather(request)
            with self._vault.changing():
                self._refresh()
                return self._take_change(request)
        except Exception as error:  # What one client sends must not end the service of all.
            self._vault.forget()
            self._edition = -1
            return _refusal(request, error)

    def _take_change(self, request: KvRequest) -> DeskAnswer | None:
        done, vault = DeskAnswer(sequence=request.sequence), self._vault
        if request.sequence <= vault.last_sequence(request.client):
            if request.ask == "init":
                self._note_whole(request)
            return done  # it was made, and the answer got lost
        match request.ask:
            case "open":
                self._open(*request.look)
                with vault.change(request.client, request.sequence):
                    pass
            case "leave":
                self._leave(request)
            case "init":
                return done if self._init(request) else None
            case "optimizer":
                assert request.rule is not None
                self._set_rule(*request.rule)
                with vault.change(request.client, request.sequence):
                    pass
            case "arrive":
                with vault.change(request.client, request.sequence) as change:
                    change.rows(self._arrivals, self._place_of(request.worker)).add_(1)
            case "push":
                return done if self._push(request) else None
            case _:
                raise SpecError(
                    f"kv: {request.ask!r} is nothing that a server does; use one version of Shoal for all."
                )
        return done

    def _refresh(self) -> None:
        """Know what another process has made of the directory."""
        if self._edition == self._vault.edition:
            return
        self._edition, directory = self._vault.edition, self._vault.directory
        self._workers = directory.get("workers", 0)
        if directory:
            self._consistency = StoreConsistency.parse(directory["kind"])
            self._arrivals = self._vault.table(directory["arrivals"], self._workers + 1, 1, torch.int64)
        self._entries = {key: self._entry(plain) for key, plain in directory.get("keys", {}).items()}

    def _write_directory(self) -> None:
        self._vault.write_directory()
        self._refresh()

    def _open(self, kind: str, workers: int) -> None:
        StoreConsistency.parse(kind)
        directory = self._vault.directory
        if not directory:
            arrivals = self._vault.reserve(workers + 1, 8)
            directory.update(kind=kind, workers=workers, arrivals=arrivals, rule=None, keys={})
            self._write_directory()
        elif (directory["kind"], directory["workers"]) != (kind, workers):
            raise SpecError(
                f"kv: the servers hold a store of kind {directory['kind']} for {directory['workers']} workers, "
                f"found {kind} for {workers}; make one like it, or use other servers."
            )

    def _set_rule(self, name: str, given: dict[str, Any]) -> None:
        settings = settings_of(name, given)
        directory = self._vault.directory
        is_other = directory["rule"] is not None and directory["rule"][0] != name
        directory["rule"] = [name, settings]
        for plain in directory["keys"].values():
            if is_other:
                plain["kept"] = []  # what one rule has kept means nothing to another
            rows, columns, dtype = plain["look"]
            while len(plain["kept"]) < num_kept(name, settings):
                plain["kept"].append(self._vault.reserve(rows, columns * _dtype(dtype).itemsize))
        self._write_directory()

    def _init(self, request: KvRequest) -> bool:
        """Who comes first fills a key, piece by piece, and who comes later waits for that; whether it is done."""
        rows, columns, dtype = request.look
        plain = self._vault.directory["keys"].get(request.key)
        if plain is None:
            plain = self._new_key(request.key, rows, columns, dtype, request.client)
        if plain["look"] != [rows, columns, dtype]:
            raise SpecError(
                f"kv: the key {request.key!r} is {plain['look']} here, and was sent as {list(request.look)}; "
                "send one like it, or use another key."
            )
        is_maker, values = plain["maker"] == request.client.hex(), _values(request, plain)
        if not (is_maker or plain["is_whole"]):
            return False
        with self._vault.change(request.client, request.sequence) as change:
            if is_maker:
                span = slice(request.start, request.start + len(values))
                change.rows(self._entries[request.key].values, span).copy_(values)
        self._note_whole(request)
        return True

    def _note_whole(self, request: KvRequest) -> None:
        """Let others have a key whose last piece its maker has sent."""
        plain = self._vault.directory["keys"][request.key]
        end = request.start + len(_values(request, plain))
        is_last = plain["maker"] == request.client.hex() and end == plain["look"][0]
        if is_last and not plain["is_whole"]:
            plain["is_whole"] = True
            self._write_directory()

    def _new_key(self, key: str, rows: int, columns: int, dtype: str, client: bytes) -> dict[str, Any]:
        vault, size = self._vault, _dtype(dtype).itemsize
        rule, is_sync = vault.directory["rule"], self._consistency.kind == "dist_sync"
        plain = {
            "look": [rows, columns, dtype],
            "maker": client.hex(),
            "is_whole": False,
            "values": vault.reserve(rows, columns * size),
            "kept": [vault.reserve(rows, columns * size) for _ in range(num_kept(*rule) if rule else 0)],
            "pushes": vault.reserve(self._workers + 1, 8),
            "sums": [vault.reserve(rows, columns * size), vault.reserve(rows, 1)] if is_sync else None,
        }
        vault.directory["keys"][key] = plain
        self._write_directory()
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

    def _place_of(self, worker: int) -> slice:
        if not 0 <= worker < self._workers:
            raise SpecError(
                f"kv: the store is for {self._workers} workers, found one of rank {worker}; start as many as all "
                "have said."
            )
        return slice(worker, worker + 1)

    def _gather(self, request: KvRequest) -> DeskAnswer | None:
        own = int(self._arrivals[self._place_of(request.worker)])
        come = int(self._arrivals[: self._workers].min())
        return DeskAnswer(sequence=request.sequence) if come >= own else None

    def _leave(self, request: KvRequest) -> None:
        """With the last worker all goes that they had in common."""
        is_last = int(self._arrivals[self._workers]) + 1 == self._workers
        if is_last:
            self._vault.drop()
            self._refresh()
        with self._vault.change(request.client, request.sequence) as change:
            if not is_last:
                change.rows(self._arrivals, slice(self._workers, self._workers + 1)).add_(1)

    def _pull(self, request: KvRequest) -> DeskAnswer | None:
        entry, place = self._found(request.key), self._place_of(request.worker)
        kind, own = self._consistency.kind, int(entry.pushes[place])
        if kind == "dist_sync" and int(entry.pushes[self._workers]) < own:
            return None
        if kind == "dist_ssp" and int(entry.pushes[: self._workers].min()) < own - self._consistency.slack:
            return None
        if (rows := request.rows) is not None:
            values = entry.values.index_select(0, rows)
        else:
            values = entry.values[request.start : request.start + request.count].clone()
        return DeskAnswer(sequence=request.sequence, bulk=PlainBulk.of([values]))

    def _push(self, request: KvRequest) -> bool:
        entry, rows, place = self._found(request.key), request.rows, self._place_of(request.worker)
        values = request.sent(len(entry.values), entry.values.shape[1], entry.values.dtype)
        if values.shape[1] != entry.values.shape[1] or (rows is not None and len(rows) != len(values)):
            raise SpecError(
                f"kv: rows of shape {list(values.shape)} do not fit the key {request.key!r}, whose rows have "
                f"{entry.values.shape[1]} elements; send such ones, one for each number of a row."
            )
        values = values.to(entry.values.dtype)
        where = slice(request.start, request.start + len(values)) if rows is None else rows
        if self._consistency.kind == "dist_sync":
            return self._push_in_round(request, entry, where, values)
        rule = self._vault.directory["rule"]
        if rule is None:
            raise SpecError("kv: pushes that are not synchronised need an optimizer; call set_optimizer first.")
        with self._vault.change(request.client, request.sequence) as change:
            _apply(rule, entry, change, where, values)
            change.rows(entry.pushes, place).add_(int(request.is_last))
        return True

    def _push_in_round(self, request: KvRequest, entry: _Entry, where: Rows, values: Tensor) -> bool:
        assert entry.sums is not None and entry.touched is not None
        applied, own = int(entry.pushes[self._workers]), int(entry.pushes[request.worker])
        if own > applied:
            return False  # the next round begins when this one is over
        counts = entry.pushes[: self._workers, 0]
        others = torch.cat([counts[: request.worker], counts[request.worker + 1 :]])
        ends = request.is_last and bool((others > applied).all())
        with self._vault.change(request.client, request.sequence) as change:
            pushes = change.rows(entry.pushes, slice(0, self._workers + 1))
            pushes[request.worker] += int(request.is_last)
            if ends:
                pushes[self._workers] += 1
                self._end_round(entry, change, where, values)
            else:
                change.rows(entry.sums, where).add_(values)
                change.rows(entry.touched, where).fill_(True)
        return True

    def _end_round(self, entry: _Entry, change: VaultChange, where: Rows, values: Tensor) -> None:
        """Apply what was pushed in this round, and with it its last push."""
        assert entry.sums is not None and entry.touched is not None
        marks = entry.touched[:, 0].clone()
        marks[where] = True
        rows, rule = marks.nonzero()[:, 0], self._vault.directory["rule"]
        numbers = torch.arange(where.start, where.stop) if isinstance(where, slice) else where
        sums = change.rows(entry.sums, rows)
        pushed = sums.index_add(0, torch.searchsorted(rows, numbers), values)
        sums.zero_()
        change.rows(entry.touched, rows).fill_(False)
        if rule is None:
            change.rows(entry.values, rows).copy_(pushed)
        else:
            _apply(rule, entry, change, rows, pushed)


def _apply(rule: list[Any], entry: _Entry, change: VaultChange, where: Rows, pushed: Tensor) -> None:
    name, settings = rule
    kept = [change.rows(table, where) for table in entry.kept[: num_kept(name, settings)]]
    RULES[name].apply(change.rows(entry.values, where), kept, pushed, settings)


def _values(request: KvRequest, plain: dict[str, Any]) -> Tensor:
    """What was sent for a key that looks so."""
    rows, columns, dtype = plain["look"]
    return request.sent(rows, columns, _dtype(dtype))


def _refusal(request: KvRequest, error: Exception) -> DeskAnswer:
    return DeskAnswer(sequence=request.sequence, outcome=WishOutcome.REFUSED, reason=str(error) or repr(error))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise SpecError(f"kv: {name!r} is no type of torch's; send float32 or the like.")
    return found
