"""One suite for the machines of the parameter server: whatever is said to them, they answer or they ignore it."""

from __future__ import annotations

import ast
import inspect
import random
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from helpers.ps_servers import server, view
from shoal.comm import codec
from shoal.coordinator import Coordinator, JobPlan, MemoryStore
from shoal.ps.consistency import parse_sync
from shoal.ps.contract import Machine
from shoal.ps.leasing import LeaseHolder
from shoal.ps.messages import COORDINATOR, KINDS, PsMessage
from shoal.ps.packing import pack, unpack
from shoal.ps.worker import WorkerMachine

MESSAGES = 400
PLAN = JobPlan(
    num_shards=1,
    shard_bytes=(100,),
    owners=(0,),
    backups=(1,),
    servers=2,
    workers=2,
    num_cells=10,
    leased=True,
    adjust=(),
)


def make_worker() -> Machine:
    leases = LeaseHolder(now=0.0, ahead=1)
    return WorkerMachine(node=10, rank=0, num_shards=1, consistency=parse_sync("asp"), now=0.0, leases=leases)


MACHINES: dict[str, Callable[[], Machine]] = {
    "primary": lambda: server(1),
    "backup": lambda: server(2),
    "gathering": lambda: server(1, "bsp"),
    "worker": make_worker,
    "coordinator": lambda: Coordinator(PLAN, MemoryStore(), 0.0),
}


@pytest.fixture(params=MACHINES)
def make(request: pytest.FixtureRequest) -> Callable[[], Machine]:
    return MACHINES[request.param]


@pytest.fixture
def machine(make: Callable[[], Machine]) -> Machine:
    return make()


def anything(kind: Any, dice: random.Random) -> Any:
    """A value of this type, likely or not."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        return [anything(arguments[0], dice) for _ in range(dice.randrange(3))]
    if origin is dict:
        keys = [anything(arguments[0], dice) for _ in range(dice.randrange(3))]
        return {key: anything(arguments[1], dice) for key in keys}
    if origin is not None:  # one of several
        return anything(dice.choice(arguments), dice)
    plain: dict[Any, list[Any]] = {
        int: [-1, 0, 1, 2, 3, 10, 11, 1 << 40],
        float: [-1.0, 0.0, 0.5, float("nan"), 1e30],
        str: ["", "worker", "server", "applied", "tcp://127.0.0.1:1"],
        bool: [False, True],
        type(None): [None],
    }
    return dice.choice(plain[kind])


TYPED = sorted(kind for kind, cls in KINDS.items() if "Any" not in str(get_type_hints(cls).values()))
"""Messages all of whose fields are checked when they arrive; what others hold is between those who made them."""


def strange(dice: random.Random) -> PsMessage:
    """Any message with any fields of the right types, as it could have come over the wire."""
    cls = KINDS[dice.choice(TYPED)]
    hints, names = get_type_hints(cls), [field.name for field in fields(cls) if field.name != "frames"]
    values = {name: anything(hints[name], dice) for name in names}
    return cls(**values, frames=tuple(b"12345678" for _ in range(dice.randrange(3))))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_formed", [False, True], ids=["alone", "formed"])
def test_nothing_that_is_said_ends_a_machine(machine: Machine, seed: int, is_formed: bool) -> None:
    dice = random.Random(seed)
    if is_formed:
        machine.on_message(COORDINATOR, view(1), 0.0)
    for number in range(MESSAGES):
        machine.on_message(dice.choice([COORDINATOR, 1, 2, 10, 11, 99]), strange(dice), number * 0.01)
        if number % 10 == 0:
            machine.on_tick(number * 0.01)
        machine.outbox.clear()


def test_what_is_to_be_sent_can_be_sent(machine: Machine) -> None:
    """By number of a node, and as the codec carries it."""
    assert isinstance(machine.outbox, deque)
    machine.on_message(COORDINATOR, view(1), 0.0)
    sent = 0
    for second in range(5):
        machine.on_tick(float(second))
        while machine.outbox:
            node, message = machine.outbox.popleft()
            carried = codec.decode([bytes(part) for part in codec.encode(pack(message))])
            assert isinstance(node, int) and unpack(carried) == message
            sent += 1
    assert sent or isinstance(machine, Coordinator), "members look for their coordinator"


def test_time_is_what_it_is_told(make: Callable[[], Machine]) -> None:
    """The same words at the same times have the same answers."""

    def answers() -> list[str]:
        one = make()
        one.on_message(COORDINATOR, view(1), 0.5)
        one.on_tick(one.wakeup)
        one.on_tick(one.wakeup + 1.0)
        return [str(answer) for answer in one.outbox]

    assert answers() == answers()


@pytest.mark.parametrize("kind", [type(make()) for make in MACHINES.values()], ids=lambda kind: kind.__name__)
def test_no_machine_does_anything_itself(kind: type) -> None:
    """Neither sockets nor clocks nor threads: whoever drives it has those."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(kind)))  # type: ignore[arg-type]
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & {"os", "socket", "threading", "time", "zmq", "select"}
