"""Local steps, then agreement: every worker trains a model of its own on its part of each batch, and after so many
steps all agree on one.

Between agreements nobody waits for anybody. What the steps of a round came to over all workers, and whether one of
them asks to stop or to save, is told at its end, or when all need to know it, as before an evaluation. There the
model is the mean of what all have, and training goes on as if nobody had asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from shoal.checkpoint.model_stream import TensorStream
from shoal.model.half_range import HalfState
from shoal.model.optimizer.state import named_state
from shoal.model.replica import Replica
from shoal.spec import Average, Data
from shoal.spec.averaging import Clip
from shoal.step.work import Work
from shoal.strategies.average.gossip import agree_with, neighbours
from shoal.strategies.average.members import (
    EnsembleMember,
    begin_apart,
    ensemble_in_use,
    ensemble_stream,
    gathered,
)
from shoal.strategies.average.outer import OuterStep, difference_, kind_name
from shoal.strategies.average.rounds import OwnStep, Rounds, StepOfRound
from shoal.strategies.average.team import Team
from shoal.strategies.average.values import AgreedValues
from shoal.strategies.base import Commit, Fill, Setting, StepResult, WholeModel
from shoal.strategies.data.collective import CollectiveData
from shoal.strategies.groups.kept_apart import OF_ALL, KeptApart
from shoal.strategies.groups.opening import open_group
from shoal.strategies.groups.plain import share_plain
from shoal.strategies.groups.vector_sums import VectorSums, make_sums
from shoal.strategies.groups.vectors import Vectors


class AveragedModel(WholeModel):
    """One worker's part in it."""

    def __init__(self, spec: Average) -> None:
        self._spec = spec
        self._clip = Clip.parse(spec.clip, spec.clips)

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica, self._setting = replica, setting
        self._group = group = open_group(self._spec.via, setting)
        self._index, self._size = group.index, group.size
        self._team = Team.of(self._spec, group, setting)
        self._sums = self._open_sums(setting)
        self._rounds = Rounds(self._team.count, setting.slots, self._speak)
        self._rounds.names = lambda: replica.loss_parts.names
        self._rounds.facts = self._facts
        self._step = replica.start.step
        self._together: CollectiveData | None = None
        """Takes the first steps, where these are synchronous."""
        self._take_up(replica)
        self._begin_alike(replica)
        begin_apart(replica, self._team.number, self._team.count, is_own=self._spec.begins_apart)
        if self._step < self._spec.after:
            self._together = CollectiveData(Data(via="ring"), group)
            self._together.open(replica, setting)
        else:
            self._go_apart()
            if self._spec.begins_apart and replica.start.model is None:
                for kind, vector in self._mean_of_own(self._agreed).items():
                    self._agreed[kind].copy_(vector)

    def _open_sums(self, setting: Setting) -> VectorSums:
        return make_sums(self._spec.compress, self._group, setting)

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
                replica.precision.adopt(HalfState.of(scaled.tolist()))

    def _begin_alike(self, replica: Replica) -> None:
        """Where there is no checkpoint, all begin from what the first one has made."""
        if replica.start.model is None:
            values = AgreedValues(replica)
            found = values.read()
            for vector in found.values():
                self._group.broadcast_(vector)
            values.write(found)

    def _go_apart(self) -> None:
        """From here on each worker is on its own between agreements."""
        replica, setting = self._replica, self._setting
        if self._together is not None:
            self._together.close()
            self._together = None
            # The optimizer has taken that up before, and has moved on.
            replica.start = replace(replica.start, optimizer={})
        self._alone = self._team.open(replica, setting)
        self._values = AgreedValues(replica)
        self._agreed: Vectors = self._values.read() if self._spec.agrees_with_all else {}
        """What all have agreed on last."""
        self._outer = self._make_outer()
        if self._spec.prox:
            self._replica.optimizer.register_step_pre_hook(self._draw_back)
        self._is_apart = self._spec.begins_apart or (not self._spec.agrees_with_all and self._step > 0)
        """Whether workers have other models than they agreed on last."""
        if self._saved_workers:
            self._go_on()

    def _make_outer(self) -> OuterStep:
        return OuterStep(self._spec, self._values.params_of(self._agreed) if self._agreed else {})

    @torch.no_grad()
    def _draw_back(self, *_: object) -> None:
        """Before a step: the gradient of half the squared distance from what was agreed on last, too."""
        for span, param in zip(self._values.params, self._replica.trained.values(), strict=True):
            if param.grad is not None:
                distance = param.detach().to(span.kind) - span.of(self._begun_from)
                param.grad.add_(distance.to(param.grad.dtype), alpha=self._spec.prox)

    @property
    def _begun_from(self) -> Vectors:
        """What this worker's steps have begun from."""
        return self._agreed

    def _go_on(self) -> None:
        """Take up, from the checkpoint, how far this worker was in its round."""
        kept, size = KeptApart("replica", self._replica.start.aside), self._team.count
        self._outer.load(kept.of(OF_ALL, "outer"))
        if self._saved_workers != size:
            if self._setting.world.is_first:
                who = "workers" if self._spec.inside == "none" else "groups of workers"
                self._setting.company.report(
                    f"average: the checkpoint is of {self._saved_workers} {who}, and these are {size}: all "
                    "begin from the mean of their models, with their optimizers' states in turn"
                )
            return
        self._load_unsent(kept.of(self._index, "unsent"))
        self._rounds.weights.copy_(kept.of(OF_ALL, "round")["weights"])
        for kind, vector in by_kind(kept.of(OF_ALL, "agreed")).items():
            self._agreed[kind].copy_(vector)
        self._go_on_apart()

    def _go_on_apart(self) -> None:
        """What of that is this worker's own."""
        kept = KeptApart("replica", self._replica.start.aside)
        if self._saved_workers == self._team.count and (values := by_kind(kept.of(self._whose, "value"))):
            self._values.write(values)
            self._is_apart = True

    def _load_unsent(self, unsent: Mapping[str, torch.Tensor]) -> None:
        self._sums.load(unsent)

    def take(self, work: Work) -> Commit:
        self._step = work.step
        if work.step <= self._spec.after:
            assert self._together is not None
            return self._together.take(work)
        if self._together is not None:
            self._go_apart()
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
        return self._team.told(self._alone.take(own).result(), work)

    def _block(self) -> None:
        if self._setting.company.on_block is not None:
            self._setting.company.on_block()

    # Agreement.

    def _agree(self) -> None:
        """The end of a round: one model for all, or one that is closer to those of the neighbours."""
        shares = self._shares()
        if self._spec.is_ensemble:
            pass  # nobody takes anything from anybody
        elif not self._spec.agrees_with_all:
            own = self._values.read()
            self._values.write(agree_with(self._group, self._peers_of(self._index, self._step), own))
        elif shares is not None:
            self._take_outer_step(self._mean_difference(shares, clip=self._clip, sums=self._sums))
            self._values.write(self._agreed)
            self._take_whole_numbers()
        self._end_round()

    def _peers_of(self, index: int, step: int) -> list[int]:
        """With whom a worker agrees after this step, where not all do."""
        number = (step - self._spec.after) // self._spec.round_steps(self._size) - 1
        return neighbours(self._spec.with_, index, self._size, number)

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
        found = difference_(self._values.read(), self._agreed, self._values.params_of, clip)
        for vector in found.values():
            vector.mul_(float(shares[self._team.number]) if self._team.speaks else 0.0)
        sums.all_reduce_(found, self._values.params)
        return found

    def _take_whole_numbers(self) -> None:
        """Counts are the first worker's."""
        for each in self._values.whole_numbers():
            self._group.broadcast_(each)

    # What others read.

    @contextmanager
    def _mean_in_use(self) -> Iterator[None]:
        """In this block the replica has the mean of all workers' models, or is their ensemble. All enter it
        together."""
        self._rounds.settle()
        if self._spec.is_ensemble:
            with ensemble_in_use(self._replica, self._values, self._members()):
                yield
            return
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
        return self._together is not None or not self._is_apart or self._team.count == 1

    def _mean_model(self, own: Vectors) -> Vectors:
        if self._agreed:
            shares = self._shares()
            if shares is None:
                return self._agreed
            plain = make_sums("none", self._group, self._setting)
            change = self._mean_difference(shares, clip=None, sums=plain)
            return {kind: vector + change[kind] for kind, vector in self._agreed.items()}
        return self._mean_of_own(own)

    def _mean_of_own(self, own: Vectors) -> Vectors:
        """The mean of what all have, each counting the same."""
        share = 1 / self._team.count if self._team.speaks else 0.0
        mean = {kind: vector * share for kind, vector in own.items()}
        for vector in mean.values():
            self._group.all_reduce_(vector)
        return mean

    def _members(self) -> list[EnsembleMember]:
        """Of an ensemble: what each worker has by now."""
        found = gathered(self._values, self._group)
        speakers = share_plain(self._team.speaks, self._group)
        return [member for member, speaks in zip(found, speakers, strict=True) if speaks]

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        table = torch.zeros(shape, dtype=torch.float64)
        with self._mean_in_use():
            fill(table, self._index)
        return self._group.all_reduce_(table)  # each row is somebody's, and zero elsewhere

    def model_stream(self, replica: Replica) -> TensorStream:
        """The mean of all workers' models, or the one that they agree on, or all of them as an ensemble."""
        self._rounds.settle()
        if self._spec.is_ensemble:
            members = self._members()
            return ensemble_stream(replica, self._values, members if self._index == 0 else ())
        own = TensorStream.of(replica.module.state_dict())
        if self._is_whole:
            return own
        with self._mean_in_use():
            found = [(name, one.detach().clone()) for name, one in own.tensors if self._index == 0]
        return replace(own, tensors=iter(found))

    def snapshot(self) -> dict[str, torch.Tensor]:
        """This worker's optimizer's state."""
        return named_state(self._replica)

    def state_stream(self) -> TensorStream:
        """The first worker's, and what all others have aside."""
        number, replica = self._team.number, self._replica
        unsent = {f"{self._index}/unsent/{name}": one for name, one in self._sums.state().items()}
        if not self._team.speaks:  # others have all that it has but this
            return KeptApart("replica", unsent).stream({}, self._group)
        aside = unsent | {f"{number}/state/{path}": one for path, one in self.snapshot().items() if number}
        if replica.precision.scales:
            values = torch.tensor(replica.precision.state.values, dtype=torch.float64)
            aside[f"{number}/precision/values"] = values
        if self._together is None:
            aside |= self._kept_apart()
        elif number == 0:
            aside[f"{OF_ALL}/round/weights"] = self._rounds.weights.clone()
        return KeptApart("replica", aside).stream(self.snapshot(), self._group)

    def _kept_apart(self) -> dict[str, torch.Tensor]:
        index, found = self._team.number, dict[str, torch.Tensor]()
        if self._is_apart and not self._spec.is_ensemble:  # whose values are the model's
            found |= {f"{index}/value/{kind_name(kind)}": one for kind, one in self._values.read().items()}
        return found | self._kept_of_all() if index == 0 else found

    def _kept_of_all(self) -> dict[str, torch.Tensor]:
        """What all have in common."""
        found = {f"{OF_ALL}/round/weights": self._rounds.weights.clone()}
        found |= {f"{OF_ALL}/outer/{name}": one for name, one in self._outer.state().items()}
        if self._is_apart:
            found |= {f"{OF_ALL}/agreed/{kind_name(kind)}": one for kind, one in self._agreed.items()}
        return found

    def _facts(self) -> Mapping[str, Any]:
        """How often all have agreed, and what that took."""
        rounds = max(0, self._step - self._spec.after) // self._spec.round_steps(self._size)
        if self._spec.is_ensemble:
            return {"agreements": 0, "members": self._team.count}
        return {"agreements": rounds, "wire": self._wire()}

    def _wire(self) -> dict[str, Any]:
        return self._sums.facts()

    def close(self) -> None:
        if self._together is not None:
            self._together.close()
        self._group.close()


def by_kind(named: Mapping[str, torch.Tensor]) -> Vectors:
    """Vectors of a checkpoint, which are called by their kinds."""
    return {getattr(torch, name): vector for name, vector in named.items()}
