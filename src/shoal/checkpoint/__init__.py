"""Saved models and training states: each named by one digest, whole or recognised as torn; nothing is unpickled.

Found on first use: those who only list checkpoints do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.checkpoint.loading import load_model
    from shoal.checkpoint.model_file import digest, load_tensors, save_tensors
    from shoal.checkpoint.room import Room
    from shoal.checkpoint.saver import BackgroundSaver
    from shoal.checkpoint.snapshot import Snapshot
    from shoal.checkpoint.store import CheckpointStore, Entry

__all__ = [
    "BackgroundSaver",
    "CheckpointStore",
    "Entry",
    "Room",
    "Snapshot",
    "digest",
    "load_model",
    "load_tensors",
    "save_tensors",
]

_HOMES = {
    "BackgroundSaver": "saver",
    "CheckpointStore": "store",
    "Entry": "listing",
    "Room": "room",
    "Snapshot": "snapshot",
    "digest": "model_file",
    "load_model": "loading",
    "load_tensors": "model_file",
    "save_tensors": "model_file",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.checkpoint' has no attribute {name!r}")
    return getattr(import_module(f"shoal.checkpoint.{_HOMES[name]}"), name)
