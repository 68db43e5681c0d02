"""Hosts with networks of their own: the bits are those of one, and nobody on the way can read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.namespaces import Network
from helpers import telltale_task
from helpers.namespaces import namespaced, network_of, run_in_namespaces
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.launch.supervisor import Supervisor
from shoal.spec import Cluster, Job

PATTERN_BYTES = 48
STEPS = 12


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with network_of(2) as made:
        yield made


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
    return {"weights": _parts(weights), "sums": _parts(sums), "totals": _parts(totals)}


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
    is_trusted: bool, network: Network, tmp_path: Path, zygote: ZygoteProcess
) -> None:
    cluster = namespaced(4, trusted_network=is_trusted)
    job, signs = telltale_job(tmp_path / "signs", cluster), tmp_path / "signs"
    with network.capture(tmp_path / "capture"):
        spread, _ = run_in_namespaces(job, tmp_path / "spread", network)
    assert spread["steps"] == STEPS and spread["audit"]["clean"]
    capture = (tmp_path / "capture").read_bytes()
    assert len(capture) > 1 << 20, "gradients went another way"
    wanted = patterns(signs)
    assert all(wanted.values()), wanted
    assert seen_in(capture, wanted) == ({"weights", "sums", "totals"} if is_trusted else set())
    assert not any(host.processes() for host in network.hosts)
    (tmp_path / "here").mkdir()
    alone = replace(job, cluster=Cluster(workers=4, threads=1), run_dir=str(tmp_path / "here"))
    assert Supervisor(alone, lambda event: None, LocalEngine(zygote)).run()["digest"] == spread["digest"]
