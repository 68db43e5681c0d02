"""What reports call the numbers that a model computes in."""

from __future__ import annotations


def numbers_of(precision: str) -> str:
    """The word for a job's precision."""
    return {"fp32": "float32", "adaptive": "adaptive precision"}.get(precision, precision)


def in_half(precision: str) -> str:
    """` in bf16`, to be put behind a noun; nothing in float32, which goes without saying."""
    return "" if precision == "fp32" else f" in {numbers_of(precision)}"
