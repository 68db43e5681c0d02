"""What is largest in a job still travels: split, counted or refused beforehand, and never the end of a process."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
import torch

from helpers.ps_servers import PRIMARY, server
from helpers.ps_sim.values import ChainValues
from shoal.comm.channel import LIMIT_BYTES, Channel
from shoal.comm.codec import MAX_FRAME_BYTES, MAX_HEADER_BYTES, TooLarge
from shoal.coordinator import Coordinator, JobPlan, MemoryStore
from shoal.coordinator.leases import AHEAD, Leases
from shoal.errors import SpecError
from shoal.ledger.cells import CellSet
from shoal.ps.between_servers import Replicate
from shoal.ps.leasing import LeaseHolder
from shoal.ps.messages import COORDINATOR, Join, Lease, PsMessage, Push, Report, ShardView, View, shard_rows
from shoal.ps.news import News
from shoal.ps.node import decode_bundle, packets
from shoal.ps.packing import pack
from shoal.ps.server import RUNS_PER_REPORT, SHARDS_PER_REPORT, ServerMachine
from shoal.ps.shard import Shard
from shoal.spec.parameter_server import MOST_CELLS_PER_PUSH, MOST_SHARDS
from shoal.spec.strategy import parse_strategy
from shoal.spec.update_path import pooling_of
from shoal.strategies.ps.parcelling import from_frames, in_frames

FAR = 1 << 40
"""Cells and nodes are told in nine bytes each from here on."""
EVERY_SECOND = range(0, 10_000, 2)
"""A quorum that leaves out every second cell, for a while."""


def travel(messages: list[PsMessage], sender: int = PRIMARY) -> list[PsMessage]:
    """As they arrive, in however many packets."""
    return [m for packet in packets(sender, messages) for m in decode_bundle([bytes(p) for p in packet])[1]]


def full_server(num_shards: int, cells: CellSet) -> ServerMachine:
    """A server that is the primary of all shards, each with these cells."""
    machine = server(PRIMARY, "quorum:1/2")
    shards = shard_rows([ShardView(generation=1, primary=PRIMARY)] * num_shards)
    world = View(term=1, number=1, shards=shards, addresses={PRIMARY: ""}, workers={}, settings={})
    machine.on_message(COORDINATOR, world, 0.0)
    for shard in range(num_shards):
        duty = machine.primary(shard)
        assert duty is not None
        duty.shard.cells = cells
        duty.shard.tally.update(applied=len(cells), cells=len(cells), late=len(cells), duplicate=FAR)
    machine.outbox.clear()
    machine.on_tick(1000.0)
    return machine


def reports_of(machine: ServerMachine) -> list[PsMessage]:
    return [message for _, message in machine.outbox if isinstance(message, Report)]


def test_one_late_cell_is_one_gap_in_what_is_told():
    """It was a list of all that came after it, and longer than a header may be after some 29,000 cells."""
    late = CellSet(cell for cell in range(100_000) if cell != 3)
    (report,) = travel(reports_of(full_server(1, late)))
    assert report.facts["shards"][0]["cells"] == [0, 3, 4, 100_000]


def test_a_thousand_shards_with_thousands_of_gaps_each_are_reported_and_audited():
    machine = full_server(1000, CellSet(EVERY_SECOND))
    reports = travel(reports_of(machine))
    assert len(reports) == -(-1000 // SHARDS_PER_REPORT)
    plan = JobPlan(
        num_shards=1000,
        shard_bytes=(1,) * 1000,
        owners=(0,) * 1000,
        backups=(None,) * 1000,
        servers=1,
        replicas=0,
        workers=1,
        num_cells=EVERY_SECOND.stop,
        leased=False,
        sync="quorum:1/2",
        adjust=(),
    )
    coordinator = Coordinator(plan, MemoryStore(), 0.0)
    coordinator.on_message(PRIMARY, Join(node=PRIMARY, role="server", rank=0, address=""), 0.0)
    coordinator.on_message(9, Join(node=9, role="worker", rank=0, address=""), 0.0)
    assert coordinator.view is not None
    done = Report(node=9, role="worker", rank=0, view=coordinator.view.number, facts={"done": True})
    coordinator.on_message(9, done, 0.0)
    for _ in range(2):
        for report in reports:
            coordinator.on_message(PRIMARY, replace(report, view=coordinator.view.number), 0.0)
    audit = coordinator.finished
    assert audit is not None and audit["clean"]
    rows = audit["shards"]
    assert len(rows) == 1000 and {(row["once"], row["never"]) for row in rows} == {(5000, 5000)}
    assert rows[999]["missing"] == list(range(1, 20, 2)), "the first of them by number"
    ours, theirs = Channel.pair()
    ours.send({"kind": "done", "results": audit})
    assert len(msgpack.packb(audit)) > LIMIT_BYTES and theirs.poll() == {"kind": "done", "results": audit}
    for end in (ours, theirs):
        end.close()


def test_what_is_reported_by_number_is_the_beginning_and_all_is_counted():
    (report,) = travel(reports_of(full_server(1, CellSet(EVERY_SECOND))))
    told = report.facts["shards"][0]
    assert len(told["cells"]) == 2 * RUNS_PER_REPORT and told["num_cells"] == 5000


def test_a_shard_with_a_hundred_thousand_gaps_fills_a_new_copy():
    shard = full_server(1, CellSet(range(0, 200_000, 2))).primary(0).shard
    (fill,) = travel([News(0, shard).fill(1)])
    assert Shard.from_books(shard.rules, ChainValues(0), fill.frames, fill.books).books() == shard.books()


def test_the_largest_push_travels_and_so_does_all_that_lists_its_cells():
    cells = [FAR + number for number in range(MOST_CELLS_PER_PUSH)]
    push = Push(
        shard=0,
        generation=1,
        origin=1,
        sequence=1,
        clock_of=0,
        clock=1,
        cells=cells,
        based_on=0,
        weight=1.0,
        loss=1.0,
    )
    entry = pack(push)
    logged = Replicate(shard=0, generation=1, index=1, entry={"kind": entry.kind, "fields": entry.fields})
    holder = LeaseHolder(now=0.0, ahead=MOST_CELLS_PER_PUSH)
    holder.on_lease(Lease(term=1, ticket=0, cells=cells, committed=0), 0.0)
    while holder.take(0.0) is not None:
        pass
    more = [FAR + MOST_CELLS_PER_PUSH + number for number in range(MOST_CELLS_PER_PUSH)]
    holder.on_lease(Lease(term=1, ticket=0, cells=[*cells, *more], committed=0), 0.0)
    holder.finish(cells, 0.0)
    asking = holder.request(1, 0, 0.0, loss=[0.5])
    assert len(asking.done) + len(asking.held) == 2 * MOST_CELLS_PER_PUSH
    given = Lease(term=1, ticket=0, cells=[*cells, *more], committed=FAR, loss=[0.5])
    for message in (push, logged, asking, given):
        assert travel([message]) == [message]


def test_a_view_of_the_most_shards_and_a_thousand_workers_travels():
    nodes = range(FAR, FAR + 1000)
    world = View(
        term=FAR,
        number=FAR,
        shards=shard_rows([ShardView(generation=FAR, primary=FAR, backup=FAR + 1, filled=True)] * MOST_SHARDS),
        addresses=dict.fromkeys(nodes, "tcp://[2001:db8:aaaa:bbbb:cccc:dddd:eeee:ffff]:65535"),
        workers=dict(enumerate(nodes)),
        settings={"shares": dict.fromkeys(range(1000), 1.0), "hold": [FAR, FAR], "bound": FAR},
    )
    assert travel([world]) == [world]


def test_messages_that_are_too_much_together_travel_apart_in_their_order():
    facts = {"text": "x" * (MAX_HEADER_BYTES // 3)}
    reports = [Report(node=1, role="worker", rank=0, view=number, facts=facts) for number in range(8)]
    assert len(list(packets(1, reports))) == 4 and travel(reports) == reports
    with pytest.raises(TooLarge, match="header"):
        travel([replace(reports[0], facts={"text": "x" * MAX_HEADER_BYTES})])


def test_a_tensor_of_any_size_travels_in_frames():
    large = torch.arange(MAX_FRAME_BYTES // 4 + 5, dtype=torch.int32)
    frames = in_frames(large.view(1, -1))
    assert [frame.nbytes for frame in frames] == [MAX_FRAME_BYTES, 20]
    assert torch.equal(from_frames(frames), large)
    for small in (torch.empty(0), torch.tensor(3.0)):
        assert torch.equal(from_frames(in_frames(small)), small.reshape(-1))


def test_leases_run_no_further_ahead_than_reports_can_say():
    leases = Leases(FAR)
    assert leases.ask(1, wanted=1, done=(), held=()) == [0]
    given = leases.ask(2, wanted=3 * AHEAD, done=(), held=())
    assert given == list(range(1, AHEAD)), "the first one is not done"
    assert leases.ask(2, wanted=3 * AHEAD, done=given, held=()) == []
    leases.release(1)
    assert leases.ask(2, wanted=1, done=(), held=()) == [0], "what is not done is given to another"
    assert leases.ask(2, wanted=1, done=[0], held=()) == [AHEAD]


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        (f"ps:shards={MOST_SHARDS + 1}", f"shards must be at most {MOST_SHARDS}, found {MOST_SHARDS + 1}"),
        (f"ps:push=parameters,every={MOST_CELLS_PER_PUSH + 1}", f"every must be at most {MOST_CELLS_PER_PUSH}"),
    ],
)
def test_more_than_travels_is_refused_beforehand(strategy, sentence):
    with pytest.raises(SpecError, match=sentence):
        parse_strategy(strategy)


def test_a_pool_that_pushes_more_than_travels_is_refused():
    with pytest.raises(SpecError, match=f"count must be at most {MOST_CELLS_PER_PUSH}"):
        pooling_of(parse_strategy(f"ps:sync=asp,pool=count:{MOST_CELLS_PER_PUSH + 1}"))
