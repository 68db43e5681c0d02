"""The best model that a run evaluates is kept beside its last one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.best_files import BestFiles, BestModel, put
from shoal.checkpoint.model_stream import TensorStream
from shoal.errors import CheckpointError, DiskRefused
from shoal.observe.run_folder import RunFolder
from shoal.roles.process.reporter import Reporter
from shoal.spec.vocabulary import State

if TYPE_CHECKING:
    from shoal.roles.training.training import Training


class BestKeeper:
    """One process's part in it. All that evaluate see the same results, so all know which model is the best."""

    def __init__(self, training: Training, folder: RunFolder, reporter: Reporter) -> None:
        best_by = training.task.best_by
        assert best_by is not None, "the task keeps its best model"
        self._metric, self._rises = best_by
        self._training = training
        self._folder = folder
        self._reporter = reporter
        begun_at = training.replica.start.step
        self._files = BestFiles(folder, begun_at=begun_at, attempt=training.world.attempt)
        # Who evaluates for all may come in the place of another, and then knows of its evaluations only this.
        newest = self._files.newest(math.inf if training.conduct.first_evaluates else begun_at)
        self._value = None if newest is None else newest.results.get(self._metric)
        self._latest: tuple[int, Mapping[str, float]] | None = None
        """The last one that was considered the best here: after which step, and its results."""

    def consider(self, step: int, results: Mapping[str, float], *, is_past: bool = False) -> None:
        """Keep the model after this step, where none before it was as good; `is_past`: that was done, long ago."""
        # One that died may have kept it before it could tell callbacks.
        was_kept = self._training.conduct.first_evaluates and not is_past and self._files.has(step)
        if not self._is_better(value := results[self._metric]) and not was_kept:
            return
        self._value = value
        if not is_past:
            self._latest = step, results
            self._keep(step, results)

    def take_over(self, step: int, *, is_still: bool) -> None:
        """This process has become the first, with this step done. The one before may have died before it had kept
        the best model; then it had no part in the next step. `is_still`: nor has anybody, so the model is that of
        this one."""
        if not is_still:  # what was not kept is best no more
            newest = self._newest()
            self._value = None if newest is None else newest.results.get(self._metric)
        elif self._latest is not None and self._latest[0] == step:
            self._keep(*self._latest)

    def _is_better(self, value: float) -> bool:
        if math.isnan(value) or self._value is None:
            return not math.isnan(value)
        return value > self._value if self._rises else value < self._value

    def _keep(self, step: int, results: Mapping[str, float]) -> None:
        training, files = self._training, self._files
        with self._reporter.pulse.during(State.SAVING):  # others, too, wait for the one who writes
            if training.conduct.first_evaluates:
                # What was evaluated: by now servers may have a newer one.
                stream = TensorStream.of(training.replica.module.state_dict())
            else:
                stream = training.strategy.model_stream(training.replica)
            if training.world.is_first:
                try:
                    if files.has(step):
                        files.settle()  # whoever kept it may have died before it could be shown
                    else:
                        files.keep(step, stream, results)
                except DiskRefused as error:  # as with a checkpoint: what is trained counts for more
                    self._reporter.warn(f"the best model, of step {step}, was not kept: {error}")
            stream.drain()
        if training.world.is_first and training.callbacks is not None and files.has(step):
            training.callbacks.best_is_kept(step, files.shown)

    def _newest(self) -> BestModel | None:
        with suppress(DiskRefused):
            self._files.settle()
        return self._files.newest()

    @property
    def is_restored(self) -> bool:
        """Whether the run ends with the best model in the place of its last one."""
        stop = self._training.task.stop
        return stop is not None and stop.restore_best and self._value is not None

    def restore(self) -> BestModel:
        """Let the run's model be the best one."""
        if (newest := self._newest()) is None:
            raise CheckpointError("The best model was to be the run's own, but it could not be kept; see above.")
        put(newest.path, self._folder.model)
        return newest

    def facts(self) -> dict[str, Any]:
        """What a run's results say of it."""
        if (newest := self._newest()) is None:
            return {}
        best = {"step": newest.step, "digest": newest.digest, "results": dict(newest.results)}
        return {"best": {"by": self._metric, **best}}
