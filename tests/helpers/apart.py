"""Hosts that share no disk: agents whose file system has nothing where the task and the runs lie here."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

NEEDS_NAMESPACES = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="file systems of one's own need root, and a kernel that gives them (unshare -m)",
)
"""For tests of hosts that share no disk."""


def ssh_to_others(script: Path, hidden: Sequence[Path], *, disk: str = "") -> str:
    """A command that takes what ssh takes, and runs it here. Host `first` has these folders; others see them
    empty, and have as much disk (`64k`) for what they are sent, if that is said."""
    covers = " && ".join(f"mount -t tmpfs none {folder}" for folder in hidden)
    if disk:
        covers += f" && mount -t tmpfs -o size={disk} none /mnt && export TMPDIR=/mnt"
    script.write_text(
        "#!/bin/sh\n"
        '[ "$1" != first ] || exec sh -c "exec $2"\n'
        f'exec unshare -m --propagation private sh -c \'{covers} && exec sh -c "exec $0"\' "$2"\n'
    )
    script.chmod(0o755)
    return str(script)


TASK = """
import os
from pathlib import Path
import torch
import shoal
from nets import Net

print("rank", os.environ.get("SHOAL_RANK"), "begins")
ROWS = Path(__file__).with_name("rows.txt")


def samples():
    rows = [[float(word) for word in line.split()] for line in ROWS.read_text().splitlines()]
    return [(torch.tensor(row[:4]), torch.tensor(row[4:])) for row in rows]


def task(steps=6):
    return shoal.Task(
        model=Net, train=samples, loss=torch.nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), batch_size=8, max_steps=steps, seed=3,
    )
"""
NETS = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
"""


def write_task(folder: Path) -> str:
    """A task of several files; its target."""
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "nets.py").write_text(NETS)
    rows = [" ".join(f"{(7 * row + 3 * column) % 11 / 11:.3f}" for column in range(5)) for row in range(64)]
    (folder / "rows.txt").write_text("\n".join(rows))
    return f"{folder}/task.py:task"
