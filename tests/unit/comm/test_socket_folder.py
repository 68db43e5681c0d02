"""Folders of sockets: nobody else can enter, and none is left behind for long."""

from __future__ import annotations

import os
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.other_user import as_another_user, needs_root
from shoal.comm.security import RunKey
from shoal.comm.socket_folder import SocketFolder
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import LaunchError

KEY = RunKey.create()


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files of this test's own, with a short name."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        os.chmod(path, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def test_a_folder_is_its_owners_alone_and_goes_with_him(base: Path) -> None:
    with SocketFolder() as folder:
        path = Path(folder.path)
        assert path.parent == base and stat.S_IMODE(path.stat().st_mode) == 0o700
        ZmqWire(f"ipc://{path}/*", key=KEY).close()
        wire = ZmqWire(f"ipc://{path}/left", key=KEY)
        assert wire.address == f"ipc://{path}/left" and (path / "left").is_socket()
    assert not list(base.iterdir())
    wire.close()


def test_what_the_killed_leave_is_removed_by_the_next(base: Path) -> None:
    with SocketFolder() as living:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writer, SocketFolder().path.encode())
            signal.pause()
        path = Path(os.read(reader, 1000).decode())
        SocketFolder().close()
        assert path.is_dir(), "its owner lives"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (reader, writer):
            os.close(fd)
        assert path.is_dir()
        SocketFolder().close()
        assert list(base.iterdir()) == [Path(living.path)]


def test_what_is_not_a_folder_of_sockets_stays(base: Path) -> None:
    (base / "shoal-other").mkdir()
    (base / "shoal-sockets-file").touch()
    (base / "shoal-sockets-link").symlink_to(base / "shoal-other")
    before = set(base.iterdir())
    SocketFolder().close()
    assert set(base.iterdir()) == before


def test_long_and_unsafe_places_are_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = base / ("x" * 60)
    long.mkdir()
    open_to_all = base / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)  # without the sticky bit anybody could put his own folder in the place of ours
    for unfit in (long, open_to_all):
        monkeypatch.setattr(tempfile, "tempdir", str(unfit))
        with SocketFolder() as folder:
            assert Path(folder.path).parent == Path("/tmp")
            ZmqWire(f"ipc://{folder.path}/*", key=KEY).close()


def test_a_full_disk_is_told_in_a_sentence(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(LaunchError, match=f"made in {base} .No space left on device.; make room there"):
        SocketFolder()


@needs_root
def test_another_user_cannot_even_connect(base: Path) -> None:
    with SocketFolder() as folder, ZmqWire(f"ipc://{folder.path}/member", key=KEY):

        def knock() -> str:
            try:
                socket.socket(socket.AF_UNIX).connect(f"{folder.path}/member")
            except PermissionError:
                return "refused by the kernel"
            return "connected"

        assert as_another_user(knock) == "refused by the kernel"


@needs_root
@pytest.mark.parametrize("where", ["ipc://@shoal-test-uid", "ipc:///tmp/shoal-test-uid"])
def test_another_user_at_a_socket_that_all_can_reach_is_hung_up_on(where: str) -> None:
    with ZmqWire(where, key=KEY) as wire:
        path = wire.address.removeprefix("ipc://")
        if not path.startswith("@"):
            os.chmod(path, 0o777)

        def knock() -> str:
            with socket.socket(socket.AF_UNIX) as caller:
                caller.settimeout(20)
                caller.connect(path.replace("@", "\0", 1))
                return "greeted" if caller.recv(1) else "hung up on"

        assert as_another_user(knock) == "hung up on"
        assert knock() == "greeted"


def test_a_name_that_is_in_use_is_not_taken_away(base: Path) -> None:
    with SocketFolder() as folder:
        address = f"ipc://{folder.path}/coordinator"
        with ZmqWire(address, key=KEY) as first:
            with pytest.raises(LaunchError, match="another process uses it; choose another name"):
                ZmqWire(address, key=KEY)
            assert first.address == address
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(f"{folder.path}/coordinator")
        stale.listen()
        stale.close()  # as whoever is killed leaves it
        with ZmqWire(address, key=KEY) as successor, ZmqWire(f"ipc://{folder.path}/*", key=KEY) as member:
            member.connect(0, address)
            member.transmit(0, [b"found you"])
            while (packet := successor.poll(1.0)) is None:
                pass
            assert bytes(packet[0]) == b"found you"
