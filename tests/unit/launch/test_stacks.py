"""Stacks of real processes: one that sleeps, one that holds Python's lock, one that is stopped."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal.errors
from shoal.comm.channel import Channel
from shoal.launch.stacks import StackSource, collect_stacks, explain_state, write_stacks
from shoal.launch.vigil import find_frame

GUARD_S = 30.0
CODE = """
import ctypes, sys, threading, time
from shoal.comm.channel import Channel
from shoal.roles.process.stacks import offer_stacks

channel = Channel.from_fd(int(sys.argv[1]))
offer_stacks(channel)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

def sleeping():
    channel.send({"kind": "there"})
    time.sleep(60)

def holding():
    channel.send({"kind": "there"})
    while True:  # A signal ends the sleep.
        ctypes.PyDLL(None).sleep(60)  # Unlike CDLL it keeps the lock.

globals()[sys.argv[2]]()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    script, processes = tmp_path / "script.py", []
    script.write_text(textwrap.dedent(CODE))

    def start(what: str) -> StackSource:
        ours, theirs = Channel.pair()
        process = subprocess.Popen(
            [sys.executable, str(script), str(theirs.fileno()), what], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        processes.append((process, ours))
        offer, there = ours.receive(GUARD_S), ours.receive(GUARD_S)
        assert offer is not None and offer["kind"] == "stacks" and there == {"kind": "there"}
        return StackSource(pid=offer["pid"], signum=offer["signal"], fd=offer["fd"])

    yield start
    for process, channel in processes:
        process.kill()
        process.wait(GUARD_S)
        channel.close()


def test_stacks_of_all_are_had_whatever_they_do(start, tmp_path: Path) -> None:
    sleeping, holding, stopped = start("sleeping"), start("holding"), start("sleeping")
    os.kill(stopped.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
    sources = [sleeping, holding, stopped]
    found = collect_stacks(sources, lambda source: os.kill(source.pid, source.signum))
    for source, function in ((sleeping, "sleeping"), (holding, "holding")):
        frame = find_frame(found[source.pid])
        assert frame is not None and frame.startswith(f"{tmp_path}/script.py:") and frame.endswith(function)
    assert "stopped (SIGSTOP)" in found[stopped.pid] and find_frame(found[stopped.pid]) is None
    path = write_stacks(tmp_path, 12, [("worker 0", found[sleeping.pid]), ("worker 1", found[stopped.pid])])
    assert path.name == "stacks-12.txt"
    assert path.read_text().index("== worker 0 ==") < path.read_text().index("== worker 1 ==")


def test_they_can_be_asked_twice(start) -> None:
    source = start("sleeping")
    texts = [
        collect_stacks([source], lambda source: os.kill(source.pid, source.signum))[source.pid] for _ in range(2)
    ]
    assert texts[0].count("in sleeping") == texts[1].count("in sleeping") == 1


def test_the_users_innermost_frame_is_named() -> None:
    text = f"""Thread 0x1 (most recent call first):
  File "/elsewhere/other.py", line 1 in beat

Current thread 0x2 (most recent call first):
  File "{queue.__file__}", line 171 in get
  File "/home/me/tasks.py", line 30 in __getitem__
  File "{shoal.errors.__file__}", line 5 in batch
  File "/home/me/outer.py", line 3 in <module>
"""
    assert find_frame(text) == "/home/me/tasks.py:30 in __getitem__"
    assert find_frame(text.replace("/home/me/", os.path.dirname(shoal.errors.__file__) + "/")) == (
        f"{queue.__file__}:171 in get"
    )


def test_who_is_gone_is_said_to_be() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(GUARD_S)
    assert explain_state(process.pid) == "it has ended"
    assert explain_state(os.getpid()) is None
