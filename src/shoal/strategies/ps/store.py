"""One shard's values on a server: the optimizer's steps on its blocks, each guarded by a version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import numpy as np
import torch
import xxhash

from shoal.comm.codec import Frame
from shoal.comm.compression import Compression
from shoal.errors import ProtocolError
from shoal.model.optimizer.chunk import ChunkOptimizer, load_state
from shoal.model.optimizer.kinds import ELEMENTWISE, settings_of
from shoal.model.optimizer.state import states_to_load
from shoal.model.replica import Replica
from shoal.ps.messages import Push
from shoal.spec.served_footprint import marked
from shoal.strategies.ps.bulk import Bulk
from shoal.strategies.ps.journal import SegmentJournal
from shoal.strategies.ps.memory import ServedMemory
from shoal.strategies.ps.moving import KEEPER, MovingMean
from shoal.strategies.ps.norms import ShardNorms
from shoal.strategies.ps.parcelling import wrap
from shoal.strategies.ps.schedule import ShardSchedule
from shoal.strategies.ps.versions import BlockVersions


def by_element(replica: Replica) -> torch.optim.Optimizer:
    """An optimizer that can be cut into pieces: the user's own, or one that stands in and is never stepped."""
    optimizer = replica.optimizer
    if type(optimizer) in ELEMENTWISE:
        return optimizer
    return torch.optim.SGD([{"params": group["params"]} for group in optimizer.param_groups], lr=0.0)


class ShardStore:
    """The `ShardValues` of one copy of one shard."""

    def __init__(
        self,
        memory: ServedMemory,
        replica: Replica,
        shard: int,
        copy: int,
        bulk: Bulk,
        moving: MovingMean | None = None,
        *,
        shared: bool,
        pulls: Compression,
        has_journal: bool = False,
        saves_blocks: bool = True,
    ) -> None:
        self._memory = memory
        self._shard = shard
        self._copy = copy
        self._bulk = bulk
        self._moving = moving
        self._shared = shared
        """The other copy lies in the same segment: filling is copying from there."""
        self._pulls = pulls
        self._versions = BlockVersions(memory, shard, copy)
        home = memory.home(copy)
        self._optimizers = [
            ChunkOptimizer(home, block.chunk, block.first_piece, by_element(replica), memory.params)
            for block in memory.blocks[shard]
        ]
        self._params = np.array(
            sorted({param for one in self._optimizers for param in one.params}), dtype=np.int64
        )
        """The parameters that this shard has a part of; of others a push may not say anything yet."""
        largest = max((one.values.numel() * one.values.element_size() for one in self._optimizers), default=0)
        clip_norm = replica.task.clip_norm
        self._norms = None if clip_norm is None else ShardNorms(memory, shard, clip_norm)
        self._workspace = torch.empty(largest, dtype=torch.uint8)
        self._replica = replica
        self._schedule = ShardSchedule(replica)
        self._settings = [settings_of(group) for group in replica.optimizer.param_groups]
        """What the optimizers have; a schedule that begins in the middle wants others at once."""
        self.journal: SegmentJournal | None = None
        """Where the values outlive this process, and another is to go on with them."""
        if has_journal:
            live = [one.live for one in self._optimizers]
            self.journal = SegmentJournal(memory, shard, copy, live, saves_blocks=saves_blocks)
        self._is_marked = False
        self._num_updates = 0
        self._updates = memory.updates(copy)
        self.before_update: Callable[[], None] = lambda: None

    def initialise(self) -> None:
        """Take the replica's own values and the state it begins with: every copy starts from the same."""
        self._versions.settle()
        self._updates[self._shard] = 0
        for number, block in enumerate(self._memory.blocks[self._shard]):
            values = self._optimizers[number]
            for piece, span in zip(block.chunk.pieces, values.spans, strict=True):
                # In memory order, whatever the strides: both have the same.
                source = self._memory.params[piece.param].detach()
                flat = torch.as_strided(source, (source.numel(),), (1,))
                values.values[span].copy_(flat[piece.start : piece.stop])
        if self._moving is not None:
            self._moving.initialise(self._copy)
        self._load_saved_state()

    def _load_saved_state(self) -> None:
        if not self._memory.schema.keeps_any:
            return  # Where parameters are averaged, each worker keeps the state of its own optimizer.
        home, states = self._memory.home(self._copy), states_to_load(self._replica, self._memory.schema)
        for block in self._memory.blocks[self._shard]:
            load_state(home, block.chunk, block.first_piece, self._memory.params, states)
        self._rebind()

    def fits(self, push: Push) -> bool:
        """Whether what the push brings has the shapes and types of this shard."""
        return self._bulk.fits(push)

    def step(self, gradients: Sequence[Push], *, scale: float, lr_scale: float, loss: float, last: bool) -> None:
        """One update with the sum of these gradients."""
        self.before_update()
        self._adopt(lr_scale)
        todo = self._todo()
        for number, (total, has_gradient) in zip(todo, self._totals(gradients, scale, todo), strict=True):
            optimizer = self._optimizers[number]
            optimizer.aim(
                [
                    total[span] if has_gradient is None or has_gradient[param] else None
                    for span, param in zip(optimizer.spans, optimizer.params, strict=True)
                ]
            )
            with self._changing(number):
                optimizer.step()
        self._commit(gradients, loss, last=last)

    def _todo(self) -> range:
        """The blocks that the update under way has still to change: all, but after a predecessor's death."""
        return range(len(self._optimizers)) if self._redo is None else self._redo.todo()

    @property
    def _redo(self) -> SegmentJournal | None:
        """The journal, where this process keeps one."""
        return self.journal if self.journal is not None and self.journal.is_kept else None

    @property
    def _is_done(self) -> bool:
        """Whether the values have the update under way already: it is only taken in again."""
        return self._redo is not None and self._redo.is_complete

    @contextmanager
    def _changing(self, block: int) -> Iterator[None]:
        """One of the blocks changes."""
        redo = self._redo
        if redo is not None:
            redo.save(block)
        with self._versions.changing(block):
            yield
        if redo is not None:
            redo.note_changed(block)

    def _commit(self, gradients: Sequence[Push], loss: float, *, last: bool) -> None:
        """The values have changed: what goes with them follows."""
        if self._moving is not None and not self._is_done:
            self._moving.commit(self._copy, [(self._bulk.moved(p), p.weight) for p in gradients])
        self._count_update()
        if last:
            self._schedule.advance(loss)

    def _count_update(self) -> None:
        self._num_updates += 1
        self._updates[self._shard] = self._num_updates
        if self._redo is not None:
            self._redo.note_complete()

    def skip(self, pushes: Sequence[Push], *, loss: float, last: bool) -> None:
        """Parameters and optimizer state stay as they are; moving buffers and the schedule go on."""
        self._commit(pushes, loss, last=last)

    def own_part(self, gradients: Sequence[Push], *, scale: float) -> tuple[Frame, ...]:
        """The squared norms of what `step` would take."""
        assert self._norms is not None
        if not gradients:
            return (self._norms.nothing,)
        self.before_update()
        totals = enumerate(self._totals(gradients, scale))
        squares = [self._norms.measure(number, total) for number, (total, _) in totals]
        return (torch.from_numpy(np.concatenate(squares)),)

    def fits_part(self, shard: int, frames: Sequence[Frame]) -> bool:
        """Whether these can be another shard's norms."""
        return self._norms is not None and self._norms.fits(shard, frames)

    def factor(self, parts: Mapping[int, Sequence[Frame]], *, scale: float) -> float:
        """The factor by which the gradient is clipped."""
        assert self._norms is not None
        return self._norms.factor(parts)

    def add_parts(self, parts: Sequence[Sequence[Frame]]) -> tuple[Frame, ...]:
        """Shards with a part of the model have nothing to add up."""
        raise AssertionError("only whole copies add up")

    def add(self, frames: Sequence[Frame], *, loss: float, steps: int) -> None:
        """Add what another copy changed, block by block."""
        for number, frame in enumerate(frames):
            assert isinstance(frame, torch.Tensor)
            with self._versions.changing(number):
                self._optimizers[number].values.add_(frame)
        self._count_update()
        for _ in range(steps):
            self._schedule.advance(loss)

    def average(self, pushes: Sequence[Push], *, share: float) -> None:
        """Move towards the weighted mean of pushed parameters."""
        total = sum(push.weight for push in pushes)
        bulks = [self._bulk.gradients(push) for push in pushes]
        for number in self._todo():
            optimizer = self._optimizers[number]
            with self._changing(number):
                optimizer.values.mul_(1.0 - share)
                for push, bulk in zip(pushes, bulks, strict=True):
                    optimizer.values.add_(bulk[number], alpha=share * push.weight / total)
        self._commit(pushes, 0.0, last=False)

    def facts(self) -> dict[str, Any]:
        """What goes with the values, as plain data."""
        return {"updates": self._num_updates, "schedule": self._schedule.facts(), "marked": self._is_marked}

    def frames(self) -> tuple[Frame, ...]:
        """Everything for another copy; in shared memory it is read from this one."""
        # The other copy has no mark to go back to, so neither may this one: they would part.
        self._is_marked = False
        return () if self._shared else tuple(self._live(self._copy))

    def load(self, frames: Sequence[Frame], facts: dict[str, Any]) -> None:
        """Become what another copy is."""
        sources = self._live(1 - self._copy) if self._shared else frames
        targets = self._live(self._copy)
        if not _alike(sources, targets):
            raise ProtocolError("What should fill a shard does not fit it.")
        with self._versions.all_changing():
            torch._foreach_copy_(targets, list(sources))
        self._take(facts)
        self._updates[self._shard] = self._num_updates

    def resume(self, facts: dict[str, Any]) -> None:
        """Go on with what a killed server left here; `journal` says what was under way."""
        assert self.journal is not None
        if (torn := self.journal.torn) is not None:
            self._versions.leave_open(torn)
            self.journal.put_back(torn)
        self._take(facts)
        self._is_marked = facts["marked"]

    def _take(self, facts: dict[str, Any]) -> None:
        self._rebind()
        self._schedule = ShardSchedule(self._replica)
        self._schedule.catch_up(facts["schedule"])
        self._num_updates = int(facts["updates"])

    def mark(self) -> None:
        """Remember the values as they are."""
        if not self._is_done:
            torch._foreach_copy_(self._live(marked(self._copy)), self._live(self._copy))
        self._is_marked = True

    def rollback(self) -> bool:
        """Go back to what was marked."""
        if not self._is_marked:
            return False
        if not self._is_done:
            with self._versions.all_changing():
                torch._foreach_copy_(self._live(self._copy), self._live(marked(self._copy)))
            self._rebind()
        self._count_update()
        return True

    def digest(self) -> str:
        """One name for values and state."""
        digest = xxhash.xxh3_128()
        for tensor in self._live(self._copy):
            digest.update(tensor.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def parts(self, *, whole: bool) -> list[Sequence[Frame]]:
        """The parameters for a worker that shares no memory, first layers first; or all there is."""
        if whole:
            return [self._live(self._copy)]
        frames: list[Frame] = wrap(self._pulls, "pull", [optimizer.values for optimizer in self._optimizers])
        if self._shard == KEEPER:
            frames.append(self._memory.moving(self._copy))
        return [frames]

    def _adopt(self, lr_scale: float) -> None:
        settings = self._schedule.settings(lr_scale)
        if settings != self._settings:
            self._settings = settings
            for optimizer in self._optimizers:
                optimizer.adopt_settings(settings)

    def _totals(
        self, pushes: Sequence[Push], scale: float, blocks: range | None = None
    ) -> Iterator[tuple[torch.Tensor, Any]]:
        """By block: the sum of its gradients, and by parameter whether there is any (None: all have some).

        A sum is good until the next is asked for.
        """
        blocks = range(len(self._optimizers)) if blocks is None else blocks
        if not blocks:
            return
        bulks = [self._bulk.gradients(push) for push in pushes]
        touched = np.stack([self._bulk.touched(push) for push in pushes])
        complete = bool(touched[:, self._params].all())
        for number in blocks:
            optimizer = self._optimizers[number]
            parts = [bulk[number] for bulk in bulks]
            if not complete:
                yield self._sum_of_present(optimizer, parts, touched, scale), touched.any(axis=0)
            elif len(parts) == 1 and scale == 1.0:
                yield parts[0], None
            else:
                yield self._sum(parts, scale), None

    def _sum(self, parts: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
        """In slot order from the first, then times `scale`: as `data` sums its chunks, so with the same bits."""
        total = self._workspace.view(parts[0].dtype)[: parts[0].numel()]
        if len(parts) == 1:
            total.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=total)
            for part in parts[2:]:
                total.add_(part)
        return total if scale == 1.0 else total.mul_(scale)

    def _sum_of_present(
        self, optimizer: ChunkOptimizer, parts: Sequence[torch.Tensor], touched: Any, scale: float
    ) -> torch.Tensor:
        """By piece: the sum over those pushes that have a gradient for it; zero where none has. From zero, which
        makes 0.0 of -0.0, as `data` does where gradients are missing."""
        total = self._workspace.view(parts[0].dtype)[: parts[0].numel()].zero_()
        for span, param in zip(optimizer.spans, optimizer.params, strict=True):
            for part, has in zip(parts, touched[:, param], strict=True):
                if has:
                    total[span].add_(part[span])
        return total if scale == 1.0 else total.mul_(scale)

    def _live(self, copy: int | str) -> list[torch.Tensor]:
        """All that an update changes, of this copy, of the other, or of what was marked."""
        moving = [self._memory.moving(copy)] if self._moving is not None else []
        return self._memory.live(self._shard, copy) + moving

    def _rebind(self) -> None:
        for optimizer in self._optimizers:
            optimizer.bind_state()


def _alike(sources: Sequence[Frame], targets: Sequence[torch.Tensor]) -> TypeGuard[Sequence[torch.Tensor]]:
    return len(sources) == len(targets) and all(
        isinstance(source, torch.Tensor) and source.dtype == target.dtype and source.shape == target.shape
        for source, target in zip(sources, targets, strict=True)
    )
