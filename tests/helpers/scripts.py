"""Scripts as users start them, without the start: run as `__main__` in a fork of this process."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from helpers.commands import environment
from shoal.launch.owner import ZygoteProcess

GUARD_S = 120.0


def run_as_main(
    script: Path, *words: str, folder: Path, zygote: ZygoteProcess, path: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """What `python script words…` in `folder` ends with; modules are found in `path` first.

    Python and torch are there already, which a process of its own would load for seconds.
    """
    # Not in the folder: what is said must not count among what the script writes.
    out, err = (os.memfd_create(name) for name in ("out", "err"))
    pid = os.fork()
    if pid == 0:
        try:
            _take_files(out, err)
            os.environ.update(environment(zygote))
            os.chdir(folder)
            sys.path[:0] = [str(script.parent), *map(str, path)]
            sys.argv[:] = [str(script), *words]
            status = _run(script)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            status = 255
        finally:
            os._exit(status)
    status = _wait(pid)
    return subprocess.CompletedProcess([str(script), *words], status, _read(out), _read(err))


def _take_files(out: int, err: int) -> None:
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, err)):
        os.dup2(source, target)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))


def _run(script: Path) -> int:
    """The exit status, as Python finds it."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _wait(pid: int) -> int:
    deadline = time.monotonic() + GUARD_S
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise TimeoutError(f"the script did not end within {GUARD_S:.0f} s")


def _read(fd: int) -> str:
    text = os.pread(fd, os.fstat(fd).st_size, 0).decode("utf-8", "replace")
    os.close(fd)
    return text
