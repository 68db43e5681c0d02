"""`ShoalClassifier` and `ShoalRegressor`: networks as scikit-learn's estimators."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import nn

from shoal.launch.runs import train
from shoal.roles.trainer.trainer import Trainer
from shoal.sklearn.networks import TrainingPlan, write_plan
from shoal.spec import World

_MOST_ROWS = 4096
"""That are computed at a time when nothing is trained."""


class _ShoalEstimator(BaseEstimator):
    """What both have in common."""

    _is_classifier: bool
    module_: nn.Module
    """Trained; there is none before the first fit."""

    def __init__(
        self,
        module: Any = None,
        hidden_layer_sizes: tuple[int, ...] = (100,),
        *,
        strategy: str = "data",
        workers: int = 1,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        lr: float = 0.01,
        weight_decay: float = 1e-4,
        batch_size: int = 32,
        epochs: int = 50,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 5,
        warm_start: bool = False,
        random_state: Any = None,
    ) -> None:
        self.module = module
        self.hidden_layer_sizes = hidden_layer_sizes
        self.strategy = strategy
        self.workers = workers
        self.optimizer = optimizer
        self.lr = lr
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.epochs = epochs
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.warm_start = warm_start
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on all of it; with `warm_start` from where the last fit ended. Where samples have weights, each
        counts its own in the mean of a batch."""
        goes_on = self.warm_start and hasattr(self, "module_")
        inputs, targets = self._checked(X, y, is_first=not goes_on)
        return self._fit(inputs, targets, sample_weight, epochs=self.epochs, goes_on=goes_on)

    def _checked(self, X: Any, y: Any, *, is_first: bool) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets as a network takes them; learns what they are like where `is_first`."""
        raise NotImplementedError

    def _num_outputs(self) -> int:
        raise NotImplementedError

    def _class_weights(self, targets: np.ndarray) -> tuple[float, ...] | None:
        return None

    def _arrays(self, inputs: np.ndarray, targets: np.ndarray, sample_weight: Any) -> dict[str, np.ndarray]:
        """What is trained on, with weights beside it where there are some. A class's weight is one of its samples:
        so a batch's mean is the same in however many parts it is computed."""
        # As scikit-learn does; a network is given no samples that count nothing, of which a batch could be made.
        weights = _check_sample_weight(sample_weight, inputs, dtype=np.float64, ensure_non_negative=True)
        of_classes = self._class_weights(targets[weights > 0])
        if sample_weight is None and of_classes is None:
            return {"x": inputs, "y": targets}
        if of_classes is not None:
            weights = weights * np.array(of_classes)[targets]
        counted = weights > 0
        if not counted.any():
            raise ValueError(f"class_weight={self.class_weight!r} leaves no sample that counts.")
        inputs, targets, weights = inputs[counted], targets[counted], weights[counted]
        return {"x": inputs, "y": targets, "w": (weights / weights.mean()).astype(np.float32)}

    def _fit(
        self, inputs: np.ndarray, targets: np.ndarray, sample_weight: Any, *, epochs: int, goes_on: bool
    ) -> Self:
        if not callable(self.optimizer):
            raise ValueError(f"optimizer is a class of torch's, as torch.optim.Adam, found {self.optimizer!r}.")
        seed = int(check_random_state(self.random_state).randint(1 << 30))
        arrays = self._arrays(inputs, targets, sample_weight)
        stops = self.early_stopping and len(arrays["x"]) > 1
        if stops:
            parts = train_test_split(*arrays.values(), test_size=self.validation_fraction, random_state=seed)
            held_out = {f"held_{name}": part for name, part in zip(arrays, parts[1::2], strict=True)}
            arrays = dict(zip(arrays, parts[::2], strict=True)) | held_out
        plan = TrainingPlan(
            module=self.module_ if goes_on else self.module,
            layers=tuple(np.atleast_1d(self.hidden_layer_sizes).tolist()),
            num_inputs=self.n_features_in_,
            num_outputs=self._num_outputs(),
            is_classifier=self._is_classifier,
            optimizer=self.optimizer,
            lr=self.lr,
            weight_decay=self.weight_decay,
            batch_size=self.batch_size,
            epochs=epochs,
            patience=self.patience if stops else None,
            seed=seed,
        )
        self.module_, self.n_steps_ = self._train(plan, arrays)
        return self

    def _train(self, plan: TrainingPlan, arrays: dict[str, np.ndarray]) -> tuple[nn.Module, int]:
        if self.workers == 1 and self.strategy == "data":
            # The caller's random numbers are its own.
            with torch.random.fork_rng(devices=[]), Trainer(plan.task(arrays), world=World()) as trainer:
                outcome = trainer.fit()
                module = plan.make_module()
                module.load_state_dict(trainer.state_dict()["model"])
            return module.eval(), outcome.step
        with tempfile.TemporaryDirectory(prefix="shoal-fit-") as folder:
            write_plan(Path(folder), plan, arrays)
            run = train(
                "shoal.sklearn.networks:task",
                args={"folder": folder},
                workers=self.workers,
                strategy=self.strategy,
                runs=Path(folder) / "runs",
                output=io.StringIO(),
                progress=False,
            )
            return run.model(trust=True), int(run.results["steps"])

    def _outputs(self, X: Any) -> torch.Tensor:
        check_is_fitted(self, "module_")
        inputs = np.array(validate_data(self, X, reset=False), dtype=np.float32)
        with torch.no_grad():
            rows = torch.from_numpy(inputs).split(_MOST_ROWS)
            return torch.cat([self.module_(part) for part in rows]).double()


class ShoalClassifier(ClassifierMixin, _ShoalEstimator):
    """A network that tells classes apart. Its module gives a score for each class.

    `module` is a torch module, a function that makes one (given the numbers of inputs and of classes where it
    takes two), or None: a perceptron with `hidden_layer_sizes`. `strategy` and `workers` are those of
    `shoal train`.
    """

    _is_classifier = True

    def __init__(
        self,
        module: Any = None,
        hidden_layer_sizes: tuple[int, ...] = (100,),
        *,
        class_weight: Any = None,
        strategy: str = "data",
        workers: int = 1,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        lr: float = 0.01,
        weight_decay: float = 1e-4,
        batch_size: int = 32,
        epochs: int = 50,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 5,
        warm_start: bool = False,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            module,
            hidden_layer_sizes,
            strategy=strategy,
            workers=workers,
            optimizer=optimizer,
            lr=lr,
            weight_decay=weight_decay,
            batch_size=batch_size,
            epochs=epochs,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            patience=patience,
            warm_start=warm_start,
            random_state=random_state,
        )
        self.class_weight = class_weight

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """One epoch on this, from where the module is; the first call tells all `classes` that will come."""
        is_first = not hasattr(self, "module_")
        if is_first and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        if is_first:
            self.classes_ = np.unique(classes)
        inputs, targets = self._checked(X, y, is_first=is_first, knows_classes=True)
        return self._fit(inputs, targets, sample_weight, epochs=1, goes_on=not is_first)

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class."""
        return self._outputs(X).softmax(1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class."""
        best = self._outputs(X).argmax(1).numpy()
        return self.classes_[best]

    def _checked(
        self, X: Any, y: Any, *, is_first: bool, knows_classes: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = validate_data(self, X, y, reset=is_first, multi_output=True)
        check_classification_targets(labels)
        labels = column_or_1d(labels, warn=True)
        if type_of_target(labels) == "unknown":
            raise ValueError(f"Unknown label type: {labels!r}")
        if is_first and not knows_classes:
            self.classes_ = np.unique(labels)
        if strange := sorted(set(labels) - set(self.classes_)):
            raise ValueError(f"y has the class {strange[0]!r}, which is not one of {list(self.classes_)}.")
        return np.array(inputs, dtype=np.float32), np.searchsorted(self.classes_, labels).astype(np.int64)

    def _num_outputs(self) -> int:
        return len(self.classes_)

    def _class_weights(self, targets: np.ndarray) -> tuple[float, ...] | None:
        if self.class_weight is None:
            return None
        weight = self.class_weight
        if isinstance(weight, dict):  # refused where it names other classes than these
            return tuple(compute_class_weight(weight, classes=self.classes_, y=self.classes_).tolist())
        numbers = np.unique(targets)
        found = dict(zip(numbers, compute_class_weight(weight, classes=numbers, y=targets), strict=True))
        return tuple(float(found.get(number, 1.0)) for number in range(len(self.classes_)))


class ShoalRegressor(RegressorMixin, _ShoalEstimator):
    """A network that gives numbers: one for each column of `y`. Its arguments are those of `ShoalClassifier`."""

    _is_classifier = False

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """One epoch on this, from where the module is."""
        is_first = not hasattr(self, "module_")
        inputs, targets = self._checked(X, y, is_first=is_first)
        return self._fit(inputs, targets, sample_weight, epochs=1, goes_on=not is_first)

    def predict(self, X: Any) -> np.ndarray:
        """The numbers, in the form that `y` had."""
        outputs = self._outputs(X).numpy()
        return outputs.reshape(len(outputs), *self._target_shape)

    def _checked(self, X: Any, y: Any, *, is_first: bool) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = validate_data(self, X, y, reset=is_first, multi_output=True, y_numeric=True)
        if is_first:
            self._target_shape = targets.shape[1:]
        elif targets.shape[1:] != self._target_shape:
            raise ValueError(f"y has rows of shape {targets.shape[1:]}, but was fitted with {self._target_shape}.")
        return np.array(inputs, dtype=np.float32), np.array(targets, dtype=np.float32)

    def _num_outputs(self) -> int:
        return int(np.prod(self._target_shape, dtype=int))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
