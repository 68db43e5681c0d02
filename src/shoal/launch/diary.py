"""A supervisor's way to its machine: what that is told is written down first, where somebody may need it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import DiskRefused
from shoal.launch.engine import Engine, Host
from shoal.launch.journal import Journal, JournalEntry, is_noise
from shoal.launch.machine import SupervisorMachine
from shoal.launch.messages import Emit, Input, Said
from shoal.observe.happenings import Happening
from shoal.observe.run_folder import RunFolder
from shoal.spec import Job, World
from shoal.spec.host_facts import HostFacts

if TYPE_CHECKING:
    from shoal.launch.remote.adoption import Adoption


class Diary:
    """Tells a machine what happens. On hosts that outlive their supervisor, another can tell it again."""

    def __init__(
        self,
        machine: SupervisorMachine,
        head: Mapping[str, Any],
        *,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
    ) -> None:
        """`head`: what goes before all else, for whoever goes on."""
        self._machine = machine
        self._head = head
        self._clock = clock
        self._journal = journal
        self._offset_s = 0.0
        """By how much the machine's clock is ahead of this process's, where it began in another one."""
        self._heard: Counter[int] = Counter()
        """By host: how many things it has told."""
        self._num_told = 0
        self._is_fresh = False
        """Whether something was taken since the machine has last acted."""

    def open(self, job: Job, hosts: Sequence[Host], engine: Engine) -> None:
        """Write down what happens from here on, where these hosts can be found by another supervisor."""
        if not job.run_dir or not job.cluster.is_remote or not job.cluster.grace:
            return
        from shoal.launch.remote.gathering import AgentEngine
        from shoal.launch.remote.remote_host import RemoteHost

        claims = [host.claim for host in hosts if isinstance(host, RemoteHost) and host.door]
        if not isinstance(engine, AgentEngine) or engine.key is None or len(claims) < len(hosts):
            return
        head = {"job": job.to_json(), "key": engine.key.text, "hosts": claims, **self._head}
        head |= {"begun_at": self._now, "begun_wall": time.time()}
        # Where decisions follow from how fast steps go, all of them must be known.
        is_exact = bool(job.chaos or job.cluster.hosts) or job.cluster.is_elastic
        with suppress(DiskRefused):  # Then nobody can go on in this one's place.
            self._journal = Journal.create(RunFolder(Path(job.run_dir)).journal, head, is_exact=is_exact)

    def go_on(self, adoption: Adoption) -> None:
        """The machine stands where that of another supervisor stood."""
        self._offset_s = adoption.clock_offset_s
        past, path = adoption.past, RunFolder(Path(adoption.past.job.run_dir)).journal
        self._journal = Journal.go_on(path, past.end, is_exact=past.head["is_exact"])
        self._heard = Counter({number: host.first for number, host in adoption.hosts.items()})
        self._num_told = max((entry.value for entry in past.entries if entry.what == "did"), default=0)
        self._machine.go_on(self._now)

    def begin(self, worlds: Sequence[World], hosts: Sequence[HostFacts]) -> None:
        """The first processes are to be started, on these hosts."""
        now = self._now
        self._write(JournalEntry(what="begin", now=now, value=[list(worlds), list(hosts)]))
        self._machine.begin(worlds, hosts, now)

    def take(self, news: Input, host: int = -1) -> None:
        """Something has happened; `host`: the number of the one that tells it."""
        now = self._now
        if host >= 0:
            self._heard[host] += 1
        before, top_step = len(self._machine.outputs), self._machine.crew.top_step
        self._machine.take(news, now)
        if self._matters(before) or not (isinstance(news, Said) and is_noise(news.word)):
            count = self._heard[host]
            self._write(JournalEntry(what="take", now=now, value=news, host=host, count=count, top_step=top_step))
            self._is_fresh = True

    def act(self) -> None:
        """Time has passed."""
        now, waited = self._now, self._machine.waits_for_stacks
        before = len(self._machine.outputs)
        self._machine.act(now)
        if self._is_fresh or self._matters(before):
            self._write(JournalEntry(what="act", now=now, top_step=self._machine.crew.top_step))
            self._is_fresh = False
        if self._machine.waits_for_stacks and not waited:
            self._write(JournalEntry(what="hung", now=now, value=self._machine.found_to_hang()))

    def _matters(self, before: int) -> bool:
        """Whether it has to be written down what has led to the outputs after the first so many. None of them has
        been carried out."""
        if self._journal is None or self._journal.is_exact:
            return self._journal is not None
        fresh = islice(self._machine.outputs, before, None)
        return any(not (isinstance(one, Emit) and is_noise(one.what)) for one in fresh)

    def note_host(self, host: Host) -> None:
        """One more host has come, of which the machine is about to be told."""
        if self._journal is not None:
            from shoal.launch.remote.remote_host import RemoteHost

            assert isinstance(host, RemoteHost), "they come to engines that have agents"
            self._write(JournalEntry(what="host", value=host.claim))

    def note_told(self, what: Happening) -> None:
        """Whoever watches was told this."""
        if not is_noise(what):
            self._num_told += 1
            self._write(JournalEntry(what="did", value=self._num_told))

    def next_deadline(self) -> float | None:
        """When `act` must be called at the latest, by this process's clock."""
        deadline = self._machine.next_deadline()
        return None if deadline is None else deadline - self._offset_s

    def close(self) -> None:
        """The run is over: nobody needs to know."""
        if self._journal is not None:
            self._journal.close()

    @property
    def _now(self) -> float:
        return self._clock() + self._offset_s

    def _write(self, entry: JournalEntry) -> None:
        if self._journal is not None:
            self._journal.write(entry)
