"""What a batch counts, where a task does not say so and its loss is known to be no mean over samples.

Torch's own losses with class weights or an ignored class, and models of Hugging Face that leave labels of -100
out, are means over what they count. Parts of a batch average to the whole only by that weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from shoal.metrics import IGNORED_TARGET
from shoal.model.replica import Replica
from shoal.spec import Task
from shoal.step.compute import split_batch

_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_SHIFTED = ("ForCausalLM", "LMHeadModel")
"""Endings of models in which a label is compared with what was made of the token before it."""
_UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")
_EITHER = "ForConditionalGeneration"
"""Shifted where there is a decoder alone."""


class Weighing(NamedTuple):
    """A weight that was derived."""

    weight: Callable[[Any], float]
    text: str
    """What is derived from what, for the user."""


def derived_weight(replica: Replica) -> Weighing | None:
    """The weight that the replica's task has in mind; None where it says one, or its loss is not known here."""
    task = replica.task
    if task.weight is not None:
        return None
    return _of_torch(task) if task.objective is None else _of_labels(replica)


def _of_torch(task: Task) -> Weighing | None:
    weights, ignored = _options(task.loss)
    if weights is None and ignored == IGNORED_TARGET:
        return None  # Most data has none of these; where it has, the first batch shows it.
    what = "the class weights of its targets" if weights is not None else f"its targets that are not {ignored}"
    return Weighing(
        lambda batch: _counted(split_batch(batch)[1], weights, ignored),
        f"weight= follows from the loss, which is a weighted mean: a batch counts {what}",
    )


def _options(loss: Any) -> tuple[torch.Tensor | None, int]:
    """Class weights and the ignored class of a loss of torch's that is a mean; of any other what most have."""
    if type(loss) in _MODULES and loss.reduction == "mean":
        return loss.weight, loss.ignore_index
    if isinstance(loss, partial) and loss.func in _FUNCTIONS and not loss.args:
        given = dict(loss.keywords)
        weights, ignored = given.pop("weight", None), given.pop("ignore_index", IGNORED_TARGET)
        given.pop("label_smoothing", None)
        if given in ({}, {"reduction": "mean"}):
            return weights, ignored
    return None, IGNORED_TARGET


def _counted(target: torch.Tensor, weights: torch.Tensor | None, ignored: int) -> float:
    """What torch divides the sum of losses by."""
    if target.is_floating_point():  # shares of classes, which are the second dimension
        return target.numel() / target.shape[min(1, target.dim() - 1)]
    counted = target[target != ignored]
    if weights is None:
        return float(counted.numel())
    return float(weights.to(counted.device).double()[counted].sum())


def _of_labels(replica: Replica) -> Weighing | None:
    """Of a model of Hugging Face that computes its own loss from `labels`."""
    module: Any = replica.module
    if hasattr(module, "get_base_model"):  # a wrapper that adapts it, LoRA's for instance
        module = module.get_base_model()
    kinds = [kind.__name__ for kind in type(module).__mro__]
    name = kinds[0]
    if "PreTrainedModel" not in kinds or not name.endswith((*_SHIFTED, *_UNSHIFTED, _EITHER)):
        return None
    if replica.sample is None or not _has_labels(replica.sample()):
        return None
    has_encoder = bool(getattr(module.config, "is_encoder_decoder", False))
    is_shifted = name.endswith(_SHIFTED) or (name.endswith(_EITHER) and not has_encoder)
    first = 1 if is_shifted else 0
    which = " but the first of each text" if is_shifted else ""
    return Weighing(
        lambda batch: float((batch["labels"][:, first:] != IGNORED_TARGET).sum()),
        f"weight= follows from {name}: a batch counts its labels{which} that are not {IGNORED_TARGET}",
    )


def _has_labels(batch: Any) -> bool:
    """Whether there is a label for each token."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return isinstance(labels, torch.Tensor) and labels.dim() == 2 and not labels.is_floating_point()
