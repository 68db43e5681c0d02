"""Copies of a shard on three servers, in every order that a network and deaths can bring about."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import pytest
import torch

from shoal.kv.holders import Holders, Seat, wish
from shoal.kv.messages import Letter, read_letter, write_letter
from shoal.kv.requests import KvRequest, carried
from shoal.kv.shard_copy import KvBacking, ShardCopy
from shoal.kv.vault import make_memory
from shoal.ps.plain.messages import DeskAnswer, WishOutcome

SERVERS, CLIENTS, PUSHES = 3, 2, 30
PATIENCE = 30
"""Steps until one asks again, or takes another for dead."""


@dataclass(eq=False)
class Client:
    """Pushes, one after the other, each until it is answered."""

    name: bytes
    requests: list[KvRequest]
    server: int = 0
    asked_at: int = -PATIENCE
    answered: int = 0
    refusals: list[str] = field(default_factory=list)
    values: torch.Tensor | None = None

    @property
    def request(self) -> KvRequest | None:
        return self.requests[self.answered] if self.answered < len(self.requests) else None

    def hear(self, answer: DeskAnswer) -> None:
        if self.request is None or answer.sequence != self.request.sequence or answer.outcome is WishOutcome.WAITS:
            return
        if answer.outcome is WishOutcome.ELSEWHERE:
            self.server = answer.moved_to if answer.moved_to >= 0 else (self.server + 1) % SERVERS
            self.asked_at -= PATIENCE // 2
        else:
            self.refusals += [answer.reason] if answer.reason else []
            self.values = answer.values
            self.answered, self.asked_at = self.answered + 1, -PATIENCE


class World:
    """Servers, clients, a network that loses and repeats, and a register."""

    def __init__(self, seed: int) -> None:
        self.chance, self.now, self.lives = random.Random(seed), 0, 0
        self.register: Holders | None = None
        self.mail: list[tuple[int, Letter | KvRequest]] = []
        self.servers: dict[int, ShardCopy] = {}
        self.memories: dict[int, int] = {}
        self.wishes: dict[int, tuple[Holders | None, Holders]] = {}
        self.deaths = 0
        for number in range(SERVERS):
            self.start(number)
        self.clients = [
            Client(name, requests(name, number)) for number, name in enumerate((b"a" * 16, b"b" * 16)[:CLIENTS])
        ]

    def start(self, number: int) -> None:
        self.lives += 1
        self.memories[number] = make_memory()
        self.servers[number] = ShardCopy(0, Seat(number, str(self.lives)), self.memories[number], is_alone=False)

    def kill(self, number: int) -> None:
        self.deaths += 1
        copy = self.servers.pop(number)
        self.wishes.pop(number, None)
        copy.vault.close()
        os.close(self.memories.pop(number))

    def close(self) -> None:
        for number in list(self.servers):
            self.kill(number)

    def living(self) -> dict[int, str]:
        return {number: copy._me.life for number, copy in self.servers.items()}

    def step(self) -> None:
        self.now += 1
        match self.chance.choices(["deliver", "tick", "ask", "wish", "decide"], [12, 2, 6, 2, 2])[0]:
            case "deliver" if self.mail:
                # In order to each, as on a wire, but for what is lost and what comes twice.
                server, what = self.mail.pop(0)
                if self.chance.random() < 0.05:
                    self.mail.append((server, what))
                if self.chance.random() > 0.05 and server in self.servers:
                    copy = self.servers[server]
                    copy.on_request(what) if isinstance(what, KvRequest) else copy.on_letter(what)
            case "tick":
                self.chance.choice(list(self.servers.values())).on_tick()
            case "ask":
                self.ask(self.chance.choice(self.clients))
            case "wish":
                self.think(self.chance.choice(list(self.servers)))
            case "decide" if self.wishes:
                number = self.chance.choice(list(self.wishes))
                before, after = self.wishes.pop(number)
                self.register = after if self.register == before else self.register
        for copy in self.servers.values():
            while copy.letters:
                to, letter = copy.letters.popleft()
                self.mail.append((to, read_letter(write_letter(letter))))
            while copy.answers:
                name, answer = copy.answers.popleft()
                if self.chance.random() > 0.05:
                    next(client for client in self.clients if client.name == name).hear(answer)

    def ask(self, client: Client) -> None:
        if client.request is not None and self.now >= client.asked_at + PATIENCE:
            if client.server not in self.servers:
                client.server = (client.server + 1) % SERVERS
            client.asked_at = self.now
            self.mail.append((client.server, client.request))

    def think(self, number: int) -> None:
        """As a server does about what the register says; now and then it takes one for dead that lives."""
        if number in self.wishes:
            return
        copy, living = self.servers[number], self.living()
        if self.register is not None:
            copy.on_holders(self.register)
        others = [other for other in living if other != number]
        if others and self.chance.random() < 0.1:
            del living[self.chance.choice(others)]
        wanted = wish(
            0,
            copy.holders,
            copy._me,
            living,
            remembers=copy.vault.generation,
            has_synced=copy.backing is KvBacking.SYNCED,
        )
        if wanted is not None:
            copy.is_fenced = not copy.is_primary
            self.wishes[number] = copy.holders, wanted

    def may_kill(self) -> list[int]:
        """Who may die without the shard: those who do not hold it, and one of two that do."""
        holders = self.register
        if holders is None or not holders.filled or holders.backup is None:
            return []
        seats = (holders.primary, holders.backup)
        if any(self.living().get(seat.server) != seat.life for seat in seats) or self.wishes:
            return []
        return list(self.servers)


def requests(name: bytes, number: int) -> list[KvRequest]:
    """A store is opened, a table made, and pushed to."""
    begin = [
        KvRequest(ask="open", client=name, sequence=1, look=("dist_async", CLIENTS)),
        KvRequest(
            ask="init",
            client=name,
            sequence=2,
            key="t",
            look=(4, 1, "float64"),
            **carried(torch.zeros(4, 1).double()),
        ),
        KvRequest(ask="optimizer", client=name, sequence=3, rule=("sgd", {"lr": -1.0})),
    ]
    return begin + [
        KvRequest(
            ask="push",
            client=name,
            sequence=4 + push,
            worker=number,
            key="t",
            **carried(
                torch.tensor([[float(3 ** (push % 5) + number)]], dtype=torch.float64), torch.tensor([push % 4])
            ),
        )
        for push in range(PUSHES)
    ]


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 200), marks=pytest.mark.long)])
def test_no_acknowledged_push_is_lost_or_made_twice(seeds):
    expected = torch.zeros(4, 1, dtype=torch.float64)
    for number in range(CLIENTS):
        for request in requests(b"", number)[3:]:
            expected.index_add_(0, *request.bulk.frames)
    deaths = 0
    for seed in seeds:
        world = World(seed)
        push_all(world)
        assert not [client.refusals for client in world.clients if client.refusals], seed
        assert torch.equal(pulled(world), expected), seed
        deaths += world.deaths
        world.close()
    assert deaths > 2 * len(seeds)


def push_all(world: World) -> None:
    """Until all is acknowledged, while servers die."""
    for _ in range(20000):
        if all(client.request is None for client in world.clients):
            return
        world.step()
        if world.deaths < 4 and world.chance.random() < 0.1 and (able := world.may_kill()):
            world.kill(number := world.chance.choice(able))
            if world.chance.random() < 0.7 or len(world.servers) < 2:
                world.start(number)
    raise AssertionError(f"{world.register} {[client.answered for client in world.clients]}")


def pulled(world: World) -> torch.Tensor:
    """What the shard holds at last, as a client finds it."""
    reader = Client(b"c" * 16, [KvRequest(ask="pull", client=b"c" * 16, sequence=1, key="t", count=4)])
    world.clients.append(reader)
    for _ in range(20000):
        if reader.values is not None:
            return reader.values
        world.step()
    raise AssertionError(f"nobody answers: {world.register}")
