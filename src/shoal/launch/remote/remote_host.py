"""A host whose processes an agent starts: what is asked goes over one connection, and what happens comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from shoal.comm.host_words import (
    FROM_HOSTS,
    BeatAnswered,
    FileGone,
    FilePiece,
    FilesLacking,
    HostAdopted,
    HostBeat,
    HostBroken,
    HostDismissed,
    HostMissed,
    HostRefused,
    HostWelcomed,
    LoadSeen,
    LoadWanted,
    LogPiece,
    ProcessDeaf,
    ProcessEnded,
    ProcessSaid,
    ProcessSignalled,
    ProcessStarted,
    ProcessTold,
    ProcessWanted,
    ScriptPrinted,
    StacksSeen,
    StacksWanted,
)
from shoal.comm.tcp.stream_channel import StreamChannel
from shoal.comm.words import FROM_PROCESSES, Garbled, understood
from shoal.errors import LaunchError
from shoal.launch.messages import Deaf, Ended, Load, News, Said, Sight, Started
from shoal.launch.remote.incoming import IncomingFiles
from shoal.launch.remote.line import HostLine
from shoal.launch.remote.pieces import KEPT, cut_folder
from shoal.launch.remote.starting import AgentHandle
from shoal.spec import Job, World
from shoal.spec.host_facts import HostFacts
from shoal.spec.told import Told, by_kind

LEASE_S = 10.0
"""How long a host goes on without hearing from its supervisor."""
_GRACE_S = 2.0
"""How much longer the supervisor waits: by then the processes over there have ended."""
_ANSWER_S = 2.0
_LEAVE_S = 5.0
_SEND_S = 60.0
"""How long a host may take in nothing of a file."""
_MOST_UNSENT = 8
"""Words that may wait for the socket before another piece of a file is read."""
_SAID = {**FROM_PROCESSES, **by_kind(Garbled)}

Answer = TypeVar("Answer", StacksSeen, LoadSeen, FilesLacking)


class RemoteHost:
    """The supervisor's end. `agent`: that of this host, where it was started from here."""

    def __init__(
        self,
        channel: StreamChannel,
        facts: HostFacts,
        *,
        agent: AgentHandle | None = None,
        lease_s: float = LEASE_S,
        away: list[AgentHandle] | None = None,
        door: str = "",
    ) -> None:
        """`away`: where its agent is left if the host is lost and it lives, so that it can come back. `door`:
        where that can be called by another supervisor."""
        self.facts = facts
        self.door = door
        self.show: Callable[[bytes], None] | None = None
        """Takes what scripts print there."""
        self.first = self.received = 0
        """Of an adopted one: how much it had told before, and how much was asked of it."""
        self._given = self._handled = 0
        self._line = HostLine(channel, FROM_HOSTS)
        self._lease_s = lease_s
        self._agent = agent
        self._away = away
        self._incoming: IncomingFiles | None = None
        """Where its files come to, if it has not the same disk."""
        self._news: list[News] = []
        self._answer: Told | None = None
        self._is_closed = False
        self._broken = ""
        """Why the host is of no use any more."""
        self._is_missed = False
        """Whether that is because it is not heard."""

    @classmethod
    def adopted(
        cls, channel: StreamChannel, facts: HostFacts, word: HostAdopted, *, claim: Mapping[str, Any], job: Job
    ) -> RemoteHost:
        """One that took part in the run for a supervisor that is gone."""
        host = cls(channel, facts, lease_s=claim["lease_s"], door=claim["door"])
        host.first = host._given = host._handled = word.first
        host.received = word.received
        if word.is_apart:
            host._incoming = IncomingFiles(job)
        return host

    @property
    def claim(self) -> dict[str, Any]:
        """What another supervisor must know to go on with this host, besides the run's key."""
        return {"facts": asdict(self.facts), "door": self.door, "lease_s": self._lease_s}

    def leave(self) -> None:
        """Hang up, and let it wait for another supervisor."""
        self._line.close()

    def welcome(self, job: Job, moved: dict[str, str]) -> None:
        """Let the host take part in a run. `moved`: by path here, where in its own folder it has what was sent."""
        if job.run_dir in moved:
            self._incoming = IncomingFiles(job)
        self._line.send(
            HostWelcomed(
                job=job.to_json(),
                folder=os.getcwd(),
                lease_s=self._lease_s,
                grace_s=job.cluster.grace if job.run_dir else 0.0,  # without a folder nobody could find it
                moved=moved,
            )
        )

    def send_piece(self, piece: FilePiece) -> None:
        """Send a part of a file. Waits while much is on its way."""
        self._line.send(piece)
        self._wait(_SEND_S, lambda: self._line.num_unsent < _MOST_UNSENT)

    @property
    def is_apart(self) -> bool:
        """Whether its run folder is not on the supervisor's disk."""
        return self._incoming is not None

    def keep_copy(self, checkpoint: Path) -> None:
        """Send a checkpoint, behind all that is to be said."""
        with suppress(OSError):  # It has been removed already, for others that are newer.
            self._line.send_behind(cut_folder(checkpoint, f"{KEPT}/{checkpoint.name}"))

    def refuse(self, text: str) -> None:
        """Say why it cannot."""
        self._line.send(HostRefused(text=text))

    def fileno(self) -> int:
        """The connection."""
        return self._line.fileno()

    def start(self, process: int, world: World) -> None:
        """Ask the agent for one more process."""
        self._line.send(ProcessWanted(process=process, world=asdict(world)))

    def collect(self) -> list[News]:
        """What the agent has told since the last call."""
        self._handled = self._given  # What was told last time has been taken note of.
        self._hear()
        news, self._news = self._news, []
        self._given += len(news)
        if not news and self._line.silent_s > self._lease_s + _GRACE_S:
            self._miss(f"nothing was heard of it for {self._line.silent_s:.0f} s")
        if not news and self._broken:
            raise LaunchError(f"Host {self.facts.name} ({self.facts.address}) is gone: {self._broken}.")
        return news

    def say(self, process: int, word: Told) -> None:
        """Say something to a process over there."""
        self._line.send(ProcessTold(process=process, word=word.as_message()))

    def signal(self, process: int, signum: int) -> None:
        """Send a signal to a process over there."""
        self._line.send(ProcessSignalled(process=process, signum=signum))

    def look_into(self, processes: Collection[int]) -> dict[int, Sight]:
        """The stacks of these processes; nothing where the host does not answer in time."""
        seen = self.ask(StacksWanted(processes=list(processes)), StacksSeen)
        if seen is None:
            return {}
        return {
            number: Sight(stacks=stacks, state=seen.states.get(number)) for number, stacks in seen.stacks.items()
        }

    def measure_load(self) -> Load:
        """What else that host does; as if it were full where it does not answer in time."""
        seen = self.ask(LoadWanted(), LoadSeen)
        return Load(idle_cores=0.0, waiting=0.0) if seen is None else Load(**seen.plain())

    def close(self) -> None:
        """Let the agent end its processes and leave, and wait for that a moment."""
        is_lost, self._is_closed = bool(self._broken), True
        # Who is missed may come back; but whatever ran there has been given up.
        self._line.send(HostMissed() if self._is_missed else HostDismissed())
        self._wait(_LEAVE_S, lambda: False)
        self._line.close()
        if self._agent is None:
            return
        if is_lost and self._away is not None and self._agent.failure() is None:
            self._away.append(self._agent)
        else:
            (self._agent.abandon if is_lost else self._agent.close)()

    @property
    def trouble(self) -> str:
        """Why it is of no use any more; nothing where it is."""
        return self._broken

    @property
    def is_there(self) -> bool:
        """Whether it is of use."""
        return not self._broken and not self._is_closed

    def cut_off(self) -> None:
        """Its agent has come back on another connection, and has ended all that ran there."""
        self._miss("it was cut off")

    def _miss(self, why: str) -> None:
        """Nobody can be heard there, who may yet come back."""
        self._is_missed = self._is_missed or not self._broken
        self._broken = self._broken or why

    def ask(self, question: Told, kind: type[Answer], patience_s: float = _ANSWER_S) -> Answer | None:
        """The answer to a question; None where it does not come in time. What comes meanwhile is told later."""
        self._answer = None
        self._line.send(question)
        self._wait(patience_s, lambda: isinstance(self._answer, kind))
        return self._answer if isinstance(self._answer, kind) else None

    def _wait(self, seconds: float, is_done: Callable[[], bool]) -> None:
        """Hear the agent until something is so, it has left, or time is over."""
        deadline = time.monotonic() + seconds
        while not is_done() and not self._broken and (left_s := deadline - time.monotonic()) > 0:
            self._line.wait(left_s)
            self._hear()

    def _hear(self) -> None:
        for word in self._line.collect():
            self._take(word)
        if self._line.ending:
            self._miss("the connection to it has ended")

    def _take(self, word: Told) -> None:
        match word:
            case HostBeat():
                self._line.send(BeatAnswered(heard=self._handled))
            case ProcessStarted():
                self._news.append(Started(word.process))
            case ProcessSaid():
                said = understood(word.word, _SAID)
                self._news.append(
                    Said(word.process, said if self._incoming is None else self._incoming.confirm(said))
                )
            case FilePiece() | LogPiece() | FileGone() if self._incoming is not None:
                self._incoming.take(word)
            case ScriptPrinted():
                if self.show is not None:
                    self.show(word.data)
            case ProcessDeaf():
                self._news.append(Deaf(word.process))
            case ProcessEnded():
                self._news.append(Ended(**word.plain()))
            case StacksSeen() | LoadSeen() | FilesLacking():
                self._answer = word
            case HostBroken():
                self._broken = word.text.rstrip(".")
            case _:
                self._broken = f"its agent says what nobody here understands ({word})"
