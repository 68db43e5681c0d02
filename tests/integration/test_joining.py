"""Processes that somebody else started find each other: in a segment that they were given, or at a store."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.forked import GUARD_S, in_processes
from shoal.arena import Segment
from shoal.errors import PeerLost
from shoal.roles.process.joining import Fellows
from shoal.spec import World

SIZE = 3


@pytest.fixture(params=["segment", "store"])
def join(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[World], Fellows]:
    """How a process finds its fellows, without any folder of sockets."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    given = {"arena_fd": None, "local_size": SIZE} if request.param == "store" else {}
    return lambda world: Fellows(replace(world, sockets="", **given))


def test_all_hear_what_the_first_says(join: Callable[[World], Fellows]) -> None:
    def meet(world: World) -> list[str]:
        fellows = join(world)
        long = "ä" * 2000  # of this as much as there is room for
        return [fellows.hear_first(f"{world.global_rank} says {text}") for text in ("a", "", long)]

    first, *others = in_processes(SIZE, meet)
    assert first[:2] == ["0 says a", "0 says "]
    for heard in others:
        assert heard[:2] == first[:2]
        assert 400 < len(heard[2]) < 2000 and first[2].startswith(heard[2])


def test_every_gathering_has_memory_of_its_own_and_all_have_one_folder(join: Callable[[World], Fellows]) -> None:
    def meet(world: World) -> dict[str, Any]:
        fellows = join(world)
        found, folders = [], []
        for number in (1, 2):
            gathered = fellows.gather()
            segment = Segment(gathered.arena_fd)
            segment.reserve("words", SIZE)
            segment.map()
            words = segment.tensor("words", torch.uint8)
            found.append(int(words[world.global_rank]))
            words[world.global_rank] = number
            fellows.hear_first()
            fellows.hear_first()  # all have written
            found.append(words.tolist())
            folders.append(gathered.sockets)
        mode = stat.S_IMODE(os.stat(folders[0]).st_mode)
        fellows.hear_first()
        fellows.close()
        return {"found": found, "folders": folders, "mode": mode}

    answers = in_processes(SIZE, meet)
    (folder,) = {folder for answer in answers for folder in answer["folders"]}
    for answer in answers:
        assert answer["found"] == [0, [1] * SIZE, 0, [2] * SIZE]
        assert answer["mode"] == 0o700
    assert not Path(folder).exists()


def test_who_left_before_a_step_is_noticed_and_who_left_an_earlier_gathering_is_not(
    join: Callable[[World], Fellows],
) -> None:
    def meet(world: World) -> str:
        earlier, fellows = join(world), join(world)
        for each in (earlier, fellows):
            each.gather()
        earlier.enter(3)
        earlier.close()
        fellows.enter(4 if world.global_rank else 3)
        fellows.look_up()  # nobody has left this gathering
        fellows.hear_first()  # all have looked
        if not world.global_rank:
            fellows.close()
            return ""
        deadline = time.monotonic() + GUARD_S
        while time.monotonic() < deadline:
            try:
                fellows.look_up()
            except PeerLost as error:
                return str(error)
            time.sleep(0.01)
        return "nothing"

    first, *others = in_processes(SIZE, meet)
    assert not first
    assert all("Worker 0 ended after 3 steps, but worker" in told and "is in step 4" in told for told in others)


def test_one_process_hears_itself() -> None:
    fellows = Fellows(World())
    assert fellows.hear_first("alone") == "alone"
    world = fellows.gather()
    assert world.arena_fd is None and Path(world.sockets).is_dir()
    fellows.close()
    assert not Path(world.sockets).exists()


def test_a_folder_that_nobody_closes_goes_with_its_maker() -> None:
    fellows = Fellows(World())
    folder = Path(fellows.gather().sockets)
    assert folder.is_dir()
    del fellows
    assert not folder.exists()
