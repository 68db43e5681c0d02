"""`wandb`: Weights & Biases. Nothing leaves this machine unless `WANDB_MODE=online` says so."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from shoal.observe.disk import write_whole
from shoal.observe.loggers.base import LoggedRun, Logger, RunEnding, Scalar, require_installed

_MOST_NAME_CHARACTERS = 100


class WandbLogger(Logger):
    """A run at Weights & Biases; its id is kept, so that a resumed run goes on there.

    Numbers come with their own `step`, because W&B drops what is told of a step before its last one: evaluations
    and steps that were undone would be lost.
    """

    def __init__(self, setting: str = "") -> None:
        """`setting`: the project; default `WANDB_PROJECT`, or `shoal`."""
        require_installed("wandb", "wandb")
        self._project = setting or os.environ.get("WANDB_PROJECT", "shoal")
        self._run: Any = None

    def begin(self, run: LoggedRun) -> None:
        import wandb

        kept, mode = run.folder / "run-id", cast(Any, os.environ.get("WANDB_MODE", "offline"))
        if not kept.is_file():
            write_whole(kept, uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=self._project,
            name=run.name,
            id=kept.read_text().strip(),
            # Offline there is nobody to ask what the run has come to; the same id brings its parts together.
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(run.folder),
            config=dict(run.settings),
            allow_val_change=True,
            reinit="create_new",  # a run that the user has begun in this process is none of ours
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, scalars: Sequence[Scalar]) -> None:
        for step, of_step in groupby(scalars, attrgetter("step")):
            self._run.log({"step": step, **{one.name: one.value for one in of_step}})

    def note(self, name: str, text: str, step: int) -> None:
        self._run.log({"step": step, name: text})

    def picture(self, name: str, path: Path, step: int) -> None:
        import wandb

        self._run.log({"step": step, name: wandb.Image(str(path))})

    def model(self, path: Path, digest: str, step: int) -> None:
        import wandb

        name = re.sub(r"[^\w.-]+", "-", self._run.name, flags=re.ASCII)[:_MOST_NAME_CHARACTERS]
        artifact = wandb.Artifact(f"{name}-model", type="model", metadata={"digest": digest, "step": step})
        artifact.add_file(str(path), policy="immutable")  # where it lies, without a copy
        self._run.log_artifact(artifact)
        self._run.summary["digest"] = digest

    def end(self, ending: RunEnding) -> None:
        self._run.finish(exit_code=0 if ending == RunEnding.FINISHED else 1)
