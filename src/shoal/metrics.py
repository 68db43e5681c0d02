"""Numbers that tell how good a model is: `metric(output, target)`, each a mean over the batch.

Means can be averaged over batches and workers by weight. What is no mean must be computed afterwards from
one that is: perplexity is `exp` of the mean loss, never the mean of the batches' perplexities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.errors import TaskError
from shoal.spec.checks import require_count

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
    return ((hits & counted).sum() / counted.sum().clamp(min=1)).item()
