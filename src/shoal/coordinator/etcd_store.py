"""The coordinator's durable memory in etcd, for jobs on several machines.

Two keys under a prefix and the attempt's name: the term, and the state. Both are only ever changed by
transactions that compare the term.
Spoken to through etcd's HTTP gateway, so that no client library is needed.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from typing import Any

from shoal.coordinator.store import StoreError, pack_state, superseded_by, unpack_state
from shoal.errors import SpecError

TIMEOUT_S = 5.0
TERM_DIGITS = 20
"""Terms are written with leading zeros: etcd compares values as text."""


class EtcdStore:
    """State in etcd (v3) at `endpoint`, as `http://host:2379`; `prefix` and `attempt` tell jobs apart."""

    def __init__(self, endpoint: str, prefix: str, attempt: str, *, timeout_s: float = TIMEOUT_S) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise SpecError(f"EtcdStore: endpoint must be written http://host:port, found {endpoint!r}.")
        self._url = endpoint.rstrip("/") + "/v3/kv/txn"
        self._term_key = _text(f"{prefix}/{attempt}/term")
        self._state_key = _text(f"{prefix}/{attempt}/state")
        self._timeout_s = timeout_s
        # A proxy for the web is not the way to a job's own store.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def load(self) -> tuple[int, dict[str, Any] | None]:
        reads = [{"request_range": {"key": key}} for key in (self._term_key, self._state_key)]
        _, found = self._transact([], reads)
        term, packed = (_first_value(response) for response in found)
        return int(term or 0), None if packed is None else unpack_state(packed)

    def claim(self, term: int) -> bool:
        put = [self._put(self._term_key, _text(f"{term:0{TERM_DIGITS}}"))]
        nobody_yet = {"key": self._term_key, "target": "VERSION", "result": "EQUAL", "version": "0"}
        claimed, _ = self._transact([nobody_yet], put)
        if not claimed:
            claimed, _ = self._transact([self._term_is("LESS", term)], put)
        return claimed

    def save(self, term: int, state: dict[str, Any]) -> None:
        put = [self._put(self._state_key, base64.b64encode(pack_state(state)).decode())]
        saved, _ = self._transact([self._term_is("EQUAL", term)], put)
        if not saved:
            raise superseded_by(term, self.load()[0])

    def _term_is(self, result: str, term: int) -> dict[str, str]:
        value = _text(f"{term:0{TERM_DIGITS}}")
        return {"key": self._term_key, "target": "VALUE", "result": result, "value": value}

    @staticmethod
    def _put(key: str, value: str) -> dict[str, Any]:
        return {"request_put": {"key": key, "value": value}}

    def _transact(
        self, compare: list[dict[str, str]], then: list[dict[str, Any]]
    ) -> tuple[bool, list[dict[str, Any]]]:
        """Run `then` if all of `compare` hold; whether they did, and the answers."""
        body = json.dumps({"compare": compare, "success": then}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            detail = error.read(300).decode(errors="replace").strip()
            raise StoreError(f"etcd at {self._url} refused ({error.code}: {detail}).") from None
        except (OSError, ValueError) as error:
            raise StoreError(
                f"etcd at {self._url} gave no answer within {self._timeout_s:g} s ({error}); "
                "check that it runs there and can be reached."
            ) from None
        return bool(answer.get("succeeded", False)), answer.get("responses", [])


def _text(plain: str) -> str:
    """Keys and values travel in base64."""
    return base64.b64encode(plain.encode()).decode()


def _first_value(response: dict[str, Any]) -> bytes | None:
    pairs = response["response_range"].get("kvs", [])
    return base64.b64decode(pairs[0]["value"]) if pairs else None
