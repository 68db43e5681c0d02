"""A machine that stands where another stood, by all that was told to that one. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.launch.journal import JournalEntry, is_noise
from shoal.launch.machine import SupervisorMachine
from shoal.launch.messages import Emit, HostLost, MeasureLoad, Output, Say, Signal, StartProcess, TakeStacks


@dataclass
class Recollection:
    """What is known of a run whose supervisor is gone."""

    heard: Counter[int] = field(default_factory=Counter)
    """By host: how many of the things that it told are known."""
    asked: dict[int, list[StartProcess | Say | Signal]] = field(default_factory=dict)
    """By host: all that was to be asked of it, in order; how much of it came there, the host knows."""
    host_of: dict[int, int] = field(default_factory=dict)
    """By process: the number of its host."""
    lost: set[int] = field(default_factory=set)
    """Hosts that were lost before."""
    left: deque[Output] = field(default_factory=deque)
    """What was not done, or perhaps not, of all that is not for a host alone."""


def recall(machine: SupervisorMachine, entries: Iterable[JournalEntry]) -> Recollection:
    """Let a fresh machine go through what another was told; what that one did is not done again."""
    found, done, told = Recollection(), 0, 0
    outputs: list[Output] = []
    machine.is_recalling = True
    for entry in entries:
        machine.crew.note_progress(entry.top_step)
        match entry.what:
            case "begin":
                worlds, hosts = entry.value
                machine.begin(worlds, hosts, entry.now)
            case "take":
                machine.take(entry.value, entry.now)
                if isinstance(entry.value, HostLost):
                    found.lost.add(entry.value.host)
            case "act":
                machine.act(entry.now)
            case "hung":
                machine.recall_hang(entry.value, entry.now)
            case "did":
                done = entry.value
        if entry.host >= 0:
            found.heard[entry.host] = max(found.heard[entry.host], entry.count)
        while machine.outputs:
            outputs.append(machine.outputs.popleft())
    machine.is_recalling = False
    for output in outputs:
        match output:
            case StartProcess():
                found.host_of[output.process] = output.world.host_number
                found.asked.setdefault(output.world.host_number, []).append(output)
            case Say() | Signal():
                found.asked.setdefault(found.host_of[output.process], []).append(output)
            case Emit() if not is_noise(output.what):
                told += 1
                if told > done:
                    found.left.append(output)
    # A question is left where its answer has not come: the last of its kind at most.
    if machine.waits_for_stacks:
        found.left.append(next(one for one in reversed(outputs) if isinstance(one, TakeStacks)))
    elif outputs and isinstance(outputs[-1], MeasureLoad):
        found.left.append(outputs[-1])
    return found
