"""The attacker is another user of this host: without a port he has no way in, and over tcp he cannot hold much."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.fuzz import announced_command, bare_connection, greeting
from helpers.memory import MIB, require_flat
from helpers.observed import ObservedEngine
from helpers.other_user import as_another_user, needs_root
from shoal.comm.pieces import MAX_PART_BYTES
from shoal.comm.security import RunKey
from shoal.comm.socket_folder import PREFIX
from shoal.comm.zmq_wire import ZmqWire
from shoal.launch.control import FILE_NAME
from shoal.launch.owner import ZygoteProcess
from shoal.observe import Event
from shoal.ps.node import open_wire
from shoal.spec import Cluster, Job, World

pytestmark = pytest.mark.alone

TASK = f"{Path(__file__).parent / 'paced_tasks.py'}:paced"
GUARD_S = 60.0
LIMIT_MIB = 32.0
STRANGERS = 1_000
KEY = RunKey.create()
HELLO = b"\x05HELLO\x05shoal\x40" + b"0" * 64
ATTACKS: list[bytes] = [
    b"",
    greeting(b"PLAIN") + announced_command(64 << 20) + bytes(200_000),
    greeting(b"PLAIN") + b"\x04" + bytes([len(HELLO)]) + HELLO,
    secrets.token_bytes(5_000),
]
"""Half-open, a huge frame, a wrong key, garbage."""


def paced_job(folder: Path, strategy: str, *, steps: int, **cluster: Any) -> Job:
    return Job(
        target=TASK,
        args={"steps": steps, "batch_size": 8},
        strategy=strategy,
        cluster=Cluster(workers=2, threads=1, **cluster),
        run_dir=str(folder),
    )


def on_first_steps(act: Callable[[], None]) -> Callable[[Event], None]:
    """What to do with events so that something is done once, as soon as the run trains."""
    has_acted = threading.Event()

    def on_event(event: Event) -> None:
        if event.kind == "steps" and not has_acted.is_set():
            has_acted.set()
            act()

    return on_event


@pytest.mark.parametrize(
    ("strategy", "listeners", "ports"),
    [
        ("ps:servers=2", 5, 0),
        ("ps:servers=2,wire=tcp", 1, 4),
        ("data:via=ring", 2, 0),
        ("data:partition=relay", 0, 0),
        ("data:via=backend", 0, 0),
        ("sharded", 0, 0),
        pytest.param("tensor", 0, 0, marks=pytest.mark.long),
        pytest.param("mesh:data=2", 0, 0, marks=pytest.mark.long),
    ],
)
def test_no_port_is_open_unless_it_was_asked_for(
    tmp_path: Path, zygote: ZygoteProcess, strategy: str, listeners: int, ports: int
) -> None:
    engine = ObservedEngine(zygote)
    found: set[tuple[str, int]] = set()
    files: set[Path] = set()

    def look(event: Event) -> None:
        if event.kind != "steps":
            return
        for pid in (os.getpid(), zygote.pid, *(engine.pid_of(hand) for hand in engine.running())):
            with suppress(psutil.NoSuchProcess):  # The last word comes from one that has ended.
                sockets = psutil.Process(pid).net_connections("all")
                found.update(tuple(one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN)
                files.update(Path(one.laddr) for one in sockets if one.family == socket.AF_UNIX and one.laddr)
        inside = [file for file in files if PREFIX in str(file)]
        for folder in {file.parent for file in inside}:
            status = folder.stat()
            assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, os.geteuid())
        # What lies in no file system checks who calls: see the tests of the zygote and of the control socket.
        others = [str(file) for file in files if file not in inside]
        assert all(name.startswith(("@shoal-zygote-", "@shoal-control-")) for name in others), others

    engine.run(paced_job(tmp_path / "run", strategy, steps=200), look)
    assert files, "nobody looked"
    assert [address for address, _ in found] == ["127.0.0.1"] * ports
    inside = [file for file in files if PREFIX in str(file)]
    assert len(inside) == listeners
    assert not any(file.parent.exists() for file in inside), "the folder goes with the run"


class Siege:
    """A thousand strangers at all sockets of a run, of which nobody must notice anything."""

    def __init__(self, engine: ObservedEngine, zygote: ZygoteProcess, run_dir: Path) -> None:
        self.outcomes: Counter[str] = Counter()
        self.grown_bytes: dict[str, int] = {}
        self.failure: BaseException | None = None
        self.is_over = threading.Event()
        self._engine, self._zygote, self._run_dir = engine, zygote, run_dir
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._besiege()
        except BaseException as failure:
            self.failure = failure
        finally:
            self.is_over.set()

    def _besiege(self) -> None:
        engine = self._engine
        processes = {hand.name: psutil.Process(engine.pid_of(hand)) for hand in engine.running()}
        processes["zygote"] = psutil.Process(self._zygote.pid)
        folder = Path(engine.host.sockets.path)
        targets = [(str(file), socket.SOCK_STREAM) for file in folder.iterdir()]
        control = (self._run_dir / FILE_NAME).read_text()
        targets += [(f"\0{name}", socket.SOCK_SEQPACKET) for name in (self._zygote.name, control)]
        before = {name: process.memory_info().rss for name, process in processes.items()}
        attacker = threading.Thread(target=lambda: self.outcomes.update(as_another_user(lambda: attack(targets))))
        attacker.start()
        victim = engine.running("worker")[1]
        engine.signal(victim, signal.SIGKILL)  # whoever takes its place has to get in
        del processes[victim.name]
        while attacker.is_alive():
            for name, process in processes.items():
                grown = process.memory_info().rss - before[name]
                self.grown_bytes[name] = max(grown, self.grown_bytes.get(name, grown))
            time.sleep(0.01)


def attack(targets: list[tuple[str, socket.SocketKind]]) -> dict[str, int]:
    """What became of so many strangers, spread over the targets, that all stay as long as they are let."""
    outcomes: Counter[str] = Counter()
    kept: list[socket.socket] = []
    for number in range(STRANGERS):
        path, kind = targets[number % len(targets)]
        caller = socket.socket(socket.AF_UNIX, kind)
        try:
            caller.connect(path)
        except PermissionError:
            outcomes["no way in"] += 1
            caller.close()
            continue
        caller.settimeout(GUARD_S)
        with suppress(OSError):
            caller.sendall(ATTACKS[number % len(ATTACKS)])
        kept.append(caller)
    for caller in kept:
        with suppress(ConnectionResetError), closing(caller):
            if caller.recv(1):
                outcomes["answered"] += 1
                continue
        outcomes["hung up on"] += 1
    return dict(outcomes)


@needs_root
def test_a_thousand_strangers_cost_a_run_nothing(tmp_path: Path, zygote: ZygoteProcess) -> None:
    engine = ObservedEngine(zygote)
    siege = Siege(engine, zygote, tmp_path / "run")
    begin = on_first_steps(siege.thread.start)
    kinds: Counter[str] = Counter()

    def on_event(event: Event) -> None:
        begin(event)
        kinds[event.kind] += 1
        if siege.is_over.is_set() and event.kind == "steps":
            kinds["steps afterwards"] += 1

    results = engine.run(paced_job(tmp_path / "run", "ps:servers=2", steps=300), on_event)
    siege.thread.join(GUARD_S)
    assert siege.failure is None
    assert siege.outcomes.total() == STRANGERS and siege.outcomes["answered"] == 0
    assert siege.outcomes["no way in"] > STRANGERS / 2 and siege.outcomes["hung up on"] > 0
    assert len(siege.grown_bytes) == 5
    for grown_bytes in siege.grown_bytes.values():
        require_flat(grown_bytes, LIMIT_MIB)
    assert kinds["replaced"] == 1 and kinds["steps afterwards"] > 0, kinds
    assert results["audit"]["clean"]


def wait_for_the_end(stranger: socket.socket) -> None:
    """Until the other side has hung up."""
    with suppress(ConnectionResetError), closing(stranger):
        while stranger.recv(1 << 16):
            pass


@pytest.mark.parametrize("encrypt", [False, True])
def test_over_tcp_a_stranger_holds_little_and_not_for_long(encrypt: bool) -> None:
    mechanism = greeting(b"CURVE" if encrypt else b"PLAIN")
    with ZmqWire("tcp://127.0.0.1:*", key=KEY, encrypt=encrypt, handshake_s=0.5) as wire:
        begun = time.monotonic()
        strangers = [bare_connection(wire.address) for _ in range(40)]
        for number, stranger in enumerate(strangers):
            size = MAX_PART_BYTES + 1 if number % 4 == 1 else MAX_PART_BYTES
            with suppress(ConnectionError):
                stranger.sendall([b"", mechanism + announced_command(size), mechanism, b"garbage"][number % 4])
        with ZmqWire("tcp://127.0.0.1:*", key=KEY, encrypt=encrypt) as member:
            member.connect(0, wire.address)
            member.transmit(0, [b"a member gets in"])
            while (packet := wire.poll(1.0)) is None:
                assert time.monotonic() < begun + GUARD_S
            assert bytes(packet[0]) == b"a member gets in"
            for stranger in strangers:
                wait_for_the_end(stranger)
            member.transmit(0, [bytes(3 * MAX_PART_BYTES)])  # a member's frames may be larger
            while (packet := wire.poll(1.0)) is None:
                assert time.monotonic() < begun + GUARD_S
            assert len(packet[0]) == 3 * MAX_PART_BYTES


def test_over_tcp_a_frame_that_is_announced_too_large_is_refused_at_once() -> None:
    with ZmqWire("tcp://127.0.0.1:*", key=KEY, handshake_s=GUARD_S) as wire:
        with closing(bare_connection(wire.address)) as stranger:
            stranger.sendall(greeting(b"PLAIN") + announced_command(MAX_PART_BYTES + 1) + bytes(1000))
            wait_for_the_end(stranger)
        # As long as it is allowed to be, it is waited for.
        with closing(bare_connection(wire.address)) as stranger:
            stranger.sendall(greeting(b"PLAIN") + announced_command(MAX_PART_BYTES) + bytes(1000))
            stranger.settimeout(0.2)
            with pytest.raises(TimeoutError):
                while stranger.recv(1 << 16):
                    pass


@pytest.mark.parametrize("has_port", [False, True])
def test_whoever_listens_at_a_fixed_port_first_learns_nothing(has_port: bool) -> None:
    """Without encryption he would have the password, and could use it once the coordinator listens there."""
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        where = f"127.0.0.1:{squatter.getsockname()[1]}"
        world = World(coordinator=where if has_port else "", secret=KEY.text)
        with open_wire(world, world.any_port) as member:
            member.connect(0, f"tcp://{where}")
            member.transmit(0, [b"join"])
            heard = b""
            with squatter.accept()[0] as caller:
                caller.settimeout(GUARD_S)
                mechanism = b"CURVE" if has_port else b"PLAIN"
                caller.sendall(greeting(mechanism)[:32] + b"\x01" + bytes(31))
                while len(heard) < 64 + 70 and (more := caller.recv(4096)):
                    heard += more
    assert len(heard) > 64, "it has said more than a greeting"
    assert (KEY.password(f"tcp://{where}") in heard) is not has_port


def test_memory_of_strangers_over_tcp_is_bounded() -> None:
    """Each holds at most one piece until its time is over; then all of it is free."""
    count = 12
    with ZmqWire("tcp://127.0.0.1:*", key=KEY, handshake_s=2.0) as wire:
        process = psutil.Process()
        before = process.memory_info().rss
        strangers = [bare_connection(wire.address) for _ in range(count)]
        for stranger in strangers:
            with suppress(ConnectionError):
                stranger.sendall(greeting(b"PLAIN") + announced_command(64 << 20) + bytes(2 * MIB))
        require_flat(process.memory_info().rss - before, LIMIT_MIB)
        for stranger in strangers:
            wait_for_the_end(stranger)
