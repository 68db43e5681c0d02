"""A real etcd on loopback, for tests: plain, or with TLS and a password; nothing of it stays."""

from __future__ import annotations

import datetime
import ipaddress
import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

START_TIMEOUT_S = 60.0
LOGIN = ("root", "not-in-any-log-7f3a")


@dataclass(frozen=True, kw_only=True)
class RunningEtcd:
    """Where it listens, and what lets one in."""

    endpoint: str
    """As `http://127.0.0.1:2379`."""
    ca: Path | None = None
    login: Path | None = None

    @property
    def url(self) -> str:
        """For `--store`, without a prefix."""
        return self.endpoint.replace("http", "etcd", 1)

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """As anybody may ask it."""
        request = urllib.request.Request(self.endpoint + path, json.dumps(body).encode())
        context = ssl.create_default_context(cafile=str(self.ca)) if self.ca else None
        handlers = [
            urllib.request.ProxyHandler({}),
            *([urllib.request.HTTPSHandler(context=context)] if context else []),
        ]
        with urllib.request.build_opener(*handlers).open(request, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def count_keys(self) -> int:
        """Of all that it holds; only where nobody asks for a password."""
        every = {"key": "AA==", "range_end": "AA==", "count_only": True}
        return int(self.ask("/v3/kv/range", every).get("count", 0))


@contextmanager
def running_etcd(folder: Path, *, secured: bool = False) -> Iterator[RunningEtcd]:
    """One for the block. `secured`: over TLS, for those who know `LOGIN`."""
    if (program := shutil.which("etcd")) is None:
        pytest.skip("etcd is not installed (Debian: etcd-server)")
    scheme = "https" if secured else "http"
    ports = free_ports(2)
    client, peer = f"{scheme}://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
    command = [program, "--data-dir", str(folder / "data"), "--log-level", "error"]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client]
    command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    command += ["--initial-cluster", f"default={peer}"]
    login = folder / "login"
    if secured:
        certificate, key = make_certificate(folder)
        command += ["--cert-file", str(certificate), "--key-file", str(key)]
        login.touch(mode=0o600)
        login.write_text(":".join(LOGIN) + "\n")
    etcd = RunningEtcd(
        endpoint=client, ca=folder / "certificate" if secured else None, login=login if secured else None
    )
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            _wait_until_healthy(etcd, server, folder / "log")
            if secured:
                etcd.ask("/v3/auth/user/add", {"name": LOGIN[0], "password": LOGIN[1]})
                etcd.ask("/v3/auth/user/grant", {"user": LOGIN[0], "role": "root"})
                etcd.ask("/v3/auth/enable", {})
            yield etcd
        finally:
            server.kill()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """One for 127.0.0.1 that signs itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "etcd")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate", folder / "key"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths


def _wait_until_healthy(etcd: RunningEtcd, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            etcd.ask("/v3/kv/range", {"key": "AA=="})
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    pytest.fail(f"etcd did not start: {log.read_text()[-500:]}")
