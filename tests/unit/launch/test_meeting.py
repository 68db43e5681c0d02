"""Processes that meet in a folder: here threads stand for them."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import LaunchError, SpecError
from shoal.launch.engines.found import FoundRank
from shoal.launch.engines.meeting import Follower, Leader
from shoal.launch.engines.notes import (
    CALL,
    TICKET,
    Call,
    CheckIn,
    HostShare,
    MeetingFolder,
    TicketLeft,
    name_of,
)

GUARD_S = 60.0
HOSTS = ["a", "a", "b", "b"]


def ranked(rank: int | None, **changes: object) -> FoundRank:
    host = "" if rank is None else HOSTS[rank]
    found = FoundRank(by="hand", rank=rank, size=4, workers=4, identity="x", host=host, patience_s=GUARD_S)
    return replace(found, **changes)  # type: ignore[arg-type]


def nobody(share: HostShare, ticket: TicketLeft) -> None:
    raise AssertionError("only the first of another host is an agent")


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(8)


def follow(
    pool: ThreadPoolExecutor,
    folder: MeetingFolder,
    rank: int | None,
    serve: Callable[[HostShare, TicketLeft], None] = nobody,
    **changes: object,
) -> Future[int]:
    return pool.submit(Follower(ranked(rank, **changes), folder, [rank or 0]).follow, serve)


def test_all_end_with_the_first(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    folder = MeetingFolder(tmp_path / "meeting")
    served: list[tuple[HostShare, str]] = []
    is_served = threading.Event()

    def serve(share: HostShare, ticket: TicketLeft) -> None:
        served.append((share, ticket.key))
        is_served.set()

    with pool:
        others = [follow(pool, folder, rank, serve if rank == 2 else nobody) for rank in (1, 2, 3)]
        guest = follow(pool, folder, None)
        leader = Leader(ranked(0), folder, [0])
        leader.gather()
        assert [(one.name, one.agent, one.cores, one.workers) for one in leader.hosts] == [
            ("a", 0, [0, 1], 2),
            ("b", 2, [2, 3], 2),
        ]
        folder.write(TICKET, TicketLeft(number="1", address="tcp://a:1", key="secret", ports=""))
        assert is_served.wait(GUARD_S)
        assert stat.S_IMODE((folder.path / TICKET).stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        leader.end(3)
        assert [one.result(GUARD_S) for one in (*others, guest)] == [3] * 4
    assert [(share.name, key) for share, key in served] == [("b", "secret")]
    assert not folder.path.exists()


def test_what_dead_processes_have_left_is_nobody(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Nor does an old call end those that come later."""
    folder = MeetingFolder(tmp_path / "meeting")
    for rank in (1, 2, 3):
        old = CheckIn(nonce=f"old{rank}", host="gone", group="", cores=[0], is_worker=True, beat=5)
        folder.write(name_of(rank), old)
    folder.write(CALL, Call(nonce="old", beat=9, members=["old1", "old2", "old3"], hosts=[], status=7))
    with pool:
        others = [follow(pool, folder, rank, lambda share, ticket: None) for rank in (1, 2)]
        leader = Leader(ranked(0, patience_s=1.0), folder, [0])
        with pytest.raises(
            LaunchError, match=r"^1 of 4 processes by hand \(rank 3\) did not come to .* within 1 s; run"
        ):
            leader.gather()
        leader.end(1)
        assert [one.result(GUARD_S) for one in others] == [1, 1]


def test_who_waits_for_nobody_says_so(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    folder = MeetingFolder(tmp_path / "meeting")
    with (
        pool,
        pytest.raises(LaunchError, match=r"^The first of 4 processes by hand was not heard in .* for 0 s; run"),
    ):
        follow(pool, folder, 1, patience_s=0.3).result(GUARD_S)


def test_a_number_that_two_have(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Whichever of them reads the other's note first says so and leaves; the other one goes on waiting."""
    folder = MeetingFolder(tmp_path / "meeting")
    with pool:
        both = [follow(pool, folder, 1, patience_s=3.0) for _ in range(2)]
        said = [str(one.exception(GUARD_S)) for one in both]
    assert any(text.startswith("Two processes say that they are rank 1 of 4 by hand; give each") for text in said)


def test_what_others_could_read_is_refused(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    folder = MeetingFolder(tmp_path / "meeting")
    folder.path.mkdir(mode=0o755)
    with pytest.raises(SpecError, match=r"must be a folder of yours alone \(mode 0700\), found mode 0755"):
        Leader(ranked(0), folder, [0]).gather()
    folder.path.chmod(0o700)
    folder.write(CALL, Call(nonce="n", beat=1, members=[], hosts=[]))
    (folder.path / CALL).chmod(0o644)
    with pytest.raises(
        SpecError, match=r"this run's key goes, must be yours alone \(mode 0600\), found mode 0644"
    ):
        Follower(ranked(1), folder, [0]).follow(nobody)


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = MeetingFolder(tmp_path / "file" / "meeting")
    with pytest.raises(
        LaunchError, match=r"cannot meet in .*meeting \(.*\); name a folder that all hosts see with"
    ):
        Leader(ranked(0), folder, [0]).gather()
