"""`World`: where one process stands among all of a job's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shoal.errors import SpecError
from shoal.spec.checks import require_choice, require_count
from shoal.spec.vocabulary import Role

LOOPBACK = "127.0.0.1"
ARENA_VARIABLE = "SHOAL_ARENA_FD"
"""Where `shoal run` leaves the number of the segment's descriptor."""
SOCKETS_VARIABLE = "SHOAL_SOCKETS"
"""And here the folder of sockets."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process stands: which of how many, on which host, since when."""

    role: Role = Role.WORKER
    global_rank: int = 0
    """A worker's rank; of any other role the number among its kind."""
    world_size: int = 1
    """How many workers there are."""
    host: str = LOOPBACK
    """The address at which processes of other hosts reach this one, where there are any."""
    hosts: tuple[int, ...] = ()
    """How many workers each of the run's hosts has, which have neighbouring ranks; nothing where there is one."""
    doors: tuple[tuple[str, str], ...] = ()
    """By host: where the first worker listens, if it is there, for those who want samples of the train set, and of
    the test set; as `address:port`."""
    host_number: int = 0
    """Which of them this process is on."""
    local_rank: int = 0
    """A worker's number on its host."""
    local_size: int = 1
    device: str = "cpu"
    generation: int = 0
    """Rises with every change of membership; messages of an older one are refused."""
    coordinator: str = ""
    """Where the processes of a job may meet, as `address:port`, where one was asked for; a script's MASTER_ADDR
    and MASTER_PORT."""
    ports: str = ""
    """Where processes may listen for other hosts, as `20000-20100`; nothing: at any free port."""
    trusted_network: bool = False
    """Whether what passes between hosts may be read on the way."""
    link: str = ""
    """The network between hosts as it should seem to be (`spec/link.py`); nothing: as it is."""
    sockets: str = ""
    """The host's folder of Unix sockets, which no other user can enter, where the launcher made one."""
    node: int = 0
    """In a job with servers: this process's number, never used again; the coordinator's is 0."""
    secret: str = field(default="", repr=False)
    """The run's key, by which its processes know each other. Never printed, never on disk."""
    attempt: str = ""
    """Which attempt at a run this is, by a name that no other has: one supervisor's life."""
    arena_fd: int | None = None
    """The host's shared segment, where the launcher made one: a file descriptor of this process."""
    shelf_fds: tuple[int, ...] = ()
    """The two ends of the host's shelf (`arena/shelf.py`), likewise."""
    places: tuple[int, ...] = ()
    """The ranks whose work this worker does: its own, and those of workers that are gone or not there yet."""
    deal: tuple[tuple[int, ...], ...] = ()
    """On several hosts, once some were lost or have come: the places of each worker that there is, in the order of
    hosts, which `hosts` then counts; nothing: each has its own."""
    torn: tuple[int, ...] = ()
    """Hosts on which a worker died alone before that deal, in the midst of something."""

    def __post_init__(self) -> None:
        require_choice("World", "role", self.role, tuple(Role))
        object.__setattr__(self, "role", Role(self.role))
        require_count("World", "world_size", self.world_size)
        require_count("World", "local_size", self.local_size)
        if self.role == Role.WORKER and not 0 <= self.global_rank < self.world_size:
            raise SpecError(
                f"World: global_rank {self.global_rank} does not fit a world of {self.world_size} "
                f"(0 to {self.world_size - 1})."
            )
        hosted = (tuple(sorted(self.places)) or (self.global_rank,)) if self.role == Role.WORKER else ()
        object.__setattr__(self, "places", hosted)
        object.__setattr__(self, "hosts", tuple(self.hosts))
        object.__setattr__(self, "shelf_fds", tuple(self.shelf_fds))
        object.__setattr__(self, "torn", tuple(self.torn))
        object.__setattr__(self, "doors", tuple((train, test) for train, test in self.doors))
        object.__setattr__(self, "deal", tuple(tuple(places) for places in self.deal))

    @cached_property
    def is_first(self) -> bool:
        """Whether this process speaks for all: it saves the model and reports the loss."""
        return self.role == Role.WORKER and 0 in self.places

    @property
    def dealt(self) -> tuple[tuple[int, ...], ...]:
        """The places of each worker that there is."""
        return self.deal or tuple((place,) for place in range(self.world_size))

    @property
    def member(self) -> int:
        """A worker's number among those that there are."""
        return self.deal.index(self.places) if self.deal else self.global_rank

    @property
    def is_spread(self) -> bool:
        """Whether the run is on more than one host."""
        return len(self.hosts) > 1

    @property
    def first_host(self) -> int:
        """The number of the host that the first worker is on, of several."""
        return next(number for number, count in enumerate(self.hosts) if count)

    @property
    def host_among_workers(self) -> tuple[int, int]:
        """The number of this process's host among those that have workers, and how many have."""
        if not self.is_spread:
            return 0, 1
        return sum(map(bool, self.hosts[: self.host_number])), sum(map(bool, self.hosts))

    @property
    def encrypts(self) -> bool | None:
        """Whether sockets of this process encrypt what they send; None where that follows from their address."""
        return not self.trusted_network if self.is_spread else None

    @property
    def any_socket(self) -> str:
        """A Unix socket of this host, of any free name."""
        return f"ipc://{self.sockets}/*"

    @property
    def any_port(self) -> str:
        """A free port: one that only this host can reach, unless there are others."""
        if not self.is_spread:
            return f"tcp://{LOOPBACK}:*"
        return f"tcp://{bracketed(self.host)}:{self.ports or '*'}"

    @property
    def coordinator_address(self) -> str:
        """Where a coordinator listens: at a Unix socket of this host, or at the port that was asked for."""
        return f"tcp://{self.coordinator}" if self.coordinator else f"ipc://{self.sockets}/coordinator"

    def hosting(self, places: Iterable[int], generation: int) -> World:
        """This process as a worker that does the work of these ranks; the lowest becomes its own."""
        kept = tuple(sorted(places))
        return replace(
            self, role=Role.WORKER, global_rank=kept[0], local_rank=kept[0], places=kept, generation=generation
        )

    def redealt(
        self,
        deal: Sequence[Sequence[int]],
        hosts: Sequence[int],
        member: int,
        generation: int,
        torn: Sequence[int] = (),
    ) -> World:
        """This worker where places were dealt anew over the hosts that there are; its number on its host stays."""
        places, dealt = tuple(deal[member]), tuple(map(tuple, deal))
        moved = replace(self, role=Role.WORKER, global_rank=places[0], places=places, generation=generation)
        return replace(moved, deal=dealt, hosts=tuple(hosts), torn=tuple(torn))

    def at(self, number: int, address: str) -> World:
        """This process on one of several hosts; a worker's number there follows from its rank."""
        # On a host that has come since the run began there were to be none.
        first, size = sum(self.hosts[:number]), sum(self.hosts[number : number + 1])
        rank = self.member - first if self.role == Role.WORKER else 0
        # A successor may be where fewer were to be.
        local_rank, local_size = max(0, rank), max(1, size, rank + 1)
        return replace(self, host_number=number, host=address, local_rank=local_rank, local_size=local_size)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> World:
        """The world that torchrun (or anything that sets its variables) put this process in."""
        env = os.environ if env is None else env
        if "WORLD_SIZE" not in env:
            return cls()
        try:
            global_rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
            local_rank = int(env.get("LOCAL_RANK", global_rank))
            local_size = int(env.get("LOCAL_WORLD_SIZE", world_size))
            arena_fd = int(env[ARENA_VARIABLE]) if ARENA_VARIABLE in env else None
        except (KeyError, ValueError) as error:
            raise SpecError(
                f"World: WORLD_SIZE is set but RANK and its kin are not whole numbers ({error}); "
                "start this script with torchrun or `shoal run`, or unset WORLD_SIZE."
            ) from None
        return cls(
            global_rank=global_rank,
            world_size=world_size,
            local_rank=local_rank,
            local_size=local_size,
            host=env.get("MASTER_ADDR", LOOPBACK),
            arena_fd=arena_fd,
            sockets=env.get(SOCKETS_VARIABLE, ""),
        )


def bracketed(address: str) -> str:
    """An address as it stands before a port: those of IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
