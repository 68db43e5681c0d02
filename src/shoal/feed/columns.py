"""Batches that are tables of named columns, as those of Hugging Face are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import TaskError

TARGETS = ("labels", "label")


def inputs_and_target(batch: Mapping[Any, Any]) -> tuple[Any, Any]:
    """The columns beside the one that is named as a target, or the only such column; and the target."""
    name = next((name for name in TARGETS if name in batch), None)
    inputs = {key: value for key, value in batch.items() if key != name}
    if name is None or not inputs:
        raise TaskError(
            f"Task: a batch is a dict of {', '.join(map(repr, batch))}, in which loss= finds no target beside "
            "inputs; name one column 'labels', let collate give (inputs, target), or use objective=."
        )
    return (inputs if len(inputs) > 1 else next(iter(inputs.values()))), batch[name]
