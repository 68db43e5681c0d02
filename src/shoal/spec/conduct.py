"""`Conduct`: how a job behaves under its strategy, as facts.

A strategy states them once, from what the user wrote. All others read facts and never ask which strategy it is, so
that one more strategy changes nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from shoal.spec.clients import ClientRounds


class Claim(Enum):
    """How close to one process a strategy says it is; `verify` judges it by that."""

    BITS = "bits"
    """Every bit is that of one process that runs the same slots."""
    SUMS = "sums"
    """The same sums in another order: close in the first step, and in all steps in double precision."""
    RESULT = "result"
    """Another way to train, which should end as well: judged over several seeds."""


class StateHolder(Enum):
    """Who keeps what the optimizer keeps."""

    WORKERS = "workers"
    """One state for all workers: shared by them, or the same in each."""
    EACH_WORKER = "each worker"
    """A state of its own, which goes with it."""
    SERVERS = "servers"


@dataclass(frozen=True, kw_only=True)
class Width:
    """Layers are cut by their width."""

    count: int
    """Workers that compute one layer together."""
    plan: str
    norms: str


@dataclass(frozen=True, kw_only=True)
class Conduct:
    """What follows from a strategy for a cluster and a number of slots. What is not said is as in one process."""

    fills: tuple[range, ...]
    """By worker: the slots that it computes when the run begins. Several may compute one slot together."""
    slots_are_free: bool = True
    """Any number of slots is computed by any number of workers, so that another run can go on with the same."""
    servers: int = 0
    """Processes besides the workers that hold the model; where there are any, there is a coordinator."""
    workers_vary: bool = False
    """Workers may come and go while the run goes on: what they do is not theirs for good."""
    standbys: int = 0
    """Processes that wait to be the coordinator."""
    is_cut: bool = False
    """Each worker holds a part of the model."""
    has_copies: bool = False
    """Others hold what a worker holds, too."""
    is_never_whole: bool = False
    """Nobody needs the whole model at any time, so that it may be larger than what one worker can hold."""
    gathers: bool = False
    """Nobody has the whole state by itself: all give what they hold where it is wanted."""
    frees_parameters: bool = False
    """Workers hold parameters only while they need them."""
    is_lockstep: bool = True
    """The result does not depend on timing."""
    leaves_out_the_late: bool = False
    """A step may be taken without the part of somebody who is slow."""
    open_commits: int = 1
    """Steps that a worker may have taken before it is known what the first of them came to."""
    mixes_devices: bool = False
    """Workers may compute on devices of very different speeds."""
    is_measured_first: bool = False
    """How batches are cut follows from what is measured before the run; the job that is run says it."""
    is_relay: bool = False
    """Workers take turns with whole batches."""
    has_phases: bool = False
    """Groups of layers take turns in training, in one process, too."""
    puts_aside: str = ""
    """What is saved besides the model and its optimizer, by the first word of its tensors' names: `head`, of
    groups of layers, `replica`, of workers whose models are their own, or `unsent`, of what compression left."""
    is_ensemble: bool = False
    """Each worker trains a member of an ensemble, which is what is saved."""
    has_places: bool = False
    """The work is cut into places in memory that all workers of a host share: any process can host any of them."""
    hosts_several: bool = False
    """A process can host several places, so that one does the work of another besides its own."""
    has_journal: bool = False
    """Who takes the place of one that died can finish its step."""
    spans_hosts: bool = False
    """Workers and servers may be on several hosts, which share no memory."""
    outlives_hosts: bool = False
    """When a host is lost, those that are left do its work and go on: every host has the whole state, or each
    worker one of its own, of which others need nothing but what all have in common."""
    takes_hosts: bool = False
    """On several hosts, others may come and have a part of the work, and any may leave."""
    meets: bool = False
    """Slots can bring rows to each other inside a forward or backward pass."""
    repeats_passes: bool = True
    """A part of the model can be computed again in its backward pass."""
    has_whole_passes: bool = True
    """A worker computes a pass by itself, with the whole model, so that it can be compiled."""
    synchronises: bool = False
    """BatchNorm can normalise by the whole batch, so that parts compute the same function."""
    can_skip: bool = True
    """Parts of a batch can be left out of its mean."""
    calls_model: bool = True
    """Somebody can call the model as a whole, though it may hold a part of it."""
    has_one_loss: bool = True
    """There is one, of the model's output, wherever that is made: who makes it can compute an objective."""
    state: StateHolder = StateHolder.WORKERS
    has_one_state: bool = True
    """The optimizer keeps one state for the model, whoever holds it."""
    microbatches: int = 1
    """Parts of a slot that follow each other through the model, as those of `accumulate` do in one process."""
    draws_otherwise: bool = False
    """Several processes compute one pass, so that the model draws other random numbers than in one."""
    width: Width | None = None
    clients: ClientRounds | None = None
    """Whose samples a slot takes, where they are those of clients that are simulated in turn."""
    protects: str = ""
    """Whose privacy noise can protect: that of `samples`, where a step's gradients are one sum over slots, or of
    `clients`, where a round is one sum over them."""
    preprocess: int = 0
    """Processes of each worker that prepare samples."""
    why: Mapping[str, str] = field(default_factory=dict)
    """By fact, or by feature: why this strategy lacks it, where it knows better words than those for all."""

    @cached_property
    def slots(self) -> int:
        """Parts of a global batch."""
        return max(filled.stop for filled in self.fills)

    @cached_property
    def first_evaluates(self) -> bool:
        """The first worker evaluates for all; others are elsewhere by then, and go on."""
        return self.servers > 0

    def lanes(self, workers: int) -> int:
        """Batches evaluated at a time: one for each worker, or for each lane of workers."""
        if self.first_evaluates:
            return 1
        return self.slots if self.is_cut or self.is_never_whole else workers

    @property
    def tells_hosts(self) -> bool:
        """Whether all hosts hear in every step what the first worker leaves for all to read."""
        return self.outlives_hosts and self.has_one_state

    @property
    def cuts_batches(self) -> bool:
        """Whether a pass sees a part of the batch alone, where `accumulate` leaves it whole."""
        return self.slots > 1 or self.microbatches > 1

    @property
    def takes_batches(self) -> bool:
        """Whether a step can be given its batches from outside: each goes through the model at once."""
        return self.calls_model and not self.is_relay

    @property
    def slots_per_worker(self) -> tuple[int, ...]:
        """How many slots each worker fills by itself."""
        return tuple(len(filled) for filled in self.fills)


def even_fills(slots: int, workers: int) -> tuple[range, ...]:
    """Neighbouring slots for each worker, as equally as it goes."""
    return tuple(range(slots * rank // workers, slots * (rank + 1) // workers) for rank in range(workers))


def fills_of(counts: Iterable[int]) -> tuple[range, ...]:
    """Neighbouring slots for each worker, so many as are given."""
    found, start = list[range](), 0
    for count in counts:
        found.append(range(start, start + count))
        start += count
    return tuple(found)
