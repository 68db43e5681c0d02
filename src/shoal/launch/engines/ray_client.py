"""The client of a Ray cluster: a process of its own (`client.py`), and the only one of a run that imports Ray.

It holds nodes by one placement group, and has an actor on each. The actor's process is Ray's and has threads, so
it runs an agent in another, clean one. Whatever ends the actor, Ray included, ends the agent.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from shoal.comm.channel import Channel
from shoal.comm.sealing import SealingPair, seal
from shoal.comm.security import RunKey
from shoal.errors import LaunchError
from shoal.launch.engines.client_side import ServingClient
from shoal.launch.engines.client_words import (
    AgentOver,
    AgentsWanted,
    AgentUnwanted,
    ClusterReached,
    ClusterWanted,
    MoreComing,
    MoreWanted,
    RoomHeld,
    RoomLacking,
    RoomWanted,
)
from shoal.launch.remote.starting import AgentProcess, Candidate, Invitation, agent_command
from shoal.spec.told import Told


class NodeAgent:
    """An actor: has an agent run on its node. All that Ray sees of the run's key is sealed for this process."""

    def __init__(self) -> None:
        self._pair = SealingPair.create()

    def public(self) -> bytes:
        """What the key is to be sealed with."""
        return self._pair.public

    def join(self, name: str, address: str, ports: str, cores: int, sealed: bytes) -> str:
        """Have the agent take part in a run; its last words, once it has ended."""
        invitation = Invitation(address=address, key=self._pair.open(sealed), ports=ports)
        # The thread of an actor's calls is the first of its process, so that the agent ends with the process.
        command = [*agent_command(invitation, Candidate(name=name, cores=str(cores))), "--owner", str(os.getpid())]
        agent = AgentProcess.run(name, command, invitation.key)
        agent.process.wait()
        return agent.failure() or ""


class RayClient(ServingClient):
    """One run's hold on a cluster."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._nodes: list[dict[str, Any]] = []
        self._group: Any = None
        self._bundles: list[dict[str, Any]] = []
        self._call: tuple[Any, int] | None = None
        """A placement group that waits for one node more than these, so that an autoscaler adds one."""
        self._actors: dict[str, Any] = {}
        self._calls: dict[Any, str] = {}
        """By what Ray calls the answer of an actor: whose it will be."""
        self._coming: dict[Any, tuple[str, MoreWanted]] = {}
        """By what an actor that came later will show: its name, and what it was asked for with."""

    @property
    def has_agents(self) -> bool:
        return bool(self._calls or self._coming)

    def give_back(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        self._hang_up()
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()

    def take(self, word: Told) -> None:
        match word:
            case ClusterWanted():
                self._reach(word.address)
            case RoomWanted():
                self._hold(word)
            case AgentsWanted():
                self._start(word)
            case MoreWanted():
                self._grow(word)
            case AgentUnwanted():
                self._end_actor(word.name)

    def _reach(self, address: str) -> None:
        try:
            ray.init(
                address=address or os.environ.get("RAY_ADDRESS") or "auto",
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RayError, ValueError, RuntimeError) as error:
            raise LaunchError(_why_unreached(address, error)) from None
        self._list_nodes()
        shown = [{key: one[key] for key in ("name", "address", "has")} for one in self._nodes]
        self.say(ClusterReached(nodes=shown))

    def _list_nodes(self) -> None:
        self._nodes = []
        living = [one for one in ray.nodes() if one["Alive"]]
        # The head first: it is what the supervisor's own address is looked for from.
        living.sort(key=lambda one: "node:__internal_head__" not in one["Resources"])
        addresses = [one["NodeManagerAddress"] for one in living]
        for one in living:
            address = one["NodeManagerAddress"]
            is_alone = addresses.count(address) == 1
            name = address if is_alone else f"{address}-{one['NodeID'][:6]}"
            self._nodes.append({"id": one["NodeID"], "name": name, "address": address, "has": one["Resources"]})

    def _hold(self, wanted: RoomWanted) -> None:
        self._bundles = wanted.bundles
        self._group = placement_group(wanted.bundles, strategy="STRICT_SPREAD")
        deadline = time.monotonic() + wanted.wait_s
        while not self._group.wait(timeout_seconds=1):
            if time.monotonic() > deadline:
                self.say(RoomLacking(free=ray.available_resources()))
                return
            self.take_all(0.0)
            if self.is_dismissed:
                return
        by_bundle = placement_group_table(self._group)["bundles_to_node_id"]
        names = {one["id"]: one["name"] for one in self._nodes}
        # One that came while we waited is called by what it is to Ray.
        found = [by_bundle[number] for number in range(len(wanted.bundles))]
        self.say(
            RoomHeld(
                nodes=[names.get(node, node[:12]) for node in found],
                cores=[max(1, int(bundle["CPU"])) for bundle in wanted.bundles],
            )
        )

    def _start(self, wanted: AgentsWanted) -> None:
        kind = ray.remote(NodeAgent)
        for number, name in enumerate(wanted.names):
            needs = dict(self._bundles[number])
            self._actors[name] = kind.options(
                num_cpus=needs.pop("CPU", 0),
                num_gpus=needs.pop("GPU", 0),
                resources=needs,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=number
                ),
            ).remote()
        key = RunKey.from_text(wanted.key)
        shown = {name: actor.public.remote() for name, actor in self._actors.items()}
        for number, (name, actor) in enumerate(self._actors.items()):
            try:
                sealed = seal(key, ray.get(shown[name]))
            except RayError as error:
                self.say(AgentOver(name=name, text=_why_ended(name, error)))
                continue
            call = actor.join.remote(name, wanted.address, wanted.ports, wanted.cores[number], sealed)
            self._calls[call] = name

    def _grow(self, wanted: MoreWanted) -> None:
        """Agents on nodes outside of the placement group, which cannot grow. Nothing here waits for them."""
        self._list_nodes()
        free = [one for one in self._nodes if one["name"] not in wanted.there]
        fit = [one for one in free if all(one["has"].get(name, 0) >= much for name, much in wanted.bundle.items())]
        if len(fit) < wanted.count:
            if wanted.calls:
                self._call_for(wanted)
            self.say(RoomLacking(free=ray.available_resources()))
            return
        self._hang_up()
        for one in fit[: wanted.count]:
            needs = dict(wanted.bundle)
            actor = (
                ray.remote(NodeAgent)
                .options(
                    num_cpus=needs.pop("CPU", 0),
                    num_gpus=needs.pop("GPU", 0),
                    resources=needs,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(one["id"], soft=False),
                )
                .remote()
            )
            self._actors[one["name"]] = actor
            self._coming[actor.public.remote()] = (one["name"], wanted)
        self.say(MoreComing(nodes=[one["name"] for one in fit[: wanted.count]]))

    def _call_for(self, wanted: MoreWanted) -> None:
        """Want a node besides those that there are. What is wanted of these is next to nothing, so that it fits
        beside all that runs there; who holds nothing any more when a node has come leaves it to the agent."""
        if self._call is not None and self._call[1] == len(self._nodes):
            return
        self._hang_up()
        others = [{"memory": 1.0}] * len(self._nodes)
        group = placement_group([wanted.bundle, *others], strategy="STRICT_SPREAD")
        self._call = group, len(self._nodes)

    def _hang_up(self) -> None:
        if self._call is not None:
            remove_placement_group(self._call[0])
            self._call = None

    def _end_actor(self, name: str) -> None:
        """End an actor, so that what it held is free."""
        if (actor := self._actors.pop(name, None)) is not None:
            ray.kill(actor)

    def _look_who_comes(self) -> None:
        if not self._coming:
            return
        for shown in ray.wait(list(self._coming), num_returns=len(self._coming), timeout=0)[0]:
            name, wanted = self._coming.pop(shown)
            try:
                sealed = seal(RunKey.from_text(wanted.key), ray.get(shown))
            except RayError as error:
                self.say(AgentOver(name=name, text=_why_ended(name, error)))
                continue
            cores = max(1, int(wanted.bundle["CPU"]))
            call = self._actors[name].join.remote(name, wanted.address, wanted.ports, cores, sealed)
            self._calls[call] = name

    def look(self) -> None:
        self._look_who_comes()
        if not self._calls:
            return
        for call in ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)[0]:
            name = self._calls.pop(call)
            try:
                text = ray.get(call)
            except RayError as error:
                text = _why_ended(name, error)
            self._end_actor(name)
            self.say(AgentOver(name=name, text=text))


def _why_unreached(address: str, error: Exception) -> str:
    text = str(error).strip()
    if "find any running Ray instance" in text:
        return (
            "No Ray cluster was found: RAY_ADDRESS is not set, and none runs on this machine; start one with ray "
            "start --head, or name its address, as in --on ray:HOST:6379."
        )
    where = address or os.environ.get("RAY_ADDRESS") or "on this machine"
    cause = error.__cause__ or error
    first = str(cause).strip().splitlines()[0] if str(cause).strip() else type(error).__name__
    return f"The Ray cluster {where} cannot be used: {first}"


def _why_ended(name: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    is_missing = [line for line in lines if "No module named" in line]
    if is_missing:
        return f"Host {name} could not join: {is_missing[-1]}; install Shoal on all nodes of the Ray cluster."
    return f"Host {name} could not join: {lines[0] if lines else type(error).__name__}"


if __name__ == "__main__":
    RayClient(Channel.from_fd(int(sys.argv[1]))).serve()
