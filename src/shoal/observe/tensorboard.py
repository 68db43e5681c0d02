"""Scalars for TensorBoard. The only file here that touches torch, and only when it is asked for."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import SpecError
from shoal.observe.disk import writing
from shoal.observe.events import Event


class TensorBoardSink:
    """Writes `train/loss`, `train/lr` and `test/<metric>` over the steps."""

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise SpecError(
                "TensorBoard was asked for but is not installed; install it: pip install shoal[tensorboard]"
            ) from None
        self._folder = Path(folder)
        with writing(self._folder):
            self._writer = SummaryWriter(str(folder))

    def handle(self, event: Event) -> None:
        """Write the scalars that this event carries."""
        with writing(self._folder):
            if event.kind == "steps":
                self._write_steps(event)
            elif event.kind == "evaluation":
                for name, value in event.values["results"].items():
                    self._writer.add_scalar(f"test/{name}", value, event.values["step"], event.time)

    def close(self) -> None:
        """Write what is left."""
        with writing(self._folder):
            self._writer.close()

    def _write_steps(self, event: Event) -> None:
        steps = event.values["steps"]
        for step, loss in steps:
            if loss is not None:
                self._writer.add_scalar("train/loss", loss, step, event.time)
        if steps and event.values.get("lr") is not None:
            self._writer.add_scalar("train/lr", event.values["lr"], steps[-1][0], event.time)
