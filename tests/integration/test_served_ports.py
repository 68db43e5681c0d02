"""Every socket of a served job is shot at while it trains: no bit changes, and who has no key gets nothing."""

from __future__ import annotations

import secrets
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq

from helpers.fuzz import fuzz_port
from helpers.memory import MIB, require_flat_under
from helpers.observed import ObservedEngine
from shoal.comm.security import RunKey
from shoal.comm.socket_folder import PREFIX
from shoal.launch.owner import ZygoteProcess
from shoal.observe import Event
from shoal.ps.messages import Ack, Join, Push, View, shard_rows
from shoal.ps.node import decode_bundle, encode_bundle
from shoal.spec import Cluster, Job

pytestmark = pytest.mark.alone

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
# Nobody can make processes that train give back what they have freed.
LIMIT_MIB = 16.0
SETTLE_S = 20.0
# So few at a time that queues stay short: an allocator keeps what the longest one needed.
FRAMES_PER_ROUND, PARTS = 1_500, 10
TRIES = 3


def valid_bundles(values: int = 64) -> list[list[bytes]]:
    """Genuine packets with so many numbers as bulk, to be damaged."""
    push = Push(
        shard=0,
        generation=1,
        origin=3,
        sequence=1,
        clock_of=0,
        clock=1,
        cells=[0],
        based_on=0,
        weight=1.0,
        loss=1.0,
        frames=(torch.arange(float(values)), b"plain"),
    )
    ack = Ack(shard=0, generation=1, sequence=1, outcome="applied", version=1, floor=1, rounds=1)
    view = View(
        term=9, number=9, shards=shard_rows([]), addresses={1: "tcp://127.0.0.1:1"}, workers={0: 1}, settings={}
    )
    join = Join(node=7, role="server", rank=0, address="tcp://127.0.0.1:1")
    bundles = ([push], [ack, join, push], [view, push])
    return [[bytes(part) for part in encode_bundle(3, messages)] for messages in bundles]


def test_the_packets_that_get_damaged_are_valid() -> None:
    assert [len(decode_bundle(packet)[1]) for packet in valid_bundles()] == [1, 3, 2]


def listening_at(process: psutil.Process) -> set[str]:
    """The addresses at which a process of a run listens."""
    ports = [each.laddr for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert {port.ip for port in ports} <= {"127.0.0.1"}
    files = [each.laddr for each in process.net_connections("unix") if PREFIX in each.laddr]
    return {f"tcp://{port.ip}:{port.port}" for port in ports} | {f"ipc://{path}" for path in files}


class Shooter:
    """Finds the sockets at which a run's processes listen once it trains, and shoots at them."""

    def __init__(self, engine: ObservedEngine, rounds: int, values: int) -> None:
        self.addresses: dict[str, str] = {}
        self.answers: list[bytes] = []
        self.sent_bytes: dict[str, int] = {}
        self.grown_bytes: dict[str, int] = {}
        self._engine = engine
        self._rounds = rounds
        self._bundles = valid_bundles(values)
        self._thread = threading.Thread(target=self._shoot)
        self._has_started = False

    def on_event(self, event: Event) -> None:
        if event.kind == "steps" and not self._has_started:
            self._has_started = True
            self._thread.start()

    def finish(self) -> None:
        self._thread.join()

    def _shoot(self) -> None:
        processes = {}
        for hand in self._engine.running():
            process = psutil.Process(self._engine.pid_of(hand))
            (self.addresses[hand.name],) = listening_at(process)
            processes[hand.name] = process
        for address in self.addresses.values():
            self._knock_without_key(address)
        self._fire(seed=0)  # for the allocators, which grow once
        for attempt in range(TRIES):
            self.sent_bytes = {}
            self._measure(processes, range(1 + attempt * self._rounds, 1 + (attempt + 1) * self._rounds))
            # An allocator grows in some rounds, with what queues needed; a leak grows in all.
            if max(self.grown_bytes.values()) < LIMIT_MIB * MIB:
                return

    def _measure(self, processes: dict[str, psutil.Process], seeds: range) -> None:
        """By how much the processes grow while they are shot at, and have had a moment to take it all in."""
        before = {name: process.memory_info().rss for name, process in processes.items()}
        for seed in seeds:
            self._fire(seed)
        deadline = time.monotonic() + SETTLE_S
        while True:
            after = {name: process.memory_info().rss for name, process in processes.items()}
            self.grown_bytes = {name: after[name] - before[name] for name in processes}
            # What still waits to be taken in is soon gone; what leaks stays.
            if max(self.grown_bytes.values()) < LIMIT_MIB * MIB or time.monotonic() > deadline:
                return
            time.sleep(0.05)

    def _fire(self, seed: int) -> None:
        """Shoot at all, a few frames at a time so that no long queue builds up; note what each was sent."""
        for part, (name, address) in product(range(PARTS), self.addresses.items()):
            dice = seed * PARTS + part
            sent = fuzz_port(address, KEY, FRAMES_PER_ROUND // PARTS, dice, valid=self._bundles, connections=1)
            self.sent_bytes[name] = self.sent_bytes.get(name, 0) + sent

    def _knock_without_key(self, address: str) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.set(zmq.LINGER, 0)
            stranger.connect(address)
            stranger.send_multipart(self._bundles[0])
            if stranger.poll(100):
                self.answers.append(stranger.recv())


KEY = RunKey.create()


@pytest.mark.parametrize(
    ("rounds", "values", "steps"),
    [(1, 12_288, 700), pytest.param(67, 256, 7_200, marks=pytest.mark.long, id="a hundred thousand frames")],
)
@pytest.mark.timeout(900)
def test_ports_under_fire(
    tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch, rounds: int, values: int, steps: int
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda count: KEY.text)

    def train(name: str, strategy: str, shooter: Shooter | None, engine: ObservedEngine) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        job = Job(
            target=f"{TASKS}:mlp",
            strategy=strategy,
            cluster=Cluster(workers=2, threads=1),
            overrides={"max_steps": steps, "epochs": steps, "evaluate_every": 10_000},
            run_dir=str(tmp_path / name),
        )
        return engine.run(job, shooter.on_event if shooter else lambda event: None)

    engine = ObservedEngine(zygote)
    shooter = Shooter(engine, rounds, values)
    try:
        hit = train("hit", "ps:servers=2,wire=tcp", shooter, engine)
    finally:
        shooter.finish()
    kinds = [address.partition("://")[0] for address in shooter.addresses.values()]
    assert sorted(kinds) == ["ipc", *["tcp"] * 4], "the coordinator needs no port"
    assert len(shooter.grown_bytes) == 5
    assert shooter.answers == []
    for name, grown_bytes in shooter.grown_bytes.items():
        require_flat_under(shooter.sent_bytes[name], grown_bytes, LIMIT_MIB)
    assert hit["audit"]["clean"]
    # Workers in lockstep end with the same bits without any server and port, and sooner.
    assert hit["digest"] == train("calm", "data:via=arena", None, ObservedEngine(zygote))["digest"]
