"""The optimizer's state of a served model, by whole-parameter names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.strategies.ps.memory import ServedMemory, shaped


def whole_state(memory: ServedMemory, names: Sequence[str], copies: Sequence[int]) -> dict[str, torch.Tensor]:
    """`parameter/key -> tensor` for parameters that have state; `copies` says by shard which copy counts."""
    state: dict[str, torch.Tensor] = {}
    started: set[int] = set()
    for shard, copy in enumerate(copies):
        home = memory.home(copy)
        for block in memory.blocks[shard]:
            flags = home.started(block.first_piece, len(block.chunk.pieces)).tolist()
            for number, piece in enumerate(block.chunk.pieces):
                if not flags[number]:
                    continue
                started.add(piece.param)
                for column, (key, dtype) in enumerate(memory.schema.scalars):
                    name = f"{names[piece.param]}/{key}"
                    state.setdefault(name, home.scalar(block.first_piece + number, column, dtype).clone())
    for key in memory.schema.mirrored:
        for number, view in enumerate(shaped(_assembled(memory, key, copies), memory.grid.offsets, memory.params)):
            if number in started:
                state[f"{names[number]}/{key}"] = view
    return state


def _assembled(memory: ServedMemory, key: str, copies: Sequence[int]) -> torch.Tensor:
    """One mirrored region, each shard's part from the copy that counts."""
    whole = torch.zeros(memory.grid.nbytes, dtype=torch.uint8)
    for shard, copy in enumerate(copies):
        source = memory.segment.tensor(f"state/{key}/{copy}", torch.uint8)
        for block in memory.blocks[shard]:
            span = slice(block.chunk.offset, block.chunk.offset + block.chunk.nbytes)
            whole[span] = source[span]
    return whole
