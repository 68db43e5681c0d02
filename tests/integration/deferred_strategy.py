"""`data` whose steps are known late: a turn that was taken stays open until four are."""

from collections import deque
from dataclasses import dataclass, replace
from typing import ClassVar

from shoal.spec import Data
from shoal.strategies.data.arena import ArenaData

MOST_OPEN = 4


@dataclass(frozen=True, kw_only=True)
class Deferred(Data):
    name: ClassVar[str] = "deferred"
    made_by: ClassVar[str] = "deferred_strategy:make"

    def conduct(self, cluster, slots=None):
        return replace(super().conduct(cluster, slots), open_commits=MOST_OPEN)


class Later:
    is_known = False

    def __init__(self, strategy, result):
        self._strategy, self._result = strategy, result

    def result(self):
        assert self._strategy.pending.popleft() is self, "turns resolve in their order"
        return self._result


class DeferredArena(ArenaData):
    def __init__(self, spec):
        super().__init__(spec)
        self.pending, self._widest = deque(), 0

    def take(self, work):
        commit = Later(self, super().take(work))
        self.pending.append(commit)
        self._widest = max(self._widest, len(self.pending))
        assert len(self.pending) <= MOST_OPEN
        return commit

    def exchange(self, serial, shape, fill):
        assert not self.pending, "what is open might still change what is evaluated"
        return super().exchange(serial, shape, fill)

    def snapshot(self):
        assert not self.pending, "what is open might still change what is saved"
        return super().snapshot()

    def close(self):
        print(f"{self._widest} turns were open at once", flush=True)
        super().close()


def make(spec, world, slots, *, replaceable=False):
    return DeferredArena(spec)
