"""What a run has left behind: processes, shared memory, listening sockets.

A run's processes are known by their working directory, which is the run's own and which whatever they start
inherits: forked processes keep the environment and command line that their parent was started with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

DEADLINE_S = 10.0
_LISTEN = "0A"


def processes_in(folder: Path) -> set[int]:
    """The living processes that work in `folder`, or write to a log in it."""
    return {pid for pid in _pids() if _is_in(pid, folder)}


def _is_in(pid: int, folder: Path) -> bool:
    return _link(f"/proc/{pid}/cwd") == str(folder) or _link(f"/proc/{pid}/fd/1").startswith(f"{folder}/")


def children_of(parent: int) -> set[int]:
    """The living processes that `parent` has started."""
    return {pid for pid in _pids() if _parent(pid) == parent}


def arenas_of(pid: int) -> list[str]:
    """The arenas that a process holds or maps."""
    files = [_link(f"/proc/{pid}/fd/{fd}") for fd in _entries(f"/proc/{pid}/fd")]
    return [link for link in [*files, *_read(f"/proc/{pid}/maps").splitlines()] if "memfd:shoal-arena" in link]


def listening_ports() -> set[int]:
    """Every TCP port that somebody on this machine listens at."""
    lines = [*_read("/proc/net/tcp").splitlines()[1:], *_read("/proc/net/tcp6").splitlines()[1:]]
    rows = [line.split() for line in lines]
    return {int(row[1].rsplit(":", 1)[1], 16) for row in rows if row[3] == _LISTEN}


def zygote_sockets(owner_pid: int) -> list[str]:
    """The sockets of zygotes that `owner_pid` has started."""
    name = f"@shoal-zygote-{owner_pid}-"
    return [line for line in _read("/proc/net/unix").splitlines() if name in line]


def left_by(folder: Path, supervisor_pid: int, zygote_pid: int | None) -> list[str]:
    """All that remains of the run in `folder`, in words; waits a while for it to become nothing."""
    deadline = time.monotonic() + DEADLINE_S
    while remains := list(_remains(folder, supervisor_pid, zygote_pid)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return remains


def _remains(folder: Path, supervisor_pid: int, zygote_pid: int | None) -> Iterator[str]:
    for pid in processes_in(folder):
        yield f"process {pid} ({_read(f'/proc/{pid}/status').splitlines()[:3]})"
    ports = {int(text) for file in folder.glob("port-*") if (text := file.read_text())}
    for port in ports & listening_ports():
        yield f"port {port}"
    yield from zygote_sockets(supervisor_pid)
    if zygote_pid is not None:
        yield from (f"the zygote's {arena}" for arena in arenas_of(zygote_pid))
        yield from (f"the zygote's child {pid}" for pid in children_of(zygote_pid))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int | None:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[1]) if fields and fields[0] != "Z" else None


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
