"""Layers that normalise by their batch: torch's BatchNorm, and other libraries', which say so themselves."""

from __future__ import annotations

from abc import abstractmethod

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from shoal.model.gathering import Asking


class BatchNormalising(nn.Module):
    """A layer that is not torch's and normalises by its batch while it trains; its statistics are buffers."""

    @abstractmethod
    def synchronise(self, asking: Asking) -> None:
        """From now on normalise by the batches of all slots."""


def normalises_by_batch(module: nn.Module) -> bool:
    """Whether this layer's outputs depend on the other samples of the batch while it trains."""
    return isinstance(module, (_BatchNorm, BatchNormalising))


def has_moving_statistics(module: nn.Module) -> bool:
    """Whether this layer is made to move its buffers while it trains, however large they are."""
    return isinstance(module, BatchNormalising) or (
        isinstance(module, _NormBase) and module.running_mean is not None
    )
