"""Saved models and training states: each named by one digest, whole or recognised as torn; nothing is unpickled.

Found on first use: those who only list checkpoints do not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy import found_in

if TYPE_CHECKING:
    from shoal.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore"]

__getattr__ = found_in(__name__, {"CheckpointStore": "store"})
