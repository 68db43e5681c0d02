"""Where a process stands, and how it learns that from its environment."""

from __future__ import annotations

import pytest

from shoal.errors import SpecError
from shoal.spec import World

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def test_without_a_launcher_one_process_is_alone() -> None:
    assert World.from_environment({}) == World()
    assert World().is_first


def test_what_torchrun_sets() -> None:
    world = World.from_environment(TORCHRUN)
    assert (world.global_rank, world.world_size, world.local_rank, world.local_size) == (1, 4, 1, 2)
    assert not world.is_first


def test_local_numbers_default_to_one_host() -> None:
    world = World.from_environment({"RANK": "1", "WORLD_SIZE": "2"})
    assert (world.local_rank, world.local_size) == (1, 2)


@pytest.mark.parametrize("change", [{"RANK": None}, {"RANK": "first"}, {"WORLD_SIZE": ""}])
def test_half_an_environment_is_refused(change: dict[str, str | None]) -> None:
    env = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(SpecError, match="start this script with torchrun or `shoal run`"):
        World.from_environment(env)


def test_a_rank_outside_its_world() -> None:
    with pytest.raises(SpecError, match=r"^World: global_rank 4 does not fit a world of 4"):
        World.from_environment({**TORCHRUN, "RANK": "4"})
    with pytest.raises(SpecError, match="role 'boss' is not known"):
        World(role="boss")


def test_a_spare_is_never_first() -> None:
    assert not World(role="spare", global_rank=5, world_size=2).is_first


def test_a_worker_hosts_its_own_place_or_several() -> None:
    world = World(global_rank=1, world_size=4)
    assert world.places == (1,) and not world.is_first
    more = world.hosting((3, 1, 0), generation=2)
    assert (more.global_rank, more.places, more.generation) == (0, (0, 1, 3), 2) and more.is_first
    assert World(role="spare", world_size=4).places == ()


def test_a_successor_may_be_on_a_host_that_came_later() -> None:
    moved = World(global_rank=2, world_size=4, hosts=(2, 2)).at(2, "10.0.0.3")
    assert (moved.host_number, moved.host, moved.local_rank, moved.local_size) == (2, "10.0.0.3", 0, 1)
