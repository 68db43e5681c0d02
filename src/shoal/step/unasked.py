"""Plain steps in fp16 that nobody waits for: a GPU looks at gradients itself, and skips what is to be skipped."""

from __future__ import annotations

import torch

from shoal.feed.parts import Part
from shoal.model.optimizer.kinds import begin_momentum
from shoal.model.replica import Replica
from shoal.step.compute import DeferredSums, EagerCompute, Sums, check_weight, seed_slot
from shoal.step.device_scale import ScaledSums
from shoal.step.device_step import DeviceStep
from shoal.step.update import Update
from shoal.step.work import Work


class UnaskedSteps:
    """Takes the steps of one process whose loss is scaled: as captured ones, with nothing captured."""

    def __init__(self, replica: Replica, compute: EagerCompute, update: Update) -> None:
        self._device = replica.device
        begin_momentum(replica.optimizer)
        self._step = DeviceStep(replica, compute, update)

    def take(self, work: Work, part: Part) -> DeferredSums:
        """A step on one part, whose gradients there are none of yet."""
        scale = self._step.scale
        assert scale is not None
        found = ScaledSums(work, part, scale)
        seed_slot(work, part.slot, self._device)
        loaded = list(part.load())
        found.add(Sums(samples=sum([samples for _, _, samples in loaded])))
        counted = [(batch, weight) for batch, weight, _ in loaded if weight]
        weights = [weight for _, weight in counted]
        check_weight(work, Sums(weight=sum(weights)))
        scale.send()
        shares = torch.tensor([weight / sum(weights) for weight in weights], pin_memory=self._device != "cpu")
        shares = shares.to(self._device, non_blocking=True)
        told = self._step.run([batch for batch, _ in counted], list(shares.unbind()), work.step)
        if not told.is_cuda:
            found.is_sent(told, None, weights)
            return found
        room, event = torch.empty(told.shape, dtype=told.dtype, pin_memory=True), torch.cuda.Event()
        room.copy_(told, non_blocking=True)
        event.record()
        found.is_sent(room, event, weights)
        return found
