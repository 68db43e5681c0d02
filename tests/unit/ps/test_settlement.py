"""Rounds that all shards close together: who tells what to whom, and when the update is made."""

from __future__ import annotations

import pytest

from helpers.ps_pushes import make_push
from helpers.ps_servers import BACKUP, PRIMARY, THIRD, WORKER, sent, server
from shoal.ps.between_servers import PartRequest, Replicate, Replicated, RoundPart
from shoal.ps.messages import COORDINATOR, NOBODY, Ack, Clocks, PsMessage, Push, ShardView, View, shard_rows
from shoal.ps.rules import Together
from shoal.ps.server import ServerMachine

PART = b"12345678"


def joined(node: int, *shards: ShardView) -> ServerMachine:
    """A server that knows who holds these shards."""
    machine = server(node, "bsp", together=Together.NORMS)
    view = View(
        term=1,
        number=1,
        shards=shard_rows(shards),
        addresses={},
        workers={0: WORKER, 1: WORKER + 1},
        settings={},
    )
    machine.on_message(COORDINATOR, view, 0.0)
    machine.outbox.clear()
    return machine


def holders(primary: int, backup: int = NOBODY) -> ShardView:
    return ShardView(generation=1, primary=primary, backup=backup, filled=backup != NOBODY)


def fill_round(machine: ServerMachine, shard: int = 0) -> list[tuple[int, PsMessage]]:
    """Both workers push their parts of the first step."""
    for cell in (0, 1):
        machine.on_message(WORKER + cell, make_push(cell, shard=shard), 0.0)
    return sent(machine)


def rounds(machine: ServerMachine, shard: int = 0) -> int:
    duty = machine.held[shard]
    assert duty.shard is not None
    return duty.shard.rounds


def test_a_complete_round_waits_for_the_parts_of_others():
    machine = joined(PRIMARY, holders(PRIMARY), holders(THIRD))
    told = fill_round(machine)
    assert [node for node, message in told if isinstance(message, Ack)] == [WORKER, WORKER + 1]
    (part,) = [(node, message) for node, message in told if isinstance(message, RoundPart)]
    assert part == (THIRD, RoundPart(shard=1, origin=0, round=1, facts={}, frames=part[1].frames))
    assert rounds(machine) == 0

    machine.on_message(THIRD, RoundPart(shard=0, origin=1, round=1, facts={}, frames=(PART,)), 0.1)
    assert rounds(machine) == 1
    assert [node for node, _ in sent(machine, Clocks)] == [WORKER, WORKER + 1]


def test_a_part_may_come_before_the_round_is_complete():
    machine = joined(PRIMARY, holders(PRIMARY), holders(THIRD))
    machine.on_message(THIRD, RoundPart(shard=0, origin=1, round=1, facts={}, frames=(PART,)), 0.0)
    assert rounds(machine) == 0
    fill_round(machine)
    assert rounds(machine) == 1


def test_the_next_round_is_early_until_this_one_is_closed():
    machine = joined(PRIMARY, holders(PRIMARY), holders(THIRD))
    fill_round(machine)
    machine.on_message(WORKER, make_push(2), 0.0)
    assert [message.kind for _, message in sent(machine)] == ["refused"]


def test_what_does_not_come_is_asked_for_and_told_again():
    machine = joined(PRIMARY, holders(PRIMARY), holders(THIRD))
    fill_round(machine)
    machine.on_tick(1.0)
    assert sent(machine, PartRequest) == [(THIRD, PartRequest(shard=1, origin=0, round=1))]
    machine.on_message(THIRD, RoundPart(shard=0, origin=1, round=1, facts={}, frames=(PART,)), 1.0)
    sent(machine)
    machine.on_message(THIRD, PartRequest(shard=0, origin=1, round=1), 1.1)
    ((node, again),) = sent(machine, RoundPart)
    assert (node, again.round) == (THIRD, 1)
    machine.on_message(THIRD, PartRequest(shard=0, origin=1, round=2), 1.2)
    assert not sent(machine)


def test_a_part_is_told_when_the_backup_has_the_round():
    machine = joined(PRIMARY, holders(PRIMARY, BACKUP), holders(THIRD))
    told = fill_round(machine)
    assert {type(message) for _, message in told} == {Replicate}
    machine.on_message(BACKUP, Replicated(shard=0, generation=1, index=2), 0.1)
    assert [type(message) for _, message in sent(machine)] == [Ack, Ack, Clocks, RoundPart]


def test_the_backup_closes_the_round_with_the_same_numbers():
    primary = joined(PRIMARY, holders(PRIMARY, BACKUP), holders(THIRD))
    backup = joined(BACKUP, holders(PRIMARY, BACKUP), holders(THIRD))
    entries = fill_round(primary)
    primary.on_message(THIRD, RoundPart(shard=0, origin=1, round=1, facts={}, frames=(PART,)), 0.0)
    for _, message in [*entries, *sent(primary, Replicate)]:
        backup.on_message(PRIMARY, message, 0.1)
    copies = [machine.held[0].shard for machine in (primary, backup)]
    assert copies[0] is not None and copies[1] is not None
    assert copies[0].books() == copies[1].books()
    assert copies[1].rounds == 1


def test_shards_of_one_server_settle_among_themselves():
    machine = joined(PRIMARY, holders(PRIMARY), holders(PRIMARY))
    for shard in (0, 1):
        assert not any(isinstance(message, RoundPart) for _, message in fill_round(machine, shard))
    assert (rounds(machine, 0), rounds(machine, 1)) == (1, 1)


@pytest.mark.parametrize(
    "part",
    [
        RoundPart(shard=0, origin=1, round=1, facts={}, frames=()),
        RoundPart(shard=0, origin=1, round=2, facts={}, frames=(PART,)),
        RoundPart(shard=0, origin=0, round=1, facts={}, frames=(PART,)),
        RoundPart(shard=7, origin=1, round=1, facts={}, frames=(PART,)),
    ],
    ids=["no bulk", "another round", "its own", "no such shard"],
)
def test_parts_that_cannot_be_are_ignored(part: RoundPart):
    machine = joined(PRIMARY, holders(PRIMARY), holders(THIRD))
    fill_round(machine)
    machine.on_message(THIRD, part, 0.0)
    assert rounds(machine) == 0


def test_what_a_worker_clipped_itself_is_scaled():
    machine = server(PRIMARY, "asp", together=Together.NORMS)
    view = View(term=1, number=1, shards=shard_rows([holders(PRIMARY)]), addresses={}, workers={}, settings={})
    machine.on_message(COORDINATOR, view, 0.0)
    push: Push = make_push(0, scale=0.25)
    machine.on_message(WORKER, push, 0.0)
    duty = machine.primary(0)
    assert duty is not None and duty.shard.values.home.factors == [0.25]
