"""Where a script's process stands in its run, and what its Trainer makes of it."""

from __future__ import annotations

import pytest

from shoal.comm.channel import Channel
from shoal.errors import LaunchError, SpecError
from shoal.launch.worlds import plan_worlds
from shoal.model.start import Start
from shoal.roles.process.joining import GivenFellows
from shoal.roles.process.reporter import Reporter
from shoal.roles.process.station import ScriptMeetings, Station, current_station, world_at
from shoal.roles.script import script_environment
from shoal.roles.trainer.service import WatchedNotes, service_of
from shoal.spec import Cluster, Job, World
from shoal.spec.vocabulary import Purpose, Role, State
from shoal.strategies.base import StepResult

SUPERVISORS: list[Channel] = []
"""The other ends, which hear what is said as long as they are there."""


def job(strategy: str, purpose: Purpose = Purpose.TRAIN) -> Job:
    return Job(target="toy.py", purpose=purpose, strategy=strategy, cluster=Cluster(workers=2, threads=1))


def station(strategy: str, role: Role = Role.WORKER) -> Station:
    """The last of a role in a script of two workers."""
    script = job(strategy, Purpose.SCRIPT)
    world = next(one for one in reversed(plan_worlds(script)) if one.role == role)
    channel, supervisor = Channel.pair()
    SUPERVISORS.append(supervisor)
    reporter = Reporter(world, channel)
    meetings = ScriptMeetings(reporter)
    return Station(job=script, world=world, channel=channel, reporter=reporter, meetings=meetings)


def test_a_process_that_runs_no_script_has_none() -> None:
    assert current_station() is None


def test_servers_are_met_at_sockets_and_leave_the_port_to_the_script() -> None:
    served = station("ps")
    found = world_at(served)
    assert found.coordinator == "" and served.world.coordinator.startswith("127.0.0.1:")
    assert (found.secret, found.node, found.global_rank) == (served.world.secret, 3, 1)
    assert found.coordinator_address.startswith("ipc://")


def test_without_servers_the_environment_says_where_a_trainer_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in script_environment(job("data"), World(global_rank=1, world_size=2)).items():
        monkeypatch.setenv(name, value)
    for found in (world_at(station("data")), world_at(None)):
        assert (found.global_rank, found.world_size, found.secret) == (1, 2, "")


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        (Role.WORKER, ("1", "1", "2", "default", "1", "2")),
        (Role.SERVER, ("-1", "-1", "2", "server", "2", "3")),
        (Role.COORDINATOR, ("-1", "-1", "2", "coordinator", "0", "1")),
    ],
)
def test_no_server_takes_itself_for_a_worker(role: Role, expected: tuple[str, ...]) -> None:
    place = station("ps:servers=3", role)
    found = script_environment(place.job, place.world)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
    assert tuple(found[name] for name in names) == expected


def test_servers_serve_one_fit() -> None:
    served = station("ps", Role.SERVER)
    with pytest.raises(LaunchError, match=r"has ended in server 0 without Trainer\.fit\(\)"):
        served.check_begun()
    served.begin()
    served.check_begun()
    with pytest.raises(SpecError, match=r"the servers of strategy=ps serve one fit\(\)"):
        served.begin()
    station("data").check_begun()  # nobody waits for this one


def test_a_trainer_has_servers_where_its_run_has_them_for_it() -> None:
    served, plain = station("ps"), station("data")
    assert service_of(job("ps"), served) is served
    assert service_of(job("sharded"), plain) is None is service_of(job("data"), None)
    assert service_of(job("ps"), None) is None is service_of(job("ps"), plain, may_serve=True)  # it serves itself
    for strategy, where in (("data", served), ("ps:servers=2", served), ("ps", plain)):
        with pytest.raises(SpecError, match=f"Trainer: strategy={strategy} "):
            service_of(job(strategy), where)


@pytest.mark.parametrize("role", [Role.WORKER, Role.SERVER])
def test_fellows_of_servers_have_all_from_the_start(role: Role) -> None:
    given = station("ps", role).meeting_world
    fellows = GivenFellows(given)
    assert fellows.gather() is given
    assert fellows.hear_first("said") == "said", "nobody is waited for"
    fellows.close()


def test_what_is_noted_of_steps_is_a_sign_of_life() -> None:
    served = station("ps:sync=asp")
    notes = WatchedNotes(Start(step=2, losses=[3.0, 2.0]), served.reporter)
    notes.on_state(State.TRAINING, 2)
    notes.on_step(3, StepResult(1.5, 1.0, False))
    notes.on_step(6, StepResult(1.0, 1.0, False))
    assert notes.losses == [3.0, 2.0, 1.5, 1.0, 1.0, 1.0], "others have taken steps 4 and 5"
    beat = served.reporter.pulse.read(0.2)
    assert (beat["step"], beat["phase"]) == (6, State.COMPUTING)
