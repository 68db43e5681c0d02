"""A client of somebody's cluster, in a process of its own: Ray, Spark.

Their libraries start threads, take over signals, and may wait for minutes where nobody answers. None of that
happens in a supervisor: it asks a process that it can end, over a channel.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TypeVar

from shoal.comm.channel import Channel
from shoal.comm.words import understood
from shoal.errors import CommError, Interrupted, LaunchError
from shoal.launch.engines.client_words import (
    FROM_CLIENT,
    AgentOver,
    AgentUnwanted,
    ClientDismissed,
    ClientFailed,
)
from shoal.spec.told import Told

_LEAVE_S = 10.0
_LOOK_EVERY_S = 0.2

W = TypeVar("W", bound=Told)


class ClusterClient:
    """The supervisor's end. The process ends when it is dismissed, or has lost its supervisor and all agents."""

    def __init__(self, what: str, channel: Channel, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self._what = what
        self._channel = channel
        self._process = process
        self._errors = errors
        self._over: dict[str, str] = {}
        """By name: why an agent has ended."""
        self._failure = ""
        self._held: set[str] = set()
        """Agents that somebody still wants."""
        self._news: list[Told] = []

    @classmethod
    def start(cls, what: str, module: str) -> ClusterClient:
        """A client that a module is, of a cluster that people call this."""
        ours, theirs = Channel.pair()
        errors = tempfile.TemporaryFile()  # noqa: SIM115  it is read as long as the process lives
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        return cls(what, ours, process, errors)

    def ask(
        self,
        word: Told,
        kinds: tuple[type[W], ...],
        within_s: float,
        wants_end: Callable[[], bool] = lambda: False,
    ) -> W:
        """The answer to a word, one of these kinds; LaunchError where there is none in time."""
        self.say(word)
        deadline = time.monotonic() + within_s
        while True:
            self._hear(_LOOK_EVERY_S)
            for news in self._news:
                if isinstance(news, kinds):
                    self._news.remove(news)
                    return news
            if self._failure:
                raise LaunchError(self._failure)
            if wants_end():
                raise Interrupted("The run was stopped on request, before its hosts were there.")
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{self._what[:1].upper()}{self._what[1:]} did not answer within {within_s:.0f} s; see "
                    "whether it can be reached from here."
                )

    def say(self, word: Told) -> None:
        """Tell the client something, if it lives."""
        with suppress(CommError):
            self._channel.send(word.as_message())

    def hold(self, names: list[str]) -> list[ClientAgent]:
        """The agents that this client has started: it ends when none of them is wanted any more."""
        self._held = set(names)
        return [ClientAgent(name, self) for name in names]

    def failure_of(self, name: str) -> str | None:
        """Why an agent cannot join any more."""
        self._hear(0.0)
        return self._over.get(name) or self._failure or None

    def end_agent(self, name: str) -> None:
        """End an agent at once."""
        self.say(AgentUnwanted(name=name))
        self.let_go(name)

    def let_go(self, name: str) -> None:
        """An agent is not wanted any more; it has ended, or will by itself."""
        self._held.discard(name)
        if not self._held:
            self.close()

    def close(self) -> None:
        """End the client, and give everything back that it held."""
        if self._channel.fileno() < 0:
            return
        self.say(ClientDismissed())
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._channel.close()
        self._errors.close()

    def kill(self) -> None:
        """End a client of which nothing has come: one that does not answer cannot be asked."""
        self._process.kill()
        self.close()

    def _hear(self, wait_s: float) -> None:
        """Take in what the client has said; wait so long where there is nothing yet."""
        try:
            while (message := self._channel.receive(wait_s)) is not None:
                wait_s = 0.0
                match word := understood(message, FROM_CLIENT):
                    case AgentOver():
                        self._over[word.name] = word.text
                    case ClientFailed():
                        self._failure = word.text
                    case _:
                        self._news.append(word)
        except CommError:
            self._failure = self._failure or f"The client of {self._what} has failed: {self._last_words()}"

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"its client ended with status {self._process.wait(_LEAVE_S)}."


@dataclass
class ClientAgent:
    """An agent that a client has started."""

    name: str
    client: ClusterClient

    def failure(self) -> str | None:
        return self.client.failure_of(self.name)

    def close(self) -> None:
        self.client.let_go(self.name)

    def abandon(self) -> None:
        self.client.end_agent(self.name)
