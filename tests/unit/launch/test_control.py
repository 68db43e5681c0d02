"""The two ends of a run's control socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.comm.channel import Channel
from shoal.comm.words import ScaleAnswered
from shoal.errors import CommTimeout, PeerLost, SpecError
from shoal.launch.control import FILE_NAME, ControlSocket, request_scale
from shoal.launch.messages import ScaleRequest

ANOTHER_USER = 65534
GUARD_S = 30.0


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlSocket]:
    end = ControlSocket(tmp_path)
    yield end
    end.close()


def connect(folder: Path) -> Channel:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(f"\0{(folder / FILE_NAME).read_text()}")
    return Channel(sock)


def collect(control: ControlSocket) -> list[ScaleRequest]:
    """What has been asked, of a client that has connected and sent: the first look only lets it in."""
    return [*control.collect(), *control.collect()]


def test_a_question_and_its_answer(tmp_path: Path, control: ControlSocket) -> None:
    client = connect(tmp_path)
    client.send({"kind": "scale", "workers": 4, "servers": None})
    (request,) = collect(control)
    assert (request.workers, request.servers, request.is_question) == (4, None, False)
    answer = ScaleAnswered(text="Done.", workers=4)
    control.reply(request.number, answer)
    assert client.receive(GUARD_S) == answer.as_message()
    with pytest.raises(PeerLost):
        client.receive(GUARD_S)
    client.close()


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "exec"},
        {},
        {"kind": "scale", "workers": 0},
        {"kind": "scale", "workers": 2, "servers": -1},
        {"kind": "scale", "servers": "2"},
        {"kind": "scale", "workers": True},
    ],
)
def test_nonsense_is_refused(tmp_path: Path, control: ControlSocket, message: dict) -> None:
    client = connect(tmp_path)
    client.send(message)
    assert not collect(control)
    answer = client.receive(GUARD_S)
    assert answer is not None and answer["is_refused"]
    client.close()


def test_garbage_and_absence_disturb_nobody(tmp_path: Path, control: ControlSocket) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(f"\0{(tmp_path / FILE_NAME).read_text()}")
        raw.send(b"\xc1 not msgpack")
    connect(tmp_path).close()
    for _ in range(3):
        assert not collect(control)
    client = connect(tmp_path)
    client.send({"kind": "scale"})
    (request,) = collect(control)
    assert request.is_question
    client.close()
    control.reply(request.number, ScaleAnswered(text="too late", is_refused=True))  # nobody waits: no error


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_turned_away(tmp_path: Path, control: ControlSocket) -> None:
    name = (tmp_path / FILE_NAME).read_text()
    pid = os.fork()
    if pid == 0:
        os.setuid(ANOTHER_USER)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(f"\0{name}")
        channel = Channel(sock)
        try:
            channel.send({"kind": "scale"})
            channel.receive(GUARD_S)
        except PeerLost:
            os._exit(7)
        os._exit(1)
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        assert not control.collect()
    assert os.waitstatus_to_exitcode(ended[1]) == 7


def test_the_name_is_private_and_goes_with_the_run(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("left by a run that was killed")
    with pytest.raises(SpecError, match="is not running"):
        request_scale(tmp_path)
    end = ControlSocket(tmp_path)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    client = connect(tmp_path)
    client.send({"kind": "scale"})
    collect(end)
    with pytest.raises(CommTimeout, match="has not answered within 0 s"):
        request_scale(tmp_path, timeout_s=0.01)
    end.close()
    with pytest.raises(PeerLost):
        client.receive(GUARD_S)
    client.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(SpecError, match="is not running; only a run that is going on can be scaled"):
        request_scale(tmp_path, workers=2)
