"""Agreement among teams whose model is cut over their workers.

A team takes its steps as a grid of workers does. Who holds the same part of the model in all teams agrees on that
part: each element travels once, and nobody needs the whole model. What the outer optimizer keeps is cut likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from shoal.checkpoint.aside import put_aside
from shoal.checkpoint.model_stream import TensorLooks, TensorStream
from shoal.comm.group import Group
from shoal.model.replica import Replica
from shoal.spec.averaging_inside import CutTeams
from shoal.step.work import Work
from shoal.strategies.average.agreeing import OUTER_PARTS, PARTS, Agreeing
from shoal.strategies.average.held_values import HeldValues, moving_floats
from shoal.strategies.average.outer import OuterStep
from shoal.strategies.average.team import Team
from shoal.strategies.base import Commit, Fill, Setting, StepResult
from shoal.strategies.groups.kept_apart import OF_ALL, KeptApart, brought_to_first
from shoal.strategies.groups.vector_sums import make_sums
from shoal.strategies.groups.vectors import Vectors
from shoal.strategies.mesh.axes import GridCrew
from shoal.strategies.mesh.held import HeldSpan, Wanted, gather
from shoal.strategies.mesh.strategy import MeshStrategy

_UNSENT, _CUT = "unsent", "cut"
"""What lies aside of each worker: what compression has left out, and of which elements."""


class AveragedGrids(Agreeing):
    """One worker's part in it."""

    _alone: MeshStrategy
    _values: HeldValues

    def open(self, replica: Replica, setting: Setting) -> None:
        self._meet_all(replica, setting)
        self._sums = make_sums(self._spec.compress, self._peers, setting)
        self._take_up(replica)
        buffers = moving_floats(replica.module)
        crew = GridCrew(everybody=self._mates, alike=self._group, grids=self._teams.rows())
        self._alone = MeshStrategy(self._teams.mesh, crew)
        self._alone.open(replica, setting)
        self._values = HeldValues(self._alone, replica.module, buffers)
        self._agreed = self._values.read()
        self._outer = OuterStep(self._spec, self._values.params_of(self._agreed))
        self._is_apart = False
        if self._saved_workers:
            self._go_on()

    def _find_team(self, group: Group, setting: Setting) -> Team:
        teams = CutTeams.of(self._spec, group.size)
        assert teams is not None, "of a strategy that cuts the model"
        self._teams, self._mates = teams, group.split(teams.rows())
        self._peers = group.split(teams.peers())
        number, place = divmod(group.index, teams.size)
        # Of copies within a team one counts: all of them have the same.
        return Team(number=number, count=teams.count, group=self._mates, counts=place < teams.num_parts)

    def _go_on(self) -> None:
        """Take up, from the checkpoint, how far this worker's team was in its round."""
        kept, values = KeptApart("replica", self._replica.start.aside), self._values
        if kept.of(OF_ALL, "agreed") or kept.of(OF_ALL, "outer"):
            self._report_other_form()
            return
        self._outer.load(values.outer_of(kept.of(OF_ALL, OUTER_PARTS)))
        if self._saved_workers != self._team.count:
            self._report_other_number()
            return
        self._rounds.weights.copy_(kept.of(OF_ALL, "round")["weights"])
        self._take_up_unsent(kept)
        if found := kept.of(self._whose, PARTS):
            values.write(values.vectors_of(found))
            self._is_apart = True
            for kind, vector in values.vectors_of(kept.of(OF_ALL, PARTS)).items():
                self._agreed[kind].copy_(vector)

    def _take_up_unsent(self, kept: KeptApart) -> None:
        """What compression has left out is of a worker's own part: nobody else could send it."""
        unsent, cut = kept.of(self._index, _UNSENT), kept.of(self._index, _CUT).get("spans")
        is_other = torch.tensor(
            [float(bool(unsent) and (cut is None or not torch.equal(cut.clone(), self._spans)))]
        )
        if not self._group.max_(is_other):
            self._sums.load({name: one.clone() for name, one in unsent.items()})
        elif self._setting.world.is_first:
            self._setting.company.report(
                "average: the model is cut otherwise than where the checkpoint was made, so what compression had "
                "not sent there is left out"
            )

    @property
    def _spans(self) -> torch.Tensor:
        """By parameter of the whole model: which elements this worker has."""
        held, shard = self._alone.held, self._alone.axes.shard.index
        rows = []
        for name in self._alone.trained_names:
            one = held.get(name)
            span = HeldSpan(0, 0) if one is None else HeldSpan(0, one.tensor.numel())
            span = one.spans[shard] if one is not None and one.spans else span
            rows.append([span.start, span.stop])
        return torch.tensor(rows, dtype=torch.int64)

    def take(self, work: Work) -> Commit:
        self._step = work.step
        return self._take_in_round(work)

    def _told(self, result: StepResult, work: Work) -> StepResult:
        """Of workers that compute one slot together, one tells of its samples."""
        axes = self._alone.axes
        tells = axes.tensor.is_first and axes.pipeline.is_first
        counts = [count * tells for count in result.counts]
        return self._team.told(replace(result, counts=counts), work)

    def _norm(self, params: Vectors) -> float:
        return self._values.norm(params)

    # What others read.

    def infer(self, replica: Replica, inputs: Any) -> Any:
        return self._alone.infer(replica, inputs)

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        first = self._team.number * self._teams.mesh.lanes
        with self._mean_in_use():
            table = self._alone.exchange(serial, shape, lambda table, lane: fill(table, first + lane))
        # All of a team have the rows of their lanes, and zeros elsewhere.
        return self._group.all_reduce_(table if self._team.speaks else torch.zeros_like(table))

    def model_stream(self, replica: Replica) -> TensorStream:
        """The mean of all teams' models, put together by the first one."""
        self._rounds.settle()
        stream = self._alone.model_stream(replica)
        return replace(stream, tensors=self._of_the_mean(stream.tensors))

    def _of_the_mean(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        with self._mean_in_use():
            if self._team.number == 0:
                yield from tensors

    def state_stream(self) -> TensorStream:
        """The first team's, and what all others have aside; whole tensors all of them."""
        self._rounds.settle()
        mine = self._wanted()
        axes = self._alone.axes
        own = {
            name: TensorLooks.of(one) if isinstance(one, torch.Tensor) else one.looks
            for name, one in mine.items()
            if axes.everybody.is_first or isinstance(one, torch.Tensor)
        }

        def give(name: str) -> torch.Tensor | None:
            one = mine.get(name)
            if isinstance(one, Wanted):
                return next((whole for _, whole in list(gather([one], axes))), None)
            return one

        return brought_to_first(own, give, self._group)

    def _wanted(self) -> dict[str, Wanted | torch.Tensor]:
        """By name: what this worker's team makes together, and what this worker alone gives."""
        number, values = self._team.number, self._values
        state = self._alone.wanted_state()
        found: dict[str, Wanted | torch.Tensor] = {}
        aside: dict[str, Wanted | torch.Tensor] = {}
        if number == 0:
            found |= state
            aside |= values.wanted_outer(f"{OF_ALL}/{OUTER_PARTS}/", self._outer)
            if self._is_apart:
                aside |= values.wanted(f"{OF_ALL}/{PARTS}/", self._agreed)
        else:
            aside |= {f"{number}/state/{path}": one for path, one in state.items()}
        if self._is_apart:
            aside |= values.wanted(f"{number}/{PARTS}/", values.read())
        if unsent := self._sums.state():
            aside |= {f"{self._index}/{_UNSENT}/{name}": one for name, one in unsent.items()}
            aside[f"{self._index}/{_CUT}/spans"] = self._spans
        if self._group.is_first:
            aside[f"{OF_ALL}/round/weights"] = self._rounds.weights.clone()
        if self._team.speaks and self._replica.precision.scales:
            scaled = torch.tensor(self._replica.precision.state.values, dtype=torch.float64)
            aside[f"{number}/precision/values"] = scaled
        return found | put_aside({f"replica/{name}": one for name, one in aside.items()})

    def close(self) -> None:
        self._alone.close()
        self._group.close()
