"""A disk that fails below Python: what `disk_faults.c` is told, and what it has done."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
PASS, FAIL, DELAY, SHORTEN = range(4)
FOR_EVER = 1 << 62


class _Control(ctypes.Structure):
    """As in the C file."""

    _fields_ = (
        ("seen", ctypes.c_int64),
        ("fired", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("action", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("delay_s", ctypes.c_double),
        ("traces", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("prefix", ctypes.c_char * 1024),
        ("contains", ctypes.c_char * 256),
        ("operations", ctypes.c_char * 256),
        ("log", ctypes.c_char * 1024),
    )


@dataclass(frozen=True)
class Operation:
    """One thing that a process did to the disk, or tried to."""

    number: int
    """Counted over all processes, from 1."""
    outcome: str
    """`passed`, `failed`, `delayed` or `shortened`."""
    name: str
    """`write`, `fsync`, `rename` and so on."""
    path: str


class DiskFaults:
    """Faults for the processes that were started with `environment`, and for all that these fork."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._file = folder / "disk-faults"
        self._log = folder / "disk-faults.log"
        self._file.write_bytes(bytes(ctypes.sizeof(_Control)))
        with self._file.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._control = _Control.from_buffer(self._memory)
        self.environment = {"LD_PRELOAD": str(library), "SHOAL_DISK_FAULTS": str(self._file)}

    def watch(self, under: Path, *, contains: str = "", operations: str = "") -> None:
        """Count what is done to paths that begin with this one and contain that; let all of it pass."""
        self.quiet()
        self._log.unlink(missing_ok=True)
        control = self._control
        control.seen = control.fired = control.first = control.last = 0
        control.log = os.fsencode(self._log)
        control.contains = contains.encode()
        control.operations = f" {operations} ".encode() if operations else b""
        control.traces = 1
        control.prefix = os.fsencode(under)

    def fail(self, first: int, last: int | None = None, *, code: int = errno.ENOSPC) -> None:
        """Of what is watched let these fail, counted from 1; one, unless the last one is given."""
        self._strike(FAIL, first, last, code)

    def shorten(self, first: int, last: int | None = None) -> None:
        """Let these writes take half of what they are given."""
        self._strike(SHORTEN, first, last)

    def delay(self, seconds: float, first: int = 1, last: int = FOR_EVER) -> None:
        """Let these take so much longer."""
        self._control.delay_s = seconds
        self._strike(DELAY, first, last)

    def _strike(self, action: int, first: int, last: int | None, code: int = 0) -> None:
        control = self._control
        control.action, control.error = action, code
        control.last = first if last is None else last
        control.first = first

    def relent(self) -> None:
        """From here on everything passes; it is still counted."""
        self._control.first = 0

    def quiet(self) -> None:
        """Nothing is watched."""
        self._control.prefix = b""
        self.relent()

    @property
    def seen(self) -> int:
        """Matching operations so far."""
        return int(self._control.seen)

    @property
    def fired(self) -> int:
        """Operations that a fault has struck."""
        return int(self._control.fired)

    def operations(self) -> list[Operation]:
        """All that was watched since `watch`, as it came."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        parts = (line.split(" ", 3) for line in lines)
        return [Operation(int(number), *rest) for number, *rest in parts]

    def struck(self) -> list[Operation]:
        """Those that a fault has struck."""
        return [one for one in self.operations() if one.outcome != "passed"]


def build_library(folder: Path) -> Path:
    """Compile the C file."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc to build the library that makes disks fail")
    library = folder / "disk_faults.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library
