"""Tensors as frames of a message, compressed: what goes over the wire where no memory is shared."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
import torch

from shoal.comm.codec import MAX_FRAME_BYTES, Frame
from shoal.comm.compression import Compression, Packed
from shoal.errors import ProtocolError
from shoal.strategies.ps.blocks import ShardBlock
from shoal.strategies.ps.memory import ServedMemory

_HEADER_LIMIT = 4 << 20
_RUN_BYTES = 4 << 20
"""As much travels in one frame: with less, each costs too much; with more, a frame drops out of the caches."""


def in_frames(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A tensor of any size as frames that may travel, flat and in order."""
    return tensor.detach().reshape(-1).split(MAX_FRAME_BYTES // tensor.dtype.itemsize)


def from_frames(frames: Sequence[Frame]) -> torch.Tensor:
    """The flat tensor that `in_frames` cut; `ProtocolError` for anything else."""
    tensors = [frame for frame in frames if isinstance(frame, torch.Tensor)]
    if not tensors or len(tensors) < len(frames) or len({tensor.dtype for tensor in tensors}) > 1:
        raise ProtocolError("A tensor that was cut into frames is not all there.")
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def wrap(compression: Compression, key: str, tensors: Sequence[torch.Tensor]) -> list[Frame]:
    """These tensors as frames, behind one that says how to read them; `key` names them for error feedback."""
    packed = [compression.encode(f"{key}/{number}", tensor) for number, tensor in enumerate(tensors)]
    header = msgpack.packb([[one.fields, len(one.frames)] for one in packed])
    return [header, *(frame for one in packed for frame in one.frames)]


def unwrap(compression: Compression, frames: Sequence[Frame], targets: Sequence[torch.Tensor]) -> None:
    """Read into tensors of known types and shapes what `wrap` made; `ProtocolError` for anything else."""
    if not frames or isinstance(frames[0], torch.Tensor) or len(frames[0]) > _HEADER_LIMIT:
        raise ProtocolError("The bulk of a message has no header.")
    try:
        rows = msgpack.unpackb(frames[0])
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"The header of a message's bulk cannot be read ({error}).") from None
    if not isinstance(rows, list) or len(rows) != len(targets):
        raise ProtocolError("The bulk of a message does not hold the tensors that it should.")
    at = 1
    for row, target in zip(rows, targets, strict=True):
        match row:
            case [dict(fields), int(count)] if 0 <= count <= len(frames) - at:
                compression.decode(Packed(fields, tuple(frames[at : at + count])), target)
                at += count
            case _:
                raise ProtocolError("A row of a bulk's header is not [fields, frames].")
    if at != len(frames):
        raise ProtocolError("The bulk of a message has frames that belong to no tensor.")


def parcels(memory: ServedMemory, shard: int, region: str, compression: Compression) -> list[torch.Tensor]:
    """A shard's part of a region in the pieces that are compressed one by one.

    Each parameter's own part as a matrix, for a compression that looks at rows; else blocks, or runs of them.
    """
    if not compression.keeps_all_elements:
        return _rows(memory, shard, region)
    return blocks(memory, shard, region) if compression.cuts_matter else _runs(memory, shard, region)


def blocks(memory: ServedMemory, shard: int, region: str) -> list[torch.Tensor]:
    """A shard's part of a region, block by block, as servers update it."""
    return [_flat(memory, block, region, block.chunk.offset, block.chunk.nbytes) for block in memory.blocks[shard]]


def _runs(memory: ServedMemory, shard: int, region: str) -> list[torch.Tensor]:
    """Blocks that lie side by side, as one."""
    runs: list[tuple[ShardBlock, int]] = []
    for block in memory.blocks[shard]:
        if runs:
            first, nbytes = runs[-1]
            joins = first.chunk.dtype == block.chunk.dtype and first.chunk.offset + nbytes == block.chunk.offset
            if joins and nbytes + block.chunk.nbytes <= _RUN_BYTES:
                runs[-1] = first, nbytes + block.chunk.nbytes
                continue
        runs.append((block, block.chunk.nbytes))
    return [_flat(memory, first, region, first.chunk.offset, nbytes) for first, nbytes in runs]


def _rows(memory: ServedMemory, shard: int, region: str) -> list[torch.Tensor]:
    """Each parameter's part as a matrix, where it consists of whole rows."""
    tensors = []
    for block in memory.blocks[shard]:
        for piece in block.chunk.pieces:
            param = memory.params[piece.param]
            nbytes = (piece.stop - piece.start) * param.dtype.itemsize
            values = _flat(memory, block, region, piece.offset, nbytes)
            width = _row_length(param)
            whole = piece.start % width == 0 == values.numel() % width
            tensors.append(values.view(-1, width) if whole and values.numel() > width else values)
    return tensors


def _flat(memory: ServedMemory, block: ShardBlock, region: str, offset: int, nbytes: int) -> torch.Tensor:
    """Memory of a region in the type that the block has."""
    dtype = memory.params[block.chunk.pieces[0].param].dtype
    return memory.tensor(region, dtype, offset=offset, count=nbytes // dtype.itemsize)


def _row_length(param: torch.Tensor) -> int:
    """Elements of one row in memory order, for a parameter seen as a matrix."""
    return max(1, param.numel() // param.shape[0]) if param.dim() > 1 else max(1, param.numel())
