"""The agent of a host: what `shoal host --join` runs. It starts and watches processes for a supervisor elsewhere.

Inside its host all is as on one machine: a zygote, a shared segment, a folder of sockets. It ends with its
connection, and its processes with it: when its supervisor leaves, or has not been heard for as long as its lease.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace

from shoal.comm.host_words import (
    TO_HOSTS,
    BeatAnswered,
    FilePiece,
    FilesOffered,
    HostBeat,
    HostBroken,
    HostDismissed,
    HostJoined,
    HostRefused,
    HostWelcomed,
    LoadSeen,
    LoadWanted,
    ProcessDeaf,
    ProcessEnded,
    ProcessSaid,
    ProcessSignalled,
    ProcessStarted,
    ProcessTold,
    ProcessWanted,
    StacksSeen,
    StacksWanted,
)
from shoal.comm.security import RunKey
from shoal.comm.tcp.addresses import listen, listening_at, parse_ports
from shoal.comm.tcp.stream_channel import StreamChannel
from shoal.comm.words import TO_PROCESSES, Garbled, understood
from shoal.errors import CommError, LaunchError
from shoal.launch.local import LocalEngine, LocalHost
from shoal.launch.messages import Deaf, Ended, News, Said, Started
from shoal.launch.remote.home import HostHome
from shoal.launch.remote.line import HostLine
from shoal.launch.remote.probing import AgentState, leave_sign
from shoal.launch.remote.remote_host import LEASE_S
from shoal.launch.remote.starting import address_towards
from shoal.launch.this_host import facts_of_this_host, versions_here
from shoal.observe.disk import explain_refusal
from shoal.spec import World
from shoal.spec.host_facts import HostFacts
from shoal.spec.told import Told

BEAT_S = 1.0
_LEASES_AWAY = 6
"""For so many leases a host that was cut off tries to come back."""
_CALL_S, _CALL_AGAIN_S = 5.0, 0.5


class SupervisorGone(LaunchError):
    """Whoever this host worked for has left without a word, or is not heard any more: the way to it may be cut."""

    def __init__(self, text: str, lease_s: float) -> None:
        super().__init__(f"The supervisor of this run {text}; what ran here for it was ended.")
        self.lease_s = lease_s


def join(
    address: str,
    key: RunKey,
    *,
    name: str = "",
    interface: str = "",
    ports: str = "",
    cores: int | None = None,
    workers: int | None = None,
    timeout_s: float = 15.0,
) -> None:
    """Take part in the run whose supervisor listens at this address, until it is over; a host that was cut off
    from it comes back when it can. `cores`, `workers`: what to give, and to have at most.

    LaunchError where this host is refused, or its supervisor is gone before the run is over; CommError where
    nobody answers within `timeout_s`. `interface`: a network's name, or an address of this host.
    """
    channel = StreamChannel.call(address, key, encrypt=True, timeout_s=timeout_s)
    while True:
        own = address_towards(channel.peer_address, interface) if interface else channel.local_address
        facts = replace(facts_of_this_host(name, own, _free_port(own, ports)), most_workers=workers)
        if cores is not None:
            facts = replace(facts, cores=cores)
        try:
            HostAgent(channel, facts).serve()
            return
        except SupervisorGone as loss:
            channel = _call_again(address, key, loss)


def _call_again(address: str, key: RunKey, loss: SupervisorGone) -> StreamChannel:
    """Call until somebody answers, for some time; where nobody listens there any more, that is the end."""
    until = time.monotonic() + _LEASES_AWAY * loss.lease_s
    while (left_s := until - time.monotonic()) > 0:
        try:
            return StreamChannel.call(address, key, encrypt=True, timeout_s=min(_CALL_S, left_s))
        except CommError as error:
            if isinstance(error.__context__, ConnectionRefusedError):
                break
            time.sleep(min(_CALL_AGAIN_S, left_s))
    raise loss


def _free_port(address: str, ports: str) -> int:
    """A port that is free now; of a range one of the last, since processes take the first ones."""
    for port in reversed(parse_ports(ports)) if ports else ():
        with suppress(LaunchError), listen(listening_at(address, str(port)), backlog=1):
            return port
    with listen(listening_at(address, ports), backlog=1) as probe:
        return int(probe.getsockname()[1])


class HostAgent:
    """One host's part in one run."""

    def __init__(self, channel: StreamChannel, facts: HostFacts) -> None:
        self._line = HostLine(channel, TO_HOSTS)
        self._lease_s = LEASE_S
        self._is_dismissed = False
        self._host: LocalHost | None = None
        self._at_end = ExitStack()
        self._home = HostHome()
        self._at_end.callback(self._home.close)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._line, selectors.EVENT_READ)
        self._line.send(HostJoined(**asdict(facts), versions=versions_here()))

    def serve(self) -> None:
        """Do what the supervisor asks for, and tell what happens, until the run is over."""
        beat_at = 0.0
        with self._selector, self._at_end:
            self._at_end.callback(self._line.close)
            while not self._is_dismissed:
                if (now := time.monotonic()) >= beat_at:
                    self._line.send(HostBeat())
                    leave_sign(AgentState.JOINED)
                    beat_at = now + BEAT_S
                self._selector.select(max(0.0, beat_at - now))
                for word in self._line.collect():
                    self._take(word)
                self._tell_news()
                self._check_line()

    def _check_line(self) -> None:
        if self._is_dismissed:
            return
        if self._line.ending:
            raise SupervisorGone("is gone", self._lease_s)
        if self._line.silent_s > self._lease_s:
            raise SupervisorGone(f"has not been heard for {self._line.silent_s:.0f} s", self._lease_s)

    def _take(self, word: Told) -> None:
        match word:
            case FilesOffered():
                self._line.send(self._home.compare(word))
            case FilePiece():
                self._keep(word)
            case HostWelcomed():
                self._open(word)
            case HostRefused():
                raise LaunchError(word.text)
            case HostDismissed():
                self._is_dismissed = True
            case BeatAnswered():
                pass
            case Garbled():
                raise LaunchError(f"The supervisor says what this host does not understand: {word.text}")
            case _ if self._host is not None:
                self._do(self._host, word)

    def _keep(self, piece: FilePiece) -> None:
        try:
            self._home.take(piece)
        except OSError as error:
            text = f"what is sent to it cannot be kept in {self._home.path} ({explain_refusal(error)})"
            self._line.send(HostBroken(text=text))

    def _open(self, welcome: HostWelcomed) -> None:
        self._lease_s = welcome.lease_s
        try:
            self._host = LocalEngine().open(self._home.settle(welcome))
        except LaunchError as error:
            self._line.send(HostBroken(text=str(error)))
            return
        self._selector.register(self._host, selectors.EVENT_READ)
        # Before the line is closed: whoever sees its end knows that nothing runs here any more.
        self._at_end.callback(self._host.close)

    def _do(self, host: LocalHost, word: Told) -> None:
        match word:
            case ProcessWanted():
                try:
                    host.start(word.process, World(**word.world))
                except LaunchError as error:
                    self._line.send(HostBroken(text=str(error)))
            case ProcessTold():
                host.say(word.process, understood(word.word, TO_PROCESSES))
            case ProcessSignalled():
                host.signal(word.process, word.signum)
            case StacksWanted():
                sights = host.look_into(word.processes)
                states = {number: sight.state for number, sight in sights.items() if sight.state is not None}
                self._line.send(StacksSeen(stacks={n: one.stacks for n, one in sights.items()}, states=states))
            case LoadWanted():
                load = host.measure_load()
                self._line.send(LoadSeen(idle_cores=load.idle_cores, waiting=load.waiting))

    def _tell_news(self) -> None:
        if self._host is None:
            return
        try:
            self._tell(self._host.collect())
        except LaunchError as error:
            self._line.send(HostBroken(text=str(error)))

    def _tell(self, news: Iterable[News]) -> None:
        for one in news:
            match one:
                case Started():
                    self._line.send(ProcessStarted(process=one.process))
                case Said():
                    self._line.send(ProcessSaid(process=one.process, word=one.word.as_message()))
                case Deaf():
                    self._line.send(ProcessDeaf(process=one.process))
                case Ended():
                    self._line.send(
                        ProcessEnded(
                            process=one.process,
                            exit_code=one.exit_code,
                            log_name=one.log_name,
                            last_output=one.last_output,
                            ran_out_of_memory=one.ran_out_of_memory,
                        )
                    )
