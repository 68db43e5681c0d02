"""Keras 3 on torch. Import this before `keras`, which then computes with torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shoal.lazy import found_in

if TYPE_CHECKING:
    from shoal.keras.distribution import distribute
    from shoal.keras.trained_model import trained

__all__ = ["distribute", "trained"]

os.environ.setdefault("KERAS_BACKEND", "torch")
__getattr__ = found_in(__name__, {"distribute": "distribution", "trained": "trained_model"})
