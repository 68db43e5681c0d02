"""One simulated run, from its first process to its end; and what must be true of every one."""

from __future__ import annotations

import random
import signal
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from helpers.ps_sim.scenario import Scenario
from helpers.run_sim.faults import Fault, Kind, draw_faults, draw_host_losses, draw_storm
from helpers.run_sim.folder import SimFolder
from helpers.run_sim.placed import PlacedJob
from helpers.run_sim.processes import SimHost, SimProcess
from helpers.run_sim.served import ServedJob
from helpers.run_sim.timeline import Alarm, Timeline
from shoal.errors import Interrupted
from shoal.launch.diary import Diary
from shoal.launch.journal import Journal
from shoal.launch.machine import SupervisorMachine
from shoal.launch.messages import (
    Answer,
    Emit,
    HostLost,
    Input,
    Interrupt,
    MeasureLoad,
    Output,
    Said,
    Say,
    ScaleRequest,
    Sight,
    Signal,
    StacksTaken,
    Started,
    StartProcess,
    TakeStacks,
)
from shoal.launch.worlds import plan_worlds
from shoal.observe.happenings import Heartbeat, Saved, StateEntered, StepsTaken
from shoal.spec import Cluster, Job, World
from shoal.spec.host_facts import HostFacts

GIVES_UP_AFTER_S = 300.0
"""Longer than any patience that a run needs to end; much shorter than the coordinator's with silent members."""
TRACED = 60


class RunFailed(AssertionError):
    """A run that did not end as it must; says how to repeat it, and its last events."""


class Undone:
    """What a test may undo, to see that the simulator finds it."""

    LOCK = "lock"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a seed decides."""

    job: Job
    scenario: Scenario | None
    """Where there are servers."""
    steps: int
    save_every: int
    hosts: int
    drop: float
    faults: tuple[Fault, ...]

    @classmethod
    def draw(cls, seed: int, most_faults: int) -> Plan:
        dice = random.Random(seed)
        workers, hosts, drop = dice.randint(2, 3), dice.choice((1, 1, 2, 3)), dice.choice((0.0, 0.0, 0.02))
        kind = dice.choice(("bsp", "asp", "ssp:3", "asp", "data", "data", "data"))
        if kind == "data":
            spares, policy = dice.choice((0, 0, 1, 2)), dice.choice(("replace", "replace", "shrink"))
            job = Job(
                target="toy.py", cluster=Cluster(workers=workers, spares=spares, threads=1), on_failure=policy
            )
            scenario = None
        else:
            strategy, slots = f"ps:servers=2,sync={kind}", None if kind == "asp" else dice.choice((None, 4))
            job = Job(target="toy.py", strategy=strategy, cluster=Cluster(workers=workers, threads=1), slots=slots)
            scenario = Scenario(
                sync=kind,
                workers=workers,
                slots=slots or 0,
                steps=dice.choice((2, 4, 8, 16)),
                in_memory=dice.random() < 0.5,
                save_every=dice.choice((0, 2)) if kind == "asp" else 0,
            )
        return cls(
            job=job,
            scenario=scenario,
            steps=scenario.steps if scenario else dice.choice((3, 10, 40, 80)),
            save_every=dice.choice((2, 5)),
            hosts=hosts,
            drop=drop,
            faults=tuple(draw_faults(dice, served=scenario is not None, ranks=workers, most=most_faults)),
        )

    @classmethod
    def draw_storm(cls, seed: int) -> Plan:
        """Places change hands all the time, and nothing else happens than that their hosts are killed."""
        dice, workers, rounds = random.Random(seed), 4, 24
        job = Job(
            target="toy.py",
            cluster=Cluster(workers=workers, threads=1),
            on_failure=dice.choice(("replace", "shrink")),
            max_failures=rounds,
        )
        faults = tuple(draw_storm(dice, ranks=workers, rounds=rounds))
        return cls(job=job, scenario=None, steps=1500, save_every=100, hosts=1, drop=0.0, faults=faults)

    @classmethod
    def draw_spread(cls, seed: int) -> Plan:
        """Servers and workers on several hosts without common memory, of which some are lost."""
        dice = random.Random(seed)
        hosts, workers, sync = dice.randint(2, 4), dice.randint(2, 4), dice.choice(("bsp", "asp", "ssp:3"))
        steps, servers = dice.choice((4, 8, 16)), dice.randint(2, hosts)
        scenario = Scenario(sync=sync, workers=workers, servers=servers, shards=servers, steps=steps)
        job = Job(
            target="toy.py",
            strategy=f"ps:servers={servers},sync={sync}",
            cluster=Cluster(workers=workers, threads=1, on=f"local:{hosts}"),
            max_failures=100,  # all that was on a lost host counts
        )
        drop, faults = dice.choice((0.0, 0.02)), tuple(draw_host_losses(dice, hosts=hosts))
        return cls(job=job, scenario=scenario, steps=steps, save_every=0, hosts=hosts, drop=drop, faults=faults)


def simulate(
    seed: int, *, most_faults: int = 5, undone: str = "", storm: bool = False, spread: bool = False
) -> Counter[str]:
    """The run of a seed; where it could not come to its end, what goes on in its folder must. What struck."""
    plan = Plan.draw_storm(seed) if storm else Plan.draw_spread(seed) if spread else Plan.draw(seed, most_faults)
    dice = random.Random(f"{seed} in detail")
    folder = SimFolder(dice)
    folder.has_lock = undone != Undone.LOCK
    run = SimRun(
        plan, f"simulate({seed}, most_faults={most_faults}, storm={storm}, spread={spread})", dice, folder
    )
    run.go()
    if run.is_orphaned or (run.machine.over is not None and run.machine.over.error is not None):
        folder.is_failing = False
        again = SimRun(replace(plan, faults=()), run.name, dice, folder)
        again.go()
        again.expect_success()
    return run.struck


@dataclass
class SimRun:
    """The supervisor's machine, hosts, and a job's processes."""

    plan: Plan
    name: str
    """How to repeat it."""
    dice: random.Random
    folder: SimFolder
    struck: Counter[str] = field(default_factory=Counter)
    trace: deque[str] = field(default_factory=lambda: deque(maxlen=TRACED))
    journal: Journal | None = None
    """Where all that the machine is told is written down."""

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.dice)
        self.machine = SupervisorMachine(self.plan.job, 0.0)
        self.diary = Diary(self.machine, {}, clock=lambda: self.timeline.now, journal=self.journal)
        self.diary.begin(_worlds(self.plan.job, self._facts), self._facts)
        self.job = self._make_job()
        self.hosts = [SimHost(self.timeline, self._make, self._happen) for _ in range(self.plan.hosts)]
        self.promised: set[int] = set()
        """Checkpoints that were told to be there."""
        self._waiting = list(self.plan.faults)
        self._cues: Counter[tuple[Fault, str]] = Counter()
        self._alarm = Alarm(self.timeline, self.machine.next_deadline, self._act)
        self.is_orphaned = False
        """The supervisor was killed. The kernel gave back what it had locked."""
        self._failing_disks = 0
        self._at_birth: list[Fault] = []

    def _make_job(self) -> ServedJob | PlacedJob:
        if self.plan.scenario is not None:
            return ServedJob(self.plan.scenario, self.timeline, self.plan.drop)
        places = self.plan.job.cluster.places
        return PlacedJob(places, self.plan.steps, self.timeline, self.folder, self.plan.save_every)

    # The loop, as `Supervisor.run`.

    def go(self) -> None:
        """Run to the end, and check what must be true of it."""
        try:
            assert self.folder.take("first"), "The folder of a run that had ended could not be had."
            self._give_cue("begin")
            self._carry_out()
            self._alarm.set()
            while self.machine.over is None and not self.is_orphaned:
                self.timeline.step()
                assert self.timeline.now < GIVES_UP_AFTER_S, f"Not over after {GIVES_UP_AFTER_S:g} s."
            self.folder.give_back("first")
            if not self.is_orphaned:
                self._check()
        except AssertionError as error:
            lines = [f"{error}", f"Repeat: {self.name}", f"{self.plan}", *self.trace]
            raise RunFailed("\n".join(lines)) from error

    def _happen(self, news: Input) -> None:
        if self.machine.over is not None:
            return
        if isinstance(news, Said):
            self._note_word(news)
        elif not isinstance(news, Started):
            self._note(f"{news}")
        self.diary.take(news)
        self._act()

    def _act(self) -> None:
        self.diary.act()
        self._carry_out()
        self._alarm.set()

    def _carry_out(self) -> None:
        while self.machine.outputs:
            self._do(self.machine.outputs.popleft())

    def _do(self, output: Output) -> None:
        match output:
            case StartProcess(process, world):
                self._check_start(process, world)
                self._note(f"start {process}: {world.role} {world.global_rank}")
                self._host_of(process).start(process, world)
                self._give_cue(f"start {world.role}")
            case Say(process, word):
                self._note(f"to {process}: {word}")
                self._host_of(process).say(process, word)
            case Signal(process, signum):
                self._note(f"signal {signum} to {process}")
                self._host_of(process).signal(process, signum)
            case Emit(what, rank):
                if not isinstance(what, Heartbeat | StepsTaken | StateEntered):
                    self._note(f"event of {rank}: {what}")
            case TakeStacks(names):
                sights = {number: Sight() for number in names}
                self.timeline.after(0.05, lambda: self._happen(StacksTaken(sights)))
            case MeasureLoad() | Answer():
                pass

    @property
    def _facts(self) -> tuple[HostFacts, ...]:
        """The hosts as the supervisor knows them: those that share one memory are one to it."""
        count = self.plan.hosts if self.plan.job.cluster.is_spread else 1
        return tuple(HostFacts(name=f"host-{number}", port=4000) for number in range(count))

    def _host_of(self, number: int) -> SimHost:
        if self.plan.job.cluster.is_spread:
            return self.hosts[self.machine.crew.hands[number].host]
        return self.hosts[number % len(self.hosts)]

    def _make(self, number: int, world: World, tell: Any) -> SimProcess:
        process = self.job.make(number, world, tell)
        for fault in [one for one in self._at_birth if one.role == world.role]:
            self._at_birth.remove(fault)
            if self.job.may_lose(process) or self.timeline.now < 1.0:
                self._strike(fault)
                process.later(self.dice.uniform(0.0, 0.02), lambda: process.end(-signal.SIGKILL))
        return process

    # What happens to it.

    def _note_word(self, said: Said) -> None:
        word = said.word
        if isinstance(word, Saved):
            self.promised.add(int(word.path))
        if not isinstance(word, Heartbeat | StepsTaken):
            self._note(f"from {said.process}: {str(word)[:200]}")
        if not isinstance(word, Heartbeat):
            self._give_cue(word.state if isinstance(word, StateEntered) else word.kind_name)

    def _give_cue(self, cue: str) -> None:
        for fault in [one for one in self._waiting if one.cue == cue]:
            self._cues[fault, cue] += 1
            if self._cues[fault, cue] > fault.skip:
                self._waiting.remove(fault)
                self.timeline.after(fault.delay_s, lambda fault=fault: self._let_happen(fault))

    def _let_happen(self, fault: Fault) -> None:
        if self.machine.over is not None:
            return
        match fault.kind:
            case Kind.KILL | Kind.STOP:
                self._hit(fault)
            case Kind.STILLBORN:
                self._at_birth.append(fault)
            case Kind.LOSE_HOST:
                self._lose_host(fault)
            case Kind.PAUSE_HOST:
                self._strike(fault)
                for process in self.hosts[fault.number % len(self.hosts)].processes.values():
                    self._stop(process, fault.seconds)
            case Kind.BAD_DISK:
                self._strike(fault)
                self._fail_disk(+1)
                self.timeline.after(fault.seconds, lambda: self._fail_disk(-1))
            case Kind.SCALE:
                self._strike(fault)
                wish = {"servers" if self.plan.scenario and fault.role != "worker" else "workers": fault.number}
                self._happen(ScaleRequest(number=1, **wish))
            case Kind.INTERRUPT:
                self._strike(fault)
                self._happen(Interrupt())
            case Kind.ORPHAN:
                self._strike(fault)
                self.is_orphaned = True
            case Kind.RIVAL:
                self._strike(fault)
                assert not self.folder.take("second"), "Two supervisors have one run folder."

    def _lose_host(self, fault: Fault) -> None:
        """At once, or as soon as nothing is lost with it for good."""
        assert isinstance(self.job, ServedJob)
        if not self.job.network.outlives(fault.number):
            self.timeline.after(0.05, lambda: self._let_happen(fault))
            return
        self._strike(fault)
        self.hosts[fault.number].lose()
        self.timeline.after(0.01, lambda: self._happen(HostLost(fault.number, "It does not answer.")))

    def _hit(self, fault: Fault) -> None:
        for host in self.hosts:
            for process in host.processes.values():
                if not process.is_alive or (process.role, process.rank) != (fault.role, fault.rank):
                    continue
                if self.job.may_lose(process):
                    self._strike(fault)
                    if fault.kind is Kind.STOP:
                        self._stop(process, fault.seconds)
                    else:
                        process.signal(signal.SIGKILL)
                    return

    def _stop(self, process: SimProcess, seconds: float) -> None:
        process.signal(signal.SIGSTOP)
        self.timeline.after(seconds, lambda: process.signal(signal.SIGCONT))

    def _fail_disk(self, change: int) -> None:
        self._failing_disks += change
        self.job.fail_disk(self._failing_disks > 0)

    def _strike(self, fault: Fault) -> None:
        self.struck[fault.kind.value] += 1
        self._note(f"FAULT {fault}")

    def _note(self, text: str) -> None:
        self.trace.append(f"{self.timeline.now:9.4f} {text}")

    # What must be true.

    def _check_start(self, process: int, world: World) -> None:
        """Nobody is started beside a worker that lives, or for one that has done its work, unless it was
        sent away and is wanted again."""
        seat = world.role, world.global_rank
        for hand in self.machine.crew.hands[:process]:
            if world.role == "worker" and (hand.role, hand.global_rank) == seat and self.plan.scenario:
                assert not hand.is_alive, f"Two processes for {seat}."
                may_follow = self.machine.is_stopping or hand.dismissed_at is not None
                assert not hand.is_done or may_follow, f"{seat} had done its work, and is started again."

    def _check(self) -> None:
        over = self.machine.over
        assert over is not None
        if over.error is None:
            self.job.check(over.results)
            assert not self._left_running(), f"Still running after a clean end: {self._left_running()}"
        elif isinstance(over.error, Interrupted):
            assert self.struck["interrupt"], "Nobody asked for the end."
        else:
            assert str(over.error).strip(), "A failure without a sentence."
            assert self.job.may_fail, f"The run failed, though nothing that happened can end it: {over.error}"
        missing = self.promised - self.folder.checkpoints - self.folder.torn
        assert not missing, f"Checkpoints were told to be there and are not: {missing}"

    def expect_success(self) -> None:
        """It must have come to its end."""
        over = self.machine.over
        if over is None or over.error is not None:
            raise RunFailed(f"What went on did not end well: {over}\nRepeat: {self.name}\n{self.plan}")

    def _left_running(self) -> Sequence[str]:
        """Processes that nobody waits for: spares wait until they are killed with the run."""
        return [
            f"{process.role} {process.rank}"
            for host in self.hosts
            for process in host.processes.values()
            if process.is_alive and not process.is_stopped and process.role != "spare"
        ]


def _worlds(job: Job, hosts: tuple[HostFacts, ...]) -> list[World]:
    return _planned(job.strategy, job.cluster.workers, job.cluster.spares, hosts)


@cache
def _planned(strategy: str, workers: int, spares: int, hosts: tuple[HostFacts, ...]) -> list[World]:
    cluster = Cluster(workers=workers, spares=spares, threads=1)
    return plan_worlds(Job(target="toy.py", strategy=strategy, cluster=cluster), hosts)
