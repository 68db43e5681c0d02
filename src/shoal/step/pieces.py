"""Finding the layer whose scores a loss takes in pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shoal.errors import SpecError
from shoal.model.replica import Replica
from shoal.model.scores import SMALLEST_VOCABULARY, candidates, is_taken_in_pieces, stand_in
from shoal.step.compute import raw_loss


def split_loss(replica: Replica) -> None:
    """Let the model's last layer and its loss be computed together, in pieces."""
    layer = find_vocabulary_layer(replica)
    if layer is None:
        raise SpecError(
            f"loss_in_pieces: no linear layer of {type(replica.module).__name__} with {SMALLEST_VOCABULARY} words "
            "or more feeds F.cross_entropy without class weights or smoothing; leave it out, or call "
            "shoal.linear_cross_entropy yourself."
        )
    stand_in(layer)


def find_vocabulary_layer(replica: Replica, batch: Any = None) -> nn.Linear | None:
    """The layer whose scores feed a cross entropy and nothing else; None where there is none. `batch`: what to
    look with, in place of the replica's own sample."""
    layers = candidates(replica.module)
    if not layers or (batch is None and replica.sample is None):
        return None
    if batch is None and replica.sample is not None:
        batch = tree_map_only(torch.Tensor, lambda t: t.to(replica.device), replica.sample())

    def make_loss() -> None:
        with replica.precision.autocast():
            raw_loss(replica.task, replica.module, batch)

    state, buffers = torch.default_generator.get_state(), [b.clone() for b in replica.module.buffers()]
    was_training = replica.module.training
    replica.module.train()
    try:
        return next((layer for layer in layers if is_taken_in_pieces(layer, make_loss)), None)
    finally:
        replica.module.train(was_training)
        torch.default_generator.set_state(state)
        with torch.no_grad():
            for buffer, before in zip(replica.module.buffers(), buffers, strict=True):
                buffer.copy_(before)
