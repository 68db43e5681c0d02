"""The first worker's checkpoints go forward: none of an earlier step takes the place of a newer one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from shoal.checkpoint.listing import list_entries
from shoal.comm.channel import Channel
from shoal.model.replica import Replica
from shoal.observe import RunFolder
from shoal.roles.process.reporter import Reporter
from shoal.roles.training.checkpointing import Checkpointing
from shoal.roles.training.training import make_schedule
from shoal.spec import Job, Task, World


def test_a_step_before_the_newest_is_not_saved_and_nothing_is_removed_for_it(tmp_path: Path) -> None:
    task = Task(
        model=lambda: nn.Linear(1, 1),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=[0] * 400,
        batch_size=1,
        epochs=1,
    )
    replica, schedule = Replica(task), make_schedule(task, task.train, slots=1, workers=1)
    job = Job(target="t.py", checkpoint="every=100,keep=1", run_dir=str(tmp_path))
    ours, theirs = Channel.pair()
    checkpoints = Checkpointing(job, replica, schedule, Reporter(World(), ours))
    for step in (100, 0, 100, 99):
        checkpoints.note_step(step, 1.0)
        checkpoints.save(step, replica.module.state_dict, dict)
    checkpoints.close()
    assert [entry.step for entry in list_entries(RunFolder(tmp_path).checkpoints)] == [100]
    told = iter(theirs.poll, None)
    warnings = [message["text"] for message in told if message["kind"] == "warning"]
    assert warnings == [
        f"checkpoint: step {step} is not saved, because that of step 100 is newer" for step in (0, 100, 99)
    ]
    for end in (ours, theirs):
        end.close()
