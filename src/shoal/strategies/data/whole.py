"""The update for optimizers that do not work element by element: the first worker does it for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.arena import Chunk, Piece
from shoal.arena.tensors import flat_of
from shoal.model.replica import Replica
from shoal.step.clipping import ChunkNorms
from shoal.strategies.data.shared import SharedState
from shoal.strategies.data.whole_journal import WholeJournal

Evaluate = Callable[[], tuple[float, float, Any]]
"""Computes all slots' gradients again; returns loss, scale and touched parameters."""


class WholeUpdate:
    """The user's own optimizer on whole parameters, run by the first place's host; a journal keeps its state."""

    def __init__(self, shared: SharedState, replica: Replica, place: int) -> None:
        self._shared = shared
        self._replica = replica
        self._mine = place == 0
        self._journal = WholeJournal(shared, replica) if self._mine else None
        self._wants_closure = isinstance(replica.optimizer, torch.optim.LBFGS)
        slots = range(shared.setting.slots)
        self._slots = [shared.gradient_views(slot) for slot in slots] if self._mine else []
        flats = [flat_of(param) for param in shared.params]
        self._norms = [
            ChunkNorms(shared.units, Chunk(f.dtype, 0, f.numel * f.itemsize, (Piece(number, 0, f.numel, 0),)))
            for number, f in enumerate(flats)
        ]

    def begin_step(self) -> None:
        """The journal counts updates, not what is done of one."""

    def measure(self, scale: float, touched: Any) -> None:
        """Write the squared norms of the whole gradient."""
        if self._mine:
            self._shared.norms[:] = 0.0
            for norms, gradient in zip(self._norms, self._reduce(scale, touched), strict=True):
                if gradient is not None and gradient.numel():
                    flat = torch.as_strided(gradient, (gradient.numel(),), (1,))
                    self._shared.norms[norms.numbers] = norms.measure(flat)

    def run(self, step: int, scale: float, touched: Any, loss: float, evaluate: Evaluate | None) -> None:
        """Take the optimizer's step, evaluating the loss again as often as it asks."""
        journal = self._journal
        if journal is None or journal.step == step:  # this far a predecessor came, but not to saying so
            return
        with journal.updating(step):
            self._assign(scale, touched)
            if not self._wants_closure:
                self._replica.optimizer.step()
            else:
                self._step_with_closure(loss, evaluate)
        for param in self._shared.params:
            param.grad = None

    def _step_with_closure(self, loss: float, evaluate: Evaluate | None) -> None:
        first = True

        def closure() -> float:
            nonlocal first
            if first:  # the gradients of this point have just been computed by all
                first = False
                return loss
            assert evaluate is not None
            for param in self._shared.params:
                param.grad = None
            with torch.enable_grad():
                value, scale, touched = evaluate()
            self._assign(scale, touched)
            return value

        self._replica.optimizer.step(closure)

    def _assign(self, scale: float, touched: Any) -> None:
        for param, gradient in zip(self._shared.params, self._reduce(scale, touched), strict=True):
            param.grad = gradient

    def _reduce(self, scale: float, touched: Any) -> list[torch.Tensor | None]:
        """Each parameter's gradient, summed in slot order, which decides the bits; None where no slot has one."""
        gradients: list[torch.Tensor | None] = []
        for number in range(len(self._shared.params)):
            total: torch.Tensor | None = None
            for slot, views in enumerate(self._slots):
                if touched is None or touched[slot, number]:
                    total = views[number].clone() if total is None else total.add_(views[number])
            gradients.append(total if total is None or scale == 1.0 else total.mul_(scale))
        return gradients
