"""Clients that are simulated in turn: each begins a round from what all agreed on, with an optimizer that knows
nothing yet, and what it has come to counts with the others'.

What a worker brings to an agreement is the mean of its clients of the round, so agreements are those of workers. A
client leaves nothing behind but that: whoever looks at the model in the middle of a round sees what was agreed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shoal.checkpoint.aside import put_aside
from shoal.checkpoint.model_stream import TensorStream
from shoal.errors import SpecError
from shoal.ledger.clients import Roster
from shoal.model.replica import Replica
from shoal.spec import Average
from shoal.spec.averaging import Clip
from shoal.step.work import Work
from shoal.strategies.average.agreeing import by_kind
from shoal.strategies.average.arena import ArenaAverage
from shoal.strategies.average.controls import ControlTable, CorrectedSteps, Correction
from shoal.strategies.average.outer import difference_, kind_name
from shoal.strategies.average.strategy import AveragedModel
from shoal.strategies.average.versions import VersionRing
from shoal.strategies.base import Setting, StepResult
from shoal.strategies.groups.kept_apart import OF_ALL, KeptApart
from shoal.strategies.groups.vectors import Vectors


@dataclass
class ClientTurn:
    """What a worker's clients of a round have come to by now."""

    begun: Vectors = field(default_factory=dict)
    """What this client began from."""
    discount: float = 1.0
    """What it counts, as old as that is."""
    own_weight: float = 0.0
    """What it was trained on."""
    moved_by: Vectors = field(default_factory=dict)
    """How far those before it have come, by what each counts."""
    counted: float = 0.0


class ClientTurns(AveragedModel):
    """What a worker does with its clients, however workers agree."""

    def __init__(self, spec: Average) -> None:
        super().__init__(spec)
        self._client_clip, self._clip = self._clip, None  # each client is clipped by itself
        self._turn = ClientTurn()
        self._asks_stop = self._asks_save = False

    def open(self, replica: Replica, setting: Setting) -> None:
        steps, total = self._spec.round_steps(setting.world.world_size), setting.extent.total_steps
        if total % steps or replica.start.step % steps:
            raise SpecError(
                f"average: a round of clients={self._spec.clients} takes {steps} steps here, and the run goes "
                f"from step {replica.start.step} to {total}, which are no whole rounds; set --max-steps to a "
                f"multiple of {steps}, and enough --epochs for them."
            )
        if (protection := setting.protection) is not None:
            self._client_clip = Clip(kind="norm", most=protection.clip)
        super().open(replica, setting)

    def take(self, work: Work) -> Any:
        self._asks_stop, self._asks_save = self._asks_stop or work.stop, self._asks_save or work.save
        if not self._spec.is_agreement(work.step, self._size):
            return super().take(replace(work, stop=False, save=False))  # heard at the end of the round
        asked = replace(work, stop=self._asks_stop, save=self._asks_save)
        self._asks_stop = self._asks_save = False
        return super().take(asked)

    @property
    def _begun_from(self) -> Vectors:
        return self._turn.begun

    def _client_start(self, work: Work) -> tuple[Vectors, float]:
        """What the client of this step begins from, and what it counts beside one that begins from what was agreed
        on last."""
        return self._agreed, 1.0

    def _take_alone(self, work: Work) -> StepResult:
        turn = self._turn
        if (work.step - 1) % self._spec.every == 0:
            turn.begun, turn.discount = self._client_start(work)
            self._values.write(turn.begun)
        own = super()._take_alone(work)
        turn.own_weight += own.weight
        if work.step % self._spec.every == 0:
            self._end_of_client(is_last=self._spec.is_agreement(work.step, self._size))
        return own

    @torch.no_grad()
    def _end_of_client(self, *, is_last: bool) -> None:
        """Keep how far it has come."""
        turn, values = self._turn, self._values
        weight = turn.own_weight if self._spec.weight == "samples" else float(turn.own_weight > 0)
        turn.own_weight = 0.0
        difference = difference_(values.read(), turn.begun, values.params_of, self._client_clip)
        factor = weight * turn.discount
        for kind, vector in difference.items():
            before = turn.moved_by.get(kind)
            turn.moved_by[kind] = vector.mul_(factor) if before is None else before.add_(vector, alpha=factor)
        turn.counted += weight
        self._replica.optimizer.state.clear()
        if not is_last:
            return
        share = 1 / turn.counted if turn.counted else 0.0
        values.write({kind: self._agreed[kind] + vector * share for kind, vector in turn.moved_by.items()})
        self._turn = ClientTurn()

    @torch.no_grad()
    def _take_outer_step(self, mean: Vectors) -> None:
        """With noise on the sum of all clients, where their privacy is asked for: all draw the same."""
        if (protection := self._setting.protection) is not None:
            draw = protection.noise.of(self._step)
            for vector in self._values.params_of(mean).values():
                vector.add_(draw.like(vector), alpha=1 / protection.clients)
        super()._take_outer_step(mean)

    def _mean_model(self, own: Vectors) -> Vectors:
        return self._agreed

    def state_stream(self) -> TensorStream:
        """What the outer optimizer keeps, and what is kept of clients; these keep nothing themselves."""
        self._rounds.settle()
        if self._index:
            return TensorStream.of({})
        found = {f"{OF_ALL}/round/weights": torch.zeros_like(self._rounds.weights)}
        found |= {f"{OF_ALL}/outer/{name}": one for name, one in self._outer.state().items()}
        found |= {f"{OF_ALL}/{name}": one for name, one in self._kept_of_clients().items()}
        return TensorStream.of(put_aside({f"replica/{name}": one for name, one in found.items()}))

    def _kept_of_clients(self) -> dict[str, torch.Tensor]:
        """By what it is, of which client, and the kind of number."""
        return {}


class FederatedAverage(ClientTurns, ArenaAverage):
    """Workers that leave their clients' mean in memory, where another can go on for one that died."""

    def _go_apart(self) -> None:
        super()._go_apart()
        rounds, spec, segment = self._spec.clients_on(self._size), self._spec, self._memory.segment
        assert rounds is not None
        self._roster = Roster(rounds, slots=self._size, seed=self._replica.task.seed)
        self._versions = VersionRing(segment, self._values, spec.oldest + 1) if spec.buffer else None
        self._controls = ControlTable(segment, self._values, spec.clients) if spec.scaffold else None
        if self._index == 0 and not self._memory.counters[self._memory.marks.opened]:
            self._take_up_clients()  # before anybody reads them
        self._correction: Correction | None = None
        if self._controls is not None:
            self._correction = Correction(self._controls, self._replica, self._values)

    def gather(self) -> bool:
        """Nobody needs what clients have come to in the middle of a round."""
        self._rounds.settle()
        return True

    def _beside(self) -> Any:
        return self._turn, None if self._correction is None else self._correction.steps

    def _take_beside(self, beside: Any) -> None:
        self._turn, steps = beside or (ClientTurn(), None)
        if self._correction is not None:
            self._correction.steps = steps or CorrectedSteps()

    def _take_up_clients(self) -> None:
        """What a checkpoint has kept of them."""
        kept, done = KeptApart("replica", self._replica.start.aside), self._rounds_before(self._step + 1)
        if self._versions is not None:
            for age, found in _numbered(kept.of(OF_ALL, "version")):
                self._versions.put(done - age, found)
        if self._controls is not None:
            for client, found in _numbered(kept.of(OF_ALL, "control")):
                if client < self._spec.clients:
                    self._controls.put(client, done, found)

    def _rounds_before(self, step: int) -> int:
        """How many rounds are done when this step begins."""
        return (step - 1) // self._spec.round_steps(self._size)

    def _client_start(self, work: Work) -> tuple[Vectors, float]:
        age = self._roster.age(work.step - 1, self._index)
        if self._versions is None or not age:
            return self._agreed, 1.0
        found = self._versions.find(self._rounds_before(work.step) - age)
        return (self._agreed, 1.0) if found is None else (found, (1 + age) ** -0.5)

    def _take_alone(self, work: Work) -> StepResult:
        if self._correction is None:
            return super()._take_alone(work)
        client = self._roster.client(work.step - 1, self._index)
        number = self._rounds_before(work.step) + 1
        if (work.step - 1) % self._spec.every == 0:
            self._correction.begin(client, number)
        found = super()._take_alone(work)
        if work.step % self._spec.every == 0:
            self._correction.end(client, number)
        return found

    def _publish(self) -> None:
        super()._publish()
        if self._versions is not None:
            self._versions.put(self._rounds_before(self._step + 1), self._agreed)

    def _kept_of_clients(self) -> dict[str, torch.Tensor]:
        done, found = self._rounds_before(self._step + 1), dict[str, Vectors]()
        if self._versions is not None:
            ages = {age: self._versions.find(done - age) for age in range(1, min(self._spec.oldest, done) + 1)}
            found |= {f"version/{age}": version for age, version in ages.items() if version is not None}
        if self._controls is not None:
            found |= {f"control/{client}": seen for client, seen in self._controls.all_before(done + 1)}
        return {
            f"{name}/{kind_name(kind)}": one for name, vectors in found.items() for kind, one in vectors.items()
        }

    def _facts(self) -> Mapping[str, Any]:
        facts = super()._facts()
        if not self._spec.buffer:
            return facts
        return {**facts, "mean_age": self._roster.mean_age(facts["agreements"])}


def _numbered(named: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, Vectors]]:
    """Vectors of a checkpoint, by the numbers under which they are kept."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, one in named.items():
        number, kind = name.split("/")
        found.setdefault(int(number), {})[kind] = one
    return ((number, by_kind(each)) for number, each in found.items())
