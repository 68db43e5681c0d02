"""Simulated hosts and processes: they start, are stopped and go on, say and hear, and end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, Protocol

from helpers.run_sim.timeline import Action, Timeline
from shoal.comm.words import FROM_PROCESSES
from shoal.launch.messages import Ended, News, Said, Started
from shoal.spec import World
from shoal.spec.told import Told, read_message

WORD_S = 0.001
"""From a process to the supervisor, and back."""
FORK_S = (0.002, 0.02)
REAP_S = (0.002, 0.03)
BEAT_S = 0.2
FAILED = 1


class SimProcess:
    """What is common to all processes. Nothing of it happens while it is stopped, or after its end."""

    def __init__(self, timeline: Timeline, world: World, tell: Callable[[Told], None]) -> None:
        self.timeline = timeline
        self.world = world
        self.role, self.rank = world.role, world.global_rank
        self.exit_code: int | None = None
        self.is_stopped = False
        self.phase, self.step = "starting", 0
        self.on_end: Action = lambda: None
        self._tell = tell
        self._held_up: list[Action] = []
        """What would have happened meanwhile."""

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    def live(self) -> None:
        """Begin: load what is needed, for a while."""
        self.say("state", state="starting", step=0)
        self._beat()
        self.later(self.timeline.dice.uniform(0.02, 0.4), self.work)

    def work(self) -> None:
        """What it does once it has loaded."""
        raise NotImplementedError

    def hear(self, word: Told) -> None:
        """The supervisor has said something."""
        raise NotImplementedError

    def later(self, seconds: float, action: Action) -> None:
        """Do something then, if it lives and runs; as soon as it goes on, where it is stopped."""
        self.timeline.after(seconds, lambda: self.do(action))

    def do(self, action: Action) -> None:
        """Do something now, under the same conditions."""
        if self.is_stopped:
            self._held_up.append(action)
        elif self.is_alive:
            action()

    def say(self, kind: str, **values: Any) -> None:
        self._tell(read_message({"kind": kind, **values}, FROM_PROCESSES))

    def enter(self, state: str) -> None:
        """Say what it is at now."""
        self.phase = {"training": "computing", "ready": "serving"}.get(state, state)
        self.say("state", state=state, step=self.step)

    def fail(self, message: str) -> None:
        """Say why it cannot go on, and end."""
        self.say("failed", message=message, traceback="", clear=True, consequence=False)
        self.end(FAILED)

    def end(self, code: int) -> None:
        if self.is_alive:
            self.exit_code = code
            self._held_up.clear()
            self.on_end()

    def signal(self, signum: int) -> None:
        if signum == signal.SIGSTOP:
            self.is_stopped = self.is_alive
        elif signum == signal.SIGCONT:
            self._go_on()
        elif signum == signal.SIGKILL or (signum == signal.SIGTERM and not self.is_stopped):
            self.end(-signum)

    def _go_on(self) -> None:
        self.is_stopped = False
        held_up, self._held_up = self._held_up, []
        for action in held_up:
            self.do(action)

    def _beat(self) -> None:
        self.say("beat", step=self.step, phase=self.phase, still=0.0, p99=0.05, gap=0.0, rss=1)
        self.later(BEAT_S, self._beat)


class MakeProcess(Protocol):
    """Makes the process of a role; `tell` says something to the supervisor."""

    def __call__(self, number: int, world: World, tell: Callable[[Told], None]) -> SimProcess: ...


class SimHost:
    """One host: `tell` is told what its processes do."""

    def __init__(self, timeline: Timeline, make: MakeProcess, tell: Callable[[News], None]) -> None:
        self.processes: dict[int, SimProcess] = {}
        self._timeline = timeline
        self._make = make
        self._tell = tell
        self._unborn: dict[int, list[Told]] = {}
        """What was said to processes that are not there yet."""
        self.is_gone = False

    def lose(self) -> None:
        """It is gone, and all of its processes; what they had said last may still arrive."""
        self.is_gone = True
        self._unborn.clear()
        for process in self.processes.values():
            process.on_end = lambda: None
            process.end(-signal.SIGKILL)

    def start(self, number: int, world: World) -> None:
        assert not self.is_gone, "A process is started on a host that is gone."
        self._unborn[number] = []
        self._timeline.after(self._timeline.dice.uniform(*FORK_S), lambda: self._fork(number, world))

    def say(self, number: int, word: Told) -> None:
        if self.is_gone:
            return
        if number in self._unborn:
            self._unborn[number].append(word)
        else:
            process = self.processes[number]
            self._timeline.after(WORD_S, lambda: process.do(lambda: process.hear(word)))

    def signal(self, number: int, signum: int) -> None:
        if number in self.processes:
            self.processes[number].signal(signum)

    def _fork(self, number: int, world: World) -> None:
        if self.is_gone:
            return
        process = self._make(number, world, lambda word: self._say_later(number, word))
        process.on_end = lambda: self._reap(number, process)
        self.processes[number] = process
        self._tell(Started(number))
        process.do(process.live)
        for word in self._unborn.pop(number):
            self.say(number, word)

    def _say_later(self, number: int, word: Told) -> None:
        self._timeline.after(WORD_S, lambda: None if self.is_gone else self._tell(Said(number, word)))

    def _reap(self, number: int, process: SimProcess) -> None:
        def told() -> None:
            if self.is_gone:
                return
            assert process.exit_code is not None
            self._tell(Ended(process=number, exit_code=process.exit_code))

        # Words travel faster than the news of an end, as on a real host.
        self._timeline.after(WORD_S + self._timeline.dice.uniform(*REAP_S), told)
