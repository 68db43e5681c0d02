"""Numbers that tell how good a model is: `metric(output, target)`, each a mean over the batch.

Means can be averaged over batches and workers by weight. What is none (F1, the area under a curve, a correlation)
is computed over the whole data set: `whole(f1_score)`, or an object of torchmetrics.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from shoal.errors import TaskError
from shoal.spec.checks import require_callable, require_choice, require_count

if TYPE_CHECKING:
    from torch import Tensor

IGNORED_TARGET = -100
"""The class that torch's `cross_entropy` leaves out (padding); metrics leave it out too."""


def accuracy(output: Tensor, target: Tensor) -> float:
    """The share of targets that got the highest score."""
    return _share(_class_scores(output, target).argmax(-1) == target, target)


def top_k(k: int) -> Callable[[Tensor, Tensor], float]:
    """A metric: the share of targets among the `k` highest scores."""
    require_count("top_k", "k", k)

    def metric(output: Tensor, target: Tensor) -> float:
        scores = _class_scores(output, target)
        if k > scores.shape[-1]:
            raise TaskError(f"top_k: k={k}, but the model scores only {scores.shape[-1]} classes.")
        best = scores.topk(k, dim=-1).indices
        return _share((best == target.unsqueeze(-1)).any(-1), target)

    metric.__name__ = f"top_{k}"
    return metric


def mean_absolute_error(output: Tensor, target: Tensor) -> float:
    """The mean distance between output and target, which must have one shape."""
    if output.shape != target.shape:
        # Broadcasting (n, 1) against (n,) would quietly compare every output with every target.
        raise TaskError(
            f"mean_absolute_error: the output has shape {tuple(output.shape)}, the target "
            f"{tuple(target.shape)}; make them equal."
        )
    return (output - target).abs().mean().item()


def _class_scores(output: Tensor, target: Tensor) -> Tensor:
    """`output` with its classes last: they come there for text, second for images (as `cross_entropy`)."""
    if output.shape[:-1] == target.shape:
        return output
    if output.dim() > 2 and output.shape[:1] + output.shape[2:] == target.shape:
        return output.movedim(1, -1)
    raise TaskError(
        f"a metric of classes got an output of shape {tuple(output.shape)} and a target of shape "
        f"{tuple(target.shape)}; the output must have one dimension more, the scores of the classes."
    )


def _share(hits: Tensor, target: Tensor) -> float:
    counted = target != IGNORED_TARGET
    return int((hits & counted).sum()) / max(1, int(counted.sum()))


class OverAll(Protocol):
    """A metric of a whole data set, which is no mean of its batches'."""

    chooses: ClassVar[bool]
    """Whether it finds its two tensors in outputs and targets of any form; else each must be a tensor."""

    def keep(self, output: Any, target: Any) -> Sequence[Any]:
        """What it needs of a batch: two tensors."""

    def value(self, kept: Iterable[Sequence[Tensor]]) -> float:
        """What all batches come to, which are given in the order of their samples."""


def over_all(metric: Any) -> OverAll | None:
    """How a task's metric is computed over a whole data set; None where it is a mean over each batch."""
    if all(callable(getattr(metric, name, None)) for name in ("keep", "value")):
        found: OverAll = metric  # `Whole`, and what other libraries' metrics are made into
        return found
    has_methods = all(callable(getattr(metric, name, None)) for name in ("reset", "update", "compute"))
    return Shown(metric) if has_methods else None


READINGS = ("outputs", "classes", "scores", "probabilities")


def whole(function: Callable[..., Any], *, reads: str | None = None, **options: Any) -> Whole:
    """A metric: `function` of all outputs and all targets at once, in the order of the samples.

    It is called as `function(output, target, **options)`, with tensors. One of scikit-learn's, which name their
    first argument `y_true`, is called as `function(target, output, **options)`, with arrays, and gets what its
    second one asks for: `y_pred` the classes with the highest scores, `y_score` scores, `y_proba` probabilities.
    `reads` says otherwise: `outputs` (as they are), `classes`, `scores` or `probabilities`. Targets of -100 are
    left out where the output has the scores of classes.
    """
    require_callable("whole", "function", function, "whole(sklearn.metrics.f1_score, average='macro')")
    names = _argument_names(function)
    if reads is not None:
        require_choice("whole", "reads", reads, READINGS)
    return Whole(function, reads or _reading_of(names), names[:1] == ["y_true"], options)


@dataclass(frozen=True)
class Whole:
    """What `whole` returns."""

    chooses: ClassVar[bool] = False
    function: Callable[..., Any]
    reads: str
    truth_first: bool
    """Whether it is called as scikit-learn's functions are."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, output: Any, target: Any) -> float:
        return self.value([self.keep(output, target)])

    def keep(self, output: Any, target: Any) -> Sequence[Any]:
        """What the function reads of them, so that classes take the place of scores before anything is kept."""
        return (output, target) if self.reads == "outputs" else _read(self.reads, output, target)

    def value(self, kept: Iterable[Sequence[Tensor]]) -> float:
        """The function, once. All that was kept is in memory then."""
        import torch

        outputs, targets = zip(*kept, strict=True)
        try:
            output, target = torch.cat(outputs), torch.cat(targets)
        except RuntimeError:
            shapes = ", ".join(sorted({str(tuple(each.shape[1:])) for each in (*outputs, *targets)}))
            raise TaskError(
                f"whole: outputs and targets of all batches cannot be put together: their rows have the shapes "
                f"{shapes}; pad them in collate, or use a metric that is shown batch by batch (torchmetrics)."
            ) from None
        if self.truth_first:
            return _number(self.function(target.numpy(), output.numpy(), **self.options), self.function)
        return _number(self.function(output, target, **self.options), self.function)


class Shown:
    """A metric object that is shown one batch after the other: torchmetrics', and what has its three methods."""

    chooses: ClassVar[bool] = False

    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def keep(self, output: Any, target: Any) -> Sequence[Any]:
        """All of it."""
        return output, target

    def value(self, kept: Iterable[Sequence[Tensor]]) -> float:
        """In the order of the samples, whoever computed them: an object that is shown all needs no merging."""
        self._metric.reset()
        for output, target in kept:
            self._metric.update(output, target)
        found = self._metric.compute()
        self._metric.reset()  # what it keeps may be large
        return _number(found, self._metric)


def _argument_names(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some that are written in C do not tell
        return []


def _reading_of(names: Sequence[str]) -> str:
    """What a function wants, by the names that scikit-learn gives its arguments."""
    match names:
        case ["y_true", "y_score", *_]:
            return "scores"
        case ["y_true", "y_proba" | "y_prob", *_]:
            return "probabilities"
        case ["y_true", *_]:
            return "classes"
    return "outputs"


def _read(reads: str, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs as `reads` says, and the targets that count, one row for each of them."""
    if output.dim() == target.dim() + 1 and output.shape[-1] == 1:
        output = output.squeeze(-1)  # one score for each target
    if target.is_floating_point() and reads == "classes":
        return output, target  # there are none: a regression's values
    if output.shape == target.shape:
        is_score = reads == "probabilities" and not _are_shares(output)
        return output.double().sigmoid() if is_score else output, target
    scores = _class_scores(output, target)
    if reads == "classes":
        return _counted(scores.argmax(-1), target)
    if scores.shape[-1] == 2 and reads == "scores":
        return _counted(scores[..., 1] - scores[..., 0], target)  # finer than probabilities, which round to 1
    sums_to_one = _are_shares(scores) and bool(((scores.sum(-1) - 1).abs() < 1e-4).all())
    shares = scores.double() if sums_to_one else scores.double().softmax(-1)
    return _counted(shares[..., 1] if shares.shape[-1] == 2 else shares, target)


def _are_shares(values: Tensor) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


def _counted(values: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    counted = target != IGNORED_TARGET
    return values[counted], target[counted]


def _number(found: Any, metric: Any) -> float:
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError):
        name = getattr(metric, "__name__", type(metric).__name__)
        raise TaskError(
            f"Task: the metric {name} must come to one number, found {type(found).__name__}; let it average "
            "(average='macro'), or give each number a metric of its own."
        ) from None
