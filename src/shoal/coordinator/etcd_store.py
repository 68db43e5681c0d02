"""The coordinator's durable memory in etcd, for jobs on several machines that share no disk.

Two keys under a prefix and the attempt's name: the term, and the state. Both are only ever changed by
transactions that compare the term.
Spoken to through etcd's HTTP gateway, so that no client library is needed.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import stat
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from shoal.coordinator.store import StoreError, pack_state, superseded_by, unpack_state
from shoal.errors import SpecError
from shoal.spec.store import LOGIN_VARIABLE, StoreAddress

TIMEOUT_S = 5.0
TERM_DIGITS = 20
"""Terms are written with leading zeros: etcd compares values as text."""
_MOST_LOGIN_BYTES = 1024
_UNAUTHENTICATED = 401
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Gateway:
    """How an etcd is asked: its endpoints one after the other, over TLS and with a token where that is wanted."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        context: ssl.SSLContext | None = None,
        login: tuple[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._endpoints = [one.rstrip("/") for one in endpoints]
        self._login = login
        self._token = ""
        self._timeout_s = timeout_s
        # A proxy for the web is not the way to a job's own store.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        handlers += [] if context is None else [urllib.request.HTTPSHandler(context=context)]
        self._opener = urllib.request.build_opener(*handlers)

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What etcd answers; `StoreError` where it refuses, or none of the endpoints answers."""
        if self._login is not None and not self._token:
            self._authenticate()
        try:
            return self._ask_any(path, body)
        except _TokenExpired:
            self._authenticate()
            return self._ask_any(path, body)

    def _authenticate(self) -> None:
        assert self._login is not None
        name, password = self._login
        self._token = ""
        try:
            self._token = self._ask_any("/v3/auth/authenticate", {"name": name, "password": password})["token"]
        except (StoreError, KeyError) as error:
            raise StoreError(f"etcd does not let user {name!r} in ({error}); check user and password.") from None

    def _ask_any(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        silence: StoreError | None = None
        for number, endpoint in enumerate(self._endpoints):
            try:
                answer = self._ask_one(endpoint + path, body)
            except _NoAnswer as error:
                silence = silence or error
                continue
            # Who has answered is asked first from now on.
            self._endpoints.insert(0, self._endpoints.pop(number))
            return answer
        assert silence is not None
        raise silence

    def _ask_one(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            detail = error.read(300).decode(errors="replace").strip()
            if self._token and (error.code == _UNAUTHENTICATED or "invalid auth token" in detail):
                raise _TokenExpired from None
            raise StoreError(f"etcd at {url} refused ({error.code}: {detail}).") from None
        except (OSError, ValueError) as error:
            raise _NoAnswer(
                f"etcd at {url} gave no answer within {self._timeout_s:g} s ({error}); "
                "check that it runs there and can be reached."
            ) from None


class _NoAnswer(StoreError):
    """Another endpoint may answer."""


class _TokenExpired(Exception):
    """Tokens live for some minutes."""


class EtcdStore:
    """State in etcd (v3); `prefix` and `attempt` tell jobs apart. `gateway`: how to ask, or an endpoint, as
    `http://host:2379`."""

    def __init__(self, gateway: Gateway | str, prefix: str, attempt: str, *, timeout_s: float = TIMEOUT_S) -> None:
        if isinstance(gateway, str):
            if not gateway.startswith(("http://", "https://")):
                raise SpecError(f"EtcdStore: endpoint must be written http://host:port, found {gateway!r}.")
            gateway = Gateway([gateway], timeout_s=timeout_s)
        self._gateway = gateway
        self._term_key = _text(f"{prefix}/{attempt}/term")
        self._state_key = _text(f"{prefix}/{attempt}/state")

    @classmethod
    def at(cls, address: StoreAddress, attempt: str) -> EtcdStore:
        """Where the user says, with what lets this process in."""
        return cls(
            Gateway(address.endpoints, context=_context_of(address), login=_login_of(address)),
            address.prefix,
            attempt,
        )

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

    def forget(self) -> None:
        deletes = [{"request_delete_range": {"key": key}} for key in (self._term_key, self._state_key)]
        self._transact([], deletes)

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
        answer = self._gateway.ask("/v3/kv/txn", {"compare": compare, "success": then})
        return bool(answer.get("succeeded", False)), answer.get("responses", [])


def _context_of(address: StoreAddress) -> ssl.SSLContext | None:
    """TLS as the files of an address say; the system's own authorities where it names none."""
    if not address.is_secure:
        return None
    try:
        context = ssl.create_default_context(cafile=address.ca or None)
        if address.cert:
            context.load_cert_chain(address.cert, address.key)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(one for one in (address.ca, address.cert, address.key) if one)
        raise SpecError(f"Cluster: store's files for TLS cannot be read: {files} ({error}).") from None
    return context


def _login_of(address: StoreAddress) -> tuple[str, str] | None:
    """User and password, from a file or the environment. Neither is ever told."""
    text = os.environ.get(LOGIN_VARIABLE, "")
    if address.login:
        text = _read_login(address.login)
    if not text:
        return None
    name, colon, password = text.partition(":")
    if not colon or not name:
        raise SpecError(
            f"{address.login or LOGIN_VARIABLE} must hold user:password, found something without a colon."
        )
    return name, password


def _read_login(path: str) -> str:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(_MOST_LOGIN_BYTES)
    except OSError as error:
        raise SpecError(f"Cluster: store's login cannot be read from {path} ({error.strerror}).") from None
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
        raise SpecError(
            f"Cluster: store's login in {path} must be yours alone (mode 0600), found mode "
            f"{stat.S_IMODE(status.st_mode):04o} and user {status.st_uid}; change the password, as others may "
            "have seen it."
        )
    return raw.decode("utf-8", "replace").strip()


def _text(plain: str) -> str:
    """Keys and values travel in base64."""
    return base64.b64encode(plain.encode()).decode()


def _first_value(response: dict[str, Any]) -> bytes | None:
    pairs = response["response_range"].get("kvs", [])
    return base64.b64decode(pairs[0]["value"]) if pairs else None
