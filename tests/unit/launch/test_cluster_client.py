"""A client of somebody's cluster: here a thread that plays a cluster of two nodes."""

from __future__ import annotations

import pytest

from shoal.comm.channel import Channel
from shoal.errors import Interrupted, LaunchError
from shoal.launch.engines.client import ClusterClient, knock
from shoal.launch.engines.client_side import ServingClient
from shoal.launch.engines.client_words import (
    AgentOver,
    AgentsWanted,
    AgentUnwanted,
    ClusterReached,
    ClusterWanted,
    RoomHeld,
    RoomWanted,
)
from shoal.spec.told import Told

GUARD_S = 30.0


class Played(ServingClient):
    """Reaches everybody but `nowhere`, holds nothing, and has agents that end when they are unwanted."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.agents: list[str] = []
        self.ended: list[str] = []
        played.append(self)

    @property
    def has_agents(self) -> bool:
        return bool(self.agents)

    def take(self, word: Told) -> None:
        match word:
            case ClusterWanted(address="nowhere"):
                raise LaunchError("There is nothing at nowhere.")
            case ClusterWanted(address="broken"):
                raise ValueError("a mistake of ours")
            case ClusterWanted():
                self.say(ClusterReached(nodes=[]))
            case AgentsWanted():
                self.agents += word.names
            case AgentUnwanted():
                self.ended.append(word.name)
            case RoomWanted():
                pass  # It takes longer than anybody waits.

    def look(self) -> None:
        for name in self.ended:
            self.agents.remove(name)
            self.say(AgentOver(name=name, text=f"{name} was ended."))
        self.ended.clear()

    def give_back(self) -> None:
        self.agents.clear()


played: list[Played] = []


def started() -> ClusterClient:
    played.clear()
    return ClusterClient.start("the played cluster", lambda channel: Played(channel).serve())


def reach(client: ClusterClient, address: str) -> ClusterReached:
    return client.ask(ClusterWanted(address=address, slots=2, cores=1), (ClusterReached,), GUARD_S)


def test_agents_are_held_until_nobody_wants_them() -> None:
    client = started()
    reach(client, "somewhere")
    client.say(AgentsWanted(names=["a", "b"], cores=[1, 1], address="", ports="", key=""))
    one, other = client.hold(["a", "b"])
    one.abandon()
    while (why := one.failure()) is None:
        pass
    assert why == "a was ended." and other.failure() is None
    other.close()
    assert not played[0].has_agents, "the client was dismissed, and has given everything back"
    one.abandon()  # Whoever cleans up after a failure ends all of them, whatever has become of them.
    assert other.failure() is None


def test_why_nothing_can_be_had_is_said() -> None:
    client = started()
    with pytest.raises(LaunchError, match=r"^There is nothing at nowhere\.$"):
        reach(client, "nowhere")
    client.close()


def test_a_client_that_fails_is_named() -> None:
    client = started()
    with pytest.raises(
        LaunchError, match="client of the played cluster has failed: ValueError: a mistake of ours"
    ):
        reach(client, "broken")
    client.close()


def test_nobody_waits_longer_than_asked_or_wanted() -> None:
    client = started()
    room = RoomWanted(bundles=[], wait_s=0.0)
    with pytest.raises(LaunchError, match="The played cluster did not answer within 0 s"):
        client.ask(room, (RoomHeld,), 0.0)
    with pytest.raises(Interrupted, match="stopped on request"):
        client.ask(room, (RoomHeld,), GUARD_S, lambda: True)
    client.close()


def test_a_process_that_cannot_begin_is_named() -> None:
    client = ClusterClient.start("the played cluster", "shoal.no_such_module")
    with pytest.raises(LaunchError, match=r"client of the played cluster has failed: .*No module named"):
        reach(client, "somewhere")
    client.close()


def test_where_nobody_listens_is_found_out_at_once() -> None:
    with pytest.raises(LaunchError, match=r"Nobody listens for it \(Connection refused\)"):
        knock("it", "spark://127.0.0.1:1")
    knock("it", "a-name-without-a-port")
