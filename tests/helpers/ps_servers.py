"""Server machines for tests of single messages."""

from __future__ import annotations

from typing import Any

from helpers.ps_sim.values import ChainValues
from shoal.ps.consistency import parse_sync
from shoal.ps.messages import COORDINATOR, NOBODY, PsMessage, ShardView, View, shard_rows
from shoal.ps.primary import Timing
from shoal.ps.rules import ShardRules
from shoal.ps.server import ServerMachine

PRIMARY, BACKUP, THIRD, WORKER = 1, 2, 3, 10


def server(node: int, sync: str = "asp", **rules: Any) -> ServerMachine:
    return ServerMachine(
        node=node,
        number=node - 1,
        address="",
        rules=ShardRules(consistency=parse_sync(sync), slots=2, workers=2, **rules),
        make_values=lambda shard, copy: ChainValues(shard),
        now=0.0,
        timing=Timing(patience_s=1.0, fill_patience_s=2.0, report_every_s=100.0),
    )


def view(number: int, *, term: int = 1, **holders: Any) -> View:
    shard = ShardView(**({"generation": number, "primary": PRIMARY, "backup": BACKUP} | holders))
    return View(
        term=term,
        number=number,
        shards=shard_rows([shard]),
        addresses=dict.fromkeys((PRIMARY, BACKUP, THIRD, WORKER, WORKER + 1), ""),
        workers={0: WORKER, 1: WORKER + 1},
        settings={},
    )


def sent(machine: ServerMachine, kind: type[PsMessage] | None = None) -> list[tuple[int, Any]]:
    """What the machine has put out since it was last asked."""
    found = [(node, m) for node, m in machine.outbox if kind is None or isinstance(m, kind)]
    machine.outbox.clear()
    return found


def tell(machine: ServerMachine, sender: int, message: PsMessage, now: float = 0.0) -> list[tuple[int, Any]]:
    machine.on_message(sender, message, now)
    return sent(machine)


def pair(sync: str = "asp") -> tuple[ServerMachine, ServerMachine]:
    """A primary and its backup, at the beginning."""
    machines = server(PRIMARY, sync), server(BACKUP, sync)
    for machine in machines:
        tell(machine, COORDINATOR, view(1, filled=True))
    return machines


def alone() -> ServerMachine:
    machine = server(PRIMARY)
    tell(machine, COORDINATOR, view(1, backup=NOBODY))
    return machine
