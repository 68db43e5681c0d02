"""The command line from a process that has imported everything: hundreds of commands need one start.

Run as a program it reads a line of JSON for each command, forks, and answers how that ended. It keeps its
environment, which names the zygote that workers are forked from: what is preloaded there is in every command.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.commands import environment
from shoal.launch.owner import ZygoteProcess

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Answer:
    """How a command ended."""

    status: int | None
    """None where it did not within its time, and was killed."""
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        """All that it said, in one line."""
        return " ".join(f"{self.out} {self.err}".split())

    @property
    def result(self) -> dict[str, Any]:
        """What a command with --json printed."""
        found: dict[str, Any] = json.loads(self.out)
        return found


class WarmCommands:
    """`commands(folder, "train", …)` runs the command there to its end."""

    def __init__(self, zygote: ZygoteProcess, guard_s: float, **more_environment: str) -> None:
        self._guard_s = guard_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", "helpers.warm_commands"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=TESTS,
            # Who forks must have one thread, and OpenBLAS would start its own when numpy is imported.
            env={**environment(zygote), **more_environment, "OPENBLAS_NUM_THREADS": "1"},
        )

    def __call__(self, folder: Path, *words: str) -> Answer:
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"words": words, "folder": str(folder), "guard_s": self._guard_s}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return Answer(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _run(request: dict[str, Any]) -> dict[str, Any]:
    from shoal.cli import main

    began = time.monotonic()
    folder = Path(request["folder"])
    # Not in any run folder: what is said must not count among what a run writes.
    out, err = (os.memfd_create(name) for name in ("out", "err"))
    pid = os.fork()
    if pid == 0:
        for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, err)):
            os.dup2(source, target)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
        status = 1
        try:
            os.chdir(folder)
            sys.argv[:] = ["shoal", *request["words"]]
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()  # as Python itself would
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = _wait(pid, began + request["guard_s"])
    said = {"out": _read(out), "err": _read(err)}
    return {"status": status, **said, "seconds": time.monotonic() - began}


def _wait(pid: int, until: float) -> int | None:
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _read(fd: int) -> str:
    text = os.pread(fd, os.fstat(fd).st_size, 0).decode("utf-8", "replace")
    os.close(fd)
    return text


def main() -> None:
    """Serve until nobody asks any more."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import torch  # noqa: F401  # which some commands need

    import shoal.cli.app
    import shoal.launch.runs
    import shoal.launch.saved  # noqa: F401

    gc.freeze()  # What is frozen is never visited by a command's collector, so its pages stay shared.
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
