"""Who holds a shard changes: old holders are fenced, new ones are filled, backups take over."""

from __future__ import annotations

from dataclasses import replace

from helpers.ps_pushes import make_push
from helpers.ps_servers import BACKUP, PRIMARY, THIRD, WORKER, alone, pair, sent, server, tell, view
from shoal.ps.between_servers import Fill, Filled, Replicate, Replicated
from shoal.ps.messages import COORDINATOR, NOBODY, Ack, Clocks, Refused
from shoal.ps.primary import Primary
from shoal.ps.server import ServerMachine


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
    primary.on_tick(2.01)
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
    assert [(m.clocks, m.rounds) for m in news if isinstance(m, Clocks)] == [({0: 1, 1: 0}, 0)] * 2
    answers = tell(backup, WORKER + 1, make_push(1, generation=2))
    assert [(n, type(m), m.rounds) for n, m in answers] == [(WORKER + 1, Ack, 1), (WORKER, Clocks, 1)]
    assert [m.outcome for _, m in tell(backup, WORKER, make_push(0, generation=2))] == ["duplicate"]


def test_an_older_view_changes_nothing():
    machine = server(PRIMARY)
    tell(machine, COORDINATOR, view(5, term=2, backup=NOBODY))
    tell(machine, COORDINATOR, view(9, term=1, primary=BACKUP, backup=NOBODY))
    tell(machine, COORDINATOR, view(4, term=2, primary=BACKUP, backup=NOBODY))
    assert machine.primary(0) is not None


def test_a_fill_that_comes_before_its_view_is_kept_for_it():
    primary, third = alone(), server(THIRD)
    tell(third, COORDINATOR, view(1, backup=NOBODY))
    fills = [m for _, m in tell(primary, COORDINATOR, view(2, backup=THIRD)) if isinstance(m, Fill)]
    assert tell(third, PRIMARY, fills[0]) == []
    assert tell(third, COORDINATOR, view(2, backup=THIRD)) == [(PRIMARY, Filled(shard=0, generation=2, index=0))]
    # Kept for a generation that never came for this node, it is worth nothing.
    assert tell(third, PRIMARY, replace(fills[0], generation=3)) == []
    assert tell(third, COORDINATOR, view(4, backup=THIRD)) == []
