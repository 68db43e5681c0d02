"""The agent of a host: what `shoal host --join` runs. It starts and watches processes for a supervisor elsewhere.

Inside its host all is as on one machine: a zygote, a shared segment, a folder of sockets. It ends, and its
processes with it, when its supervisor dismisses it, or has not been heard for as long as its lease. Where the
supervisor has ended before the run was over, it goes on for a time of grace, in which another may take its place.
"""

from __future__ import annotations

import selectors
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace

from shoal.comm.host_words import (
    TO_HOSTS,
    BeatAnswered,
    FilePiece,
    FilesOffered,
    HostAdopted,
    HostBeat,
    HostBroken,
    HostClaimed,
    HostDismissed,
    HostJoined,
    HostMissed,
    HostRefused,
    HostWelcomed,
    LoadSeen,
    LoadWanted,
    ProcessSignalled,
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
from shoal.launch.echo import Echo
from shoal.launch.local import LocalEngine, LocalHost
from shoal.launch.remote.heirs import Heirs
from shoal.launch.remote.home import HostHome
from shoal.launch.remote.line import HostLine
from shoal.launch.remote.printing import PrintedLines
from shoal.launch.remote.probing import AgentState, leave_sign
from shoal.launch.remote.remote_host import LEASE_S
from shoal.launch.remote.starting import address_towards
from shoal.launch.remote.teller import Teller
from shoal.launch.this_host import facts_of_this_host, versions_here
from shoal.observe.disk import explain_refusal
from shoal.spec import World
from shoal.spec.host_facts import HostFacts
from shoal.spec.told import Told
from shoal.spec.vocabulary import Purpose

BEAT_S = 1.0
_LEASES_AWAY = 6
"""For so many leases a host that is missed tries to come back."""
_CALL_S, _CALL_AGAIN_S = 5.0, 0.5
_MOST_PORTS = 3
"""For a coordinator, and for the first worker where it sends others samples of two sets."""


class SupervisorGone(LaunchError):
    """Whoever this host worked for has left without a word, or is not heard any more: the way to it may be cut."""

    def __init__(self, text: str, patience_s: float) -> None:
        """`patience_s`: for how long it is worth trying to come back."""
        super().__init__(f"The supervisor of this run {text}; what ran here for it was ended.")
        self.patience_s = patience_s


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
        heirs = Heirs(listening_at(own, ports), key)
        port, train_port, test_port = _free_ports(own, ports)
        facts = facts_of_this_host(name, own, port)
        facts = replace(facts, train_port=train_port, test_port=test_port, most_workers=workers)
        if cores is not None:
            facts = replace(facts, cores=cores)
        agent = HostAgent(channel, facts, heirs)
        try:
            agent.serve()
            return
        except SupervisorGone as loss:
            channel = _call_again(address, key, loss)
            agent.home.come_back()


def _call_again(address: str, key: RunKey, loss: SupervisorGone) -> StreamChannel:
    """Call until somebody answers, for some time; where nobody listens there any more, that is the end."""
    until = time.monotonic() + loss.patience_s
    while (left_s := until - time.monotonic()) > 0:
        try:
            return StreamChannel.call(address, key, encrypt=True, timeout_s=min(_CALL_S, left_s))
        except CommError as error:
            if isinstance(error.__context__, ConnectionRefusedError):
                break
            time.sleep(min(_CALL_AGAIN_S, left_s))
    raise loss


def _free_ports(address: str, ports: str) -> list[int]:
    """Ports that are free now; of a range some of the last, since processes take the first ones."""
    with ExitStack() as held:
        found: list[int] = []
        for port in reversed(parse_ports(ports)) if ports else ():
            if len(found) < _MOST_PORTS:
                with suppress(LaunchError):
                    held.enter_context(listen(listening_at(address, str(port)), backlog=1))
                    found.append(port)
        while len(found) < _MOST_PORTS:
            try:
                probe = held.enter_context(listen(listening_at(address, ports), backlog=1))
                found.append(int(probe.getsockname()[1]))
            except LaunchError:
                if not found:
                    raise
                found.append(0)  # Most runs need no more than one.
        return found


class HostAgent:
    """One host's part in one run."""

    def __init__(self, channel: StreamChannel, facts: HostFacts, heirs: Heirs) -> None:
        """`heirs`: where another supervisor calls, should this one be gone."""
        self._line = HostLine(channel, TO_HOSTS)
        self._lease_s, self._grace_s = LEASE_S, 0.0
        self._left_at: float | None = None
        """Since when there is no supervisor; None where there is one."""
        self._num_received = 0
        """What was asked of processes."""
        self._is_dismissed = False
        self._host: LocalHost | None = None
        self._printed: PrintedLines | None = None
        self._heirs = heirs
        self._at_end = ExitStack()
        self.home = HostHome()
        self._at_end.callback(self.home.close)
        self._at_end.callback(heirs.close)
        self._at_end.callback(lambda: self._line.close())
        self._selector = selectors.DefaultSelector()
        self._selector.register(heirs, selectors.EVENT_READ)
        self._selector.register(self._line, selectors.EVENT_READ)
        self._teller = Teller(self._line)
        self._line.send(HostJoined(**asdict(facts), versions=versions_here(), door=heirs.address))

    def serve(self) -> None:
        """Do what the supervisor asks for, and tell what happens, until the run is over."""
        beat_at = 0.0
        with self._selector, self._at_end:
            while not self._is_dismissed:
                if (now := time.monotonic()) >= beat_at:
                    self._beat()
                    beat_at = now + BEAT_S
                self._selector.select(max(0.0, beat_at - now))
                if (claimed := self._heirs.collect()) is not None:
                    self._change_supervisor(*claimed)
                if self._left_at is None:
                    for word in self._line.collect():
                        self._take(word)
                self._tell_news()
                if self._printed is not None:
                    self._printed.send_to(self._line)
                self._check_supervisor()

    def _beat(self) -> None:
        if self._left_at is None:
            self._line.send(HostBeat())
            self._teller.tell_printed()
        leave_sign(AgentState.JOINED)

    def _check_supervisor(self) -> None:
        if self._is_dismissed:
            return
        if self._left_at is not None:
            if time.monotonic() - self._left_at > self._grace_s:
                self.home.is_orphaned = True
                text = f"is gone, and nobody has taken its place within {self._grace_s:g} s"
                raise SupervisorGone(text, 0.0)
        elif self._line.ending:
            if self._host is None or not self._grace_s:
                raise SupervisorGone("is gone", _LEASES_AWAY * self._lease_s)
            self._lose_supervisor()
        elif self._line.silent_s > self._lease_s:
            # It may live, and go on without this host: whoever is cut off must not. Or its machine is gone.
            self.home.is_orphaned = True
            left_s = max(self._lease_s, self._grace_s - self._line.silent_s)
            raise SupervisorGone(f"has not been heard for {self._line.silent_s:.0f} s", left_s)

    def _lose_supervisor(self) -> None:
        """It has ended. Processes go on, and what they say is kept for whoever takes its place."""
        self._left_at = time.monotonic()
        self._teller.lose_line()
        self._selector.unregister(self._line)
        self._line.close()

    def _change_supervisor(self, channel: StreamChannel, claim: HostClaimed) -> None:
        if self._host is None:
            channel.close()  # There is nothing to go on with.
            return
        if self._left_at is None:
            self._lose_supervisor()
        self._left_at, self._line = None, HostLine(channel, TO_HOSTS)
        self._selector.register(self._line, selectors.EVENT_READ)
        first = self._teller.move(self._line, claim.heard)
        is_apart = self.home.outgoing is not None
        self._line.send(HostAdopted(first=first, received=self._num_received, is_apart=is_apart))
        self._teller.repeat()

    def _take(self, word: Told) -> None:
        match word:
            case FilesOffered():
                self._line.send(self.home.compare(word))
            case FilePiece():
                self._keep(word)
            case HostWelcomed():
                self._open(word)
            case HostRefused():
                raise LaunchError(word.text)
            case HostMissed():
                raise SupervisorGone("goes on without this host", _LEASES_AWAY * self._lease_s)
            case HostDismissed():
                self._is_dismissed = True
            case BeatAnswered():
                self._teller.settle(word.heard)
            case Garbled():
                raise LaunchError(f"The supervisor says what this host does not understand: {word.text}")
            case _ if self._host is not None:
                self._do(self._host, word)

    def _keep(self, piece: FilePiece) -> None:
        try:
            self.home.take(piece)
        except OSError as error:
            text = f"what is sent to it cannot be kept in {self.home.path} ({explain_refusal(error)})"
            self._line.send(HostBroken(text=text))

    def _open(self, welcome: HostWelcomed) -> None:
        self._lease_s, self._grace_s = welcome.lease_s, welcome.grace_s
        try:
            job = self.home.settle(welcome)
            echo = self._show_printed() if job.purpose == Purpose.SCRIPT else None
            self._host = LocalEngine(echo=echo).open(job)
        except LaunchError as error:
            self._report(error)
            return
        self._teller.outgoing = self.home.outgoing
        self._selector.register(self._host, selectors.EVENT_READ)
        # Before the line is closed: whoever sees its end knows that nothing runs here any more.
        self._at_end.callback(self._host.close)

    def _show_printed(self) -> Echo:
        """From here on what processes print goes to the supervisor, the last of it when they have ended."""
        self._printed = printed = PrintedLines(self._selector)
        self._at_end.callback(lambda: printed.end(self._line))
        return printed.echo

    def _do(self, host: LocalHost, word: Told) -> None:
        self._num_received += isinstance(word, ProcessWanted | ProcessTold | ProcessSignalled)
        match word:
            case ProcessWanted():
                try:
                    host.start(word.process, World(**word.world))
                except LaunchError as error:
                    self._report(error)
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
            self._teller.tell(self._host.collect())
        except LaunchError as error:
            self._report(error)

    def _report(self, error: LaunchError) -> None:
        if self._left_at is not None:
            raise error  # Nobody could do anything about it.
        self._line.send(HostBroken(text=str(error)))
