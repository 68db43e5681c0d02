"""`Task`: what to train. It says nothing about processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import SpecError, TaskError
from shoal.spec.checks import require_callable, require_choice, require_count
from shoal.spec.sampling import Sampler, check_sampler


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
    """The training set: anything with `len()` and `[]`, or a function that makes it."""
    loss: Callable[[Any, Any], Any] | None = None
    """`loss(output, target)`: the mean over the batch, one number."""
    objective: Callable[[Any, Any], Any] | None = None
    """`objective(model, batch)` in place of `loss`, for models that compute their own."""
    test: Any = None
    """The test set, as `train`; without one nothing is evaluated."""
    batch_size: int = 32
    """Samples of one step of all workers together: the same job on 1 or 8 workers."""
    batch_per_worker: bool = False
    """Read `batch_size` as each worker's, so that more workers make a bigger global batch."""
    epochs: int = 1
    """Passes over the training set."""
    max_steps: int | None = None
    """Stop after so many steps, whatever `epochs` says."""
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    """`name -> metric(output, target)`: numbers that are means over the batch."""
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
    seed: int = 0
    """Decides the initial parameters, the order of samples and every random number in between."""

    def __post_init__(self) -> None:
        require_callable("Task", "model", self.model, "model=lambda: nn.Linear(4, 2)")
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
        for name in ("seed", "prefetch"):
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
        if self.metrics and self.objective is not None:
            raise SpecError(
                "Task: metrics compare the model's output with a target, which an objective hides; "
                "use loss= in place of objective=, or leave metrics out."
            )
        for name, metric in self.metrics.items():
            require_callable("Task", f"metrics[{name!r}]", metric, "shoal.metrics.accuracy")
        if self.stop is not None and self.stop.metric not in ("loss", *self.metrics):
            known = ", ".join(("loss", *self.metrics))
            raise SpecError(f"Task: stop watches {self.stop.metric!r}, but the task evaluates only: {known}.")
        if self.stop is not None and self.test is None:
            raise SpecError("Task: stop needs evaluations, and there is no test set; set test=.")
        check_dataset("train", self.train)
        if self.test is not None:
            check_dataset("test", self.test)

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


def check_dataset(part: str, value: Any) -> None:
    """A data set has a length and is read by index."""
    if is_maker(value):
        return
    try:
        length = len(value)
    except (TypeError, NotImplementedError):
        raise TaskError(
            f"Task: the {part} set ({type(value).__name__}) has no length, so it cannot be shared out among "
            "workers; give it a __len__, or use a data set that is read by index."
        ) from None
    if length == 0:
        raise TaskError(f"Task: the {part} set ({type(value).__name__}) is empty; give it at least one sample.")
    if not hasattr(value, "__getitem__"):
        raise TaskError(
            f"Task: the {part} set ({type(value).__name__}) cannot be read by index; give it a __getitem__."
        )
