"""Saving while training goes on: copies first, one at a time, failures told."""

from __future__ import annotations

import threading

import pytest
import torch

from helpers.checkpoint_states import assert_same, state
from shoal.checkpoint.saver import BackgroundSaver
from shoal.checkpoint.snapshot import Room
from shoal.checkpoint.store import CheckpointStore

GUARD_S = 30.0


class HeldStore(CheckpointStore):
    """Saves as the real one does, but not before it may."""

    def __init__(self, folder):
        super().__init__(folder)
        self.begun, self.may_save = threading.Event(), threading.Event()

    def save(self, snapshot):
        self.begun.set()
        assert self.may_save.wait(GUARD_S)
        return super().save(snapshot)


def test_training_may_change_the_tensors_at_once(tmp_path):
    store, saved = HeldStore(tmp_path), []
    saver = BackgroundSaver(store, lambda entry, stall_s: saved.append((entry.step, stall_s)), pytest.fail)
    snapshot = state(10)
    took_s = saver.offer(snapshot)
    assert store.begun.wait(GUARD_S)
    assert saved == [] and saver.seconds == 0.0
    for _, tensors in snapshot.parts():
        for tensor in tensors.values():
            tensor.zero_()
    store.may_save.set()
    saver.close()
    [(step, stall_s)] = saved
    assert step == 10 and 0 < stall_s <= took_s and saver.seconds > 0
    assert_same(store.latest(pytest.fail), state(10))


def test_an_offer_waits_for_the_save_in_flight(tmp_path):
    store, saved = HeldStore(tmp_path), []
    saver = BackgroundSaver(store, lambda entry, _: saved.append(entry.step), pytest.fail)
    saver.offer(state(10))
    second = threading.Thread(target=saver.offer, args=[state(20)])
    second.start()
    assert store.begun.wait(GUARD_S) and saved == []
    store.may_save.set()
    second.join(GUARD_S)
    saver.close()
    assert saved == [10, 20] == [entry.step for entry in store.entries()]


def test_a_failure_is_told_and_the_next_save_goes_on(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    saved, failed = [], []
    saver = BackgroundSaver(
        CheckpointStore(tmp_path / "checkpoints"), lambda *told: saved.append(told), failed.append
    )
    saver.offer(state(10))
    saver.close()
    assert saved == [] and len(failed) == 1
    assert failed[0].startswith("step 10 was not saved: ")
    (tmp_path / "checkpoints").unlink()
    saver.offer(state(20))
    saver.close()
    assert saved[0][0].step == 20 and len(failed) == 1


def test_a_room_is_used_again_as_long_as_the_state_has_its_form():
    room = Room()

    def place(snapshot):
        copy = snapshot.copy_into(room)
        assert_same(copy, snapshot)
        return copy.model["tokens"].data_ptr()

    first = place(state(10))
    assert place(state(20)) == first
    assert place(state(20, width=5000)) != first


def test_gaps_between_tensors_are_zeros_whatever_lay_there_before():
    room = Room()
    large, small = {"a": torch.full((64,), 7.0)}, {"a": torch.full((3,), 7.0), "b": torch.full((3,), 7.0)}
    room.copy("model", large)
    memory = room.copy("model", small).memory
    assert memory.nonzero().max() < 64 + 12 and not memory[12:64].any()
