"""Going on with a run whose supervisor is gone: its hosts wait for another, who has the run folder's lock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.comm.host_words import FROM_HOSTS, HostAdopted, HostClaimed
from shoal.comm.security import RunKey
from shoal.comm.tcp.stream_channel import StreamChannel
from shoal.comm.words import understood
from shoal.errors import CommError
from shoal.launch.chaos import Timetable
from shoal.launch.journal import RunPast, read_journal
from shoal.launch.machine import SupervisorMachine
from shoal.launch.recalling import Recollection, recall
from shoal.launch.remote.remote_host import RemoteHost
from shoal.observe.events import Event
from shoal.observe.happenings import StepsTaken
from shoal.observe.jsonl import read_events
from shoal.spec.host_facts import HostFacts

_CALL_S = 5.0


@dataclass
class Adoption:
    """A run as its last supervisor left it, and those of its hosts that are there."""

    past: RunPast
    machine: SupervisorMachine
    timetable: Timetable
    known: Recollection
    hosts: dict[int, RemoteHost]
    """By number."""
    missing: dict[int, str]
    """By number: why a host that was there cannot be reached."""
    clock_offset_s: float
    """By how much the machine's clock is ahead of this process's."""

    @cached_property
    def told(self) -> list[Event]:
        """What was told of this attempt."""
        return told_since(self.past)

    def abandon(self) -> None:
        """Hang up; the hosts wait for somebody else."""
        for host in self.hosts.values():
            host.leave()


def adopt(path: Path) -> Adoption | None:
    """Take over what the journal at this path tells of; None where there is nothing to be taken over any more."""
    past = read_journal(path)
    if past is None or not past.entries:
        return None
    timetable = Timetable.of(past.job)
    machine = SupervisorMachine(past.job, past.entries[0].now, timetable=timetable)
    known = recall(machine, past.entries)
    if machine.over is not None:
        return None
    hosts, missing = _call_all(past, known)
    if not hosts:
        return None
    _catch_up(machine, past)
    passed_s = max(past.head["begun_at"] + time.time() - past.head["begun_wall"], past.entries[-1].now)
    return Adoption(past, machine, timetable, known, hosts, missing, passed_s - time.monotonic())


def _catch_up(machine: SupervisorMachine, past: RunPast) -> None:
    """How far the run is, of which a journal says little: what was told says more."""
    for event in told_since(past):
        if isinstance(event.what, StepsTaken) and event.what.steps:
            step, loss = event.what.steps[-1]
            machine.crew.note_progress(int(step))
            machine.crew.last_loss = machine.crew.last_loss if loss is None else loss


def told_since(past: RunPast) -> list[Event]:
    """What was told of the attempt that goes on."""
    return [event for event in read_events(past.job.run_dir) if event.time >= past.head["attempt_at"]]


def _call_all(past: RunPast, known: Recollection) -> tuple[dict[int, RemoteHost], dict[int, str]]:
    key = RunKey.from_text(past.head["key"])
    every = [*past.head["hosts"], *(entry.value for entry in past.entries if entry.what == "host")]
    claims = {number: claim for number, claim in enumerate(every) if number not in known.lost}
    hosts: dict[int, RemoteHost] = {}
    missing: dict[int, str] = {}
    with ThreadPoolExecutor(max(1, len(claims))) as pool:
        calls = {
            number: pool.submit(_call, claim, key, past, known.heard[number]) for number, claim in claims.items()
        }
        for number, call in calls.items():
            try:
                hosts[number] = call.result()
            except CommError as error:
                missing[number] = f"Host {claims[number]['facts']['name']} could not be taken over: {error}"
    return hosts, missing


def _call(claim: Mapping[str, Any], key: RunKey, past: RunPast, heard: int) -> RemoteHost:
    channel = StreamChannel.call(claim["door"], key, encrypt=True, timeout_s=_CALL_S)
    try:
        channel.send(HostClaimed(heard=heard).as_message())
        message = channel.receive(_CALL_S)
        word = None if message is None else understood(message, FROM_HOSTS)
        if not isinstance(word, HostAdopted):
            raise CommError(f"it does not say what it has done ({word})")
    except BaseException:
        with closing(channel):
            raise
    return RemoteHost.adopted(channel, HostFacts(**claim["facts"]), word, claim=claim, job=past.job)
