"""What a supervisor and the agent of a host say to each other, over one connection.

The agent says what its host has; it is welcomed with the job, or refused. From then on the supervisor asks for
what a `Host` can do, and hears what its processes do. Beats go both ways: whoever hears none for long knows that
the other is gone, or the way to it.
"""

from __future__ import annotations

from typing import Any

from shoal.spec.told import Told, by_kind

# What an agent says.


class HostJoined(Told, kind="joined"):
    """A host is there for the run; its fields are those of `spec.host_facts.HostFacts`."""

    name: str
    address: str
    cores: int
    gpus: int
    memory_bytes: int
    port: int
    train_port: int
    test_port: int
    most_workers: int | None = None
    versions: dict[str, str]
    """Of Python, torch and Shoal."""
    door: str
    """Where the agent listens for another supervisor, should its own be gone."""


class HostAdopted(Told, kind="adopted"):
    """The answer to `HostClaimed`: the host goes on for whoever called."""

    first: int
    """So many things were told of its processes before what follows."""
    received: int
    """So many things were asked of them."""
    is_apart: bool
    """Whether it sends its files."""


class HostBeat(Told, kind="beat"):
    """The agent lives; answered by `BeatAnswered`."""


class ProcessStarted(Told, kind="started"):
    """A process runs."""

    process: int


class ProcessSaid(Told, kind="said"):
    """A process has said something."""

    process: int
    word: dict[str, Any]


class ProcessDeaf(Told, kind="deaf"):
    """A process reads nothing of what it is told."""

    process: int


class ProcessEnded(Told, kind="ended"):
    """A process has been reaped; the fields are those of `launch.messages.Ended`."""

    process: int
    exit_code: int
    log_name: str
    last_output: str
    ran_out_of_memory: bool


class StacksSeen(Told, kind="seen"):
    """Where processes are, by their numbers: stacks, and why they do not run."""

    stacks: dict[int, str]
    states: dict[int, str]


class LoadSeen(Told, kind="load"):
    """What else the host does."""

    idle_cores: float
    waiting: float


class FilesLacking(Told, kind="lacking"):
    """Of the files that were offered, these are not on the host, or are others there."""

    names: list[str]
    lacks_mark: bool
    """Whether the run folder is not this host's, too."""


class FilePiece(Told, kind="piece"):
    """A part of a file, in either direction."""

    name: str
    """Its path in the folder of whoever gets it."""
    offset: int
    data: bytes
    is_last: bool


class LogPiece(Told, kind="printed"):
    """What a process has printed."""

    name: str
    """Of the log, in the run folder."""
    offset: int
    data: bytes


class ScriptPrinted(Told, kind="script printed"):
    """The next piece of what scripts have printed on the host, each line under its rank."""

    data: bytes


class FileGone(Told, kind="gone"):
    """A file of the run folder is no more."""

    name: str


class HostBroken(Told, kind="broken"):
    """The host can start or watch nobody any more, for this reason."""

    text: str


# What it is told.


class FilesOffered(Told, kind="offered"):
    """What the job's task is made of; answered by `FilesLacking`, before the host is welcomed."""

    root: str
    """Where it lies on the supervisor's host."""
    files: dict[str, str]
    """By path under it: a digest."""
    mark: str
    """A file in the run folder, by which a host knows that it has the same disk; nothing: there is none."""


class HostWelcomed(Told, kind="welcomed"):
    """The host takes part."""

    job: str
    """As JSON."""
    folder: str
    """The supervisor's working folder, which is the processes' too where the host has it."""
    lease_s: float
    """How long the host may go on without hearing anything."""
    grace_s: float
    """How long it goes on when its supervisor has ended, for another to take its place."""
    moved: dict[str, str]
    """By path on the supervisor's host: where in the host's own folder that is, what was sent there before."""


class HostClaimed(Told, kind="claimed"):
    """Another supervisor goes on with the run, and calls the host: the first word of that connection."""

    heard: int
    """So many things that the host told are known."""


class HostRefused(Told, kind="refused"):
    """The host cannot take part, for this reason."""

    text: str


class BeatAnswered(Told, kind="answered"):
    """The supervisor lives."""

    heard: int
    """So many things that the host has told of its processes it will not have to tell again."""


class ProcessWanted(Told, kind="start"):
    """Start a process that stands here."""

    process: int
    world: dict[str, Any]


class ProcessTold(Told, kind="say"):
    """Say something to a process."""

    process: int
    word: dict[str, Any]


class ProcessSignalled(Told, kind="signal"):
    """Send a signal to a process."""

    process: int
    signum: int


class StacksWanted(Told, kind="look"):
    """See where these processes are."""

    processes: list[int]


class LoadWanted(Told, kind="measure"):
    """See what else the host does."""


class HostMissed(Told, kind="missed"):
    """Nothing was heard of the host, and the run goes on without it: end all processes, and join anew."""


class HostDismissed(Told, kind="dismissed"):
    """The run is over, or goes on without this host: end all processes, and leave."""


FROM_HOSTS: dict[str, type[Told]] = by_kind(
    *(
        HostJoined,
        HostAdopted,
        HostBeat,
        ProcessStarted,
        ProcessSaid,
        ProcessDeaf,
        ProcessEnded,
        StacksSeen,
        LoadSeen,
        FilesLacking,
        FilePiece,
        LogPiece,
        ScriptPrinted,
        FileGone,
        HostBroken,
    )
)
TO_HOSTS: dict[str, type[Told]] = by_kind(
    *(HostWelcomed, HostClaimed, HostRefused, BeatAnswered, ProcessWanted, ProcessTold, ProcessSignalled),
    *(StacksWanted, LoadWanted, FilesOffered, FilePiece, HostMissed, HostDismissed),
)
