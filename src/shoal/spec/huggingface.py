"""Tasks of models of Hugging Face's library, which compute their own loss. The library is not needed here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.errors import TaskError
from shoal.spec.checks import require_callable
from shoal.spec.task import Task

_LABELS = {"label": "labels", "label_ids": "labels"}
"""What data sets call what models call `labels`."""


def make_task(
    model: Callable[[], Any],
    train: Any,
    *,
    optimizer: Callable[[Any], Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    **fields: Any,
) -> Task:
    """See `Task.from_huggingface`."""
    require_callable("Task.from_huggingface", "model", model, "lambda: BertForSequenceClassification(config)")
    if hasattr(model, "forward") and not isinstance(model, type):
        raise TaskError(
            f"Task.from_huggingface: every process makes the model for itself, but found one that is made "
            f"({type(model).__name__}); write lambda: {type(model).__name__}(config), or .from_pretrained(…)."
        )
    for name, given in (("train", train), ("test", fields.get("test"))):
        if isinstance(given, Mapping):
            raise TaskError(
                f"Task.from_huggingface: the {name} set has several parts ({', '.join(map(str, given))}); "
                f"choose one of them, as in dataset[{next(iter(given), 'train')!r}]."
            )
    made = HuggingFaceModel(model)
    return Task(
        model=made.make,
        train=train,
        objective=made.loss,
        optimizer=optimizer or _adamw,
        collate=columns_of if collate is None else _as_dict(collate),
        **fields,
    )


class HuggingFaceModel:
    """What is known of a model once this process has made it: what it takes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._taken: frozenset[str] | None = None
        """Names of its arguments; None: any."""

    def make(self) -> Any:
        module = self._make()
        parameters = inspect.signature(module.forward).parameters
        takes_labels = "labels" in parameters  # else it hands on whatever it gets, as LoRA's wrappers do
        self._taken = frozenset(parameters) if takes_labels else None
        return module

    def loss(self, model: Any, batch: Mapping[str, Any]) -> Any:
        taken = self._taken
        output = model(**{name: value for name, value in batch.items() if taken is None or name in taken})
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise TaskError(
                f"Task.from_huggingface: the model has computed no loss from {', '.join(batch)}; give it a column "
                "named labels and a model with a head that uses it (such as BertForSequenceClassification), or "
                "use Task with loss= or objective=."
            )
        return loss


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch of rows: their numbers as tensors, by column; texts are left out."""
    import torch

    found: dict[str, Any] = {}
    for name, first in rows[0].items():
        if _is_text(first):
            continue
        try:
            found[_LABELS.get(name, name)] = torch.stack([torch.as_tensor(row[name]) for row in rows])
        except (RuntimeError, TypeError, ValueError) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TaskError(
                f"Task.from_huggingface: the rows of column {name!r} make no tensor ({why}); pad them to one "
                "length where you tokenize, or set collate= (to DataCollatorWithPadding(tokenizer), say)."
            ) from None
    return found


def _is_text(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return value is None or isinstance(value, str)


def _as_dict(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], dict[str, Any]]:
    """The library's collators make something that is like a dict and is none."""
    return lambda rows: dict(collate(rows))


def _adamw(params: Any) -> Any:
    """As the library's own trainer."""
    import torch

    return torch.optim.AdamW(params, lr=5e-5)
