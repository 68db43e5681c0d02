"""All that a run can say about itself: each kind of event, and what it tells.

These are the fields that stand under `values` in `events.jsonl`, and in what processes send to their supervisor.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, TypeAlias

from shoal.spec.told import Told, by_kind
from shoal.spec.vocabulary import Role, State

Numbers: TypeAlias = dict[str, Any]
"""Results by name: `loss`, and what else there is."""


class Happening(Told):
    """What an event tells; most of it is said by a process of the run."""


# Where a run stands.


class WorldFormed(Happening, kind="world"):
    """All workers are ready."""

    workers: int
    spares: int = 0
    hosts: int = 1
    slots: int | None = None
    strategy: str = "data"
    threads: int | None = None
    """Of each worker."""
    text: str = ""
    places: int | None = None
    """The most workers that there can be, where their number varies."""
    servers: int | None = None


class StateEntered(Happening, kind="state"):
    """A process is at something else."""

    state: State
    step: int = 0


class Heartbeat(Happening, kind="beat"):
    """A sign of life; shown, never kept."""

    step: int = 0
    rss: int = 0
    """Bytes of memory that the process holds."""
    phase: State | None = None
    still: float = 0.0
    """For how many seconds its main thread has shown no sign of moving."""
    p99: float | None = None
    """How long it usually goes without one, at most, once that is known."""
    gap: float | None = None
    """By how much its beats have been late, at most."""


class MemoryPeaks(Happening, kind="memory"):
    """What is kept of the beats: of each rank, the most bytes it held."""

    peak_rss: list[list[Any]]
    """`[rank, bytes]` each."""


class StepsTaken(Happening, kind="steps"):
    """Steps that are done."""

    steps: list[list[Any]]
    """`[step, loss]` each; the loss is None where it is not known."""
    samples: int = 0
    """Trained on so far."""
    total_steps: int = 0
    lr: float | None = None
    epoch: int | None = None
    skipped: list[Any] | None = None
    """`[parts, weight]` of these steps that were learnt already, where there were any."""
    parts: list[list[Any]] | None = None
    """`[step, {name: number}]` each, where the loss is told with other numbers."""


class ProgressMade(Happening, kind="progress"):
    """Work without a loss, as prediction."""

    step: int
    total_steps: int
    samples: int


class Evaluated(Happening, kind="evaluation"):
    """The model was tried on the test set, and on what clients hold back."""

    step: int
    results: Numbers
    by_client: dict[str, list[Any]] | None = None
    """In columns: each client's number, what it has held back counts (`weight`), loss and metrics."""


class ScalarsLogged(Happening, kind="scalars"):
    """Numbers that callbacks log."""

    scalars: list[list[Any]]
    """`[step, name, number]` each."""


class TextLogged(Happening, kind="text"):
    """A text that a callback logs."""

    name: str
    text: str
    step: int


class ImageLogged(Happening, kind="image"):
    """A picture that a callback logs, as a PNG file."""

    name: str
    path: str
    """In the run's folder, relative to it."""
    step: int


class LineSaid(Happening, kind="line"):
    """What a process has to say."""

    text: str
    level: str = "info"


class Warned(Happening, kind="warning"):
    """What somebody should know."""

    text: str


# What goes wrong, and what follows.


class FaultInjected(Happening, kind="fault"):
    """A fault that the user asked for; its fields are those of `spec.chaos.Fault`."""

    kind: str
    role: Role
    rank: int
    step: int
    seconds: float | None
    """None: for ever."""
    factor: float
    always: bool


class Hung(Happening, kind="hung"):
    """A process hangs; it is ended next."""

    role: Role
    rank: int
    step: int
    seconds: float
    reason: str
    where: str
    stacks: str
    """A path, where the stacks of all could be kept."""


class Lost(Happening, kind="lost"):
    """A process is gone that others go on without, or follow."""

    rank: int
    reason: str
    places: list[int] | None = None
    role: Role | None = None
    """Told where there are servers, as is the node."""
    node: int | None = None


class HostGone(Happening, kind="host"):
    """A host is gone, with all processes that ran there."""

    name: str
    reason: str
    processes: int


class HostAdded(Happening, kind="host_added"):
    """One more host is there for a run that goes on, or one is back that was lost."""

    name: str


class Replaced(Happening, kind="replaced"):
    """Somebody goes on with the work of one that was lost."""

    rank: int
    seconds: float
    places: list[int] | None = None
    hosts: list[list[int]] | None = None
    """The places of each worker, now."""
    spare: int | None = None
    """The number of the spare that took them, where one did."""
    by: int | None = None
    """The rank of the worker that took them besides its own, where one did."""
    role: Role | None = None
    node: int | None = None


class Restarted(Happening, kind="restarted"):
    """All begin again after `step`: what was told of later steps is void."""

    reason: str
    step: int
    samples: int
    undone: int
    """Steps."""
    seconds: float
    """Lost with them."""


class Resumed(Happening, kind="resumed"):
    """The user goes on after `step`: what was told of later steps is void."""

    step: int


class Raised(Happening, kind="raised"):
    """What a worker said about the error that ended it."""

    step: int
    slot: int | None
    """The part of the batch that it computed; None where it was at something else."""
    sample: int | None
    """The first sample that raises by itself, by its index; None where none does."""
    tried: int | None = None
    """How many samples of that part were tried by themselves once one was found."""
    raising: int | None = None
    """How many of these raise."""
    error: str
    final: bool
    """Another process could do no better."""


class Failed(Happening, kind="failed"):
    """A process, or the run, has failed."""

    message: str
    traceback: str
    clear: bool | None = None
    """Said by a process: the message needs no traceback."""
    consequence: bool | None = None
    """Said by a process: it only lost a peer, whose failure is the one to show."""
    misuse: bool | None = None
    """Said by a process: what was asked for cannot be."""


# Who does whose work.


class Adopted(Happening, kind="adopted"):
    """A worker goes on with these places."""

    places: list[int]
    generation: int = 0


class Released(Happening, kind="released"):
    """A worker has let go of these places."""

    places: list[int]
    generation: int = 0


class Scaled(Happening, kind="scaled"):
    """The number of workers has changed."""

    workers: int
    before: int
    hosts: list[list[int]]
    """The places of each worker, now."""
    reason: str


class Decided(Happening, kind="decision"):
    """The coordinator has decided something."""

    text: str
    what: str | None = None
    why: str | None = None
    routine: bool | None = None
    """It is kept, but not shown while the run goes on."""
    more: Numbers = field(default_factory=dict)
    """What it was decided by."""


class CutsChanged(Happening, kind="cuts"):
    """From this step on slots have these sizes."""

    from_step: int
    sizes: list[int] | None
    """None: even ones."""


# What is left.


class Audited(Happening, kind="audit"):
    """What became of the data: of every sample, or of its parts by shard where there are servers."""

    samples: int | None = None
    clean: bool | None = None
    once: int | None = None
    more_than_once: int | None = None
    never: int | None = None
    cells: int | None = None
    shards: list[Numbers] | None = None


class CheckpointWritten(Happening, kind="checkpoint"):
    """A training state is on disk."""

    step: int
    path: str
    digest: str
    nbytes: int
    seconds: float
    """To write it."""
    stall: float
    """Seconds for which training stood still."""


class Saved(Happening, kind="saved"):
    """The model is on disk."""

    path: str
    digest: str


class Done(Happening, kind="done"):
    """One process is done; `observe/results.py` says what a run's results are."""

    results: Numbers
    memory: dict[str, int] | None = None
    """The most bytes that it held, by kind: `host`, `gpu`, `gpu_taken`."""


class Finished(Happening, kind="finished"):
    """The run is done."""

    results: Numbers = field(default_factory=dict)
    seconds: float | None = None
    samples_per_s: float | None = None


class Stopped(Happening, kind="stopped"):
    """The run ended before its time."""

    reason: str
    results: Numbers = field(default_factory=dict)
    seconds: float | None = None
    samples_per_s: float | None = None


KINDS: dict[str, type[Happening]] = by_kind(
    *(WorldFormed, StateEntered, Heartbeat, MemoryPeaks, StepsTaken, ProgressMade, Evaluated, LineSaid, Warned),
    *(ScalarsLogged, TextLogged, ImageLogged),
    *(FaultInjected, Hung, Lost, HostGone, HostAdded, Replaced, Restarted, Resumed, Raised, Failed),
    *(Adopted, Released, Scaled, Decided, CutsChanged),
    *(Audited, CheckpointWritten, Saved, Done, Finished, Stopped),
)
"""All of them, by the names they have in files and messages."""
ADVANCES = (StepsTaken, Evaluated, CheckpointWritten)
"""What shows that a run has really begun to train."""
