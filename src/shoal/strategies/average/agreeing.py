"""What workers do to agree now and then, whatever each of them holds of a model.

Between agreements nobody waits for anybody. What the steps of a round came to over all workers, and whether one of
them asks to stop or to save, is told at its end, or when all need to know it, as before an evaluation. There the
model is the mean of what all have, and training goes on as if nobody had asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from shoal.comm.group import Group
from shoal.model.half_range import HalfState
from shoal.model.replica import Replica
from shoal.spec import Average
from shoal.spec.averaging import Clip
from shoal.step.work import Work
from shoal.strategies.average.outer import OuterStep, difference_, norm_of
from shoal.strategies.average.rounds import OwnStep, Rounds, StepOfRound
from shoal.strategies.average.team import Team
from shoal.strategies.average.values import AgreedValues
from shoal.strategies.base import Commit, Lockstep, Setting, StepResult
from shoal.strategies.groups.kept_apart import OF_ALL, KeptApart
from shoal.strategies.groups.opening import open_group
from shoal.strategies.groups.vector_sums import VectorSums, make_sums
from shoal.strategies.groups.vectors import Vectors

PARTS, OUTER_PARTS = "parts", "outer parts"
"""What lies aside of teams that cut their model, by the names of its tensors: values, and what the outer optimizer
keeps. Others leave vectors of all."""


class TakesSteps(Protocol):
    """A strategy by which a team takes its steps."""

    def take(self, work: Work) -> Commit:
        """As any strategy does."""

    def close(self) -> None:
        """Leave the team."""


class Agreeing(Lockstep, ABC):
    """One worker's part in it."""

    _group: Group
    """All workers of all teams."""
    _peers: Group
    """Those who have, in whichever team, what this worker has of a model; the first are of the first team."""
    _team: Team
    _sums: VectorSums
    """Over the peers."""
    _alone: TakesSteps
    """Takes this team's steps."""
    _values: AgreedValues
    _agreed: Vectors
    """What all have agreed on last, of what this worker has."""
    _outer: OuterStep
    _is_apart: bool
    """Whether teams have other models than they agreed on last."""

    def __init__(self, spec: Average) -> None:
        self._spec = spec
        self._clip = Clip.parse(spec.clip, spec.clips)

    def _meet_all(self, replica: Replica, setting: Setting) -> None:
        """Come together with all other workers, and find this worker's team."""
        self._replica, self._setting = replica, setting
        self._group = group = self._open_group(setting)
        self._index, self._size = group.index, group.size
        self._team = self._find_team(group, setting)
        self._rounds = Rounds(self._team.count, setting.slots, self._speak)
        self._rounds.names = lambda: replica.loss_parts.names
        self._rounds.facts = self._facts
        self._step = replica.start.step

    def _open_group(self, setting: Setting) -> Group:
        """All workers."""
        return open_group(self._spec.via, setting)

    @abstractmethod
    def _find_team(self, group: Group, setting: Setting) -> Team:
        """Those with whom this worker trains one model, and its peers; all call this together."""

    def _take_up(self, replica: Replica) -> None:
        """Begin where the checkpoint's workers were."""
        kept = KeptApart("replica", replica.start.aside)
        weights = kept.of(OF_ALL, "round").get("weights")
        self._saved_workers = 0 if weights is None else len(weights)
        """How many workers, or teams of these, have left their state in the checkpoint."""
        if self._saved_workers:
            self._whose = self._team.number % self._saved_workers
            if self._whose:  # the first one's state is where any strategy finds it
                replica.start = replace(replica.start, optimizer=kept.of(self._whose, "state"))
            if (scaled := kept.of(self._whose, "precision").get("values")) is not None:
                replica.precision.adopt(HalfState.of(scaled.clone().tolist()))

    def _report_other_number(self) -> None:
        """The checkpoint is of another number of teams than there are."""
        if self._setting.world.is_first:
            who = "workers" if self._spec.inside == "none" else "groups of workers"
            self._setting.company.report(
                f"average: the checkpoint is of {self._saved_workers} {who}, and these are {self._team.count}: "
                "all begin from the mean of their models, with their optimizers' states in turn"
            )

    def _report_other_form(self) -> None:
        """It is of teams whose workers had other parts of a model than these have."""
        if self._setting.world.is_first:
            self._setting.company.report(
                "average: what the checkpoint has of its round is of workers that held a model in another way: "
                "all begin from the mean of their models, and an outer optimizer anew"
            )

    def _take_in_round(self, work: Work) -> Commit:
        """Take a step of this team's own, and agree if it ends a round."""
        step = self._open_step(self._take_alone(work), work)
        self._is_apart = True
        if self._spec.is_agreement(work.step, self._size):
            self._block()
            self._rounds.settle()
            self._agree()
            self._group.barrier()  # this may be the last step: nobody leaves before all have what it sent
        return step

    def _open_step(self, own: StepResult, work: Work) -> StepOfRound:
        """This worker has taken a step, of which others hear later."""
        return self._rounds.add({self._team.number: OwnStep.of(own, work)}, work)

    def _speak(self, rows: Mapping[int, Mapping[int, torch.Tensor]]) -> torch.Tensor:
        """Tell of these steps, and hear of the others'."""
        table = torch.stack([row for of_step in rows.values() for row in of_step.values()])
        self._group.all_reduce_(table)
        return table

    def _take_alone(self, work: Work) -> StepResult:
        """A step of this worker's own."""
        # What a part counts among all others does not matter to who is on its own.
        own = replace(work, parts=tuple(replace(part, total_weight=None) for part in work.parts))
        return self._told(self._alone.take(own).result(), work)

    def _told(self, result: StepResult, work: Work) -> StepResult:
        """What this worker tells of a step that its team has taken."""
        return self._team.told(result, work)

    def _block(self) -> None:
        if self._setting.company.on_block is not None:
            self._setting.company.on_block()

    # Agreement.

    def _agree(self) -> None:
        """The end of a round: one model for all."""
        if (shares := self._shares()) is not None:
            self._take_outer_step(self._mean_difference(shares, clip=self._clip, sums=self._sums))
            self._values.write(self._agreed)
            self._take_whole_numbers()
        self._end_round()

    @torch.no_grad()
    def _take_outer_step(self, mean: Vectors) -> None:
        """From the mean of how far all have come."""
        for kind, vector in self._agreed.items():  # buffers, which are no optimizer's
            count = self._values.num_params.get(kind, 0)
            vector[count:].add_(mean[kind][count:])
        self._outer.take(self._values.params_of(mean))

    def _end_round(self) -> None:
        self._rounds.weights.zero_()
        if self._spec.agrees_with_all:
            self._is_apart = False

    def _shares(self) -> torch.Tensor | None:
        """By worker: what it counts in the mean; None where nobody was trained on anything."""
        shares = self._rounds.shares
        if shares is None or self._spec.weight == "samples":
            return shares
        return torch.full_like(shares, 1 / len(shares))

    def _mean_difference(self, shares: torch.Tensor, *, clip: Clip | None, sums: VectorSums) -> Vectors:
        """How far all have come since they agreed, in the mean; the same bits at all."""
        found = difference_(self._values.read(), self._agreed, self._values.params_of, clip, self._norm)
        for vector in found.values():
            vector.mul_(float(shares[self._team.number]) if self._team.counts else 0.0)
        sums.all_reduce_(found, self._values.params)
        return found

    def _norm(self, params: Vectors) -> float:
        """Of all of the team's, where this worker has these."""
        return norm_of(params)

    def _take_whole_numbers(self) -> None:
        """Counts are the first worker's."""
        for each in self._values.whole_numbers():
            self._peers.broadcast_(each)

    # What others read.

    @contextmanager
    def _mean_in_use(self) -> Iterator[None]:
        """In this block the replica has the mean of all teams' models. All enter it together."""
        self._rounds.settle()
        if self._is_whole:
            yield
            return
        own = self._values.read()
        self._values.write(self._mean_model(own))
        try:
            yield
        finally:
            self._values.write(own)

    @property
    def _is_whole(self) -> bool:
        """Whether all workers have the same model, or this one is alone."""
        return not self._is_apart or self._team.count == 1

    def _mean_model(self, own: Vectors) -> Vectors:
        if self._agreed:
            shares = self._shares()
            if shares is None:
                return self._agreed
            plain = make_sums("none", self._peers, self._setting)
            change = self._mean_difference(shares, clip=None, sums=plain)
            return {kind: vector + change[kind] for kind, vector in self._agreed.items()}
        return self._mean_of_own(own)

    def _mean_of_own(self, own: Vectors) -> Vectors:
        """The mean of what all have, each counting the same."""
        share = 1 / self._team.count if self._team.counts else 0.0
        mean = {kind: vector * share for kind, vector in own.items()}
        for vector in mean.values():
            self._peers.all_reduce_(vector)
        return mean

    def _facts(self) -> Mapping[str, Any]:
        """How often all have agreed, and what that took."""
        rounds = max(0, self._step - self._spec.after) // self._spec.round_steps(self._size)
        if self._spec.is_ensemble:
            return {"agreements": 0, "members": self._team.count}
        return {"agreements": rounds, "wire": self._wire()}

    def _wire(self) -> dict[str, Any]:
        return self._sums.facts()


def by_kind(named: Mapping[str, torch.Tensor]) -> Vectors:
    """Vectors of a checkpoint, which are called by their kinds."""
    return {getattr(torch, name): vector for name, vector in named.items()}
