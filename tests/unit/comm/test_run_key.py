"""The run's key: made, kept, read back, and never shown; and which connections must be encrypted."""

from __future__ import annotations

import os
import stat

import pytest
from zmq import curve_public

from shoal.comm.security import RunKey, leaves_host
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import SpecError


@pytest.fixture
def key() -> RunKey:
    return RunKey.create()


def test_every_key_is_new_and_survives_as_text(key):
    assert len({RunKey.create() for _ in range(20)}) == 20
    assert RunKey.from_text(key.text) == key
    assert len(key.secret) == 32


def test_nothing_shows_the_key(key):
    pair = key.listener_pair()
    shown = f"{key!r} {key} {pair!r} {pair}"
    assert key.text not in shown and pair.secret.decode() not in shown


def test_what_is_derived_depends_on_key_purpose_and_address(key):
    other = RunKey.create()
    passwords = {
        k.password(address) for k in (key, other) for address in ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    }
    pairs = [k_pair for k in (key, other) for k_pair in (k.listener_pair(), k.caller_pair())]
    assert len(passwords) == 4 and len({pair.secret for pair in pairs}) == 4
    assert RunKey.from_text(key.text).password("ipc://@a") == key.password("ipc://@a")
    assert all(curve_public(pair.secret) == pair.public for pair in pairs)


def test_a_saved_key_is_for_its_owner_alone(key, tmp_path):
    before = os.umask(0)
    try:
        key.save(tmp_path / "run.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.key").stat().st_mode) == 0o600
    assert RunKey.load(tmp_path / "run.key") == key


def test_a_key_is_never_written_over_anything(key, tmp_path):
    (tmp_path / "taken").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("taken", "link", "no/folder"):
        with pytest.raises(SpecError, match=f"cannot be saved in .*{name}"):
            key.save(tmp_path / name)
    assert (tmp_path / "taken").read_text() == "precious" and not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_key_that_others_can_touch_is_refused(key, tmp_path, mode):
    key.save(tmp_path / "run.key")
    (tmp_path / "run.key").chmod(mode)
    with pytest.raises(SpecError, match=f"must be yours alone .* found mode {mode:04o}") as caught:
        RunKey.load(tmp_path / "run.key")
    assert key.text not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_refused(key, tmp_path):
    key.save(tmp_path / "run.key")
    os.chown(tmp_path / "run.key", 12345, -1)
    with pytest.raises(SpecError, match="user 12345"):
        RunKey.load(tmp_path / "run.key")


@pytest.mark.parametrize(
    "content", ["", "ab", "g" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n\n", "ä" * 64, "a a " * 16]
)
def test_a_malformed_key_is_refused_and_not_repeated(tmp_path, content):
    with pytest.raises(SpecError, match="64 hexadecimal digits"):
        RunKey.from_text(content)
    path = tmp_path / "run.key"
    os.close(os.open(path, os.O_CREAT, 0o600))
    path.write_text(content)
    with pytest.raises(SpecError, match="holds no run's key") as caught:
        RunKey.load(path)
    assert not content.strip() or content.strip() not in str(caught.value)


def test_a_missing_key_is_a_clear_error(tmp_path):
    with pytest.raises(SpecError, match=r"cannot be read from .*absent"):
        RunKey.load(tmp_path / "absent")
    with pytest.raises(SpecError, match="32 bytes, found 3"):
        RunKey(b"abc")


@pytest.mark.parametrize(
    ("address", "leaves"),
    [
        ("tcp://127.0.0.1:5000", False),
        ("tcp://127.0.0.2:*", False),
        ("tcp://[::1]:5000", False),
        ("ipc://@shoal-1", False),
        ("tcp://10.0.0.1:5000", True),
        ("tcp://[fe80::1]:5000", True),
        ("tcp://a-host:5000", True),
        ("tcp://127.0.0.1.example.org:5000", True),
    ],
)
def test_what_leaves_this_host_is_known_by_its_address(address, leaves):
    assert leaves_host(address) is leaves


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]"])
def test_nobody_listens_on_every_network(key, host):
    with pytest.raises(SpecError, match=r"every network .* name the one address"):
        ZmqWire(f"tcp://{host}:*", key=key)
