"""Every port of a served job is shot at while it trains: not one bit changes, and who has no key gets nothing."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq

from helpers.fuzz import fuzz_port
from shoal.comm import RunKey
from shoal.launch import LocalEngine, Supervisor, ZygoteProcess
from shoal.observe import Event
from shoal.ps.messages import Ack, Join, Push, View, shard_rows
from shoal.ps.node import decode_bundle, encode_bundle
from shoal.spec import Cluster, Job

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
FLAT_BYTES = 48 * 2**20
STEPS = 800


def valid_bundles() -> list[list[bytes]]:
    """Genuine packets, to be damaged."""
    push = Push(
        shard=0,
        generation=1,
        origin=3,
        sequence=1,
        rank=0,
        clock=1,
        cells=[0],
        based_on=0,
        weight=1.0,
        loss=1.0,
        frames=(torch.arange(64.0), b"plain"),
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


class Shooter:
    """Finds the ports of a run's processes once it trains, and shoots at them."""

    def __init__(self, engine: LocalEngine, frames: int) -> None:
        self.ports: dict[str, int] = {}
        self.answers: list[bytes] = []
        self.grown: dict[str, int] = {}
        self._engine = engine
        self._frames = frames
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
        for member in self._engine.handle.members:  # type: ignore[attr-defined]
            process = psutil.Process(member.pid)
            (listener,) = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            assert listener.laddr.ip == "127.0.0.1"
            self.ports[member.name], processes[member.name] = listener.laddr.port, process
        before = {name: process.memory_info().rss for name, process in processes.items()}
        for number, port in enumerate(self.ports.values()):
            address = f"tcp://127.0.0.1:{port}"
            self._knock_without_key(address)
            fuzz_port(address, KEY, self._frames, seed=number, valid=valid_bundles(), connections=10)
        after = {name: process.memory_info().rss for name, process in processes.items()}
        self.grown = {name: after[name] - before[name] for name in processes}

    def _knock_without_key(self, address: str) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.set(zmq.LINGER, 0)
            stranger.connect(address)
            stranger.send_multipart(valid_bundles()[0])
            if stranger.poll(100):
                self.answers.append(stranger.recv())


KEY = RunKey.create()


class Engine(LocalEngine):
    """An engine that remembers its processes."""

    def start(self, job: Job, worlds: Any) -> Any:
        self.handle = super().start(job, worlds)
        return self.handle


@pytest.mark.parametrize("frames", [1_500, pytest.param(100_000, marks=pytest.mark.long)])
@pytest.mark.timeout(400)
def test_ports_under_fire(
    tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch, frames: int
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda count: KEY.text)

    def train(name: str, steps: int, shooter: Shooter | None, engine: LocalEngine) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        job = Job(
            target=f"{TASKS}:mlp",
            strategy="ps:servers=2",
            cluster=Cluster(workers=2, threads=1),
            overrides={"max_steps": steps, "epochs": steps, "evaluate_every": 10_000},
            run_dir=str(tmp_path / name),
        )
        return Supervisor(job, shooter.on_event if shooter else lambda event: None, engine).run()

    steps = STEPS if frames < 10_000 else 20 * STEPS
    engine = Engine(zygote)
    shooter = Shooter(engine, frames)
    try:
        hit = train("hit", steps, shooter, engine)
    finally:
        shooter.finish()
    assert len(shooter.ports) == 5 and len(shooter.grown) == 5
    assert shooter.answers == []
    assert max(shooter.grown.values()) < FLAT_BYTES, shooter.grown
    assert hit["audit"]["clean"]
    assert hit["digest"] == train("calm", steps, None, LocalEngine(zygote))["digest"]
