"""Owning a zygote: start one, find one, end one."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from shoal.errors import LaunchError

if TYPE_CHECKING:
    from shoal.comm.channel import Channel

ZYGOTE_VARIABLE = "SHOAL_ZYGOTE"
"""Names a running zygote that supervisors should use in place of a private one."""
_END_TIMEOUT_S = 5.0
_BACKLOG = 64


class ZygoteProcess:
    """A zygote that this process started. It ends with this process, or at `close`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        """What `connect` and `SHOAL_ZYGOTE` call it."""
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative for the signal that ended it."""
        return self._process.poll()

    def close(self) -> None:
        """End it and every process it started."""
        self._process.terminate()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def __enter__(self) -> ZygoteProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_zygote() -> ZygoteProcess:
    """Start a zygote and return at once; it can be connected to already, and answers when it has loaded."""
    name = f"shoal-zygote-{os.getpid()}-{secrets.token_hex(8)}"
    command = [sys.executable, "-P", "-m", "shoal.launch.zygote"]
    # The kernel tells a child of the death of the thread that started it, and only the main one lasts.
    if threading.current_thread() is threading.main_thread():
        command += ["--owner", str(os.getpid())]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # Bound here and not there, so that nobody has to wait until it listens.
        listener.bind(f"\0{name}")
        listener.listen(_BACKLOG)
        process = subprocess.Popen(
            [*command, "--listen", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            # OpenBLAS starts its threads when numpy is imported, and a zygote must have one only.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
    return ZygoteProcess(name, process)


def connect(name: str) -> Channel:
    """A connection to the zygote of this name."""
    from shoal.comm.channel import Channel  # Not above: starting a zygote must wait for no import.

    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(f"\0{name}")
    except OSError as error:
        sock.close()
        raise LaunchError(
            f"No zygote named {name!r} is running ({error.strerror}); unset {ZYGOTE_VARIABLE} to have one started."
        ) from None
    channel = Channel(sock, "the zygote")
    if channel.peer_uid() != os.getuid():
        channel.close()
        raise LaunchError(f"The zygote {name!r} belongs to another user; unset {ZYGOTE_VARIABLE}.")
    return channel
