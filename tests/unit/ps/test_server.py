"""The server machine, message by message: what it answers, what it holds back, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.ps_pushes import make_push
from helpers.ps_sim.values import ChainValues
from shoal.ps.consistency import parse_sync
from shoal.ps.messages import (
    COORDINATOR,
    NOBODY,
    Ack,
    Clocks,
    Control,
    Controlled,
    Fill,
    Filled,
    Hello,
    Join,
    PsMessage,
    Pull,
    Push,
    Refused,
    Replicate,
    Replicated,
    Report,
    ShardView,
    Values,
    View,
    shard_rows,
)
from shoal.ps.primary import Primary, Timing
from shoal.ps.server import ServerMachine
from shoal.ps.shard import ShardRules

PRIMARY, BACKUP, THIRD, WORKER = 1, 2, 3, 10


def server(node: int, sync: str = "asp") -> ServerMachine:
    return ServerMachine(
        node=node,
        number=node - 1,
        address="",
        rules=ShardRules(consistency=parse_sync(sync), slots=2, workers=2),
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


def test_it_asks_to_join_until_a_view_names_it():
    machine = server(PRIMARY)
    for now in (0.0, 100.0):
        machine.on_tick(now)
        assert [type(m) for _, m in sent(machine)] == [Join]
    tell(machine, COORDINATOR, view(1))
    machine.on_tick(200.0)
    (node, report), *_ = sent(machine, Report)
    assert (node, report.view, report.facts["shards"][0]["cells"]) == (COORDINATOR, 1, [0, []])


def test_alone_it_answers_at_once():
    ((node, ack),) = tell(alone(), WORKER, make_push(0))
    assert (node, type(ack), ack.outcome, ack.version) == (WORKER, Ack, "applied", 1)


def test_with_a_backup_it_answers_when_that_has_it_too():
    primary, backup = pair()
    ((node, replicate),) = tell(primary, WORKER, make_push(0))
    assert (node, type(replicate), replicate.index) == (BACKUP, Replicate, 1)
    ((node, replicated),) = tell(backup, PRIMARY, replicate)
    assert (node, type(replicated), replicated.index) == (PRIMARY, Replicated, 1)
    ((node, ack),) = tell(primary, BACKUP, replicated)
    assert (node, type(ack), ack.outcome) == (WORKER, Ack, "applied")


def test_what_only_the_primary_has_is_reported_by_nobody():
    primary, _ = pair()
    for cell in (0, 2):
        tell(primary, WORKER, make_push(cell))
    assert tell(primary, WORKER, Hello(shard=0, generation=1, rank=0)) == []
    duty = primary.primary(0)
    assert duty is not None
    assert duty.safe_cells().to_plain() == [0, []]
    answers = tell(primary, BACKUP, Replicated(shard=0, generation=1, index=1))
    assert [type(m) for _, m in answers] == [Ack]
    assert duty.safe_cells().to_plain() == [1, []]
    answers = tell(primary, BACKUP, Replicated(shard=0, generation=1, index=2))
    assert [type(m) for _, m in answers] == [Ack, Clocks]
    assert answers[1][1].yours == 2
    assert duty.safe_cells().to_plain() == [1, [2]]


def test_a_push_that_comes_again_is_answered_with_the_first():
    primary, _ = pair()
    tell(primary, WORKER, make_push(0))
    assert tell(primary, WORKER, make_push(0)) == []
    answers = tell(primary, BACKUP, Replicated(shard=0, generation=1, index=1))
    assert [m.outcome for _, m in answers] == ["applied", "duplicate"]
    assert [m.outcome for _, m in tell(primary, WORKER, make_push(0))] == ["duplicate"]


def test_entries_are_repeated_until_confirmed():
    primary, backup = pair()
    tell(primary, WORKER, make_push(0))
    tell(primary, WORKER, make_push(2), now=0.9)
    primary.on_tick(1.0)
    repeated = [m for _, m in sent(primary, Replicate)]
    assert [m.index for m in repeated] == [1, 2]
    # After a gap nothing is taken; in order everything is, and what comes again is only confirmed.
    assert tell(backup, PRIMARY, repeated[1]) == []
    assert [m.index for entry in [*repeated, repeated[0]] for _, m in tell(backup, PRIMARY, entry)] == [1, 2, 2]
    tell(primary, BACKUP, Replicated(shard=0, generation=1, index=2))
    assert primary.wakeup > 50


@pytest.mark.parametrize("generation", [0, 2])
def test_a_push_of_another_generation_is_refused(generation):
    ((node, refused),) = tell(alone(), WORKER, make_push(0, generation=generation))
    assert (node, refused) == (WORKER, Refused(shard=0, generation=1, sequence=1))


def test_a_push_from_a_newer_world_makes_it_ask_for_that():
    machine = alone()
    machine.on_tick(0.0)
    sent(machine)
    tell(machine, WORKER, make_push(0, generation=2), now=0.5)
    assert machine.wakeup == 0.5


@pytest.mark.parametrize("shard", [1, -1, 10**9])
def test_a_push_for_no_shard_of_its_own_is_refused(shard):
    ((_, refused),) = tell(alone(), WORKER, make_push(0, shard=shard))
    assert (type(refused), refused.generation) == (Refused, -1)


def test_a_gap_is_answered_so_that_all_comes_again():
    ((_, refused),) = tell(alone(), WORKER, make_push(2))
    assert refused == Refused(shard=0, generation=1, sequence=2)


def test_a_deposed_primary_gets_no_confirmation_and_so_gives_none():
    primary, backup = pair()
    ((_, old),) = tell(primary, WORKER, make_push(0))
    tell(backup, COORDINATOR, view(2, primary=BACKUP, backup=NOBODY))
    assert tell(backup, PRIMARY, old) == []
    assert backup.ignored["fenced"] == 1
    assert [m.outcome for _, m in tell(backup, WORKER, make_push(0, generation=2))] == ["applied"]
    # The old primary learns it: it answers nothing that it logged, and holds the shard no more.
    assert tell(primary, COORDINATOR, view(2, primary=BACKUP, backup=NOBODY)) == []
    assert primary.held == {}


def test_a_backup_takes_nothing_from_an_older_generation():
    _, backup = pair()
    tell(backup, COORDINATOR, view(3, filled=False))
    entry = Replicate(shard=0, generation=1, index=1, entry={"kind": "push", "fields": {}})
    assert tell(backup, PRIMARY, entry) == []
    fill = Fill(shard=0, generation=1, index=0, books={})
    assert tell(backup, PRIMARY, fill) == []
    assert tell(backup, THIRD, Fill(shard=0, generation=3, index=0, books={})) == []
    assert backup.ignored["fenced"] == 3


def test_a_primary_believes_only_its_backup_of_now():
    primary, _ = pair()
    tell(primary, WORKER, make_push(0))
    assert tell(primary, THIRD, Replicated(shard=0, generation=1, index=1)) == []
    assert tell(primary, BACKUP, Replicated(shard=0, generation=0, index=1)) == []
    assert len(tell(primary, BACKUP, Replicated(shard=0, generation=1, index=1))) == 1


def test_a_backup_that_is_gone_is_not_waited_for():
    primary, _ = pair()
    tell(primary, WORKER, make_push(0))
    answers = tell(primary, COORDINATOR, view(2, backup=NOBODY))
    assert [(n, m.outcome) for n, m in answers if isinstance(m, Ack)] == [(WORKER, "applied")]


def filling() -> tuple[ServerMachine, ServerMachine, Fill]:
    """A primary that has something, its new backup, and what fills that."""
    primary, third = alone(), server(THIRD)
    tell(primary, WORKER, make_push(0))
    news = view(2, backup=THIRD)
    tell(third, COORDINATOR, news)
    fills = [m for _, m in tell(primary, COORDINATOR, news) if isinstance(m, Fill)]
    return primary, third, fills[0]


def test_a_shard_stands_still_while_its_backup_is_filled():
    primary, third, fill = filling()
    assert tell(primary, WORKER, make_push(2, generation=2)) == []
    primary.on_tick(2.0)
    assert [m.index for _, m in sent(primary, Fill)] == [1]
    ((node, filled),) = tell(third, PRIMARY, fill)
    assert (node, filled) == (PRIMARY, Filled(shard=0, generation=2, index=1))
    answers = tell(primary, THIRD, filled)
    # First it waits for its backup, then others hear of it.
    assert [(node, type(m)) for node, m in answers] == [(COORDINATOR, Filled), (THIRD, Replicate)]
    assert [m.index for _, m in tell(third, PRIMARY, answers[1][1])] == [2]
    primary.on_tick(10.0)
    assert COORDINATOR in [node for node, _ in sent(primary, Filled)]
    tell(primary, COORDINATOR, view(3, generation=2, backup=THIRD, filled=True))
    tell(primary, THIRD, Replicated(shard=0, generation=2, index=2))
    primary.on_tick(20.0)
    assert sent(primary) == []


def test_a_backup_is_filled_once():
    primary, third, fill = filling()
    ((_, filled),) = tell(third, PRIMARY, fill)
    tell(primary, THIRD, filled)
    ((_, replicate),) = tell(primary, WORKER, make_push(2, generation=2))
    tell(third, PRIMARY, replicate)
    assert len(tell(third, PRIMARY, fill)) == 1
    duty = third.backup(0)
    assert duty is not None
    assert duty.shard is not None
    assert duty.shard.index == 2


def test_a_fill_that_makes_no_sense_fills_nothing():
    _, third, _ = filling()
    assert tell(third, PRIMARY, Fill(shard=0, generation=2, index=1, books={"bulk": "x"})) == []
    duty = third.backup(0)
    assert duty is not None
    assert (duty.shard, dict(duty.ignored)) == (None, {"malformed fill": 1})


def test_a_backup_without_everything_does_not_serve():
    _, third, _ = filling()
    tell(third, COORDINATOR, view(4, primary=THIRD, backup=NOBODY))
    assert third.ignored["promoted before it was filled"] == 1
    ((_, refused),) = tell(third, WORKER, make_push(0, generation=4))
    assert isinstance(refused, Refused)


def test_the_queue_of_a_shard_that_stands_still_is_bounded():
    primary, _, _ = filling()
    for sequence in range(2, Primary.MAX_QUEUED + 12):
        primary.on_message(WORKER, make_push(2, sequence=sequence, generation=2), 0.0)
    duty = primary.primary(0)
    assert duty is not None
    assert (duty.queued, duty.ignored["queue full"]) == (Primary.MAX_QUEUED, 10)


def test_a_promoted_backup_goes_on_from_its_log():
    primary, backup = pair("bsp")
    ((_, replicate),) = tell(primary, WORKER, make_push(0))
    tell(backup, PRIMARY, replicate)
    news = [m for _, m in tell(backup, COORDINATOR, view(2, primary=BACKUP, backup=NOBODY))]
    assert [(m.yours, m.rounds) for m in news if isinstance(m, Clocks)] == [(1, 0), (0, 0)]
    answers = tell(backup, WORKER + 1, make_push(1, generation=2))
    assert [(n, type(m), m.rounds) for n, m in answers] == [(WORKER + 1, Ack, 1), (WORKER, Clocks, 1)]
    assert [m.outcome for _, m in tell(backup, WORKER, make_push(0, generation=2))] == ["duplicate"]


def test_nobody_is_told_clocks_that_asynchronous_workers_do_not_wait_for():
    machine = alone()
    tell(machine, WORKER, make_push(0))
    assert [type(m) for _, m in tell(machine, WORKER + 1, make_push(1))] == [Ack]


def test_controls_are_logged_like_pushes():
    primary, backup = pair()
    control = Control(shard=0, term=1, number=1, action="scale", values={"factor": 0.5})
    ((_, replicate),) = tell(primary, COORDINATOR, control)
    tell(backup, PRIMARY, replicate)
    answers = tell(primary, BACKUP, Replicated(shard=0, generation=1, index=1))
    assert answers == [(COORDINATOR, Controlled(shard=0, number=1))]
    assert tell(primary, COORDINATOR, control) == [(COORDINATOR, Controlled(shard=0, number=1))]
    for machine in (primary, backup):
        shard = machine.held[0].shard
        assert shard is not None
        assert (shard.lr_scale, shard.index) == (0.5, 1)


def test_a_control_of_an_older_term_is_ignored():
    machine = server(PRIMARY)
    tell(machine, COORDINATOR, view(1, term=2, backup=NOBODY))
    assert tell(machine, COORDINATOR, Control(shard=0, term=1, number=1, action="mark", values={})) == []
    assert machine.ignored["fenced"] == 1


def test_an_older_view_changes_nothing():
    machine = server(PRIMARY)
    tell(machine, COORDINATOR, view(5, term=2, backup=NOBODY))
    tell(machine, COORDINATOR, view(9, term=1, primary=BACKUP, backup=NOBODY))
    tell(machine, COORDINATOR, view(4, term=2, primary=BACKUP, backup=NOBODY))
    assert machine.primary(0) is not None


def test_values_come_in_parts():
    machine = alone()
    answers = tell(machine, WORKER, Pull(shard=0, generation=1, ticket=4))
    assert [(type(m), m.part, m.parts, m.ticket) for _, m in answers] == [(Values, 0, 2, 4), (Values, 1, 2, 4)]
    answers = tell(machine, WORKER, Pull(shard=0, generation=1, ticket=5, whole=True))
    assert [(m.parts, m.version) for _, m in answers] == [(1, 0)]


def test_a_malformed_push_is_counted_and_not_logged():
    machine = alone()
    assert tell(machine, WORKER, make_push(0, frames=())) == []
    duty = machine.primary(0)
    assert duty is not None
    assert (duty.ignored["malformed push"], duty.shard.index) == (1, 0)


def test_an_entry_that_cannot_be_read_is_not_confirmed():
    _, backup = pair()
    for entry in ({}, {"kind": "ack", "fields": {}}, {"kind": Push.kind, "fields": {"shard": "x"}}, {"kind": 3}):
        assert tell(backup, PRIMARY, Replicate(shard=0, generation=1, index=1, entry=entry)) == []
    duty = backup.backup(0)
    assert duty is not None
    assert duty.ignored["malformed entry"] == 4


def test_messages_for_others_are_counted():
    machine = alone()
    assert tell(machine, WORKER, Controlled(shard=0, number=1)) == []
    assert machine.ignored["unexpected controlled"] == 1
