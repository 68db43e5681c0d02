"""One suite for every place where a coordinator keeps its state."""

from __future__ import annotations

import os
import signal
import socket
import stat
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.etcd import LOGIN, RunningEtcd, free_ports, running_etcd
from shoal.coordinator import DurableStore, EtcdStore, MemoryStore, SqliteStore, StoreError, Superseded
from shoal.errors import SpecError
from shoal.spec.store import LOGIN_VARIABLE, StoreAddress

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
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running.endpoint


@pytest.fixture(scope="module")
def secured_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEtcd]:
    """The same over TLS, and with a password."""
    with running_etcd(tmp_path_factory.mktemp("secured"), secured=True) as running:
        yield running


@pytest.fixture(
    scope="module", params=["memory", "sqlite", "etcd", pytest.param("secured etcd", marks=pytest.mark.long)]
)
def make_reopen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Reopen]:
    """Makes an empty store at a place of its own, and says how to open it."""
    endpoint = request.getfixturevalue("etcd") if request.param == "etcd" else ""
    secured = request.getfixturevalue("secured_etcd") if request.param == "secured etcd" else None

    def make() -> Reopen:
        memory, path, prefix = MemoryStore(), tmp_path_factory.mktemp("store") / "file", f"/shoal/{uuid.uuid4()}"
        stores: dict[str, Reopen] = {
            "memory": lambda: memory,
            "sqlite": lambda: SqliteStore(path, "a"),
            "etcd": lambda: EtcdStore(endpoint, prefix, "a"),
            "secured etcd": lambda: EtcdStore.at(StoreAddress.parse(written(secured, prefix)), "a"),
        }
        return stores[request.param]

    return make


def written(etcd: RunningEtcd | None, prefix: str) -> str:
    assert etcd is not None
    return f"{etcd.url}{prefix}?ca={etcd.ca}&login={etcd.login}"


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
    (port,) = free_ports(1)
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


def test_what_is_forgotten_is_gone(etcd):
    store = EtcdStore(etcd, f"/shoal/{uuid.uuid4()}", "a")
    assert store.claim(1)
    store.save(1, STATE)
    store.forget()
    assert store.load() == (0, None)


def test_who_answers_is_asked(etcd):
    """Of several endpoints of one etcd the first may be down."""
    (port,) = free_ports(1)
    place = StoreAddress.parse(f"etcd://127.0.0.1:{port},{etcd.removeprefix('http://')}/{uuid.uuid4()}")
    store = EtcdStore.at(place, "a")
    assert store.claim(1) and store.load() == (1, None)


@pytest.mark.long
def test_a_token_that_is_not_good_any_more_is_replaced(secured_etcd):
    store = EtcdStore.at(StoreAddress.parse(written(secured_etcd, f"/{uuid.uuid4()}")), "a")
    assert store.claim(1)
    store._gateway._token = "simple.1"
    assert not store.claim(1) and store.claim(2)


@pytest.mark.long
def test_a_wrong_password_is_refused_and_not_told(secured_etcd, tmp_path, monkeypatch):
    url = f"{secured_etcd.url}?ca={secured_etcd.ca}"
    with pytest.raises(StoreError, match="refused"):
        EtcdStore.at(StoreAddress.parse(url), "a").load()
    monkeypatch.setenv(LOGIN_VARIABLE, "root:wrong-one")
    with pytest.raises(StoreError, match="does not let user 'root' in") as refused:
        EtcdStore.at(StoreAddress.parse(url), "a").load()
    assert "wrong-one" not in str(refused.value)
    monkeypatch.setenv(LOGIN_VARIABLE, ":".join(LOGIN))
    assert EtcdStore.at(StoreAddress.parse(url), "b").load() == (0, None)
    with pytest.raises(StoreError, match=r"gave no answer.*certificate"):
        EtcdStore.at(StoreAddress.parse(secured_etcd.url), "a").load()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("etc://a", "none that is known; write etcd://host:2379/prefix"),
        ("etcd://", "names no host"),
        ("etcd://root:hidden@a", "names a user, which lists of processes would show"),
        ("etcd://a?ca=b", "which etcds:// is for"),
        ("etcds://a?cert=b", "needs cert= and key= together"),
        ("etcd://a?pasword=b", "store's key 'pasword' is not known"),
    ],
)
def test_a_place_that_cannot_be_is_refused(text, sentence):
    with pytest.raises(SpecError) as refused:
        StoreAddress.parse(text)
    assert sentence in str(refused.value) and "hidden" not in str(refused.value)


def test_a_place_as_one_writes_it():
    place = StoreAddress.parse("etcds://a,[::1]:9/team/job/?ca=/c")
    assert place.endpoints == ("https://a:2379", "https://[::1]:9")
    assert (place.prefix, place.ca, place.is_secure) == ("team/job", "/c", True)
    assert StoreAddress.parse("etcd://a").prefix == "shoal"


def test_a_login_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "login"
    path.write_text("root:hidden")
    path.chmod(0o644)
    with pytest.raises(SpecError, match="must be yours alone") as refused:
        EtcdStore.at(StoreAddress.parse(f"etcd://a?login={path}"), "a")
    assert "hidden" not in str(refused.value)
