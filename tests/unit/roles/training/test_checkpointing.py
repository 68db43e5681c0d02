"""When a checkpoint is due to a worker that follows another."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from helpers.checkpoint_states import state
from shoal.checkpoint.store import CheckpointStore
from shoal.comm.channel import Channel
from shoal.roles.process.reporter import Reporter
from shoal.roles.training.checkpointing import Checkpointing
from shoal.spec import Job, World


def successor(run: Path, rule: str) -> Checkpointing:
    """What a worker of a run has that is there already, before its first step."""
    _, ours = Channel.pair()
    start = SimpleNamespace(step=0, losses=[], evaluations={})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    replica = cast(Any, SimpleNamespace(start=start, optimizer=optimizer))
    job = Job(target="toy.py", checkpoint=rule, run_dir=str(run))
    return Checkpointing(job, replica, cast(Any, None), Reporter(World(), ours))


def leave_checkpoint(run: Path, step: int, *, seconds_ago: float, patch: pytest.MonkeyPatch) -> None:
    now = time.time()
    with patch.context() as context:
        context.setattr(time, "time", lambda: now - seconds_ago)
        CheckpointStore(run / "checkpoints").save(state(step))


def test_what_was_due_by_steps_is_due_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_checkpoint(tmp_path, 20, seconds_ago=0.0, patch=monkeypatch)
    assert not successor(tmp_path, "every=20").is_due(33)
    assert successor(tmp_path, "every=20").is_due(41)


@pytest.mark.parametrize(("seconds_ago", "expected"), [(0.0, False), (3000.0, False), (4000.0, True)])
def test_what_was_due_by_time_is_due_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_ago: float, expected: bool
) -> None:
    leave_checkpoint(tmp_path, 20, seconds_ago=seconds_ago, patch=monkeypatch)
    assert successor(tmp_path, "every=1h").is_due(33) is expected
