"""Who hears of a `fit` in each process: Keras's callbacks, of which some are for the first process alone."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from shoal.keras.installed import load_keras

_WRITERS = ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "SwapEMAWeights", "TensorBoard")
"""Callbacks that write files, which the first process does for all."""
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


class Audience(NamedTuple):
    """The callbacks of a `fit` in this process."""

    callbacks: list[Any]
    is_first: bool
    """Whether this is the process that shows how it goes."""
    hears_batches: bool
    """Whether any callback, in any process, is called between two steps."""

    @classmethod
    def of(cls, given: Any) -> Audience:
        """Of what `fit` was given, the same in all processes."""
        every = load_keras().tree.flatten(given) if given else []
        is_first = is_first_process()
        here = every if is_first else [part for each in every for part in _without_files(each)]
        return cls(here, is_first, any(map(_hears_batches, every)))


def is_first_process() -> bool:
    """Of those that run the script."""
    return int(os.environ.get("RANK", "0")) == 0


def _without_files(callback: Any) -> list[Any]:
    """What is called in the other processes."""
    kind = type(callback).__name__
    if kind == "BackupAndRestore":  # where a fit goes on, all must know
        return [load_keras().callbacks.LambdaCallback(
            set_model=callback.set_model, on_train_begin=callback.on_train_begin
        )]  # fmt: skip
    return [] if kind in _WRITERS else [callback]


def _hears_batches(callback: Any) -> bool:
    # Keras marks the hooks that nobody has overridden.
    return not all(getattr(getattr(callback, hook), "_is_default", False) for hook in _BATCH_HOOKS)
