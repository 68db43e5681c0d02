"""Hosts with networks of their own: the bits are those of one, and nobody on the way can read them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

import shoal
from benchmarks.namespaces import Network
from helpers import strangers, telltale_task
from helpers.counting import TASK as COUNTING
from helpers.counting import applied
from helpers.memory import require_flat
from helpers.namespaces import (
    NamespaceStarter,
    namespaced,
    network_of,
    run_in_namespaces,
    zygotes_in,
)
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.spec import Cluster, Job

DIGITS = Path(__file__).parents[3] / "examples" / "digits.py"
PATTERN_BYTES = 48
STEPS = 12
STRANGERS = 1_000
EPOCHS = 40
LIMIT_MIB = 32.0
GUARD_S = 120.0
Zygotes = Mapping[str, ZygoteProcess]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with network_of(2) as made:
        yield made


@pytest.fixture(scope="module")
def zygotes(network: Network) -> Iterator[Zygotes]:
    with zygotes_in(network) as started:
        yield started


def telltale_job(folder: Path, cluster: Cluster) -> Job:
    folder.mkdir()
    return Job(
        target=telltale_task.__file__,
        args={"folder": str(folder), "steps": STEPS},
        strategy="data",
        cluster=cluster,
    )


def told(folder: Path, part: str) -> dict[str, list[np.ndarray]]:
    """By network: what each worker there has left."""
    found: dict[str, list[np.ndarray]] = {}
    for file in sorted(folder.glob(f"{part}-*")):
        found.setdefault(file.name.split("-")[1], []).append(np.fromfile(file, dtype=np.float32))
    return found


def patterns(folder: Path) -> dict[str, list[bytes]]:
    """What passes between two hosts of two workers in their first step, as floats. Who is the first of two is
    not told: so there are some sums that nobody makes."""
    weights = [one for found in told(folder, "weight").values() for one in found]
    here, there = told(folder, "gradient").values()
    sums = [here[0] + here[1], there[0] + there[1]]
    totals = [
        before + first + second
        for before, pair in ((sums[0], there), (sums[1], here))
        for first, second in (pair, pair[::-1])
    ]
    digits, _ = shoal.datasets.digits()
    samples = [np.asarray(digits[number][0], dtype=np.float32) for number in range(len(digits))]
    return {
        "weights": _parts(weights),
        "sums": _parts(sums),
        "totals": _parts(totals),
        "samples": _parts(samples),
    }


def keys(starter: NamespaceStarter) -> dict[str, list[bytes]]:
    """Those of the run and its processes, as they are written and as they are."""
    run, processes = starter.secrets
    return {
        "run's key": [run.encode(), bytes.fromhex(run)],
        "processes' key": [processes.encode(), bytes.fromhex(processes)],
    }


def _parts(tensors: list[np.ndarray]) -> list[bytes]:
    """Some bytes from the middle of each, where they are those of nothing else."""
    parts = []
    for tensor in tensors:
        raw = tensor.tobytes()
        cuts = [raw[at : at + PATTERN_BYTES] for at in range(0, len(raw) - PATTERN_BYTES, 4 * PATTERN_BYTES)]
        parts += [cut for cut in cuts if np.count_nonzero(np.frombuffer(cut, np.float32)) > PATTERN_BYTES // 8]
    return parts


def seen_in(capture: bytes, wanted: dict[str, list[bytes]]) -> set[str]:
    """Which of these can be read there."""
    return {name for name, parts in wanted.items() if any(part in capture for part in parts)}


@pytest.mark.parametrize("is_trusted", [False, True])
def test_the_bits_are_those_of_one_host_and_nobody_reads_them_on_the_way(
    is_trusted: bool, network: Network, zygotes: Zygotes, tmp_path: Path, zygote: ZygoteProcess
) -> None:
    cluster = namespaced(4, trusted_network=is_trusted)
    job, signs = telltale_job(tmp_path / "signs", cluster), tmp_path / "signs"
    starters: list[NamespaceStarter] = []
    with network.capture(tmp_path / "capture"):
        spread, _ = run_in_namespaces(
            job,
            tmp_path / "spread",
            network,
            zygotes=zygotes,
            on_event=lambda event, starter: starters.append(starter),
        )
    assert spread["steps"] == STEPS and spread["audit"]["clean"]
    capture = (tmp_path / "capture").read_bytes()
    assert len(capture) > 1 << 20, "gradients went another way"
    wanted = patterns(signs)
    assert all(wanted.values()), wanted
    assert seen_in(capture, wanted) == (wanted.keys() if is_trusted else set())
    assert seen_in(capture, keys(starters[0])) == set()
    assert digest_on_one_host(job, tmp_path / "here", zygote) == spread["digest"]


def digest_on_one_host(job: Job, folder: Path, zygote: ZygoteProcess) -> str:
    folder.mkdir()
    cluster = Cluster(workers=job.cluster.workers, threads=1)
    alone = replace(job, cluster=cluster, run_dir=str(folder))
    return str(Supervisor(alone, lambda event: None, LocalEngine(zygote)).run()["digest"])


class Siege:
    """A thousand strangers at each port that processes of a run listen at, as another host sees them."""

    def __init__(self, network: Network) -> None:
        self.outcomes: dict[str, dict[str, int]] = {}
        """By address: what became of them."""
        self.grown_bytes: list[int] = []
        self._network = network
        self._thread = threading.Thread(target=self._run)

    @property
    def has_begun(self) -> bool:
        return self._thread.ident is not None

    def begin(self, door: str) -> None:
        """`door`: that of the run's supervisor."""
        self._door = door
        self._thread.start()

    def wait(self) -> None:
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        hosts = self._network.hosts
        processes = [psutil.Process(), *(psutil.Process(pid) for host in hosts for pid in host.processes())]
        before = [process.memory_info().rss for process in processes]
        targets = {host.address: _listening(host.processes()[0]) for host in hosts}
        address, _, port = self._door.removeprefix("tcp://").rpartition(":")
        targets[address] = [port]
        attackers = {}
        for number, (address, ports) in enumerate(targets.items()):
            words = [sys.executable, strangers.__file__, str(STRANGERS), address, *ports]
            attacker = hosts[(number + 1) % len(hosts)]
            attackers[address] = subprocess.Popen(attacker.command(words), stdout=subprocess.PIPE)
        found = {address: one.communicate(timeout=GUARD_S)[0] for address, one in attackers.items()}
        for process, size in zip(processes, before, strict=True):
            with suppress(psutil.NoSuchProcess):
                self.grown_bytes.append(process.memory_info().rss - size)
        self.outcomes = {address: json.loads(text) for address, text in found.items()}


def _listening(pid: int) -> list[str]:
    """The tcp ports that somebody listens at on the host of a process, by the kernel's own table."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    found = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    return [str(int(one.partition(":")[2], 16)) for one in found]


@pytest.mark.long
def test_a_thousand_strangers_at_each_port_cost_a_run_nothing(
    network: Network, zygotes: Zygotes, tmp_path: Path
) -> None:
    siege, afterwards = Siege(network), list[Event]()
    job = Job(
        target=str(COUNTING),
        args={"signs": str(tmp_path), "epochs": EPOCHS, "pause_s": 0.2},
        strategy="data",
        cluster=namespaced(2),
    )

    def on_event(event: Event, starter: NamespaceStarter) -> None:
        if event.kind != "steps":
            return
        if not siege.has_begun:
            siege.begin(starter.door)
        elif siege.outcomes:
            afterwards.append(event)
            (tmp_path / "hurry").touch()

    results, events = run_in_namespaces(job, tmp_path / "run", network, zygotes=zygotes, on_event=on_event)
    siege.wait()
    assert results["audit"]["clean"] and afterwards
    assert {event.kind for event in events}.isdisjoint({"lost", "replaced", "restarted"})
    assert set(siege.outcomes) == {network.address, *(host.address for host in network.hosts)}
    for found in siege.outcomes.values():
        assert set(found) == {"hung up on"} and found["hung up on"] >= STRANGERS
    for grown_bytes in siege.grown_bytes:
        require_flat(grown_bytes, LIMIT_MIB)
    assert set(applied(tmp_path / "run" / "model.safetensors")) == {EPOCHS}


@pytest.mark.long
def test_half_as_much_travels_where_gradients_are_cast(network: Network, zygotes: Zygotes, tmp_path: Path) -> None:
    """`between=bf16`: the sums that pass between hosts have half their bytes, and the model is as good."""
    carried, results = dict[str, int](), dict[str, dict[str, float]]()
    for strategy in ("data", "data:between=bf16"):
        before = network.carried_bytes()
        job = Job(target=str(DIGITS), strategy=strategy, cluster=namespaced(2))
        done, _ = run_in_namespaces(job, tmp_path / strategy[-4:], network, zygotes=zygotes)
        carried[strategy] = network.carried_bytes() - before
        results[strategy] = done["results"]
    assert 0.45 < carried["data:between=bf16"] / carried["data"] < 0.6, carried
    uncast, cast = results["data"], results["data:between=bf16"]
    assert cast["accuracy"] > 0.9 and cast["accuracy"] == pytest.approx(uncast["accuracy"], abs=0.02)
    assert cast["loss"] == pytest.approx(uncast["loss"], rel=0.05) and cast["loss"] != uncast["loss"]


@pytest.mark.long
def test_hosts_that_have_ipv6_alone(tmp_path: Path, zygote: ZygoteProcess) -> None:
    """Three of them with one slot each, whose gradients go straight to whoever adds them up."""
    job = telltale_job(tmp_path / "signs", namespaced(3, hosts=3, ports="20000-20100"))
    with network_of(3, ipv6=True) as network:
        spread, _ = run_in_namespaces(job, tmp_path / "spread", network)
    assert spread["digest"] == digest_on_one_host(job, tmp_path / "here", zygote)
