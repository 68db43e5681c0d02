"""The values of a model whose optimizer does not work element by element: one shard, updated as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import torch
import xxhash

from shoal.arena.tensors import as_bytes
from shoal.comm.codec import Frame
from shoal.errors import ProtocolError
from shoal.model.optimizer.kinds import changed_settings, settings_of
from shoal.model.optimizer.state import load_named_state
from shoal.model.optimizer.whole_state import MovedSettings, by_name, put_together, take_apart
from shoal.model.replica import Replica
from shoal.ps.messages import Push
from shoal.strategies.ps.memory import shaped
from shoal.strategies.ps.parcelling import from_frames, in_frames
from shoal.strategies.ps.store import ShardStore


class WholeStore(ShardStore):
    """The user's own optimizer on the whole parameters of one copy; its state is this process's."""

    def initialise(self) -> None:
        """Start from the replica's own values, and let it live in this copy."""
        super().initialise()
        params = self._memory.params
        for view, param in zip(self._memory.views(f"params/{self._copy}"), params, strict=True):
            param.data = view
        self._whole_sum = torch.zeros(self._memory.grid.nbytes, dtype=torch.uint8)
        self._gradients = shaped(self._whole_sum, self._memory.grid.offsets, params)
        self._moved = MovedSettings(self._replica.optimizer)
        self._told = [settings_of(group) for group in self._replica.optimizer.param_groups]
        """The settings that the schedule asked for last."""

    def step(self, gradients: Sequence[Push], *, scale: float, lr_scale: float, loss: float, last: bool) -> None:
        """One update with the sum of these gradients."""
        self.before_update()
        present: Any = None
        totals = self._totals(gradients, scale)
        for block, (total, has_gradient) in zip(self._memory.blocks[self._shard], totals, strict=True):
            chunk, present = block.chunk, has_gradient
            self._whole_sum[chunk.offset : chunk.offset + chunk.nbytes].view(total.dtype).copy_(total)
        for number, (param, gradient) in enumerate(zip(self._memory.params, self._gradients, strict=True)):
            param.grad = gradient if present is None or present[number] else None
        optimizer, wanted = self._replica.optimizer, self._schedule.settings(lr_scale)
        for group, told, settings in zip(optimizer.param_groups, self._told, wanted, strict=True):
            group.update(changed_settings(told, settings))  # what the optimizer changes itself is its own
        self._told = wanted
        with self._versions.all_changing(), self._moved.watching():
            optimizer.step()
        self._commit(gradients, loss, last=last)

    def _load_saved_state(self) -> None:
        load_named_state(self._replica)

    def parts(self, *, whole: bool) -> list[Sequence[Frame]]:
        """The parameters; or what is not in any memory but this process's: the optimizer's state."""
        if not whole:
            return super().parts(whole=False)
        plain, tensors = take_apart(self._replica.optimizer)
        # Copies: the next update may come before all of them are on their way.
        frames = [frame for tensor in tensors for frame in in_frames(tensor.clone())]
        return [[msgpack.packb({"state": plain, **_shapes(tensors)}), *frames]]

    def facts(self) -> dict[str, Any]:
        """What goes with the values: also the optimizer's state, but for its tensors."""
        plain, tensors = take_apart(self._replica.optimizer)
        return {**super().facts(), "state": plain, "moved": self._moved.plain(), **_shapes(tensors)}

    def frames(self) -> tuple[Frame, ...]:
        """Everything for another copy, the tensors of the optimizer's state included."""
        _, tensors = take_apart(self._replica.optimizer)
        return (*super().frames(), *(frame for tensor in tensors for frame in in_frames(tensor)))

    def load(self, frames: Sequence[Frame], facts: dict[str, Any]) -> None:
        """Become what another copy is."""
        at = len(frames) - sum(facts["state_frames"])
        super().load(frames[:at], facts)
        put_together(self._replica.optimizer, facts["state"], _tensors(frames[at:], facts))
        self._moved.adopt(facts["moved"])

    def mark(self) -> None:
        """Remember values and state as they are."""
        super().mark()
        plain, tensors = take_apart(self._replica.optimizer)
        self._marked_state = plain, [tensor.clone() for tensor in tensors]
        self._marked_settings = self._moved.plain()

    def rollback(self) -> bool:
        """Go back to what was marked."""
        if not super().rollback():
            return False
        put_together(self._replica.optimizer, *self._marked_state)
        self._moved.adopt(self._marked_settings)
        return True

    def digest(self) -> str:
        """One name for values and state."""
        plain, tensors = take_apart(self._replica.optimizer)
        digest = xxhash.xxh3_128((super().digest() + repr([plain, self._moved.plain()])).encode())
        for tensor in tensors:
            digest.update(as_bytes(tensor.contiguous()).numpy().data)
        return digest.hexdigest()


def pulled_state(frames: Sequence[Frame], replica: Replica) -> dict[str, torch.Tensor]:
    """`parameter/key -> tensor`, from all that a server has sent of its `WholeStore`."""
    try:
        facts = msgpack.unpackb(frames[0])
        return by_name(facts["state"], _tensors(frames[1:], facts), replica)
    except (IndexError, KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"What a server sent of an optimizer's state cannot be read ({error}).") from None


def _shapes(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """How tensors are put together again from their frames."""
    return {
        "state_frames": [len(in_frames(tensor)) for tensor in tensors],
        "state_shapes": [list(tensor.shape) for tensor in tensors],
    }


def _tensors(frames: Sequence[Frame], facts: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that `_shapes` tells of."""
    found, at = [], 0
    for count, shape in zip(facts["state_frames"], facts["state_shapes"], strict=True):
        found.append(from_frames(frames[at : at + count]).reshape(shape))
        at += count
    return found
