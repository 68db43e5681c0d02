"""The worker machine: what it repeats, to whom, and when it lets its driver go on."""

from __future__ import annotations

from typing import Any

from helpers.ps_sim.values import gradient
from shoal.ps.consistency import parse_sync
from shoal.ps.leasing import LeaseHolder
from shoal.ps.link import Offer
from shoal.ps.messages import (
    COORDINATOR,
    Ack,
    Clocks,
    Hello,
    Join,
    Lease,
    LeaseRequest,
    PsMessage,
    Pull,
    Push,
    Refused,
    Report,
    ShardView,
    Values,
    View,
    shard_rows,
)
from shoal.ps.primary import Timing
from shoal.ps.worker import WorkerMachine

NODE, OLD, NEW = 10, 1, 2
TIMING = Timing(patience_s=1.0, report_every_s=100.0)


def worker(sync: str = "asp", *, leases: LeaseHolder | None = None, shards: int = 2) -> WorkerMachine:
    return WorkerMachine(
        node=NODE, rank=0, num_shards=shards, consistency=parse_sync(sync), now=0.0, leases=leases, timing=TIMING
    )


def view(number: int, *primaries: int, term: int = 1, generation: int | None = None, **changed: Any) -> View:
    shards = [ShardView(generation=generation or number, primary=primary) for primary in primaries]
    fields: dict[str, Any] = {
        "term": term,
        "number": number,
        "shards": shard_rows(shards),
        "addresses": {NODE: "", OLD: "", NEW: ""},
        "workers": {0: NODE},
        "settings": {},
    }
    return View(**(fields | changed))


def clocks(shard: int, **changed: Any) -> Clocks:
    fields = {"shard": shard, "generation": 1, "version": 0, "floor": 0, "rounds": 0, "clocks": {0: 0}}
    return Clocks(**(fields | changed))


def ack(shard: int, sequence: int, outcome: str = "applied", **changed: Any) -> Ack:
    fields: dict[str, Any] = {"generation": 1, "version": 1, "floor": 0, "rounds": 0}
    return Ack(shard=shard, sequence=sequence, outcome=outcome, **(fields | changed))


def sent(machine: WorkerMachine, kind: type[PsMessage]) -> list[tuple[int, Any]]:
    found = [(node, m) for node, m in machine.outbox if isinstance(m, kind)]
    machine.outbox.clear()
    return found


def ready(sync: str = "asp", **how: Any) -> WorkerMachine:
    """A worker that knows where its two shards are, and how far."""
    machine = worker(sync, **how)
    machine.on_message(COORDINATOR, view(1, OLD, OLD), 0.0)
    for shard in range(2):
        machine.on_message(OLD, clocks(shard), 0.0)
    machine.outbox.clear()
    return machine


def push(machine: WorkerMachine, clock: int = 1, now: float = 0.0) -> int:
    frames = [(gradient(shard, [clock], 0),) for shard in range(2)]
    offer = Offer(clock_of=0, clock=clock, cells=[clock], weight=1.0, loss=1.0)
    return machine.push(offer, based_on=[0, 0], frames=frames, now=now)


def test_it_is_not_ready_before_it_knows_where_the_shards_are():
    machine = worker("bsp", shards=1)
    machine.on_message(OLD, clocks(0), 0.0)
    assert not machine.is_ready, "a server heard of it first"
    machine.on_message(COORDINATOR, view(1, OLD), 0.0)
    assert [node for node, _ in sent(machine, Hello)] == [OLD]
    machine.on_message(OLD, clocks(0), 0.0)
    assert machine.is_ready


def test_news_of_a_new_primary_count_when_it_is_known_where_its_copy_lies():
    machine = ready("bsp")
    machine.on_tick(0.0)
    machine.on_message(OLD, clocks(1, rounds=1), 0.0)
    machine.outbox.clear()
    news = clocks(0, generation=2, version=1, rounds=1)
    machine.on_message(NEW, news, 0.1)
    assert not machine.may_start(2), "it would read the copy of the dead primary, which lacks the first round"
    machine.on_tick(0.1)
    assert [m.view for _, m in sent(machine, Report)] == [1], "it asks for the view that explains the news"
    machine.on_message(COORDINATOR, view(2, NEW, OLD), 0.2)
    assert (NEW, 0) in [(node, m.shard) for node, m in sent(machine, Hello)]
    machine.on_message(NEW, news, 0.3)
    assert machine.may_start(2)


def test_it_joins_and_asks_every_shard_how_far_it_is():
    machine = worker()
    machine.on_tick(0.0)
    assert [node for node, _ in sent(machine, Join)] == [COORDINATOR]
    assert not machine.may_start(1)
    machine.on_message(COORDINATOR, view(1, OLD, NEW), 0.0)
    assert [(node, m.shard) for node, m in sent(machine, Hello)] == [(OLD, 0), (NEW, 1)]
    machine.on_message(OLD, clocks(0, clocks={0: 3}), 0.0)
    assert not machine.is_ready
    machine.on_message(NEW, clocks(1, clocks={0: 2}), 0.0)
    # Whoever died before it had one of the shards a step further: that step is done again.
    assert (machine.is_ready, machine.completed(), machine.may_start(3)) == (True, 2, True)


def test_a_push_is_kept_until_every_shard_has_it():
    machine = ready()
    sequence = push(machine)
    assert [(m.shard, m.sequence, m.origin) for _, m in sent(machine, Push)] == [(0, 1, NODE), (1, 1, NODE)]
    machine.on_message(OLD, ack(0, sequence), 0.0)
    assert (machine.is_released(sequence), machine.outstanding) == (False, 1)
    machine.on_message(OLD, ack(0, sequence), 0.0)
    machine.on_message(OLD, ack(1, sequence, "duplicate"), 0.0)
    assert (machine.is_released(sequence), machine.outstanding) == (True, 0)
    assert machine.outcomes == {"applied": 1, "duplicate": 1}


def test_what_is_not_answered_is_said_again_in_order():
    machine = ready()
    push(machine, 1)
    push(machine, 2, now=0.5)
    machine.on_message(OLD, ack(1, 1), 0.6)
    machine.on_message(OLD, ack(1, 2), 0.6)
    machine.outbox.clear()
    machine.on_tick(1.01)
    assert [(m.shard, m.sequence) for _, m in sent(machine, Push)] == [(0, 1), (0, 2)]


def test_a_new_primary_gets_everything_at_once_in_its_generation():
    machine = ready()
    push(machine, 1)
    push(machine, 2)
    machine.outbox.clear()
    machine.on_message(COORDINATOR, view(2, NEW, OLD), 0.0)
    found = [(node, m.sequence, m.generation) for node, m in sent(machine, Push) if m.shard == 0]
    assert found == [(NEW, 1, 2), (NEW, 2, 2)]


def test_an_older_view_changes_nothing():
    machine = ready()
    machine.on_message(COORDINATOR, view(3, NEW, NEW, term=2), 0.0)
    machine.on_message(COORDINATOR, view(9, OLD, OLD, term=1), 0.0)
    assert [link.holders.primary for link in machine.links if link.holders] == [NEW, NEW]


def test_refused_by_a_newer_world_it_asks_for_the_view():
    machine = ready()
    machine.on_tick(0.0)
    push(machine)
    machine.outbox.clear()
    machine.on_message(OLD, Refused(shard=0, generation=2, sequence=1), 0.1)
    machine.on_tick(0.1)
    assert [m.view for _, m in sent(machine, Report)] == [1]


def test_refused_for_a_gap_it_repeats_soon():
    machine = ready()
    machine.on_tick(0.0)
    push(machine)
    machine.on_message(OLD, Refused(shard=0, generation=1, sequence=1), 0.0)
    assert machine.wakeup == 0.25
    machine.outbox.clear()
    machine.on_tick(0.25)
    assert [(m.shard, m.sequence) for _, m in sent(machine, Push)] == [(0, 1)]


def test_synchronous_steps_wait_for_every_shard():
    machine = ready("bsp")
    assert machine.may_start(1)
    machine.on_message(OLD, clocks(0, rounds=1, loss=0.5), 0.0)
    assert not machine.may_start(2)
    machine.on_message(OLD, clocks(1, rounds=1, loss=0.5), 0.0)
    assert (machine.may_start(2), machine.may_start(3), machine.rounds_loss) == (True, False, 0.5)
    # Old news, come late, take nothing back.
    machine.on_message(OLD, clocks(1, rounds=0, loss=9.0), 0.0)
    assert (machine.may_start(2), machine.rounds_loss) == (True, 0.5)


def test_the_coordinator_may_move_the_bound():
    machine = ready("ssp:1")
    assert (machine.may_start(2), machine.may_start(3)) == (True, False)
    machine.on_message(COORDINATOR, view(2, OLD, OLD, generation=1, settings={"bound": 3}), 0.0)
    assert (machine.may_start(4), machine.may_start(5)) == (True, False)


def test_cells_of_a_push_that_overlaps_are_done_again_one_by_one():
    leases = LeaseHolder(now=0.0, ahead=4)
    machine = ready(leases=leases)
    machine.on_message(COORDINATOR, lease(3, 4, 5), 0.0)
    together = [leases.take(0.0), leases.take(0.0)]
    assert not leases.is_closed(together)
    offer = Offer(clock_of=0, clock=1, cells=together, weight=1.0, loss=0.0)
    machine.push(offer, based_on=[0, 0], frames=[(), ()], now=0.0)
    machine.on_message(OLD, ack(0, 1, "overlap"), 0.0)
    machine.on_message(OLD, ack(1, 1), 0.0)
    for cell in together:
        assert leases.is_closed([5]), "a cell that stays by itself comes before any other joins"
        assert leases.take(0.0) == cell and leases.is_closed([cell])
        leases.finish([cell], 0.0)
    assert leases.take(0.0) == 5 and not leases.is_closed([5])


def test_values_are_put_together_from_their_parts():
    machine = ready()
    ticket = machine.pull(1, 0.0)
    assert [(m.shard, m.ticket) for _, m in sent(machine, Pull)] == [(1, ticket)]

    def part(number: int, version: int, of: int = ticket) -> Values:
        return Values(shard=1, generation=1, ticket=of, version=version, part=number, parts=2)

    for stray in (part(0, 1, of=ticket - 1), part(1, 1)):
        machine.on_message(OLD, stray, 0.0)
    assert machine.pulled(1) is None
    # The answer to a repeated question is of a newer version: halves of two versions make no whole.
    machine.on_message(OLD, part(0, 2), 0.0)
    assert machine.pulled(1) is None
    machine.on_message(OLD, part(1, 2), 0.0)
    assert [(v.part, v.version) for v in machine.pulled(1) or []] == [(0, 2), (1, 2)]


def test_a_pull_that_is_not_answered_is_repeated():
    machine = ready()
    machine.pull(0, 0.0)
    machine.outbox.clear()
    machine.on_tick(1.0)
    assert [m.shard for _, m in sent(machine, Pull)] == [0]


def test_a_pull_says_nothing_again_that_is_on_its_way():
    machine = ready()
    push(machine, 1)
    machine.outbox.clear()
    machine.pull(0, 0.1)
    assert [type(message) for _, message in machine.outbox] == [Pull]


def test_it_learns_that_another_has_its_rank():
    machine = ready()
    assert not machine.is_dismissed
    machine.on_message(COORDINATOR, view(2, OLD, OLD, workers={0: 11}), 0.0)
    assert machine.is_dismissed


def test_strange_messages_are_counted():
    machine = ready()
    machine.on_message(OLD, ack(7, 1), 0.0)
    machine.on_message(OLD, Hello(shard=0, generation=1), 0.0)
    assert machine.ignored == {"unexpected ack": 1, "unexpected hello": 1}


def lease(*cells: int, term: int = 1, ticket: int = 0, over: bool = False) -> Lease:
    return Lease(term=term, ticket=ticket, cells=list(cells), committed=0, over=over)


def request(machine: WorkerMachine, now: float) -> LeaseRequest:
    machine.on_tick(now)
    ((node, found),) = sent(machine, LeaseRequest)
    assert node == COORDINATOR
    return found


def test_the_next_cell_is_asked_for_while_one_is_trained_on():
    holder = LeaseHolder(now=0.0, patience_s=1.0)
    machine = ready(leases=holder)
    assert (request(machine, 0.0).wanted, holder.take(0.0)) == (1, None)
    machine.on_message(COORDINATOR, lease(4), 0.1)
    assert machine.wakeup > 0.5
    assert holder.take(0.2) == 4
    again = request(machine, 0.2)
    assert (again.wanted, again.held, again.done) == (2, [4], [])
    machine.on_message(COORDINATOR, lease(4, 5), 0.3)
    assert (holder.take(0.4), holder.take(0.4)) == (5, None)


def test_what_every_shard_has_is_told_until_that_is_heard():
    holder = LeaseHolder(now=0.0, patience_s=1.0)
    machine = ready(leases=holder)
    machine.on_message(COORDINATOR, lease(1), 0.0)
    assert holder.take(0.0) == 1
    push(machine, 1)
    machine.on_message(OLD, ack(0, 1), 0.1)
    assert request(machine, 0.1).done == []
    machine.on_message(OLD, ack(1, 1), 0.2)
    assert request(machine, 0.2).done == [1]
    # The answer shows that it was not heard; the cell is not trained on again.
    machine.on_message(COORDINATOR, lease(1, 2), 0.3)
    assert request(machine, 1.3).done == [1]
    assert (holder.take(1.3), holder.take(1.3)) == (2, None)
    machine.on_message(COORDINATOR, lease(2), 1.4)
    assert request(machine, 2.4).done == []


def test_an_answer_that_comes_late_brings_nothing_back():
    holder = LeaseHolder(now=0.0, patience_s=1.0)
    machine = ready(leases=holder)
    first = request(machine, 0.0)
    machine.on_message(COORDINATOR, lease(1, ticket=first.ticket), 0.0)
    assert holder.take(0.0) == 1
    push(machine, 1)
    for shard in range(2):
        machine.on_message(OLD, ack(shard, 1), 0.1)
    second = request(machine, 0.2)
    assert (second.ticket > first.ticket, second.done) == (True, [1])
    for late in (lease(2, ticket=second.ticket), lease(1, ticket=first.ticket), lease(9, ticket=99)):
        machine.on_message(COORDINATOR, late, 0.3)
        assert holder.held == [2], "what every shard has is not trained on again, nor what nobody asked for"


def test_the_end_is_heard_even_if_old_news_follow():
    holder = LeaseHolder(now=0.0, patience_s=1.0)
    machine = ready(leases=holder)
    machine.on_message(COORDINATOR, lease(over=True), 0.0)
    assert holder.is_over
    machine.on_message(COORDINATOR, lease(), 0.1)
    assert request(machine, 1.2).held == []
    machine.on_message(COORDINATOR, lease(over=True), 1.3)
    assert holder.is_over


def test_a_new_coordinator_is_told_and_an_old_one_not_believed():
    holder = LeaseHolder(now=0.0, patience_s=1.0)
    machine = ready(leases=holder)
    machine.on_message(COORDINATOR, lease(4, 5), 0.0)
    machine.on_tick(0.0)
    machine.outbox.clear()
    machine.on_message(COORDINATOR, view(2, OLD, OLD, term=2, generation=1), 0.5)
    machine.on_tick(0.5)
    kinds = [type(m) for _, m in machine.outbox if isinstance(m, Report | LeaseRequest)]
    assert kinds == [Report, LeaseRequest]
    assert next(m.held for _, m in machine.outbox if isinstance(m, LeaseRequest)) == [4, 5]
    machine.on_message(COORDINATOR, lease(9, term=1), 0.6)
    assert holder.held == [4, 5]
