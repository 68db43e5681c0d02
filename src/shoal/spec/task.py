"""`Task`: what to train. It says nothing about processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from shoal.errors import SpecError, TaskError
from shoal.spec.callback import Callback, check_callbacks
from shoal.spec.checks import knows_its_names, require_callable, require_choice, require_count, require_maker
from shoal.spec.sampling import Sampler, check_sampler

MOST_LOSS_PARTS = 8
"""So many numbers a loss may be told with, beside itself."""


class Unsaid(int):
    """A number that nobody has said: a default, in whose stead what else was given may say another."""


@knows_its_names
@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Stop early once an evaluated number no longer gets better."""

    metric: str = "loss"
    """`loss` (of the test set) or the name of one of the task's metrics."""
    patience: int = 3
    """How many evaluations in a row may pass without an improvement."""
    min_delta: float = 1e-4
    """The least change that counts as an improvement."""
    mode: str = "auto"
    """`min`, `max`, or `auto`: the loss should fall, every other metric should rise."""
    restore_best: bool = False
    """Whether the run ends with the best model that was evaluated in the place of its last one."""

    def __post_init__(self) -> None:
        require_count("Plateau", "patience", self.patience)
        require_choice("Plateau", "mode", self.mode, ("min", "max", "auto"))
        if not self.min_delta >= 0:
            raise SpecError(f"Plateau: min_delta must not be negative, found {self.min_delta!r}.")

    @property
    def rising(self) -> bool:
        """Whether bigger is better."""
        return self.mode == "max" or (self.mode == "auto" and self.metric != "loss")

    def reached(self, history: list[float]) -> bool:
        """Whether the last `patience` of these values brought no improvement over those before."""
        if len(history) <= self.patience:
            return False
        sign = 1.0 if self.rising else -1.0
        scores = [sign * value for value in history]
        best_before, best_since = max(scores[: -self.patience]), max(scores[-self.patience :])
        return best_since <= best_before or best_since < best_before + self.min_delta


@knows_its_names
@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train: model, loss, optimizer and data. How and where are said elsewhere, in a word each.

    A batch is `(inputs, target)`; inputs may be a tensor, a tuple (`model(*inputs)`) or a dict
    (`model(**inputs)`).
    """

    model: Callable[[], Any]
    """Makes the `nn.Module`. Called once in every process, after the seed is set."""
    optimizer: Callable[[Any], Any]
    """Makes the optimizer from the list of the model's parameters."""
    train: Any
    """The training set: anything with `len()` and `[]`; arrays `(X, y)`, in memory or mapped; a `DataLoader`; an
    `IterableDataset`; a Hugging Face data set; or a function that makes it."""
    loss: Callable[[Any, Any], Any] | None = None
    """`loss(output, target)`: the mean over the batch, one number; or a dict of this `loss` and numbers that it is
    told with."""
    objective: Callable[[Any, Any], Any] | None = None
    """`objective(model, batch)` in place of `loss`, for models that compute their own."""
    test: Any = None
    """The test set, as `train`; without one nothing is evaluated."""
    batch_size: int = Unsaid(32)
    """Samples of one step of all workers together: the same job on 1 or 8 workers."""
    batch_per_worker: bool = False
    """Read `batch_size` as each worker's, so that more workers make a bigger global batch."""
    epochs: int = 1
    """Passes over the training set."""
    max_steps: int | None = None
    """Stop after so many steps, whatever `epochs` says."""
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    """`name -> metric(output, target)`: means over the batch; or, over the whole test set,
    `shoal.metrics.whole(function)` or an object of torchmetrics."""
    weight: Callable[[Any], float] | None = None
    """`weight(batch)`: what a batch counts in every mean (tokens for padded text); default its samples."""
    scheduler: Callable[[Any], Any] | None = None
    """Makes the learning-rate scheduler from the optimizer; stepped once per committed step."""
    clip_norm: float | None = None
    """Scale gradients down to this total norm."""
    skip_loss_below: float | None = None
    """Do not learn from parts of a batch whose loss is below this: their backward pass is left out, and they count
    nothing in the mean of the gradients."""
    accumulate: int = 1
    """Cut each worker's part of a batch into so many micro-batches, to save memory."""
    shuffle: bool = True
    """Train on samples in another order each epoch; the order follows from the seed alone."""
    sampler: Sampler | None = None
    """Which samples an epoch takes: `Weighted`, `Stratified`, a function `(epoch, seed) -> indices`, or an object
    with `order(epoch)`; default each once."""
    drop_last: bool = False
    """Leave out an epoch's last batch where it would be smaller than the others."""
    loaders: int = 0
    """Processes beside each worker that read, augment and collate ahead of their step; 0: a thread does."""
    prefetch: int = 8
    """The most parts of batches that are loaded ahead of their step; 0: none."""
    collate: Callable[[list[Any]], Any] | None = None
    """Turns a list of samples into a batch; default stacks tensors, as torch's `default_collate`."""
    prepare: Callable[[Any], Any] | None = None
    """Makes a model's inputs of one record of new data (a row, a JSON value, a file's path), for `shoal predict
    --input`; default gives it type and shape of the inputs in the train set."""
    evaluate_every: int | None = None
    """Evaluate after so many steps; default at the end of each epoch."""
    stop: Plateau | None = None
    """Stop early on a plateau."""
    keep_best: str | None = None
    """Keep the best model that was evaluated beside the last: by a number that should rise, `accuracy`, or fall,
    `-loss`."""
    ema: float | None = None
    """Keep an average of the parameters over steps, each of which counts so many times as much as the next."""
    swa: int | None = None
    """Keep the mean of the parameters over all steps from this one on (stochastic weight averaging)."""
    callbacks: Sequence[Callback] = ()
    """Who is told what happens to the job, in the first worker."""
    seed: int = 0
    """Decides the initial parameters, the order of samples and every random number in between."""

    def __post_init__(self) -> None:
        require_maker("Task", "model", self.model, "model=lambda: nn.Linear(4, 2)")
        require_callable(
            "Task", "optimizer", self.optimizer, "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )
        if (self.loss is None) == (self.objective is None):
            found = "neither" if self.loss is None else "both"
            raise SpecError(f"Task: set exactly one of loss and objective, found {found}.")
        if self.loss is not None:
            require_callable("Task", "loss", self.loss, "loss=nn.functional.cross_entropy")
        if self.objective is not None:
            require_callable("Task", "objective", self.objective, "objective=lambda model, batch: ...")
        for name in ("weight", "scheduler", "collate", "prepare"):
            if getattr(self, name) is not None:
                require_callable("Task", name, getattr(self, name), f"{name}=lambda value: ...")
        for name in ("batch_size", "epochs", "accumulate"):
            require_count("Task", name, getattr(self, name))
        for name in ("max_steps", "evaluate_every"):
            if getattr(self, name) is not None:
                require_count("Task", name, getattr(self, name))
        for name in ("seed", "prefetch", "loaders"):
            require_count("Task", name, getattr(self, name), least=0)
        if self.sampler is not None:
            check_sampler(self.sampler)
            if not self.shuffle:
                raise SpecError(
                    "Task: shuffle=False and sampler= both say which samples come when; set one of them."
                )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise SpecError(f"Task: clip_norm must be above 0, found {self.clip_norm!r}.")
        if self.skip_loss_below is not None and self.skip_loss_below != self.skip_loss_below:
            raise SpecError("Task: skip_loss_below must be a number, found nan.")
        check_callbacks(self.callbacks)
        self._check_best()
        self._check_average()
        for name, metric in self.metrics.items():
            if not callable(getattr(metric, "compute", None)):  # an object that is shown batches may be none
                require_callable("Task", f"metrics[{name!r}]", metric, "shoal.metrics.accuracy")
        if self.stop is not None and self.stop.metric not in ("loss", *self.metrics):
            known = ", ".join(("loss", *self.metrics))
            raise SpecError(f"Task: stop watches {self.stop.metric!r}, but the task evaluates only: {known}.")
        if self.stop is not None and self.test is None:
            raise SpecError("Task: stop needs evaluations, and there is no test set; set test=.")
        check_dataset("train", self.train)
        if self.test is not None:
            check_dataset("test", self.test)

    def _check_average(self) -> None:
        if self.ema is not None and not 0 < self.ema < 1:
            raise SpecError(f"Task: ema must be between 0 and 1, as 0.999, found {self.ema!r}.")
        if self.swa is not None:
            require_count("Task", "swa", self.swa)
            if self.ema is not None:
                raise SpecError("Task: ema and swa are two averages; set one of them.")

    def _check_best(self) -> None:
        if self.keep_best is None:
            return
        name = self.keep_best.removeprefix("-")
        if name not in ("loss", *self.metrics):
            known = ", ".join(("-loss", *self.metrics))
            raise SpecError(f"Task: keep_best={self.keep_best!r}, but the task evaluates only: {known}.")
        if self.keep_best == "loss":
            raise SpecError("Task: keep_best='loss' would keep the model with the largest; write '-loss'.")
        if self.test is None:
            raise SpecError("Task: keep_best needs evaluations, and there is no test set; set test=.")
        if self.stop is not None and self.stop.restore_best and self.best_by != (name, name == self.keep_best):
            raise SpecError(
                f"Task: keep_best={self.keep_best!r} and a Plateau that restores the best by {self.stop.metric!r} "
                "mean two models; leave one of them out."
            )

    @property
    def best_by(self) -> tuple[str, bool] | None:
        """By which evaluated number the best model is kept, and whether that should rise; None where none is."""
        if self.stop is not None and self.stop.restore_best:
            return self.stop.metric, self.stop.rising
        if self.keep_best is None:
            return None
        name = self.keep_best.removeprefix("-")
        return name, name == self.keep_best

    @classmethod
    def from_huggingface(cls, model: Callable[[], Any], train: Any, **fields: Any) -> Task:
        """A model of Hugging Face's library with a head, which computes its own loss from rows of columns.

        `model` makes it. Columns that it does not take are left out, and so are texts. Means are over the tokens
        that count where each has a label. The optimizer is AdamW, as in the library; all fields can be set.
        """
        from shoal.spec.huggingface import make_task

        return make_task(model, train, **fields)

    @classmethod
    def from_lightning(cls, module: Callable[[], Any], train: Any = None, **fields: Any) -> Task:
        """A module of Lightning's: `training_step` computes the loss, `configure_optimizers` makes the optimizer,
        and `train_dataloader` has the data where `train`, a data set or a `DataLoader`, does not.

        `module` makes it. All fields but the model can be set.
        """
        from shoal.spec.lightning import make_task

        return make_task(module, train, **fields)

    @classmethod
    def from_keras(cls, build: Callable[[], Any], train: Any, **fields: Any) -> Task:
        """A compiled model of Keras 3: loss, optimizer, metrics and the learning rate's schedule are those that
        `compile` was given.

        `build` makes it. `train` has `(x, y)` or `(x, y, weights)`, arrays or samples; `class_weight=` is as in
        Keras's `fit`. All fields but model and loss can be set.
        """
        made: Task = getattr(import_module("shoal.keras.task"), "make_task")(build, train, **fields)  # noqa: B009
        return made

    def dataset(self, part: str) -> Any:
        """The `train` or `test` set; made now if the task gave a function."""
        given = getattr(self, part)
        if is_maker(given):
            given = given()
            check_dataset(part, given)
        return given


def is_maker(value: Any) -> bool:
    """Whether this is a function (or class) that makes a data set rather than a data set."""
    return isinstance(value, type) or (callable(value) and not hasattr(value, "__getitem__"))


def reads_forward(value: Any) -> bool:
    """Whether this can only be gone through from its beginning."""
    torch_data = sys.modules.get("torch.utils.data")  # whose IterableDataset has a [] that raises
    if torch_data is not None and isinstance(value, torch_data.IterableDataset):
        return True
    return hasattr(value, "__iter__") and not hasattr(value, "__getitem__")


def check_dataset(part: str, value: Any) -> None:
    """A data set has a length and is read by index, or can be gone through again and again."""
    if is_maker(value):
        return
    if reads_forward(value):
        if hasattr(value, "__next__"):
            raise TaskError(
                f"Task: the {part} set ({type(value).__name__}) can be gone through only once, so neither a "
                "second epoch nor another worker could read it; give an object whose __iter__ begins anew."
            )
        return
    try:
        length = len(value)
    except (TypeError, NotImplementedError):
        raise TaskError(
            f"Task: the {part} set ({type(value).__name__}) has no length, so it cannot be shared out among "
            "workers; give it a __len__, or use a data set that is gone through with __iter__."
        ) from None
    if length == 0:
        raise TaskError(f"Task: the {part} set ({type(value).__name__}) is empty; give it at least one sample.")
    if not hasattr(value, "__getitem__"):
        raise TaskError(
            f"Task: the {part} set ({type(value).__name__}) cannot be read by index; give it a __getitem__."
        )
