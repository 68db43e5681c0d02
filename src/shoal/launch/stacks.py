"""Where the processes of a run are: their stacks, and what the system says of those that cannot show any."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.observe.disk import write_whole

ANSWER_TIMEOUT_S = 0.3
_LOOK_EVERY_S = 0.01
_NOT_RUNNING = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "D": "it waits inside the kernel, for a disk or a network file system",
    "Z": "it has ended",
}


@dataclass(frozen=True, kw_only=True)
class StackSource:
    """How to ask one process for its stacks."""

    pid: int
    signum: int
    fd: int
    """Its descriptor of the file that it writes them to."""

    @property
    def _path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"

    def size(self) -> int:
        """Bytes that it has written so far; 0 where it is gone."""
        try:
            return os.stat(self._path).st_size
        except OSError:
            return 0

    def read(self, start: int) -> str:
        """What it has written since."""
        try:
            with open(self._path, "rb") as file:
                file.seek(start)
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


def collect_stacks(sources: Sequence[StackSource], send: Callable[[StackSource], None]) -> dict[int, str]:
    """The stacks of these processes by process id; `send` sends one its signal. Waits a moment for them.

    Of a process that writes none, what the system says of it.
    """
    asked = {}
    for source in sources:
        if explain_state(source.pid) is None:
            asked[source] = source.size()
            send(source)
    before, deadline = dict(asked), time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        now = {source: source.size() for source in asked}
        if now == before and all(now[source] > asked[source] for source in asked):
            break  # Everybody has written, and nobody writes any more.
        before = now
    found = {source.pid: source.read(start) for source, start in asked.items()}
    return {
        source.pid: found.get(source.pid) or f"  ({explain_state(source.pid) or 'it did not answer'})\n"
        for source in sources
    }


def write_stacks(folder: Path, step: int, stacks: Iterable[tuple[str, str]]) -> Path:
    """Write stacks by the names of their processes, to a file named after the step."""
    path = folder / f"stacks-{step}.txt"
    write_whole(path, "\n".join(f"== {name} ==\n{text}" for name, text in stacks))
    return path


def explain_state(pid: int) -> str | None:
    """Why a process does not run, by what the system says; None where it could."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _NOT_RUNNING["Z"]
    return _NOT_RUNNING.get(text.rpartition(")")[2].split()[0])
