"""The supervisor: drives the machine that decides about a run, and carries out what it asks for."""

from __future__ import annotations

import json
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from shoal.comm.words import ScaleAnswered
from shoal.errors import LaunchError
from shoal.launch.chaos import Timetable
from shoal.launch.control import ControlSocket
from shoal.launch.diary import Diary
from shoal.launch.engine import Engine, Newcomers, OpenEngine
from shoal.launch.inside import refuse_inside
from shoal.launch.local import LocalEngine
from shoal.launch.machine import SupervisorMachine
from shoal.launch.messages import (
    Answer,
    Deaf,
    Emit,
    Ended,
    HostFailed,
    HostLost,
    Input,
    LetGo,
    MeasureLoad,
    Output,
    Said,
    Say,
    Sight,
    Signal,
    StacksTaken,
    Started,
    StartProcess,
    TakeStacks,
    WantHosts,
)
from shoal.launch.owner import ZygoteProcess
from shoal.launch.party import HostParty
from shoal.launch.requests import Requests
from shoal.launch.scaling import BEGUN, refusal
from shoal.launch.stacks import write_stacks
from shoal.launch.worlds import plan_worlds, servers_of
from shoal.observe.events import Event
from shoal.observe.happenings import Warned
from shoal.spec import Cluster, Job
from shoal.spec.vocabulary import Purpose

if TYPE_CHECKING:
    from shoal.launch.remote.adoption import Adoption


class Supervisor:
    """Runs one job, once. One loop, no threads: what happens goes into the machine, what it asks for is done."""

    def __init__(
        self,
        job: Job,
        on_event: Callable[[Event], None],
        engine: Engine | None = None,
        *,
        hang_timeout_s: float | None = None,
        timetable: Timetable | None = None,
        requests: Requests | None = None,
        head: Mapping[str, Any] | None = None,
        adoption: Adoption | None = None,
    ) -> None:
        """`requests`: where the run is asked for something; by default it heeds signals alone. `head`: what
        whoever goes on in this one's place must know. `adoption`: in whose place this one goes on."""
        refuse_inside(job.purpose)
        if adoption is None:
            now = time.monotonic()
            self.machine = SupervisorMachine(job, now, hang_timeout_s=hang_timeout_s, timetable=timetable)
        else:
            self.machine = adoption.machine
        self._adoption = adoption
        self._diary = Diary(self.machine, head or {})
        self._job = job
        self._on_event = on_event
        self._engine = engine or LocalEngine()
        self._requests = requests
        self._party: HostParty
        self._newcomers: Newcomers | None = None
        self._control: ControlSocket | None = None

    def run(self) -> dict[str, Any]:
        """Run the job to its end; the results of its first worker, and what the coordinator counted."""
        with selectors.DefaultSelector() as selector, ExitStack() as at_end:
            if self._requests is None:
                self._requests = at_end.enter_context(Requests())
            if self._adoption is None:
                self._reserve(selector, at_end)
            else:
                self._go_on(self._adoption, selector, at_end)
            self._carry_out()
            self._open_control(at_end)
            for source in (self._requests, self._control):
                if source is not None:
                    selector.register(source, selectors.EVENT_READ)
            while True:
                self._diary.act()
                self._carry_out()
                if (over := self.machine.over) is not None:
                    break
                selector.select(self._seconds_to_deadline())
                for news in self._collect(self._requests):
                    self._take(news)
        if over.error is not None:
            raise over.error
        return over.results

    def _reserve(self, selector: selectors.BaseSelector, at_end: ExitStack) -> None:
        """Have hosts, and plan who goes where on them."""
        job = self._job
        if servers_of(job) and not job.run_dir:
            # A coordinator's memory outlives it, so that its successor can go on.
            scratch = at_end.enter_context(TemporaryDirectory(prefix="shoal-"))
            job = replace(job, options={**job.options, "scratch": scratch})
        hosts = self._engine.reserve(job)
        if isinstance(self._engine, OpenEngine):
            self._newcomers = self._engine.newcomers()
            at_end.callback(self._newcomers.close)
            selector.register(self._newcomers, selectors.EVENT_READ)
        self._party = HostParty(hosts, selector)
        at_end.callback(self._diary.close)  # After the hosts: until then another could go on with them.
        at_end.callback(self._party.close)
        facts = [host.facts for host in hosts]
        self._diary.open(job, hosts, self._engine)
        self._diary.begin(plan_worlds(job, facts), facts)

    def _go_on(self, adoption: Adoption, selector: selectors.BaseSelector, at_end: ExitStack) -> None:
        """Have the hosts of a supervisor that is gone, and do what it has not done any more."""
        self._party = HostParty.of_adopted(adoption.hosts, adoption.known.host_of, selector)
        at_end.callback(self._diary.close)
        at_end.callback(self._party.close)
        self._diary.go_on(adoption)
        for number, host in adoption.hosts.items():
            for output in adoption.known.asked.get(number, [])[host.received :]:
                self._do(output)
        self.machine.outputs.extendleft(reversed(adoption.known.left))
        for number, text in adoption.missing.items():
            self._take(HostLost(number, text))

    def _take(self, news: Input) -> None:
        host = self._party.host_of(news.process) if isinstance(news, Started | Said | Ended | Deaf) else -1
        self._diary.take(news, host)

    def _open_control(self, at_end: ExitStack) -> None:
        if self._job.run_dir and self.machine.over is None:
            self._control = ControlSocket(self._job.run_dir)
            at_end.callback(self._control.close)

    def _seconds_to_deadline(self) -> float | None:
        deadlines = (self._diary.next_deadline(), self._party.next_deadline())
        deadline = min((one for one in deadlines if one is not None), default=None)
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _collect(self, requests: Requests) -> Iterator[Input]:
        # First, for a signal to all processes at once ends workers that were to be asked to stop.
        yield from requests.take()
        yield from self._party.collect()
        if self._newcomers is not None:
            for host in self._newcomers.collect():
                self._diary.note_host(host)
                yield self._party.add(host)
        if self._control is not None:
            yield from self._control.collect()

    def _carry_out(self) -> None:
        """Do what the machine asks for; what follows from the answers is asked for, too."""
        while self.machine.outputs:
            try:
                answer = self._do(self.machine.outputs.popleft())
            except LaunchError as error:
                answer = HostFailed(str(error))
            if answer is not None:
                self._take(answer)

    def _do(self, output: Output) -> Input | None:
        match output:
            case StartProcess():
                return self._party.start(output.process, output.world)
            case Say():
                self._party.say(output.process, output.word)
            case Signal():
                self._party.signal(output.process, output.signum)
            case Emit():
                self._emit(output)
            case Answer():
                self._reply(output.request, output.answer)
            case WantHosts():
                self._have_come(output)
            case LetGo():
                return self._party.let_go(output.host)
            case TakeStacks():
                sights = self._party.look_into(output.names)
                return StacksTaken(sights, self._keep(sights, output))
            case MeasureLoad():
                return self._party.measure_load()
        return None

    def _reply(self, request: int, answer: ScaleAnswered) -> None:
        source: Requests | ControlSocket | None = self._requests if request < 0 else self._control
        assert source is not None
        source.reply(request, answer)

    def _have_come(self, wanted: WantHosts) -> None:
        """Have more hosts come; they are there when they have joined."""
        try:
            if self._newcomers is None:
                raise LaunchError("This run's hosts stay the same from the first step to the last.")
            self._newcomers.invite(wanted.count)
            answer = ScaleAnswered(text=BEGUN)
        except LaunchError as error:
            answer = refusal(str(error))
        if wanted.request is not None:
            self._reply(wanted.request, answer)

    def _emit(self, told: Emit) -> None:
        self._on_event(Event(told.what, told.rank))
        self._diary.note_told(told.what)

    def _keep(self, sights: dict[int, Sight], asked: TakeStacks) -> str:
        """Write the stacks to the run folder, where there is one; the file's path."""
        named = [(asked.names[process], sight.stacks) for process, sight in sights.items() if sight.stacks]
        if not self._job.run_dir or not named:
            return ""
        try:
            return str(write_stacks(Path(self._job.run_dir), asked.step, named))
        except LaunchError as error:
            # The hung one must end all the same.
            self._emit(Emit(Warned(text=f"the stacks could not be kept: {error}")))
            return ""


def run_job(job: Job, on_event: Callable[[Event], None], zygote: ZygoteProcess | None = None) -> dict[str, Any]:
    """Run a job on this host to its end; its results."""
    return Supervisor(job, on_event, LocalEngine(zygote)).run()


def inspect_task(
    job: Job, folder: Path, zygote: ZygoteProcess | None, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the job's task is made of: found out in a process of its own, which leaves it in this folder."""
    inspection = Job(
        target=job.target,
        args=job.args,
        purpose=Purpose.INSPECT,
        cluster=Cluster(workers=1, threads=job.cluster.threads_per_worker),
        overrides=job.overrides,
        run_dir=str(folder),
        options=dict(options or {}),
    )
    run_job(inspection, lambda event: None, zygote)
    found: dict[str, Any] = json.loads((folder / "inspection.json").read_text(encoding="utf-8"))
    return found
