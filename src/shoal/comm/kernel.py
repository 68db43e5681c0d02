"""What a process asks of the kernel about itself."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def die_with_parent(parent_pid: int, signum: int) -> None:
    """Ask for `signum` when the parent's thread that forked us ends; end now where the parent already has."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os._exit(1)


def name_process(name: str) -> None:
    """The name that `ps` and `top` show."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    argument = value if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
