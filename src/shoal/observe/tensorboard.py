"""Scalars for TensorBoard. The only file here that touches torch, and only when it is asked for."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import DiskRefused, SpecError
from shoal.observe.disk import explain_refusal, writing
from shoal.observe.events import Event
from shoal.observe.happenings import Evaluated, Restarted, StepsTaken


class TensorBoardSink:
    """Writes `train/loss` and what it is told with, `train/lr` and `test/<metric>` over the steps."""

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise SpecError(
                "TensorBoard was asked for but is not installed; install it: pip install shoal[tensorboard]"
            ) from None
        self._folder = Path(folder)
        self._refusal: OSError | None = None
        with writing(self._folder):
            self._writer = SummaryWriter(str(folder))
        self._reopen = lambda step: SummaryWriter(str(folder), purge_step=step)

    def handle(self, event: Event) -> None:
        """Write the scalars that this event carries. A disk that refuses does not end the run; `close` tells."""
        if self._refusal is not None:
            return
        try:
            match event.what:
                case StepsTaken():
                    self._write_steps(event.what, event.time)
                case Restarted(step=step):
                    # TensorBoard leaves out what an earlier file says of these steps.
                    self._writer.close()
                    self._writer = self._reopen(step + 1)
                case Evaluated(step=step, results=results):
                    for name, value in results.items():
                        self._writer.add_scalar(f"test/{name}", value, step, event.time)
        except OSError as error:
            self._refusal = error

    def close(self) -> None:
        """Write what is left."""
        try:
            self._writer.close()
        except OSError as error:
            self._refusal = self._refusal or error
        if self._refusal is not None:
            raise DiskRefused(f"{self._folder.name} is not whole: {explain_refusal(self._refusal)}.")

    def _write_steps(self, told: StepsTaken, time: float) -> None:
        for step, loss in told.steps:
            if loss is not None:
                self._writer.add_scalar("train/loss", loss, step, time)
        for step, parts in told.parts or ():
            for name, value in parts.items():
                self._writer.add_scalar(f"train/{name}", value, step, time)
        if told.steps and told.lr is not None:
            self._writer.add_scalar("train/lr", told.lr, told.steps[-1][0], time)
