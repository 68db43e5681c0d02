"""One supervisor at a time in a run folder."""

import errno
import fcntl
import os
import signal

import pytest

from shoal.errors import LaunchError
from shoal.observe.run_lock import FILE_NAME, RunLock


def lock(folder):
    return RunLock(folder, pytest.fail)


def run_in_child(work):
    """Forks a process that does `work`, says so and stays; its pid."""
    heard, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kept = work()  # noqa: F841, what is held must not be collected
            os.write(tell, b".")
            signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    with os.fdopen(heard, "rb", buffering=0) as said:
        assert said.read(1) == b"."
    return pid


def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_second_one_is_told_who_was_first(tmp_path):
    pid = run_in_child(lambda: lock(tmp_path).__enter__())
    try:
        who = rf"Run '{tmp_path.name}' is going on in .*, process {pid} on \S+ since \d+-.*; wait for its end or"
        for _ in range(2):
            with pytest.raises(LaunchError, match=who), lock(tmp_path):
                pass
    finally:
        end(pid)
    with lock(tmp_path):
        assert (tmp_path / FILE_NAME).exists(), "a dead process's lock is none"
    assert not (tmp_path / FILE_NAME).exists()


def test_one_process_cannot_have_it_twice(tmp_path):
    with lock(tmp_path), pytest.raises(LaunchError, match=f"process {os.getpid()} on"), lock(tmp_path):
        pass


def test_who_has_written_nothing_yet_has_just_begun(tmp_path):
    with (tmp_path / FILE_NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LaunchError, match="a process that has just begun"), lock(tmp_path):
            pass


def test_a_lock_that_was_let_go_meanwhile_is_not_taken_for_the_folders(tmp_path, monkeypatch):
    """Between opening and locking the file its holder ends, and another takes the folder."""
    first, flock, taken = lock(tmp_path), fcntl.flock, []
    first.__enter__()

    def late(fd, how):
        if not taken:
            first.__exit__()
            taken.append(lock(tmp_path))
            monkeypatch.setattr(fcntl, "flock", flock)
            taken[0].__enter__()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(LaunchError, match="is going on"), lock(tmp_path):
        pass
    taken[0].__exit__()


def test_a_fork_of_the_holder_does_not_hold_it(tmp_path):
    heard, tell = os.pipe()

    def hold_and_fork():
        held = lock(tmp_path).__enter__()
        os.write(tell, b"%d\n" % run_in_child(lambda: None))
        return held

    holder = run_in_child(hold_and_fork)
    os.close(tell)
    with os.fdopen(heard) as said:
        child = int(said.readline())
    end(holder)
    try:
        os.kill(child, 0)  # it lives
        with lock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_disk_without_locks_is_told_of(tmp_path, monkeypatch):
    def refuse(fd, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    told = []
    with RunLock(tmp_path, told.append):
        pass
    assert len(told) == 1 and "has no locks (No locks available)" in told[0]
