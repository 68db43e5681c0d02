"""`mlflow`: MLflow tracking, as `mlflow:sqlite:///mlflow.db` or the address of a server."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.observe.disk import write_whole
from shoal.observe.loggers.base import LoggedRun, Logger, RunEnding, Scalar, require_installed

_STATUS = {RunEnding.FINISHED: "FINISHED", RunEnding.STOPPED: "KILLED", RunEnding.FAILED: "FAILED"}
_MOST_METRICS, _MOST_PARAMS, _MOST_TAG_CHARACTERS = 1000, 100, 5000
"""What MLflow takes at once."""


class MlflowLogger(Logger):
    """A run of MLflow's; its id is kept, so that a resumed run goes on there. Settings are its parameters, texts
    its tags, pictures and the model its artifacts."""

    def __init__(self, setting: str = "") -> None:
        """`setting`: where to, as MLflow writes it; default `MLFLOW_TRACKING_URI`, or MLflow's own default."""
        require_installed("mlflow", "mlflow")
        self._uri = setting or None
        self._notes: defaultdict[str, list[str]] = defaultdict(list)
        """By tag: several things may happen at one step."""

    def begin(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=self._uri)
        kept = run.folder / "run.json"
        found = json.loads(kept.read_text()) if kept.is_file() else {}
        if found.get("uri") == self._uri and "run_id" in found:
            self._run_id = found["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._client.create_run(self._experiment(), run_name=run.name).info.run_id
            write_whole(kept, json.dumps({"uri": self._uri, "run_id": self._run_id}))
        self._keep_settings({_key(name): str(value) for name, value in run.settings.items()})

    def log(self, scalars: Sequence[Scalar]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(_key(name), value, round(when * 1000), step) for step, name, value, when in scalars]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MOST_METRICS])

    def note(self, name: str, text: str, step: int) -> None:
        tag = f"{_key(name)}.{step}"
        self._notes[tag].append(text)
        self._client.set_tag(self._run_id, tag, "\n".join(self._notes[tag])[:_MOST_TAG_CHARACTERS])

    def picture(self, name: str, path: Path, step: int) -> None:
        self._client.log_artifact(self._run_id, str(path), f"plots/{_key(name)}")

    def model(self, path: Path, digest: str, step: int) -> None:
        self._client.log_artifact(self._run_id, str(path), "model")
        self._client.set_tag(self._run_id, "digest", digest)

    def end(self, ending: RunEnding) -> None:
        self._client.set_terminated(self._run_id, _STATUS[ending])

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "shoal")
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _keep_settings(self, settings: dict[str, str]) -> None:
        """Parameters cannot be changed: what a resumed run was told otherwise becomes a tag."""
        from mlflow.entities import Param

        known = self._client.get_run(self._run_id).data.params
        params = [Param(name, value) for name, value in settings.items() if name not in known]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MOST_PARAMS])
        for name, value in settings.items():
            if known.get(name, value) != value:
                self._client.set_tag(self._run_id, f"resumed.{name}", value)


def _key(name: str) -> str:
    """A name as MLflow takes it."""
    return re.sub(r"[^\w./ -]", "_", name)
