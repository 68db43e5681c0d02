"""State that the processes of one host share: a segment, its layout, and ways to wait."""

from shoal.arena.grid import Chunk, Flat, Grid, Piece, make_grid
from shoal.arena.malloc import keep_freed_memory, return_freed_memory, use_small_stacks
from shoal.arena.room import GrowingRoom
from shoal.arena.segment import Segment, SharedMemory, counter_bytes, segment_bytes
from shoal.arena.shelf import FdShelf
from shoal.arena.waits import Counters, supported

__all__ = [
    "Chunk",
    "Counters",
    "FdShelf",
    "Flat",
    "Grid",
    "GrowingRoom",
    "Piece",
    "Segment",
    "SharedMemory",
    "counter_bytes",
    "keep_freed_memory",
    "make_grid",
    "return_freed_memory",
    "segment_bytes",
    "supported",
    "use_small_stacks",
]
