"""One suite for every place where a coordinator keeps its state."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.coordinator import DurableStore, EtcdStore, MemoryStore, SqliteStore, StoreError, Superseded
from shoal.errors import SpecError

INSTALL_TIMEOUT_S = 120
START_TIMEOUT_S = 30
STATE = {
    "number": 7,
    "shards": [[1, 10, 11, True, 0]],
    "targets": {3: 1},
    "stop": None,
    "rate": 0.5,
    "bytes": b"\0\1",
}

Reopen = Callable[[], DurableStore]
"""Opens the same store again, as another process would."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real etcd on loopback, for this module."""
    program = shutil.which("etcd") or _install_etcd()
    client, peer = (f"http://127.0.0.1:{port}" for port in _free_ports(2))
    folder = tmp_path_factory.mktemp("etcd")
    command = [program, "--data-dir", str(folder / "data"), "--log-level", "error"]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client]
    command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    command += ["--initial-cluster", f"default={peer}"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            _wait_until_healthy(client, server, folder / "log")
            yield client
        finally:
            server.kill()


def _install_etcd() -> str:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.fail("These tests need a real etcd: install the Debian package etcd-server.")
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", "etcd-server"]):
        subprocess.run(["apt-get", *arguments], timeout=INSTALL_TIMEOUT_S, capture_output=True, check=False)
    program = shutil.which("etcd")
    if program is None:
        pytest.fail("These tests need a real etcd, and apt-get could not install etcd-server.")
    return program


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with opener.open(f"{url}/health", timeout=1) as answer:
                if b'"true"' in answer.read():
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.02)
    pytest.fail(f"etcd did not start: {log.read_text()[-500:]}")


@pytest.fixture(scope="module", params=["memory", "sqlite", pytest.param("etcd", marks=pytest.mark.long)])
def make_reopen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Reopen]:
    """Makes an empty store at a place of its own, and says how to open it."""
    endpoint = request.getfixturevalue("etcd") if request.param == "etcd" else ""

    def make() -> Reopen:
        memory, path, prefix = MemoryStore(), tmp_path_factory.mktemp("store") / "file", f"/shoal/{uuid.uuid4()}"
        stores: dict[str, Reopen] = {
            "memory": lambda: memory,
            "sqlite": lambda: SqliteStore(path, "a"),
            "etcd": lambda: EtcdStore(endpoint, prefix, "a"),
        }
        return stores[request.param]

    return make


@pytest.fixture
def reopen(make_reopen: Callable[[], Reopen]) -> Reopen:
    return make_reopen()


def test_a_new_store_is_empty(reopen):
    assert reopen().load() == (0, None)


def test_what_was_saved_is_loaded_by_another(reopen):
    store = reopen()
    assert store.claim(1)
    store.save(1, STATE)
    assert reopen().load() == (1, STATE)
    store.save(1, {"number": 8})
    assert reopen().load() == (1, {"number": 8})


def test_a_claim_must_be_higher_than_all_before(reopen):
    store = reopen()
    assert store.claim(1)
    assert not store.claim(1)
    assert store.claim(10)
    assert not store.claim(9)
    assert not store.claim(10)
    assert reopen().load() == (10, None)


def test_a_claim_keeps_the_state_and_stops_whoever_saved_it(reopen):
    old, new = reopen(), reopen()
    assert old.claim(1)
    old.save(1, STATE)
    assert new.claim(2)
    with pytest.raises(Superseded, match="Term 1 may not save: term 2"):
        old.save(1, {"number": 99})
    assert reopen().load() == (2, STATE)
    new.save(2, {"number": 8})
    assert reopen().load() == (2, {"number": 8})


def test_nothing_is_saved_under_a_term_that_nobody_claimed(reopen):
    store = reopen()
    with pytest.raises(Superseded):
        store.save(1, STATE)
    assert store.claim(1)
    with pytest.raises(Superseded):
        store.save(2, STATE)
    assert store.load() == (1, None)


def test_of_many_that_claim_one_term_one_wins(reopen):
    stores = [reopen() for _ in range(4)]
    for term in range(1, 6):
        with ThreadPoolExecutor(len(stores)) as pool:
            won = list(pool.map(lambda store, term=term: store.claim(term), stores))
        assert sum(won) == 1
    assert reopen().load()[0] == 5


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("etcd", marks=pytest.mark.long)])
def test_attempts_in_one_place_do_not_see_each_other(kind, tmp_path, request):
    if kind == "sqlite":
        first, second = (SqliteStore(tmp_path / "file", attempt) for attempt in "ab")
    else:
        endpoint, prefix = request.getfixturevalue("etcd"), f"/shoal/{uuid.uuid4()}"
        first, second = (EtcdStore(endpoint, prefix, attempt) for attempt in "ab")
    assert first.claim(1)
    first.save(1, STATE)
    assert second.load() == (0, None)
    assert second.claim(1), "its terms are its own"
    second.save(1, {"number": 8})
    first.save(1, {"number": 9})
    assert (first.load(), second.load()) == ((1, {"number": 9}), (1, {"number": 8}))


def test_an_attempt_whose_store_was_removed_falls_silent(tmp_path):
    path = tmp_path / "coordinator.sqlite"
    old = SqliteStore(path, "old")
    assert old.claim(1)
    path.unlink()
    assert SqliteStore(path, "new").claim(1)
    with pytest.raises(Superseded, match="another attempt's by now"):
        old.save(1, STATE)
    assert not old.claim(2)


def test_the_file_is_its_owners_alone(tmp_path):
    path = tmp_path / "coordinator.sqlite"
    store = SqliteStore(path, "a")
    store.claim(1)
    store.save(1, STATE)
    assert [stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()] == [0o600]


def test_a_file_that_was_open_to_others_is_closed_to_them(tmp_path):
    path = tmp_path / "coordinator.sqlite"
    path.touch(mode=0o644)
    SqliteStore(path, "a")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"nowhere/file \(No such file or directory\)"):
        SqliteStore(tmp_path / "nowhere" / "file", "a")


def test_a_file_that_is_no_store_is_named(tmp_path):
    path = tmp_path / "coordinator.sqlite"
    path.write_bytes(b"something else, and long enough to be looked at" * 100)
    with pytest.raises(StoreError, match=r"coordinator\.sqlite cannot be read"):
        SqliteStore(path, "a")


def save_for_ever(path: Path, tell: int) -> None:
    store = SqliteStore(path, "a")
    term, state = store.load()
    assert store.claim(term + 1)
    number = 0 if state is None else state["number"]
    while True:
        number += 1
        store.save(term + 1, {"number": number, "bulk": bytes([number % 256]) * 20_000})
        os.write(tell, f"{number}\n".encode())


def test_what_was_saved_survives_kill_9(tmp_path):
    path = tmp_path / "coordinator.sqlite"
    for life in range(1, 6):
        heard, tell = os.pipe()
        saver = os.fork()
        if saver == 0:
            try:
                save_for_ever(path, tell)
            finally:
                os._exit(1)
        os.close(tell)
        with os.fdopen(heard) as lines:
            told = [lines.readline() for _ in range(5 * life)]
            os.kill(saver, signal.SIGKILL)
            last = int([*told, *lines][-1])
        os.waitpid(saver, 0)
        term, state = SqliteStore(path, "a").load()
        assert term == life and state is not None
        assert state["number"] in (last, last + 1)
        assert state["bulk"] == bytes([state["number"] % 256]) * 20_000


def test_an_etcd_that_is_not_there_is_named():
    (port,) = _free_ports(1)
    store = EtcdStore(f"http://127.0.0.1:{port}", "/shoal", "a", timeout_s=1.0)
    for attempt in (store.load, lambda: store.claim(1), lambda: store.save(1, STATE)):
        with pytest.raises(StoreError, match=f"{port}.*check that it runs"):
            attempt()


def test_an_etcd_that_does_not_answer_is_not_waited_for_for_ever():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = EtcdStore(f"http://127.0.0.1:{silent.getsockname()[1]}", "/shoal", "a", timeout_s=0.2)
        with pytest.raises(StoreError, match=r"within 0\.2 s"):
            store.load()


def test_an_endpoint_is_an_address():
    with pytest.raises(SpecError, match="http://host:port"):
        EtcdStore("localhost:2379", "/shoal", "a")


@pytest.mark.long
def test_what_etcd_refuses_is_passed_on(etcd):
    with pytest.raises(StoreError, match="refused"):
        EtcdStore(f"{etcd}/nowhere", "/shoal", "a").load()
