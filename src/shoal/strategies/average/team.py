"""Workers that train one model in lockstep, as one of those that agree with each other now and then."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shoal.comm.group import Group
from shoal.model.replica import Replica
from shoal.spec import Average, Data
from shoal.spec.conduct import even_fills
from shoal.step.work import Work
from shoal.strategies.base import Setting, StepResult
from shoal.strategies.data.collective import CollectiveData
from shoal.strategies.data.single import SingleProcess
from shoal.strategies.groups.over_hosts import ranks_by_host


@dataclass(frozen=True, kw_only=True)
class Team:
    """One worker's team: itself alone, or those of its host, or of its group."""

    number: int
    count: int
    """How many teams there are."""
    group: Group | None = None
    """Its workers, where they are several."""
    counts: bool = True
    """Whether what this worker has counts in sums over all, where others of its team have the same."""

    @classmethod
    def of(cls, spec: Average, among: Group, setting: Setting) -> Team:
        """As a strategy asks for it; all workers call this together."""
        if spec.inside == "none":
            return cls(number=among.index, count=among.size)
        rows = list(even_fills(among.size, spec.groups) if spec.groups else ranks_by_host(setting.world.hosts))
        number = next(number for number, row in enumerate(rows) if among.index in row)
        inside = among.split([[among.ranks[index] for index in row] for row in rows])
        return cls(
            number=number, count=len(rows), group=inside if inside.size > 1 else None, counts=inside.is_first
        )

    @property
    def speaks(self) -> bool:
        """Whether this worker speaks for its team: all in it have the same."""
        return self.group is None or self.group.is_first

    def open(self, replica: Replica, setting: Setting) -> SingleProcess | CollectiveData:
        """Who takes its steps."""
        inner: SingleProcess | CollectiveData = SingleProcess(may_lack_samples=True)
        if self.group is not None:
            inner = CollectiveData(Data(via="ring"), self.group, may_lack_samples=True)
        inner.open(replica, setting)
        return inner

    def told(self, result: StepResult, work: Work) -> StepResult:
        """What this worker tells the others of a step: the samples of its own slots, and the loss of its team, if
        it speaks for that."""
        if self.group is None:
            return result
        own = replace(result, counts=tuple(result.counts[part.slot] for part in work.parts))
        if self.speaks:
            return own
        return replace(own, loss=math.nan, weight=0.0, skipped=0.0, skipped_parts=0, parts={})
