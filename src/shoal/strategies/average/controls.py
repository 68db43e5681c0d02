"""SCAFFOLD: a client's steps go where those of all clients would, and not where its own samples alone lead.

Of every client the mean gradient is kept that it saw when it trained last. The mean of these over all clients,
less its own, is added to each gradient of the client. With plain SGD at one learning rate that is the second of
the two forms in the paper (Karimireddy and others, 2020); with other optimizers it says the same of gradients.

All of it lies in the host's memory, twice: who trains a client writes over the older one, and whoever takes its
round again, because a worker has died, finds the one that it began with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from shoal.arena import Segment
from shoal.errors import SpecError
from shoal.model.replica import Replica
from shoal.strategies.average.values import AgreedValues
from shoal.strategies.groups.vectors import Vectors


class ControlTable:
    """By client: its mean gradient, and the round in which it saw that. Rounds count from 1."""

    def __init__(self, segment: Segment, values: AgreedValues, clients: int) -> None:
        self._values = values
        self._rooms = segment.tensor("controls", torch.uint8).view(clients, 2, -1)
        self._rounds = segment.tensor("control rounds", torch.int64).view(clients, 2)

    def before(self, client: int, number: int) -> Vectors | None:
        """What it saw last before this round; None where it has not trained."""
        half = self._newest(client, number)
        return self._in(client, half) if self._rounds[client, half] else None

    def all_before(self, number: int) -> Iterator[tuple[int, Vectors]]:
        """The same of all who have trained."""
        for client in range(len(self._rounds)):
            if (found := self.before(client, number)) is not None:
                yield client, found

    def mean_before(self, number: int) -> Vectors:
        """Over all clients; who has not trained has seen nothing."""
        mean = {kind: torch.zeros(count, dtype=kind) for kind, count in self._values.num_params.items()}
        for _, found in self.all_before(number):
            for kind, vector in found.items():
                mean[kind].add_(vector)
        for vector in mean.values():
            vector.div_(len(self._rounds))
        return mean

    def put(self, client: int, number: int, seen: Mapping[torch.dtype, torch.Tensor]) -> None:
        """What a client saw in this round. Whoever does so again writes the same to the same place."""
        half = 1 - self._newest(client, number)
        for kind, vector in self._in(client, half).items():
            vector.copy_(seen[kind])
        self._rounds[client, half] = number

    def _newest(self, client: int, number: int) -> int:
        first, second = (each if each < number else -1 for each in self._rounds[client].tolist())
        return int(second > first)

    def _in(self, client: int, half: int) -> Vectors:
        return self._values.params_of(self._values.views(self._rooms[client, half]))


@dataclass
class CorrectedSteps:
    """Those of one client by now."""

    added: Vectors = field(default_factory=dict)
    """What is added to each gradient."""
    seen: Vectors = field(default_factory=dict)
    """The sum of its own."""
    count: int = 0


class Correction:
    """What the steps of one client at a time are corrected by."""

    def __init__(self, table: ControlTable, replica: Replica, values: AgreedValues) -> None:
        if isinstance(replica.optimizer, torch.optim.LBFGS):
            raise SpecError(
                "average: scaffold=on corrects the one gradient of a step, but LBFGS asks for several; use "
                "another optimizer."
            )
        self._table, self._replica, self._values = table, replica, values
        self._of_all: tuple[int, Vectors] = (0, {})
        """The mean over all clients, and of which round."""
        self.steps = CorrectedSteps()
        replica.optimizer.register_step_pre_hook(self._correct)

    @torch.no_grad()
    def begin(self, client: int, number: int) -> None:
        """A client begins its part of a round."""
        if self._of_all[0] != number:
            self._of_all = number, self._table.mean_before(number)
        mean, own = self._of_all[1], self._table.before(client, number)
        self.steps = CorrectedSteps(
            added=mean if own is None else {kind: vector - own[kind] for kind, vector in mean.items()},
            seen={kind: torch.zeros_like(vector) for kind, vector in mean.items()},
        )

    @torch.no_grad()
    def end(self, client: int, number: int) -> None:
        """It has taken its last step: keep what it saw."""
        if self.steps.count:
            for vector in self.steps.seen.values():
                vector.div_(self.steps.count)
            self._table.put(client, number, self.steps.seen)

    @torch.no_grad()
    def _correct(self, *_: object) -> None:
        """Before a step of the optimizer."""
        steps = self.steps
        steps.count += 1
        for span, param in zip(self._values.params, self._replica.trained.values(), strict=True):
            if param.grad is not None:
                span.of(steps.seen).add_(param.grad)
                param.grad.add_(span.of(steps.added))
