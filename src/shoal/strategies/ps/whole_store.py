"""The values of a model whose optimizer does not work element by element: one shard, updated as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from shoal.comm.codec import Frame
from shoal.errors import ProtocolError
from shoal.ps.messages import Push
from shoal.strategies.optimizer_state import load_named_state
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
        optimizer = self._replica.optimizer
        for group, settings in zip(optimizer.param_groups, self._schedule.settings(lr_scale), strict=True):
            group.update(settings)
        with self._versions.all_changing():
            optimizer.step()
        self._commit(gradients, loss, last=last)

    def _load_saved_state(self) -> None:
        load_named_state(self._replica)

    def facts(self) -> dict[str, Any]:
        """What goes with the values: also the optimizer's state, but for its tensors."""
        tensors: list[torch.Tensor] = []
        plain = _plain(self._replica.optimizer.state_dict()["state"], tensors)
        return {**super().facts(), "state": plain, **_shapes(tensors)}

    def frames(self) -> tuple[Frame, ...]:
        """Everything for another copy, the tensors of the optimizer's state included."""
        tensors: list[torch.Tensor] = []
        _plain(self._replica.optimizer.state_dict()["state"], tensors)
        return (*super().frames(), *(frame for tensor in tensors for frame in in_frames(tensor)))

    def load(self, frames: Sequence[Frame], facts: dict[str, Any]) -> None:
        """Become what another copy is."""
        at = len(frames) - sum(facts["state_frames"])
        super().load(frames[:at], facts)
        tensors = []
        for count, shape in zip(facts["state_frames"], facts["state_shapes"], strict=True):
            tensors.append(from_frames(frames[at : at + count]).reshape(shape))
            at += count
        whole = self._replica.optimizer.state_dict()
        whole["state"] = _unplain(facts["state"], tensors)
        self._replica.optimizer.load_state_dict(whole)

    def mark(self) -> None:
        """Remember values and state as they are."""
        super().mark()
        tensors: list[torch.Tensor] = []
        plain = _plain(self._replica.optimizer.state_dict()["state"], tensors)
        self._marked_state = plain, [tensor.clone() for tensor in tensors]

    def rollback(self) -> bool:
        """Go back to what was marked."""
        if not super().rollback():
            return False
        whole = self._replica.optimizer.state_dict()
        whole["state"] = _unplain(*self._marked_state)
        self._replica.optimizer.load_state_dict(whole)
        return True

    def digest(self) -> str:
        """One name for values and state."""
        tensors: list[torch.Tensor] = []
        plain = _plain(self._replica.optimizer.state_dict()["state"], tensors)
        digest = xxhash.xxh3_128((super().digest() + repr(plain)).encode())
        for tensor in tensors:
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _shapes(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """How tensors are put together again from their frames."""
    return {
        "state_frames": [len(in_frames(tensor)) for tensor in tensors],
        "state_shapes": [list(tensor.shape) for tensor in tensors],
    }


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A state as plain data: tensors are put aside and named by their number."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, dict):
        return ["dict", [[key, _plain(item, tensors)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        return ["list", [_plain(item, tensors) for item in value]]
    return ["value", value]


def _unplain(plain: Any, tensors: Sequence[Frame]) -> Any:
    """The state that `_plain` took apart."""
    match plain:
        case ["tensor", int(number)] if 0 <= number < len(tensors):
            tensor = tensors[number]
            assert isinstance(tensor, torch.Tensor)
            return tensor.clone()
        case ["dict", list(items)]:
            return {key: _unplain(item, tensors) for key, item in items}
        case ["list", list(items)]:
            return [_unplain(item, tensors) for item in items]
        case ["value", value]:
            return value
    raise ProtocolError("What should be an optimizer's state is none.")
