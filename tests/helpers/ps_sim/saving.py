"""The first worker's checkpoints: what it asks for, when it is at the border, what it finds there."""

from __future__ import annotations

from dataclasses import dataclass

from helpers.ps_sim.scenario import Scenario
from helpers.ps_sim.values import Memory
from shoal.ps.worker import WorkerMachine
from shoal.strategies.ps.holding import Hold

LOOKS_EVERY_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint: the step that it is said to be of, and by shard the cells that are in its values."""

    step: int
    cells: list[list[int]]


class Saving:
    """As `strategies/ps/borders.py`; it waits for nothing: `go_on`, or `may_begin`, is called again and again."""

    def __init__(
        self, scenario: Scenario, machine: WorkerMachine, generation: int, memory: Memory, saved: list[Saved]
    ) -> None:
        self.wakeup = float("inf")
        self._scenario = scenario
        self._machine = machine
        self._memory = memory
        self._saved = saved
        self._now = 0.0
        self._hold = Hold(machine, lambda is_done: None, generation, lambda: self._now)
        self._released = 0
        self._asks_at = 0.0
        self._last = max((one.step for one in saved), default=0)

    def on_step(self, step: int, now: float) -> None:
        """It has pushed a cell of this step: it may be time to save."""
        self._now, every = now, self._scenario.save_every
        is_due = step // every > self._last // every and step < self._scenario.steps
        if self._machine.rank == 0 and is_due and self._hold.current is None:
            self._hold.ask()

    def clear(self, now: float) -> None:
        """A first worker that died may have left the others waiting."""
        self._now = now
        if self._machine.rank == 0 and self._hold.current is not None:
            self._released = self._hold.current[0]
            self._hold.release()

    def go_on(self, now: float) -> bool:
        """Where cells are leased: save, where all are at the border; whether this worker may go on training."""
        self._now = now
        hold, leases = self._hold.current, self._machine.leases
        assert leases is not None
        if hold is None:
            return True
        number, border = hold
        assert border is not None
        if number == self._released:
            return False
        if leases.held:
            return True
        if not self._hold.have_seen(border):
            if now >= self._asks_at:
                self._asks_at = now + LOOKS_EVERY_S
                self._machine.ask_how_far(now)
            self.wakeup = self._asks_at
            return True
        if border < self._scenario.num_cells and self._hold.is_exact(border):
            self._save(border // self._scenario.num_slots)
        self._released = number
        self._hold.release()
        return False

    def may_begin(self, clock: int, now: float) -> bool:
        """Where every rank has its own cells: whether it may begin this clock. The first saves at the border."""
        self._now = now
        hold, machine = self._hold.current, self._machine
        if hold is None or self._hold.may_begin(clock):
            return True
        number, border = hold
        if machine.rank == 0 and border is not None and number != self._released:
            if machine.consistency.gathers(clock - 1):
                all_are_there = all(link.rounds >= clock - 1 for link in machine.links)
            else:
                all_are_there = all(link.floor >= clock - 1 for link in machine.links)
            if all_are_there:
                if self._hold.is_exact((clock - 1) * self._scenario.num_slots):
                    self._save(clock - 1)
                self._released = number
                self._hold.release()
        return False

    def _save(self, step: int) -> None:
        self._last = step
        copies = [link.holders.copy for link in self._machine.links if link.holders is not None]
        cells = [sorted(self._memory[shard, copy].cells) for shard, copy in enumerate(copies)]
        self._saved.append(Saved(step=step, cells=cells))
