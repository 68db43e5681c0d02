"""The server machine, message by message: what it answers, what it holds back, what it refuses."""

from __future__ import annotations

import pytest

from helpers.ps_pushes import make_push
from helpers.ps_servers import BACKUP, PRIMARY, WORKER, alone, pair, sent, server, tell, view
from shoal.ps.between_servers import Replicate, Replicated
from shoal.ps.messages import (
    COORDINATOR,
    NOBODY,
    Ack,
    Clocks,
    Control,
    Controlled,
    Hello,
    Join,
    Pull,
    Push,
    Refused,
    Report,
    Values,
)


def test_it_asks_to_join_until_a_view_names_it():
    machine = server(PRIMARY)
    for now in (0.0, 100.0):
        machine.on_tick(now)
        assert [type(m) for _, m in sent(machine)] == [Join]
    tell(machine, COORDINATOR, view(1))
    machine.on_tick(200.0)
    (node, report), *_ = sent(machine, Report)
    assert (node, report.view, report.facts["shards"][0]["cells"]) == (COORDINATOR, 1, [])


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
    assert tell(primary, WORKER, Hello(shard=0, generation=1)) == []
    duty = primary.primary(0)
    assert duty is not None
    assert duty.safe_cells().to_plain() == []
    answers = tell(primary, BACKUP, Replicated(shard=0, generation=1, index=1))
    assert [type(m) for _, m in answers] == [Ack]
    assert duty.safe_cells().to_plain() == [0, 1]
    answers = tell(primary, BACKUP, Replicated(shard=0, generation=1, index=2))
    assert [type(m) for _, m in answers] == [Ack, Clocks]
    assert answers[1][1].clocks == {0: 2, 1: 0}
    assert duty.safe_cells().to_plain() == [0, 1, 2, 3]


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
    primary.on_tick(1.01)
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
