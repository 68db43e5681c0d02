"""A client of somebody's cluster, in a process of its own: Ray, Spark.

Their libraries start threads, take over signals, and may wait for minutes where nobody answers. None of that
happens in a supervisor: it asks a process that it can end, over a channel.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from shoal.comm.channel import Channel
from shoal.comm.words import understood
from shoal.errors import CommError, Interrupted, LaunchError, SpecError
from shoal.launch.engines.client_words import (
    FROM_CLIENT,
    AgentOver,
    AgentUnwanted,
    ClientDismissed,
    ClientFailed,
)
from shoal.spec.told import Told

_LEAVE_S = 10.0
_KNOCK_S = 5.0
_LOOK_EVERY_S = 0.2

W = TypeVar("W", bound=Told)


class ClientBody(Protocol):
    """What a client runs in."""

    def has_ended(self, within_s: float) -> bool:
        """Whether it has, or does so in time."""

    def kill(self) -> None:
        """End it, where that can be done from outside."""

    def last_words(self) -> str:
        """What is known of its end."""


class ClientProcess:
    """A process that a module is."""

    def __init__(self, module: str, channel: Channel) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it is read as long as the process lives
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(channel.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=[channel.fileno()],
            start_new_session=True,
        )
        channel.close()

    def has_ended(self, within_s: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with status {self._process.wait(_LEAVE_S)}."


class ClientThread:
    """A thread of this process, for a client of what this process has connected with already."""

    def __init__(self, serve: Callable[[Channel], None], channel: Channel) -> None:
        self._failure = ""
        self._thread = threading.Thread(
            target=self._run, args=(serve, channel), name="shoal-cluster-client", daemon=True
        )
        self._thread.start()

    def has_ended(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def kill(self) -> None:
        pass  # Nobody can. It ends when it hears that nobody wants it.

    def last_words(self) -> str:
        return self._failure or "its thread has ended."

    def _run(self, serve: Callable[[Channel], None], channel: Channel) -> None:
        try:
            serve(channel)
        except Exception as error:  # Told by whoever waits for this client.
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            channel.close()


class ClusterClient:
    """The supervisor's end. The client ends when it is dismissed, or has lost its supervisor and all agents."""

    def __init__(self, what: str, channel: Channel, body: ClientBody) -> None:
        self._what = what
        self._channel = channel
        self._body = body
        self._over: dict[str, str] = {}
        """By name: why an agent has ended."""
        self._failure = ""
        self._held: set[str] = set()
        """Agents that somebody still wants."""
        self._news: list[Told] = []

    @classmethod
    def start(cls, what: str, client: str | Callable[[Channel], None]) -> ClusterClient:
        """A client of a cluster that people call `what`: a module for a process, or a function for a thread."""
        ours, theirs = Channel.pair()
        body: ClientBody = (
            ClientProcess(client, theirs) if isinstance(client, str) else ClientThread(client, theirs)
        )
        return cls(what, ours, body)

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
        if not self._is_closed:
            with suppress(CommError):
                self._channel.send(word.as_message())

    def hold(self, names: list[str]) -> list[ClientAgent]:
        """The agents that this client has started: it ends when none of them is wanted any more."""
        self._held |= set(names)
        for name in names:
            self._over.pop(name, None)  # It may have been there before.
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
        if self._is_closed:
            return
        self.say(ClientDismissed())
        if not self._body.has_ended(_LEAVE_S):
            self._body.kill()
        self._channel.close()

    def kill(self) -> None:
        """End a client of which nothing has come: one that does not answer cannot be asked."""
        self._body.kill()
        self.close()

    @property
    def _is_closed(self) -> bool:
        return self._channel.fileno() < 0

    def _hear(self, wait_s: float) -> None:
        """Take in what the client has said; wait so long where there is nothing yet."""
        if self._is_closed:
            return
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
            self._failure = self._failure or f"The client of {self._what} has failed: {self._body.last_words()}"


def knock(what: str, address: str) -> None:
    """LaunchError where nobody listens at an address that names a port: their libraries try for minutes."""
    found = urlsplit(address if "://" in address else f"//{address}")
    try:
        if found.hostname and found.port:
            socket.create_connection((found.hostname, found.port), _KNOCK_S).close()
    except ValueError:
        raise SpecError(f"{address} is no address; write it as HOST:PORT.") from None
    except OSError as error:
        raise LaunchError(f"Nobody listens for {what} ({error.strerror or error}); see whether it runs.") from None


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
