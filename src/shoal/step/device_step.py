"""All of a step without a question to the host: passes, clipping and update, as a device can replay them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.model.replica import Replica
from shoal.step.compute import EagerCompute
from shoal.step.device_scale import DeviceScale, step_unless
from shoal.step.update import Update


class DeviceStep:
    """The steps of one process."""

    def __init__(self, replica: Replica, compute: EagerCompute, update: Update) -> None:
        self._optimizer = replica.optimizer
        self._params = list(replica.trained.values())
        self._compute = compute
        self._update = update
        self.scale = DeviceScale(replica.precision, replica.device) if replica.precision.scales else None

    def run(self, batches: Sequence[Any], shares: Sequence[torch.Tensor], step: int) -> torch.Tensor:
        """A step on batches that have these shares of it. Told are, by batch, its loss and what that is told with;
        where the loss is scaled, all that one behind the other, and then the values of the scale."""
        told = self._passes(batches, shares, step)
        if self.scale is None:
            if self._update.flat is not None:
                self._update.flat.scale = 1.0  # shares have made the gradients those of the mean
            self._update.step(self._params)
            return told
        spoilt = self.scale.unscale(param.grad for param in self._params if param.grad is not None)
        self._update.clip(self._params)
        step_unless(spoilt, self._optimizer)
        self.scale.advance(spoilt)
        return torch.cat([told.flatten().double(), self.scale.values])

    def _passes(self, batches: Sequence[Any], shares: Sequence[torch.Tensor], step: int) -> torch.Tensor:
        rows, halves = [], self._compute.halves
        for batch, share in zip(batches, shares, strict=True):
            if halves is not None:
                halves.begin()
            told = self._compute.loss(batch, step)
            weight = share if self.scale is None else self.scale.scaled(share)
            weight = weight.to(told.loss.dtype).reshape(told.loss.shape)
            self._compute.backward(torch.Tensor.backward, told.loss, weight)
            if halves is not None:
                halves.end()
            parts = (torch.as_tensor(p, dtype=told.loss.dtype, device=share.device) for p in told.parts)
            row = [each.detach().reshape(()) for each in (told.loss, *parts)]
            rows.append(row[0].reshape(1) if len(row) == 1 else torch.stack(row))
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)
