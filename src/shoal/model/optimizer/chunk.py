"""The user's optimizer over one chunk of the model, its state in memory that outlives the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim

from shoal.arena import Chunk, SharedMemory
from shoal.model.optimizer.kinds import StateSchema, rebuild, settings_of
from shoal.spec.model_size import SCALAR_BYTES


@dataclass(frozen=True, kw_only=True)
class Home:
    """The regions of a segment that hold a model's values and optimizer state, as `ModelSize.regions` names them;
    `suffix` tells copies apart."""

    segment: SharedMemory
    schema: StateSchema
    suffix: str = ""

    def flat(self, region: str, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """A chunk's part of a region."""
        count = chunk.nbytes // dtype.itemsize
        return self.segment.tensor(f"{region}{self.suffix}", dtype, offset=chunk.offset, count=count)

    def started(self, first_piece: int, count: int) -> torch.Tensor:
        """By piece: whether the optimizer has made its state."""
        return self.segment.tensor(f"started{self.suffix}", torch.uint8, offset=first_piece, count=count)

    def scalar_blocks(self, first_piece: int, count: int) -> list[torch.Tensor]:
        """The scalars of these pieces as bytes, where there are any; a block in each memory that has some."""
        if not (width := len(self.schema.scalars) * SCALAR_BYTES):
            return []
        return [
            self.segment.tensor(
                f"scalars{self.suffix}", torch.uint8, offset=first_piece * width, count=count * width
            )
        ]

    def scalar(self, piece: int, column: int, dtype: torch.dtype) -> torch.Tensor:
        """One scalar of a piece's optimizer state, as a tensor without dimensions."""
        offset = (piece * len(self.schema.scalars) + column) * SCALAR_BYTES
        return self.segment.tensor(f"scalars{self.suffix}", dtype, offset=offset, count=1).reshape(())


def load_state(
    home: Home,
    chunk: Chunk,
    first_piece: int,
    params: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Put a chunk's part of saved optimizer state where it lives; `states` by parameter, as whole tensors."""
    dtype = params[chunk.pieces[0].param].dtype
    for number, piece in enumerate(chunk.pieces):
        if not (state := states[piece.param]):
            continue
        start = (piece.offset - chunk.offset) // dtype.itemsize
        span = slice(start, start + piece.stop - piece.start)
        for key in home.schema.mirrored:
            if key in state:
                whole = in_memory_order(state[key], params[piece.param])
                home.flat(f"state/{key}", chunk, dtype)[span].copy_(whole[piece.start : piece.stop])
        for column, (key, kind) in enumerate(home.schema.scalars):
            if key in state:
                home.scalar(first_piece + number, column, kind).copy_(state[key])
        home.started(first_piece + number, 1).fill_(1)


def in_memory_order(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A whole tensor as a flat one, its elements in the order in which the parameter's lie in memory."""
    laid_out = torch.empty_like(param, dtype=value.dtype, memory_format=torch.preserve_format).copy_(value)
    return torch.as_strided(laid_out, (laid_out.numel(),), (1,))


class ChunkOptimizer:
    """An optimizer of the user's class over a chunk's pieces.

    A step visits dozens of chunks, so everything that can be is cut to size beforehand.
    """

    def __init__(
        self,
        home: Home,
        chunk: Chunk,
        first_piece: int,
        optimizer: optim.Optimizer,
        params: Sequence[torch.Tensor],
    ) -> None:
        self._home = home
        self._first_piece = first_piece
        self.dtype = params[chunk.pieces[0].param].dtype
        self.params = [piece.param for piece in chunk.pieces]
        """By piece: the number of its parameter."""
        self.values = home.flat("params", chunk, self.dtype)
        self._mirrored = {key: home.flat(f"state/{key}", chunk, self.dtype) for key in home.schema.mirrored}
        self._started = home.started(first_piece, len(chunk.pieces))
        starts = [(piece.offset - chunk.offset) // self.dtype.itemsize for piece in chunk.pieces]
        self.spans = [
            slice(start, start + piece.stop - piece.start)
            for start, piece in zip(starts, chunk.pieces, strict=True)
        ]
        self._pieces = [nn.Parameter(self.values[span], requires_grad=True) for span in self.spans]
        self._build(optimizer, params)
        self.bind_state()

    @property
    def live(self) -> list[torch.Tensor]:
        """All that a step changes: values, mirrored state, flags, scalars."""
        scalars = self._home.scalar_blocks(self._first_piece, len(self._pieces))
        return [self.values, *self._mirrored.values(), self._started, *scalars]

    def _build(self, optimizer: optim.Optimizer, params: Sequence[torch.Tensor]) -> None:
        group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        numbers = [group_of[id(params[param])] for param in self.params]
        self._groups = sorted(set(numbers))
        groups: list[dict[str, Any]] = [
            {
                **settings_of(optimizer.param_groups[number]),
                "params": [piece for piece, own in zip(self._pieces, numbers, strict=True) if own == number],
            }
            for number in self._groups
        ]
        self._optimizer = rebuild(optimizer, groups)
        # Adagrad makes its state here, and torch before 2.13 makes none later.
        self._made = {piece: dict(state) for piece, state in self._optimizer.state.items()}

    def bind_state(self) -> None:
        """Point the optimizer at the state of every piece that has some, as it is in memory now."""
        self._optimizer.state.clear()
        self._new = []
        for number, piece in enumerate(self._pieces):
            if self._started[number]:
                self._optimizer.state[piece] = self._state_of(number)
            else:
                self._new.append(number)
                if piece in self._made:
                    state = {key: value.clone() for key, value in self._made[piece].items()}
                    self._optimizer.state[piece] = state

    def _state_of(self, number: int) -> dict[str, torch.Tensor]:
        state = {key: flat[self.spans[number]] for key, flat in self._mirrored.items()}
        for column, (key, dtype) in enumerate(self._home.schema.scalars):
            state[key] = self._home.scalar(self._first_piece + number, column, dtype)
        return state

    def adopt_settings(self, settings: Sequence[dict[str, Any]]) -> None:
        """Take over the learning rate and the like from the user's groups."""
        for group, number in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(settings[number])

    def aim(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The pieces' gradients of the steps from now on; None for a piece that got none."""
        for piece, gradient in zip(self._pieces, gradients, strict=True):
            piece.grad = gradient

    def step(self) -> bool:
        """Update the pieces that have a gradient; False where `aim` must be called again before the next."""
        if not self._new:
            self._optimizer.step()
            return True
        self._first_step()
        return False

    def _first_step(self) -> None:
        """A piece's first step makes its state: let the optimizer do so, then move the state to its home.

        Pieces that already have state go apart, because fused kernels take either all or none as new.
        """
        gradients = [piece.grad for piece in self._pieces]
        fresh = [number for number in self._new if gradients[number] is not None]
        older = [number for number in range(len(self._pieces)) if number not in self._new]
        for chosen in (older, fresh):
            for number, piece in enumerate(self._pieces):
                piece.grad = gradients[number] if number in chosen else None
            if any(gradients[number] is not None for number in chosen):
                self._optimizer.step()
        for number in fresh:
            own = self._optimizer.state[self._pieces[number]]
            for key, kept in self._state_of(number).items():
                if own.get(key) is not None:
                    kept.copy_(own[key])
                    own[key] = kept
            self._started[number] = 1  # last: until then a successor lets the optimizer make the state anew
        self._new = [number for number in self._new if number not in fresh]
