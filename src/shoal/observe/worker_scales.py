"""Loss scales that each worker has for itself, told as one result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class WorkerScales:
    """What the workers of a run have told at their ends."""

    def __init__(self) -> None:
        self._told: dict[int, Mapping[str, Any]] = {}

    def note(self, rank: int, results: Mapping[str, Any]) -> dict[str, Any]:
        """Take in a worker's results. Gives those of all so far; nothing where workers have one scale, or none.

        The smallest scale, all steps that any of them skipped, and every layer that any computes in float32.
        """
        if not results.get("scales_apart"):
            return {}
        self._told[rank] = results
        told = self._told.values()
        together = {
            "loss_scale": min(one["loss_scale"] for one in told),
            "skipped_steps": sum(one["skipped_steps"] for one in told),
        }
        if "float32_layers" in results:
            together["float32_layers"] = sorted({name for one in told for name in one["float32_layers"]})
        return together
