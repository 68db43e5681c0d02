"""Fractions as whole numbers modulo 2^64, whose sums are exact: the same in any order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.errors import ProtocolError

_BITS = 64


@dataclass(frozen=True)
class FixedPoint:
    """Each number is rounded to a multiple of 2^-fraction; the sum of `parts` of them fits."""

    parts: int
    fraction: int = 32

    @property
    def most(self) -> float:
        """The largest number that one may have."""
        return float(2 ** (_BITS - 1 - self.fraction)) / self.parts

    def encode(self, values: np.ndarray) -> np.ndarray:
        """As whole numbers; negative ones from the far end."""
        exact = values.astype(np.float64)
        largest = float(np.abs(exact).max(initial=0.0))
        if not largest < self.most:  # nor where one is no number
            raise ProtocolError(
                f"A secure sum of {self.parts} takes numbers below {self.most:g}, found {largest:g}; lower the "
                "learning rate, or clip what is added up."
            )
        return np.rint(exact * 2.0**self.fraction).astype(np.int64).view(np.uint64)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """What a sum of encoded numbers stands for."""
        return total.view(np.int64).astype(np.float64) * 2.0**-self.fraction
