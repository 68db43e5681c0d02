"""Agreement among workers each of which has a whole model, of its own or of its team."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from shoal.checkpoint.model_stream import TensorStream
from shoal.comm.group import Group
from shoal.model.optimizer.state import named_state
from shoal.model.replica import Replica
from shoal.spec import Data
from shoal.step.work import Work
from shoal.strategies.average.agreeing import OUTER_PARTS, PARTS, Agreeing, by_kind
from shoal.strategies.average.gossip import agree_with, neighbours
from shoal.strategies.average.members import (
    EnsembleMember,
    begin_apart,
    ensemble_in_use,
    ensemble_stream,
    gathered,
)
from shoal.strategies.average.outer import OuterStep, kind_name
from shoal.strategies.average.team import Team
from shoal.strategies.average.values import AgreedValues
from shoal.strategies.base import Commit, Fill, Setting, WholeModel
from shoal.strategies.data.collective import CollectiveData
from shoal.strategies.groups.kept_apart import OF_ALL, KeptApart
from shoal.strategies.groups.plain import share_plain
from shoal.strategies.groups.vector_sums import VectorSums, make_sums
from shoal.strategies.groups.vectors import Vectors


class AveragedModel(Agreeing, WholeModel):
    """One worker's part in it."""

    def open(self, replica: Replica, setting: Setting) -> None:
        self._meet_all(replica, setting)
        self._sums = self._open_sums(setting)
        self._together: CollectiveData | None = None
        """Takes the first steps, where these are synchronous."""
        self._take_up(replica)
        self._begin_alike(replica)
        begin_apart(replica, self._team.number, self._team.count, is_own=self._spec.begins_apart)
        if self._step < self._spec.after:
            self._together = CollectiveData(Data(via="ring"), self._group)
            self._together.open(replica, setting)
        else:
            self._go_apart()
            if self._spec.begins_apart and replica.start.model is None:
                for kind, vector in self._mean_of_own(self._agreed).items():
                    self._agreed[kind].copy_(vector)

    def _find_team(self, group: Group, setting: Setting) -> Team:
        self._peers = group
        return Team.of(self._spec, group, setting)

    def _open_sums(self, setting: Setting) -> VectorSums:
        return make_sums(self._spec.compress, self._group, setting)

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
        self._agreed = self._values.read() if self._spec.agrees_with_all else {}
        self._outer = self._make_outer()
        if self._spec.prox:
            self._replica.optimizer.register_step_pre_hook(self._draw_back)
        self._is_apart = self._spec.begins_apart or (not self._spec.agrees_with_all and self._step > 0)
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
            self._report_other_number()
            return
        if kept.of(OF_ALL, PARTS) or kept.of(OF_ALL, OUTER_PARTS):
            self._report_other_form()
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
        return self._take_in_round(work)

    # Agreement.

    def _agree(self) -> None:
        """The end of a round: one model for all, or one that is closer to those of the neighbours."""
        if self._spec.is_ensemble:
            self._end_round()  # nobody takes anything from anybody
        elif not self._spec.agrees_with_all:
            own = self._values.read()
            self._values.write(agree_with(self._group, self._peers_of(self._index, self._step), own))
            self._end_round()
        else:
            super()._agree()

    def _peers_of(self, index: int, step: int) -> list[int]:
        """With whom a worker agrees after this step, where not all do."""
        number = (step - self._spec.after) // self._spec.round_steps(self._size) - 1
        return neighbours(self._spec.with_, index, self._size, number)

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
        with super()._mean_in_use():
            yield

    @property
    def _is_whole(self) -> bool:
        return self._together is not None or super()._is_whole

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

    def close(self) -> None:
        if self._together is not None:
            self._together.close()
        self._group.close()
