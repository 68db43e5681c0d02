"""A whole copy of the model for each group of workers; copies add up what is pushed to them, and stay equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from shoal.comm.codec import Frame
from shoal.layout import Placement
from shoal.ps.messages import Push
from shoal.ps.rules import ShardRules, Together
from shoal.spec import ParameterServer
from shoal.strategies.ps.bulk import SharedBulk
from shoal.strategies.ps.parcelling import blocks as cut_blocks
from shoal.strategies.ps.store import ShardStore

_TOGETHER = {"allreduce": Together.SUM, "ring": Together.RING, "scatter-sum": Together.CHANGES}


def ranks_of_host(host: int, hosts: int, workers: int) -> range:
    """The workers that a host's copy serves."""
    return range(workers * host // hosts, workers * (host + 1) // hosts)


def host_of(rank: int, hosts: int, workers: int) -> int:
    """The host whose copy serves a worker."""
    return next(host for host in range(hosts) if rank in ranks_of_host(host, hosts, workers))


def rules_of_host(rules: ShardRules, host: int, spec: ParameterServer) -> ShardRules:
    """The rules of one host's copy: it gathers what its own workers push, and closes rounds with the others."""
    ranks = ranks_of_host(host, spec.hosts, rules.workers)
    slots = range(
        rules.slots * ranks.start // rules.workers,
        rules.slots * ranks.stop // rules.workers,
    )
    return replace(
        rules,
        together=_TOGETHER[spec.agree],
        own_slots=slots,
        first_rank=ranks.start,
        workers=len(ranks),
    )


def one_copy_each(placement: Placement, hosts: int) -> Placement:
    """The shards as the coordinator sees them: each host's server holds one, and it is the whole model."""
    return replace(
        placement,
        shards=placement.shards * hosts,
        shard_bytes=placement.shard_bytes * hosts,
        owners=tuple(range(hosts)),
        backups=(None,) * hosts,
        capacities=(1.0,) * hosts,
    )


class HostBulk(SharedBulk):
    """Workers' pushes lie in memory; the sum over all hosts comes as frames."""

    def gradients(self, push: Push) -> Sequence[torch.Tensor]:
        return _tensors(push.frames[:-3]) if push.frames else super().gradients(push)

    def touched(self, push: Push) -> Any:
        return _tensors(push.frames)[-3].numpy() if push.frames else super().touched(push)

    def moved(self, push: Push) -> torch.Tensor:
        return _tensors(push.frames)[-2] if push.frames else super().moved(push)


class HostStore(ShardStore):
    """One host's copy. Its part of a round is the sum of its own workers' gradients.

    A part's frames are the blocks, by parameter whether there is a gradient, the moving buffers, and the weight.
    """

    def own_part(self, gradients: Sequence[Push], *, scale: float) -> tuple[Frame, ...]:
        """What this host's workers have pushed, added up and not yet a mean."""
        self.before_update()
        self._round = gradients[0].clock
        own = self._shelf(0)
        for kept, (total, _) in zip(own, self._totals(gradients, 1.0), strict=True):
            kept.copy_(total)
        touched = np.stack([self._bulk.touched(push) for push in gradients]).any(axis=0).astype(np.uint8)
        moved = self._mean_of([(self._bulk.moved(push), push.weight) for push in gradients])
        weight = torch.tensor([sum(push.weight for push in gradients)], dtype=torch.float64)
        return (*own, torch.from_numpy(touched), moved, weight)

    def fits_part(self, shard: int, frames: Sequence[Frame]) -> bool:
        """Whether these can be another host's sum."""
        memory = self._memory
        expected = [
            *((one.values.dtype, one.values.shape) for one in self._optimizers),
            (torch.uint8, (len(memory.params),)),
            (torch.uint8, memory.moving(self._copy).shape),
            (torch.float64, (1,)),
        ]
        found = [(frame.dtype, frame.shape) for frame in frames if isinstance(frame, torch.Tensor)]
        return 0 <= shard < memory.copies and found == expected

    def add_parts(self, parts: Sequence[Sequence[Frame]]) -> tuple[Frame, ...]:
        """The sum over hosts, in their order."""
        hosts = [_tensors(frames) for frames in parts]
        totals = self._shelf(1)
        for total, first, *others in zip(totals, *(host[:-3] for host in hosts), strict=True):
            total.copy_(first)
            for other in others:
                total.add_(other)
        touched, moved, weights = zip(*(host[-3:] for host in hosts), strict=True)
        mean = self._mean_of([(block, float(weight)) for block, weight in zip(moved, weights, strict=True)])
        return (*totals, torch.stack(touched).amax(0), mean, torch.stack(weights).sum(0))

    def _shelf(self, number: int) -> list[torch.Tensor]:
        """Room, by block, for one of this round's two sums: this host's own, and all hosts'.

        It is in the host's memory, where a successor finds it, and lasts for two rounds: until all have this one.
        """
        return cut_blocks(self._memory, self._shard, f"part/{self._copy}/{2 * (self._round % 2) + number}")

    def factor(self, parts: Mapping[int, Sequence[Frame]], *, scale: float) -> float:
        """The factor by which the sum over all hosts is clipped."""
        if self._norms is None:
            return 1.0
        (total,) = parts.values()
        blocks = enumerate(_tensors(total)[:-3])
        squares = [self._norms.measure(number, block * scale) for number, block in blocks]
        return self._norms.factor({0: [torch.from_numpy(np.concatenate(squares))]})

    def _mean_of(self, left: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
        """The moving buffers that several have left, as one."""
        mean = self._memory.moving(self._copy).clone()
        if self._moving is not None:
            self._moving.merge(mean, left)
        return mean


class ScatterStore(ShardStore):
    """One host's copy that updates on its own; what it changed since it was last asked, the others add."""

    def initialise(self) -> None:
        super().initialise()
        self._before = [one.values.clone() for one in self._optimizers]
        """The values when the last change was made, and what others have added since."""

    def own_part(self, gradients: Sequence[Push], *, scale: float) -> tuple[Frame, ...]:
        """What has changed since, other than by what others changed."""
        changes = []
        for before, one in zip(self._before, self._optimizers, strict=True):
            changes.append(one.values - before)
            before.copy_(one.values)
        return tuple(changes)

    def fits_part(self, shard: int, frames: Sequence[Frame]) -> bool:
        """Whether these can be another host's change."""
        expected = [(one.values.dtype, one.values.shape) for one in self._optimizers]
        found = [(frame.dtype, frame.shape) for frame in frames if isinstance(frame, torch.Tensor)]
        return 0 <= shard < self._memory.copies and found == expected

    def add(self, frames: Sequence[Frame], *, loss: float, steps: int) -> None:
        """Add what another host changed; it is not to be told to others again."""
        super().add(frames, loss=loss, steps=steps)
        torch._foreach_add_(self._before, _tensors(frames))


def _tensors(frames: Sequence[Frame]) -> list[torch.Tensor]:
    return [frame for frame in frames if isinstance(frame, torch.Tensor)]
