"""One warm zygote and one warm command line for all tests; no test leaves a process or a thread of ours behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from helpers.commands import GUARD_S
from helpers.warm_commands import WarmCommands
from shoal.launch.owner import ZygoteProcess, start_zygote

END_GRACE_S = 5.0

# A busy machine is slow, and no finding.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure() -> None:
    """Ctrl-C ends what tests start, also in the background, where a shell lets it be ignored."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collector of a test, or of a process forked here, looks at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def zygote() -> Iterator[ZygoteProcess]:
    with start_zygote() as process:
        yield process


@pytest.fixture(scope="session")
def warm_commands(zygote: ZygoteProcess) -> Iterator[WarmCommands]:
    """`warm_commands(folder, "train", …)` runs the command there to its end."""
    commands = WarmCommands(zygote, GUARD_S)
    yield commands
    commands.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails a test whose processes or threads still live a while after it."""
    # Twice: while a child ends, the kernel's list may lack another one for a moment.
    before = _children() | _children(), _our_threads()
    yield
    deadline = time.monotonic() + END_GRACE_S
    while (left := (_children() - before[0], _our_threads() - before[1])) != (set(), set()):
        assert time.monotonic() < deadline, f"this test left processes {left[0]} and threads {left[1]}"
        time.sleep(0.01)


def _children() -> set[int]:
    """From the kernel's own list, which costs next to nothing: this is asked thousands of times."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # It has ended since.
            found |= {int(pid) for pid in Path("/proc/self/task", thread, "children").read_text().split()}
    return found


def _our_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("shoal")}
