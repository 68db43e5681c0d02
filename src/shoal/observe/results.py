"""What a run came to: folded, in this one place, from what its processes say when they are done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.observe.happenings import Done

_PEAKS = {"host": "peak_memory", "gpu": "peak_gpu_memory", "gpu_taken": "peak_gpu_taken"}


class RunResults:
    """The results of the first worker, and what all workers together have to add to them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.restarts = 0
        """How often all began again."""
        self._scaled: dict[int, Mapping[str, Any]] = {}
        """By rank: the results of workers that have a loss scale each."""
        self._peaks: dict[str, dict[int, int]] = {}
        """By kind of memory and rank: the most bytes that were held."""

    def note(self, rank: int, done: Done) -> None:
        """A worker is done."""
        if rank == 0:
            self.values.update(done.results)
            if self.restarts:
                self.values["restarts"] = self.restarts
        if done.results.get("scales_apart"):
            self._scaled[rank] = done.results
            self.values |= self._common_scale()
        for kind, nbytes in (done.memory or {}).items():
            if kind in _PEAKS:
                self._peaks.setdefault(kind, {})[rank] = nbytes
        for kind, by_rank in self._peaks.items():
            self.values[_PEAKS[kind]] = {str(one): nbytes for one, nbytes in sorted(by_rank.items())}

    def begin_again(self) -> None:
        """What the attempt before came to does not count."""
        self.restarts += 1
        self.forget()

    def forget(self) -> None:
        """All that was told so far is void, but for the memory that it took."""
        self.values, self._scaled = {}, {}

    def _common_scale(self) -> dict[str, Any]:
        """The smallest scale, all steps that anybody skipped, and every layer that anybody computes in float32."""
        told = self._scaled.values()
        together = {
            "loss_scale": min(one["loss_scale"] for one in told),
            "skipped_steps": sum(one["skipped_steps"] for one in told),
        }
        layers = {name for one in told for name in one.get("float32_layers", ())}
        if any("float32_layers" in one for one in told):
            together["float32_layers"] = sorted(layers)
        return together
