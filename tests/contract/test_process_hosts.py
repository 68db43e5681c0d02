"""One suite for every host: what a supervisor asks of it, and what it tells of its processes."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.actors import ActorEngine
from shoal.comm.words import Adopt, Stop
from shoal.launch.engine import Engine, Host
from shoal.launch.engines.here import HereStarter
from shoal.launch.local import LocalEngine
from shoal.launch.messages import Ended, Load, News, Said, Started
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.launch.remote.gathering import AgentEngine
from shoal.spec import Cluster, Job, World
from shoal.spec.vocabulary import Purpose

GUARD_S = 60.0
ENDS, RAISES, STAYS = range(3)
"""What each process does, by its rank."""
FATES = f"""
import time
if rank == {RAISES}:
    raise SystemError("on purpose")
if rank == {STAYS}:
    time.sleep(600)
"""
SCRIPT = f"import os\nrank = int(os.environ['RANK'])\n{FATES}"
ACTOR = f"""
import msgpack, socket, sys
rank, sock = int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
sock.send(msgpack.packb({{"kind": "state", "state": "ready", "step": 0}}))
{FATES}
"""

Until = Callable[[list[News]], bool]


@pytest.fixture(params=["local", "plain processes", "agent"])
def host(
    request: pytest.FixtureRequest, tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Host]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = Job(target=str(script), purpose=Purpose.SCRIPT, cluster=Cluster(workers=3, threads=1))
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)  # for the agent, which has no other
    engines: dict[str, Callable[[], Engine]] = {
        "local": lambda: LocalEngine(zygote),
        "plain processes": lambda: ActorEngine(ACTOR, {}),
        "agent": lambda: AgentEngine(HereStarter(1)),
    }
    engine = engines[request.param]()
    (opened,) = engine.reserve(job)
    try:
        yield opened
    finally:
        opened.close()


def start(host: Host, *ranks: int) -> None:
    for process, rank in enumerate(ranks):
        host.start(process, World(global_rank=rank, local_rank=rank, world_size=3, local_size=3))


def collect(host: Host, until: Until) -> list[News]:
    """News until enough is known; the host's descriptor says when there are any."""
    told: list[News] = []
    deadline = time.monotonic() + GUARD_S
    while not until(told):
        ready, _, _ = select.select([host], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing more was told than {told}"
        told += host.collect()
    return told


def has_ended(*processes: int) -> Until:
    return lambda told: set(processes) <= {news.process for news in told if isinstance(news, Ended)}


def test_a_host_says_what_it_has(host: Host) -> None:
    assert host.facts.name and host.facts.cores >= 1


def test_each_process_starts_speaks_and_ends_in_that_order(host: Host) -> None:
    start(host, ENDS, RAISES)
    told = collect(host, has_ended(0, 1))
    for process in (0, 1):
        own = [news for news in told if news.process == process]  # type: ignore[union-attr]
        assert isinstance(own[0], Started) and isinstance(own[-1], Ended)
        said = [news.word.kind_name for news in own if isinstance(news, Said)]
        assert "state" in said and len(said) == len(own) - 2
    codes = {news.process: news.exit_code for news in told if isinstance(news, Ended)}
    assert codes == {0: 0, 1: 1}
    assert host.collect() == []


def test_a_signal_ends_the_one_that_it_is_for(host: Host) -> None:
    start(host, STAYS, STAYS)
    collect(host, lambda told: {news.process for news in told if isinstance(news, Said)} == {0, 1})
    host.signal(1, signal.SIGKILL)
    told = collect(host, has_ended(1))
    assert [news.exit_code for news in told if isinstance(news, Ended)] == [-signal.SIGKILL]
    assert not has_ended(0)(told)
    sights = host.look_into([0])
    assert set(sights) == {0}
    assert isinstance(host.measure_load(), Load)


def test_who_has_ended_is_left_alone(host: Host) -> None:
    start(host, ENDS)
    collect(host, has_ended(0))
    host.signal(0, signal.SIGKILL)
    host.say(0, Stop())
    assert host.collect() == []


def test_saying_something_never_waits(host: Host) -> None:
    """Also where nobody reads it."""
    start(host, STAYS)
    collect(host, lambda told: any(isinstance(news, Said) for news in told))
    host.signal(0, signal.SIGSTOP)
    begun = time.monotonic()
    for number in range(2000):
        host.say(0, Adopt(places=list(range(100)), generation=number))
    assert time.monotonic() - begun < GUARD_S / 2
    host.collect()


def test_closing_ends_whatever_still_runs(host: Host) -> None:
    """That nothing is left is what the fixture of all tests holds."""
    start(host, STAYS, STAYS)
    told = collect(host, lambda told: sum(isinstance(news, Started) for news in told) == 2)
    assert not has_ended(0)(told) and not has_ended(1)(told)
