"""What an optimizer keeps, in the host's memory: fetched for its update bucket by bucket, and sent back.

Three streams work at a time: one fetches what the next bucket needs, one computes, one sends back what the last
one has changed. A few slots on the GPU are used in turn, so that it never holds more than those; the first of
them are filled while the backward pass runs. Nothing is waited for on the host. Each bucket is updated by an
optimizer of the user's class on its parameters, element by element: the bits are those of an update in one go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import optim

from shoal.errors import SpecError
from shoal.model.optimizer.kinds import rebuild, settings_of, state_schema
from shoal.model.replica import Replica

SLOTS = 3
"""Buckets whose state is on the GPU: one comes, one is updated, one leaves."""
LARGEST_BUCKET, SMALLEST_BUCKET = 64 << 20, 1 << 20
"""Bytes of parameters."""
BUCKETS = 12
"""As many there are where that makes them neither too large nor too small: with few, little is saved."""
_States = Mapping[int, Mapping[str, Any]]
"""By a parameter's `id`: what was kept for it."""
_BEGIN_AT_ZERO = (optim.AdamW, optim.Adam, optim.SGD, optim.RMSprop)


@dataclass
class _StreamMark:
    """When a stream has come to something."""

    event: torch.cuda.Event | None = None

    def set(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            self.event = self.event or torch.cuda.Event()
            self.event.record(stream)

    def let_wait(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None and self.event is not None:
            stream.wait_event(self.event)


@dataclass(frozen=True)
class _Piece:
    """Neighbouring elements of a parameter, as they lie in memory."""

    param: torch.Tensor
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor that lies in memory as the parameter does."""
        return torch.as_strided(tensor, (tensor.numel(),), (1,), tensor.storage_offset())[self.start : self.stop]


@dataclass(frozen=True)
class _Bucket:
    """Pieces that are updated together."""

    optimizer: optim.Optimizer
    groups: Sequence[int]
    """By group of its optimizer: the number of the user's."""
    pieces: Sequence[tuple[_Piece, torch.Tensor]]
    """Each with what the optimizer takes for a parameter."""
    kept: Sequence[torch.Tensor]
    """In the host's memory, by key."""
    lent: Sequence[torch.Tensor]
    """The same in a slot on the device."""
    slot: int
    is_here: _StreamMark = field(default_factory=_StreamMark)
    is_done: _StreamMark = field(default_factory=_StreamMark)

    def aim(self) -> None:
        """Let the optimizer find the gradients of this step."""
        for piece, own in self.pieces:
            gradient = piece.param.grad
            if gradient is not None and gradient.stride() != piece.param.stride():
                gradient = torch.empty_like(piece.param).copy_(gradient)
            own.grad = None if gradient is None else piece.of(gradient)

    def forget(self) -> None:
        """Let go of gradients."""
        for _, own in self.pieces:
            own.grad = None


class OffloadedOptimizer:
    """Takes the steps of a replica's optimizer, whose state it has moved to the host's memory. On a CPU it does
    the same without streams."""

    def __init__(self, replica: Replica) -> None:
        self._own, self._device = replica.optimizer, torch.device(replica.device)
        schema = state_schema(self._own)
        if type(self._own) not in _BEGIN_AT_ZERO or schema is None or not schema.mirrored:
            names = ", ".join(kind.__name__ for kind in _BEGIN_AT_ZERO)
            raise SpecError(
                f"offload: {type(self._own).__name__} keeps nothing, or nothing that is known to begin at zero, "
                f"as that of {names} does; use one of these, or leave offload out."
            )
        if any(group.get("dampening") for group in self._own.param_groups):
            raise SpecError("offload: SGD with dampening takes its first step otherwise; leave offload out.")
        self._is_gpu = self._device.type == "cuda"
        self._fetching = torch.cuda.Stream(self._device) if self._is_gpu else None
        self._sending = torch.cuda.Stream(self._device) if self._is_gpu else None
        self._slot_is_free = [_StreamMark() for _ in range(SLOTS)]
        self._counts = any(key == "step" for key, _ in schema.scalars)
        params = list(replica.trained.values())
        if len({param.dtype for param in params}) > 1:
            raise SpecError("offload: parameters of several types do not share a slot; leave offload out.")
        self._group_of = {
            id(param): at for at, group in enumerate(self._own.param_groups) for param in group["params"]
        }
        before = {id(param): self._own.state.get(param, {}) for param in params}
        keys, cut = schema.mirrored, _cut(params)
        largest = max(sum(piece.stop - piece.start for piece in bucket) for bucket in cut)
        self._slots = [
            [torch.zeros(largest, dtype=params[0].dtype, device=self._device) for _ in keys]
            for _ in range(min(SLOTS, len(cut)))
        ]
        self._kept = [
            torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype, pin_memory=self._is_gpu)
            for _ in keys
        ]
        """All of it in the host's memory, by key."""
        self._show_state(params, keys, before)
        self._buckets: list[_Bucket] = []
        start = 0
        for bucket in cut:
            self._buckets.append(self._make_bucket(bucket, keys, start, before))
            start += sum(piece.stop - piece.start for piece in bucket)
        self._num_fetched = 0
        if self._is_gpu:
            torch.cuda.synchronize(self._device)  # before other streams write to what this one has made

    @property
    def offloaded_bytes(self) -> int:
        """What a GPU does not hold because of this."""
        return max(
            0, sum(each.nbytes for each in self._kept) - sum(each.nbytes for slot in self._slots for each in slot)
        )

    def begin(self) -> None:
        """A step begins: fetch what the first buckets need while gradients are computed."""
        while self._num_fetched < min(len(self._slots), len(self._buckets)):
            self._fetch_next()

    def step(self) -> None:
        """Update all parameters that have a gradient."""
        computing = torch.cuda.current_stream(self._device) if self._is_gpu else None
        settings = [settings_of(group) for group in self._own.param_groups]
        self.begin()
        for number, bucket in enumerate(self._buckets):
            for group, own in zip(bucket.optimizer.param_groups, bucket.groups, strict=True):
                group.update(settings[own])
            bucket.is_here.let_wait(computing)
            bucket.aim()
            bucket.optimizer.step()
            bucket.forget()
            bucket.is_done.set(computing)
            self._send_back(bucket)
            if number + len(self._slots) < len(self._buckets):
                self._fetch_next()
        self._num_fetched = 0

    def settle(self) -> None:
        """Wait until the host has all that the steps so far have changed."""
        if self._sending is not None:
            self._sending.synchronize()

    def _fetch_next(self) -> None:
        bucket = self._buckets[self._num_fetched]
        self._num_fetched += 1
        # Who had the slot before has sent back what was there; so has this bucket, in the step before.
        self._slot_is_free[bucket.slot].let_wait(self._fetching)
        with _on(self._fetching):
            for lent, kept in zip(bucket.lent, bucket.kept, strict=True):
                lent.copy_(kept, non_blocking=True)
        bucket.is_here.set(self._fetching)

    def _send_back(self, bucket: _Bucket) -> None:
        bucket.is_done.let_wait(self._sending)
        with _on(self._sending):
            for lent, kept in zip(bucket.lent, bucket.kept, strict=True):
                kept.copy_(lent, non_blocking=True)
        self._slot_is_free[bucket.slot].set(self._sending)

    def _show_state(self, params: Sequence[torch.Tensor], keys: Sequence[str], before: _States) -> None:
        """Let the user's optimizer have the state where it is now, for whoever saves it."""
        start = 0
        for param in params:
            span, old = slice(start, start + param.numel()), before[id(param)]
            start += param.numel()
            state = {
                key: torch.as_strided(whole, param.shape, param.stride(), span.start)
                for key, whole in zip(keys, self._kept, strict=True)
            }
            for key, value in state.items():
                if old.get(key) is not None:
                    value.copy_(old[key])
            self._own.state[param] = state

    def _make_bucket(self, pieces: Sequence[_Piece], keys: Sequence[str], start: int, before: _States) -> _Bucket:
        slot, size = len(self._buckets) % len(self._slots), sum(piece.stop - piece.start for piece in pieces)
        kept = [whole[start : start + size] for whole in self._kept]
        lent = [vector[:size] for vector in self._slots[slot]]
        owns = [(piece, torch.nn.Parameter(piece.of(piece.param.data))) for piece in pieces]
        numbers = sorted({self._group_of[id(piece.param)] for piece in pieces})
        groups: list[dict[str, Any]] = [
            {
                **settings_of(self._own.param_groups[at]),
                "params": [own for piece, own in owns if self._group_of[id(piece.param)] == at],
            }
            for at in numbers
        ]
        made, at = rebuild(self._own, groups), 0
        for piece, own in owns:
            state = {key: vector[at : at + own.numel()] for key, vector in zip(keys, lent, strict=True)}
            at += own.numel()
            if self._counts:
                state = {"step": self._count_of(piece.param, before[id(piece.param)]), **state}
                # All pieces count alike; that of the first is the parameter's.
                shown = self._own.state[piece.param]
                self._own.state[piece.param] = {"step": state["step"], **shown} if "step" not in shown else shown
            made.state[own] = state
        return _Bucket(made, numbers, owns, kept, lent, slot)

    def _count_of(self, param: torch.Tensor, old: Mapping[str, Any]) -> torch.Tensor:
        group = self._own.param_groups[self._group_of[id(param)]]
        is_here = group.get("fused") or group.get("capturable")
        count = torch.zeros((), device=param.device if is_here else "cpu")
        return count if old.get("step") is None else count.copy_(old["step"])


def _cut(params: Sequence[torch.Tensor]) -> list[list[_Piece]]:
    """All elements in order, in buckets of equal size."""
    total, width = sum(param.numel() for param in params), params[0].element_size()
    wanted = min(LARGEST_BUCKET, max(SMALLEST_BUCKET, total * width // BUCKETS)) // width
    found: list[list[_Piece]] = [[]]
    room = wanted
    for param in params:
        start = 0
        while start < param.numel():
            stop = min(param.numel(), start + room)
            found[-1].append(_Piece(param, start, stop))
            room -= stop - start
            start = stop
            if not room:
                found.append([])
                room = wanted
    return [bucket for bucket in found if bucket]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
