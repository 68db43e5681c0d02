"""Tasks that hang once, in one process: the first that comes to a certain step as a certain rank."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import shoal
from shoal.strategies.ps.client import PsClient

SAMPLES, BATCH = 64, 16


class Hanging(Dataset):
    """Samples of noise; reading one of them may hang, as `how` says. A file keeps it from happening twice."""

    def __init__(self, how: str, mark: str, at_read: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self._inputs = torch.randn(SAMPLES, 16, generator=generator)
        self._targets = torch.randint(0, 4, (SAMPLES,), generator=generator)
        self._how = how
        self._mark = Path(mark)
        self._reads_left = at_read

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._reads_left -= 1
        if self._reads_left == 0 and self._how and os.environ["SHOAL_RANK"] == "1" and self._is_first():
            getattr(self, self._how)()
        return self._inputs[number], self._targets[number]

    def _is_first(self) -> bool:
        try:
            self._mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def deadlock(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def hold_lock(self) -> None:
        while True:
            ctypes.PyDLL(None).sleep(60)  # Unlike CDLL it keeps Python's lock.


def killed_task(mark: str, steps: int) -> shoal.Task:
    """A task whose first worker is killed while it builds it, as for want of memory; it happens once."""
    if os.environ["SHOAL_ROLE"] == "worker" and os.environ["SHOAL_RANK"] == "0" and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return task(steps=steps)


def torn_task(mark: str, steps: int) -> shoal.Task:
    """A task whose first worker is killed when one shard has what it pushed in step 10, and no other; once."""
    if os.environ["SHOAL_ROLE"] == "worker" and os.environ["SHOAL_RANK"] == "0" and not Path(mark).exists():
        whole = PsClient._push_shard

        def tear(client: PsClient, shard: int) -> None:
            whole(client, shard)
            if client._open.clock == 10:
                client.wait(lambda: not client.machine.links[shard].unacked)
                Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)

        PsClient._push_shard = tear  # type: ignore[method-assign]
    return task(steps=steps)


def task(how: str = "", mark: str = "", steps: int = 60, at_read: int = 1600) -> shoal.Task:
    settings: dict[str, Any] = {"max_steps": steps, "epochs": steps, "batch_size": BATCH}
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        train=Hanging(how, mark, at_read),
        **settings,
    )
