"""`kill -9` in the middle of a save: what counts as a checkpoint is whole, whenever it happens."""

from __future__ import annotations

import os
import random
import select
import signal
import time

import pytest
import torch

from helpers.checkpoint_states import assert_same, state
from shoal.checkpoint.store import CheckpointStore

FEW, MANY = 20, 60
"""Kills: where all tests must be quick, and where they need not."""
WIDTH = 20_000
GUARD_S = 30.0


def start_saver(store, first_step):
    """A process that saves one state after the other and writes a byte when it begins; its pid, and the pipe."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        torch.set_num_threads(1)
        for step in range(first_step, first_step + 1000):
            snapshot = state(step, width=WIDTH)
            os.write(writer, b".")
            store.save(snapshot)
    finally:
        os._exit(1)


def kill_at(store, first_step, delay_s):
    pid, pipe = start_saver(store, first_step)
    try:
        assert select.select([pipe], [], [], GUARD_S)[0], "the process did not begin to save"
        time.sleep(delay_s)
    finally:
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        os.close(pipe)


@pytest.mark.parametrize("kills", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_whenever_it_is_killed_what_counts_is_whole(tmp_path, kills):
    store, dice = CheckpointStore(tmp_path, keep=3, chunk_bytes=1 << 16), random.Random(4)
    store.save(state(1, width=WIDTH))
    top, interrupted = 1, 0
    for _ in range(kills):
        # Half of the time later steps, half of the time the same again: that replaces a checkpoint.
        kill_at(store, top + dice.randint(0, 1), dice.random() * 0.03)
        interrupted += any(path.name.startswith(".") for path in tmp_path.iterdir())
        snapshot = store.latest(pytest.fail)
        assert_same(snapshot, state(snapshot.step, width=WIDTH))
        assert all(store.load(entry).step == entry.step for entry in store.entries())
        top = max(entry.step for entry in store.entries())
    assert interrupted >= kills // 4, "hardly any save was hit"
    store.save(state(top + 1, width=WIDTH))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
