"""For lossy compressions that draw random numbers: what was drawn is remembered with what was left out."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from shoal.comm.compression.chance import KeyedChance
from shoal.comm.compression.lossy import Lossy


class ByChance(Lossy):
    """Has a seed for every call, which goes on where a checkpoint was."""

    def __init__(self, text: str, *, error_feedback: bool = True) -> None:
        super().__init__(text, error_feedback=error_feedback)
        self._chance = KeyedChance()

    def forget(self, key: Hashable) -> None:
        super().forget(key)
        self._chance.forget(key)

    def remembered(self) -> dict[str, torch.Tensor]:
        return super().remembered() | self._chance.remembered()

    def remember(self, state: Mapping[str, torch.Tensor]) -> None:
        super().remember(state)
        self._chance.remember(state)
