"""Who calls at the door of a run, before it is known which host that is."""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

from shoal.comm.host_words import FROM_HOSTS, HostJoined
from shoal.comm.tcp.stream_channel import ChannelDoor, StreamChannel
from shoal.comm.words import understood
from shoal.errors import CommError
from shoal.launch.this_host import versions_here
from shoal.spec.host_facts import HostFacts


class Arrival(NamedTuple):
    """A host that has said what it is."""

    channel: StreamChannel
    facts: HostFacts
    versions: dict[str, str]
    door: str
    """Where its agent listens for another supervisor."""


class Callers:
    """Who has come in and not yet said who it is."""

    def __init__(self, door: ChannelDoor) -> None:
        self._door = door
        self._waiting: list[StreamChannel] = []

    def take(self) -> list[Arrival]:
        """Those who have said so by now. Never waits."""
        self._waiting += self._door.collect()
        return [found for caller in list(self._waiting) if (found := self._hear(caller)) is not None]

    def close(self) -> None:
        """Hang up on all of them."""
        for caller in self._waiting:
            caller.close()

    def _hear(self, caller: StreamChannel) -> Arrival | None:
        try:
            message = caller.poll()
        except CommError:
            self._waiting.remove(caller)
            caller.close()
            return None
        if message is None:
            return None
        self._waiting.remove(caller)
        word = understood(message, FROM_HOSTS)
        if not isinstance(word, HostJoined):
            caller.close()
            return None
        values = word.plain()
        facts = HostFacts(**{one.name: values[one.name] for one in fields(HostFacts) if one.name in values})
        return Arrival(caller, facts, word.versions, word.door)


def other_versions(name: str, versions: dict[str, str]) -> str | None:
    """In which version a host differs from this one, in a sentence."""
    for program, here in versions_here().items():
        if (there := versions.get(program, "none")) != here:
            return f"Host {name} has {program} {there}, but this one has {here}; install the same on all hosts."
    return None
