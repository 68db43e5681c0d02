"""Random numbers that belong to one reader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class OwnGenerators:
    """States of Python's, numpy's and torch's generators that nobody else moves: what is drawn with them follows
    from the key alone, whatever else the process draws in between."""

    def __init__(self, key: int) -> None:
        outside = _states()
        random.seed(key)
        np.random.seed(key % (1 << 32))
        torch.default_generator.manual_seed(key)
        self._own = _states()
        _restore(outside)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Whatever is drawn meanwhile comes from these."""
        outside = _states()
        _restore(self._own)
        try:
            yield
        finally:
            self._own = _states()
            _restore(outside)


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _restore(states: tuple[Any, Any, torch.Tensor]) -> None:
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.default_generator.set_state(of_torch)
