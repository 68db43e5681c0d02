"""What a Keras model was compiled with as a task's loss and metrics: functions of output and target."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from shoal.errors import TaskError
from shoal.keras.installed import computing, load_keras
from shoal.keras.operation import last_pass

TARGET, WEIGHTS = "keras_target", "keras_sample_weight"
"""What a batch's target has where samples have weights."""


def split_target(target: Any) -> tuple[Any, Any]:
    """Targets, and the samples' weights where there are some."""
    if isinstance(target, Mapping) and WEIGHTS in target:
        return target[TARGET], target[WEIGHTS]
    return target, None


class KerasLoss:
    """`loss(output, target)`, as `compile` said; the same for all models that one function builds."""

    def __init__(self, class_weight: Mapping[int, float] | None) -> None:
        self._class_weight = dict(class_weight or {})
        self._compiled: dict[torch.dtype, Any] = {}
        self._models: list[weakref.ref[Any]] = []

    def learn(self, model: Any, dtype: torch.dtype) -> None:
        """A model that computes in these numbers has been built, and its loss with it."""
        compiled = model._compile_loss
        if compiled is not None:
            _check_reductions(compiled)
        self._compiled[dtype] = compiled
        self._models = [ref for ref in self._models if ref() is not None] + [weakref.ref(model)]

    def __call__(self, output: Any, target: Any) -> Any:
        y, weights = split_target(target)
        if self._class_weight:
            weights = _of_classes(self._class_weight, y)
        operation, inputs = last_pass.operation, last_pass.inputs
        last_pass.operation, last_pass.inputs = None, None
        with computing(str(_first(output).device), _first(output).dtype):
            # Another task's model may have been asked last, and its loss not.
            if operation is not None and any(ref() is operation.operation for ref in self._models):
                return self._of_whole(operation, inputs, y, output, weights)
            return _told(self._compiled_for(output), lambda loss: loss(y, output, weights))

    def _of_whole(self, operation: Any, inputs: Any, y: Any, output: Any, weights: Any) -> Any:
        """Of a model that is all here: its layers' losses count, and its own `compute_loss`."""
        model = operation.operation
        return _told(
            model._compile_loss,
            lambda _: model._compute_loss(inputs, y, output, weights, training=operation.training),
        )

    def _compiled_for(self, output: Any) -> Any:
        found = self._compiled.get(_first(output).dtype) or next(iter(reversed(self._compiled.values())), None)
        if found is None:
            raise TaskError("Task.from_keras: the model was compiled without a loss; set compile(loss=…).")
        return found


def _told(compiled: Any, compute: Any) -> Any:
    """The loss; of several outputs with the loss of each, by the names that Keras gives them."""
    trackers = [] if compiled is None else compiled.metrics
    for tracker in trackers:
        tracker.reset_state()
    loss = compute(compiled)
    if len(trackers) < 2:
        return loss
    return {"loss": loss, **{tracker.name: tracker.result().detach() for tracker in trackers}}


def _of_classes(weights: Mapping[int, float], y: Any) -> torch.Tensor:
    """The weight of each sample by its class, as Keras reads targets: numbers of classes, or a column for each."""
    if not isinstance(y, torch.Tensor):
        raise TaskError("Task.from_keras: class_weight= is for models with one output; give samples weights.")
    classes = y.argmax(-1) if y.dim() > 1 and y.shape[-1] > 1 else y.reshape(len(y))
    found = torch.ones(len(y), dtype=torch.get_default_dtype(), device=y.device)
    for number, weight in weights.items():
        found[classes.round().to(torch.int64) == number] = weight
    return found


def _check_reductions(compiled: Any) -> None:
    for entry in compiled._flat_losses or ():
        reduction = getattr(entry.loss, "reduction", None)
        if reduction not in ("sum_over_batch_size", "mean", "mean_with_sample_weight"):
            raise TaskError(
                f"Task.from_keras: the loss {entry.name} has reduction={reduction!r}, which depends on how many "
                "samples a worker has; use reduction='sum_over_batch_size'."
            )


def _first(output: Any) -> torch.Tensor:
    return next(leaf for leaf in load_keras().tree.flatten(output) if isinstance(leaf, torch.Tensor))


class CompiledMetric:
    """One of the numbers that `compile(metrics=…)` asks for, over a whole data set.

    Keras's metrics are no means in general, and add up inside themselves. So whoever evaluates shows all batches,
    in their order, to one of them.
    """

    chooses: ClassVar[bool] = True

    def __init__(self, metric: Any, compiled: Any, index: int, *, is_weighted: bool = False) -> None:
        """`index`: of its output, as Keras counts them in `compiled`, all that was asked for."""
        self._metric = metric
        self._compiled = compiled
        self._index = index
        self._is_weighted = is_weighted

    def __call__(self, output: Any, target: Any) -> float:
        return self.value([self.keep(output, target)])

    @property
    def is_mean(self) -> bool:
        """Whether it is a mean over samples, so that those of parts add up to that of all."""
        keras = load_keras()
        return not self._is_weighted and type(self._metric).result is keras.metrics.Mean.result

    def keep(self, output: Any, target: Any) -> Sequence[Any]:
        """Output and target; a weight becomes a column more of a target's rows."""
        y, weights = split_target(target)
        output, y = (self._compiled._flatten_y(each)[self._index] for each in (output, y))
        if not self._is_weighted or weights is None:
            return output, y
        rows = y.reshape(len(y), -1)
        return output, torch.cat([rows.double(), weights.double().reshape(-1, 1)], 1)

    def value(self, kept: Iterable[Sequence[torch.Tensor]]) -> float:
        """What all of them come to."""
        self._metric.reset_state()
        for output, target in kept:
            weights = None
            if self._is_weighted and target.dim() == 2:
                target, weights = target[:, :-1], target[:, -1]
            with load_keras().device("cpu"):
                self._metric.update_state(target, output, sample_weight=weights)
        found = float(self._metric.result())
        self._metric.reset_state()
        return found


def metrics_of(model: Any) -> dict[str, CompiledMetric]:
    """By the names that Keras gives them in its history."""
    compiled = model._compile_metrics
    if compiled is None:
        return {}
    assert compiled.built
    found: dict[str, CompiledMetric] = {}
    for lists, is_weighted in ((compiled._flat_metrics, False), (compiled._flat_weighted_metrics, True)):
        for index, several in enumerate(lists):
            if several is None:
                continue
            for metric in several.metrics:
                name = f"{several.output_name}_{metric.name}" if several.output_name else metric.name
                name = f"weighted_{name}" if name in found else name
                found[name] = CompiledMetric(metric, compiled, index, is_weighted=is_weighted)
    return found
