"""What footprints are computed from: the sizes of a model, of its parts, of a run and of a pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.spec.footprint import MemoryRegion, aligned

SCALAR_BYTES = 8
"""Room for one scalar of an optimizer's state."""
UNIT_BYTES = 16 * 1024
"""Of the parts of a parameter whose norms are noted, where gradients are clipped."""
VALUES = "parameters and optimizer state"
TABLES = "counters, flags and tables"


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model and its optimizer, in bytes."""

    trained: tuple[int, ...]
    """Of each trained parameter, in the model's order."""
    frozen: tuple[int, ...] = ()
    """Of each other parameter."""
    buffers: int = 0
    moving: int = 0
    """Of those buffers that training changes, laid out one behind the other."""
    mirrored: tuple[str, ...] = ()
    """What the optimizer keeps for each element of a trained parameter, by its name for it."""
    scalars: int = 0
    """How many single numbers it keeps for each piece of one."""
    whole_state: int | None = None
    """All that it keeps, where it does not work element by element; None where it does."""

    @property
    def parameters(self) -> int:
        """Of all trained parameters; gradients are as large again."""
        return sum(self.trained)

    @property
    def laid_out(self) -> int:
        """The same, one behind the other, each at the beginning of a cache line."""
        return sum(map(aligned, self.trained))

    @property
    def fixed(self) -> int:
        """Of frozen parameters and buffers."""
        return sum(self.frozen) + self.buffers

    @property
    def kept(self) -> int:
        """How many values the optimizer keeps for each element of a trained parameter."""
        return len(self.mirrored)

    @property
    def state(self) -> int:
        """Of what the optimizer keeps."""
        return self.kept * self.parameters if self.whole_state is None else self.whole_state

    @property
    def units(self) -> int:
        """Parts of parameters whose norms are noted."""
        return sum(-(-num_bytes // UNIT_BYTES) for num_bytes in self.trained)

    def regions(self, pieces: int, suffix: str = "", *, is_used: bool = True) -> list[MemoryRegion]:
        """What one copy of the values and the optimizer's state takes; `suffix` tells copies apart."""
        flags = {f"started{suffix}": pieces, f"scalars{suffix}": SCALAR_BYTES * pieces * self.scalars}
        values = [f"params{suffix}", *(f"state/{key}{suffix}" for key in self.mirrored)]
        return [
            *(
                MemoryRegion(name=name, what=TABLES, num_bytes=size, is_used=is_used)
                for name, size in flags.items()
            ),
            *(MemoryRegion(name=name, what=VALUES, num_bytes=self.laid_out, is_used=is_used) for name in values),
        ]


@dataclass(frozen=True)
class ChunkSize:
    """What is updated at once: neighbouring pieces of parameters."""

    num_bytes: int
    pieces: int


@dataclass(frozen=True, kw_only=True)
class CutSize:
    """How a strategy's own code cuts a model; nothing where that was not asked."""

    shards: tuple[tuple[ChunkSize, ...], ...] = ()
    """By shard: its chunks. Where no servers hold the model it is one shard."""
    units: tuple[int, ...] = ()
    """Bytes of the blocks that are gathered together; the last is the rest of the model."""
    parts: tuple[int, ...] = ()
    """By worker, where each has some layers: bytes of their trained parameters."""
    uncut: float = 0.0
    """Where layers are cut by width: the share of the parameters that all of them have whole."""
    talk: int = 0
    """Bytes of the host's memory through which workers talk; none where they use sockets."""
    agreed: int = 0
    """Bytes of what workers agree on now and then, as long vectors."""

    @property
    def pieces(self) -> int:
        """Of all chunks."""
        return sum(chunk.pieces for shard in self.shards for chunk in shard)

    @property
    def largest_chunk(self) -> int:
        """Bytes that hold any chunk, seen as whole elements of any dtype."""
        return aligned(max((chunk.num_bytes for shard in self.shards for chunk in shard), default=0))


@dataclass(frozen=True, kw_only=True)
class PassSize:
    """What a forward and backward pass over one micro-batch makes besides parameters, at its worst moment."""

    activations: int = 0
    """Where gradients are taken away as they come: what is kept for the backward pass, and temporaries."""
    with_gradients: int = 0
    """Where they stay until the step."""
    batch: int = 0
    """The micro-batch itself."""
    widest: int = 0
    """The largest result that one layer gives to another."""


@dataclass(frozen=True, kw_only=True)
class RunSize:
    """What a job adds to its model."""

    workers: int = 1
    slots: int = 1
    steps: int = 0
    table: int = 0
    """Bytes of the tables in which evaluations are written."""
    image: int = 0
    """Bytes of an image of what an optimizer keeps that works on the whole model; 0 where it cannot be kept."""
    precision: tuple[int, int] = (0, 0)
    """Bytes for what the slots see of their gradients, and for what follows, where steps may be skipped."""
    one: PassSize = field(default_factory=PassSize)
    """Of one pass."""
    process: int = 0
    """Bytes that any worker takes once it has started: threads, sockets, kernels."""
    data: int = 0
    """Bytes of the data sets, and of what the task's own code makes."""
    is_limited: bool = False
    """Whether `--memory` is set: models that are to be cut wait in a file then, and are never whole in memory."""
    saves: bool = False
    """Whether the state is saved during the run."""
    is_replaceable: bool = False
    """Whether spares wait for a worker to die."""
    hosted: int = 1
    """Places that a worker has at most while there are as few workers as there may be."""
    shares_memory: bool = True
    """Whether the host lets processes share memory as the arena does."""
