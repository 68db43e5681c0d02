"""A training state as whole tensors by name, whoever held the pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.block import Block
from shoal.checkpoint.room import Room
from shoal.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that training needs to go on after `step`, in any strategy and with any number of workers."""

    step: int
    """Committed steps."""
    model: Mapping[str, torch.Tensor]
    """The module's `state_dict`: parameters and buffers."""
    optimizer: Mapping[str, torch.Tensor]
    """The optimizer's state, by `parameter/key`."""
    losses: torch.Tensor
    """The losses of steps 1 to `step`, in float64: a resumed run replays them through the scheduler."""
    rng: Mapping[str, torch.Tensor]
    """The states of random generators as bytes, by `rank/name`, as far as ranks gave theirs."""
    facts: Mapping[str, Any]
    """Plain JSON data: the job, its slots, evaluations, the ledger's position."""

    def parts(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        """The tensors by part, each of which becomes a file."""
        yield "model", self.model
        yield "optimizer", self.optimizer
        yield "losses", {"losses": self.losses}
        yield "rng", self.rng

    def copy_into(self, room: Room) -> PackedSnapshot:
        """A copy that training does not touch, in memory kept from the last time."""
        blocks = {part: room.copy(part, tensors) for part, tensors in self.parts()}
        return PackedSnapshot.of(blocks, step=self.step, facts=_plain(self.facts))


@dataclass(frozen=True, kw_only=True)
class PackedSnapshot(Snapshot):
    """A snapshot whose parts lie in memory as they will lie in their files."""

    blocks: Mapping[str, Block]

    @classmethod
    def of(cls, blocks: Mapping[str, Block], *, step: int, facts: Mapping[str, Any]) -> PackedSnapshot:
        """The snapshot that the blocks of all parts hold."""
        found = {part: block.tensors() for part, block in blocks.items()}
        return cls(
            step=step,
            facts=facts,
            model=found["model"],
            optimizer=found["optimizer"],
            losses=found["losses"].get("losses", torch.empty(0, dtype=torch.float64)),
            rng=found["rng"],
            blocks=blocks,
        )


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A copy as it will come back from JSON."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(facts))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"Snapshot: its facts must be plain JSON data, found otherwise ({error}).") from None
    return copy
