"""Keras 3 on torch: compiled models as tasks. Import this before `keras`, which then computes with torch."""

from __future__ import annotations

from shoal.keras.library import load_keras

__all__ = ["load_keras"]
