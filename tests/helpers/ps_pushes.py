"""Pushes for tests of single parts of the parameter server."""

from __future__ import annotations

from typing import Any

from helpers.ps_sim.values import ChainValues, gradient
from shoal.ps.consistency import parse_sync
from shoal.ps.messages import Push
from shoal.ps.rules import ShardRules
from shoal.ps.shard import Shard


def make_push(cell: int, *more_cells: int, slots: int = 2, **changed: Any) -> Push:
    """A push of shard 0 as an honest worker of the cell's rank makes it; `changed` replaces fields."""
    cells = [cell, *more_cells]
    step, rank = cell // slots + 1, cell % slots
    fields: dict[str, Any] = {
        "shard": 0,
        "generation": 1,
        "origin": 10 + rank,
        "sequence": step,
        "clock_of": rank,
        "clock": step,
        "cells": cells,
        "based_on": 0,
        "weight": 1.0,
        "loss": 2.0,
        "frames": (gradient(0, cells, 0),),
    }
    return Push(**(fields | changed))


def make_shard(sync: str, *, slots: int = 2, **changed: Any) -> Shard:
    """A shard whose values are a `Recorder`."""
    rules = ShardRules(consistency=parse_sync(sync), slots=slots, workers=slots, **changed)
    return Shard(rules, Recorder(0))


class Recorder(ChainValues):
    """Values that remember how they were called."""

    def __init__(self, shard: int) -> None:
        super().__init__(shard)
        self.calls: list[tuple[list[list[int]], dict[str, Any]]] = []

    def step(self, gradients: Any, **how: Any) -> None:
        self.calls.append(([push.cells for push in gradients], how))
        super().step(gradients, **how)

    def average(self, pushes: Any, **how: Any) -> None:
        self.calls.append(([push.cells for push in pushes], how))
        super().average(pushes, **how)
