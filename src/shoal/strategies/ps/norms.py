"""Clipping in a served job: servers measure what they gather, workers what is an update of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from shoal.comm.codec import Frame
from shoal.step.clipping import ChunkNorms, clip_factor
from shoal.strategies.ps.memory import ServedMemory


class ShardNorms:
    """A shard's part of the gradient's norm, and the whole from the parts of all shards."""

    def __init__(self, memory: ServedMemory, shard: int, clip_norm: float) -> None:
        self._clip_norm = clip_norm
        self._num_units = len(memory.units)
        self._numbers = [
            memory.units.numbers(chain.from_iterable(block.chunk.pieces for block in blocks))
            for blocks in memory.blocks
        ]
        """By shard: its units, in the order of its part."""
        self._chunks = [ChunkNorms(memory.units, block.chunk) for block in memory.blocks[shard]]
        self.nothing = torch.zeros(self._numbers[shard].shape, dtype=torch.float64)
        """The part of a shard that has no gradient to measure."""

    def measure(self, block: int, gradient: torch.Tensor) -> np.ndarray:
        """The squared norms of one of the shard's blocks."""
        return self._chunks[block].measure(gradient)

    def fits(self, shard: int, frames: Sequence[Frame]) -> bool:
        """Whether these can be a shard's part: one number for each of its units."""
        if not 0 <= shard < len(self._numbers) or len(frames) != 1:
            return False
        (part,) = frames
        return (
            isinstance(part, torch.Tensor)
            and part.dtype is torch.float64
            and part.shape == self._numbers[shard].shape
        )

    def factor(self, parts: Mapping[int, Sequence[Frame]]) -> float:
        """What to multiply the gradient by."""
        squares = np.zeros(self._num_units)
        for shard, (part,) in parts.items():
            assert isinstance(part, torch.Tensor)
            squares[self._numbers[shard]] = part.numpy()
        return clip_factor(squares, self._clip_norm)


class WorkerClip:
    """A worker's own clipping: the norm of the gradient that one of its buffers holds."""

    def __init__(self, memory: ServedMemory, clip_norm: float) -> None:
        self._memory = memory
        self._clip_norm = clip_norm
        self._blocks = [block for blocks in memory.blocks for block in blocks]
        self._norms = [ChunkNorms(memory.units, block.chunk) for block in self._blocks]

    def factor(self, buffer: int, scale: float) -> float:
        """What to multiply the gradient in this buffer by, besides `scale`."""
        memory, squares = self._memory, np.zeros(len(self._memory.units))
        touched = memory.touched(buffer).tolist()
        for block, norms in zip(self._blocks, self._norms, strict=True):
            chunk, dtype = block.chunk, memory.params[block.chunk.pieces[0].param].dtype
            count = chunk.nbytes // dtype.itemsize
            gradient = memory.tensor(f"gradients/{buffer}", dtype, offset=chunk.offset, count=count)
            squares[norms.numbers] = norms.measure(gradient if scale == 1.0 else gradient * scale, touched)
        return clip_factor(squares, self._clip_norm)
