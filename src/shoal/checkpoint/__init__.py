"""Saved models and training states: each named by one digest, whole or recognised as torn; nothing is unpickled.

Found on first use: those who only list checkpoints do not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy import found_in

if TYPE_CHECKING:
    from shoal.checkpoint.loading import load_model
    from shoal.checkpoint.model_file import digest, load_tensors, save_tensors
    from shoal.checkpoint.model_stream import TensorStream, save_stream
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
    "TensorStream",
    "digest",
    "load_model",
    "load_tensors",
    "save_stream",
    "save_tensors",
]

_HOMES = {
    "BackgroundSaver": "saver",
    "CheckpointStore": "store",
    "Entry": "listing",
    "Room": "room",
    "Snapshot": "snapshot",
    "TensorStream": "model_stream",
    "digest": "model_file",
    "load_model": "loading",
    "load_tensors": "model_file",
    "save_stream": "model_stream",
    "save_tensors": "model_file",
}

__getattr__ = found_in(__name__, _HOMES)
