"""One suite for every form of a group: processes or threads, whoever carries what they say."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.forked import in_processes
from shoal.arena import Segment
from shoal.comm.group import Group, HierarchicalGroup, LoneGroup, MemoryGroup, Reduction, group_bytes, together
from shoal.comm.group.letters import LARGEST_KEPT_BYTES
from shoal.comm.group.regions import BUFFER_BYTES, MOST_LETTERS
from shoal.comm.zmq_transport import ZmqTransport
from shoal.errors import PeerLost, ProtocolError
from shoal.spec import Conduct, World
from shoal.spec.conduct import even_fills
from shoal.strategies.base import Company, Setting
from shoal.strategies.groups.meeting import SegmentMeeting
from shoal.strategies.groups.opening import open_group

FORMS = ("memory", "backend", "sockets", "threads", "2 hosts", "3 hosts")
IN_ORDER = ("memory", "sockets", "threads", "2 hosts", "3 hosts")
"""Forms that add up in the order of ranks."""
NUMBERS = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
ANYTHING = (*NUMBERS, torch.bool, torch.uint8)
LARGE = BUFFER_BYTES // 4 * 2 + 3
"""Elements of float32 that need three rounds."""
SIZES = (0, 1, 7, 1000)

Work = Callable[[Group], Any]


def opened(form: str, world: World, on_idle: Callable[[], None] | None = None) -> Group:
    conduct = Conduct(fills=even_fills(world.world_size, world.world_size))
    return open_group(form, Setting(world=world, conduct=conduct, company=Company(on_idle=on_idle)))


def run(form: str, size: int, work: Work, on_idle: Callable[[], None] | None = None) -> list[Any]:
    """What each member of a group of so many returns."""
    if form == "threads":
        return together(size, work)
    hosts = min(int(form[0]), size) if form.endswith(" hosts") else 0
    segments = [os.memfd_create("shoal-host") for _ in range(hosts)]

    def live(world: World) -> Any:
        group = opened_over_hosts(world, segments, on_idle) if hosts else opened(form, world, on_idle)
        result = work(group)
        group.close()
        return result

    try:
        return in_processes(size, live)
    finally:
        for segment in segments:
            os.close(segment)


def opened_over_hosts(world: World, segments: list[int], on_idle: Callable[[], None] | None = None) -> Group:
    """A group of processes that share memory with some of the others, and talk to the rest over sockets."""
    hosts = even_fills(world.world_size, len(segments))
    number = next(number for number, ranks in enumerate(hosts) if world.global_rank in ranks)
    ranks = hosts[number]
    inside: Group = LoneGroup(world.global_rank)
    if len(ranks) > 1:
        index = ranks.index(world.global_rank)
        inside = MemoryGroup.of_all(Segment(segments[number]), index, len(ranks), on_idle, ranks)
    meeting = SegmentMeeting(Setting(world=world, conduct=Conduct(fills=hosts)))
    key = meeting.agree_on_key()
    transport = ZmqTransport(world.global_rank, key=key, address="tcp://127.0.0.1:*", encrypt=True)
    transport.connect(meeting.exchange_addresses(transport.address))
    return HierarchicalGroup(inside, transport, hosts, on_idle=on_idle)


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers, so that sums of a few are exact in every dtype."""
    found = torch.randint(-50, 50, (numel,), generator=torch.Generator().manual_seed(1000 * rank + numel))
    return found > 0 if dtype is torch.bool else found.abs().to(dtype) if dtype is torch.uint8 else found.to(dtype)


def everybodys(size: int, numel: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [values(rank, numel, dtype) for rank in range(size)]


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert torch.equal(found, expected)


each_form = pytest.mark.parametrize("form", FORMS)
each_size = pytest.mark.parametrize("size", [2, 3])


@each_form
@each_size
def test_all_get_what_a_plain_computation_gives(form: str, size: int) -> None:
    def work(group: Group) -> None:
        assert (group.size, group.ranks, group.is_first) == (size, tuple(range(size)), group.index == 0)
        for numel in SIZES:
            for dtype in NUMBERS:
                check_sums(group, numel, dtype)
            for dtype in ANYTHING:
                check_copies(group, numel, dtype)
        check_sums(group, LARGE, torch.float32)
        check_copies(group, LARGE, torch.float32)
        group.barrier()

    run(form, size, work)


def check_sums(group: Group, numel: int, dtype: torch.dtype) -> None:
    given = everybodys(group.size, numel, dtype)
    expected = torch.stack(given).sum(0).to(dtype)
    own = given[group.index]
    total = own.clone()
    assert group.all_reduce_(total) is total
    assert_same(total, expected)
    assert_same(group.max_(own.clone()), torch.stack(given).amax(0))
    smallest = Reduction(smallest_of, before=doubled, after=doubled)
    assert_same(group.reduce_(own.clone(), smallest), torch.stack(given).amin(0) * 4)
    even = [own + index for index in range(group.size)]
    kept = [part.clone() for part in even]
    assert_same(group.reduce_scatter(even), (expected + group.size * group.index).to(dtype))
    assert all(map(torch.equal, even, kept)), "what was given is left as it was"


@each_form
@each_size
def test_sums_that_were_begun_end_while_others_are_on_their_way(form: str, size: int) -> None:
    numels = (0, 1, 1000, LARGE, 7)

    def work(group: Group) -> bool:
        for _ in range(2):
            totals = {number: values(group.index, numel) for number, numel in enumerate(numels)}
            order = sorted(totals, key=lambda number: (number + group.index) % len(numels))
            begun = {number: group.begin_sum(totals[number], number) for number in order}
            for each in begun.values():
                group.pump()
                each.advance()
            for number, numel in enumerate(numels):
                begun[number].wait()
                assert_same(totals[number], torch.stack(everybodys(size, numel)).sum(0).float())
        group.barrier()
        return group.sums_ahead

    assert set(run(form, size, work)) == {
        form == "sockets" or form == f"{size} hosts" or (form, size) == ("3 hosts", 2)
    }


def smallest_of(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    out.copy_(parts[0])
    for part in parts[1:]:
        torch.minimum(out, part, out=out)
    return out


def doubled(given: Tensor, out: Tensor) -> None:
    torch.mul(given, 2, out=out)


def check_copies(group: Group, numel: int, dtype: torch.dtype) -> None:
    given = everybodys(group.size, numel, dtype)
    own = given[group.index]
    for found, expected in zip(group.all_gather(own), given, strict=True):
        assert_same(found, expected)
    for root in range(group.size):
        assert_same(group.broadcast_(own.clone(), root), given[root])


@each_form
def test_parts_of_different_sizes(form: str) -> None:
    sizes = [LARGE, 0, 5]

    def work(group: Group) -> None:
        parts = [everybodys(3, numel) for numel in sizes]
        mine = group.reduce_scatter([part[group.index] for part in parts])
        assert_same(mine, torch.stack(parts[group.index]).sum(0))
        vector = torch.zeros(sum(sizes))
        slices = list(vector.split(sizes))
        slices[group.index].copy_(values(group.index, sizes[group.index]))
        group.all_gather_(slices)
        assert_same(vector, torch.cat([values(rank, numel) for rank, numel in enumerate(sizes)]))

    run(form, 3, work)


@each_form
def test_any_shape_and_order_of_memory(form: str) -> None:
    def work(group: Group) -> None:
        scalar = torch.tensor(2.0 + group.index, dtype=torch.float64)
        assert float(group.all_reduce_(scalar)) == 5.0
        turned = values(group.index, 12).view(3, 4).t()
        assert_same(group.all_reduce_(turned), sum(one.view(3, 4).t() for one in everybodys(2, 12)))
        assert not turned.is_contiguous()
        rows = [torch.full((2, 3), float(group.index + part)) for part in range(2)]
        assert_same(group.reduce_scatter(rows), torch.full((2, 3), 1.0 + 2 * group.index))
        leaf = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            group.all_reduce_(leaf)
        assert leaf.tolist() == [2.0] * 3 and leaf.requires_grad

    run(form, 2, work)


@each_form
@each_size
def test_the_same_bits_everywhere_and_every_time(form: str, size: int) -> None:
    """Numbers that do not add up exactly; small sums are computed in another way than large ones."""

    def work(group: Group) -> list[str]:
        found = []
        for numel in (1000, 100_003):
            given = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
            totals = [group.all_reduce_(given[group.index].clone()) for _ in range(2)]
            assert torch.equal(*totals)
            if form in IN_ORDER:
                expected = given[0] + given[1]
                for part in given[2:]:
                    expected = expected + part
                assert torch.equal(totals[0], expected)
                part = group.reduce_scatter([given[group.index]] * size)
                assert torch.equal(part, expected)
            found.append(hashlib.sha256(totals[0].numpy().tobytes()).hexdigest())
        return found

    first, *others = run(form, size, work)
    assert all(other == first for other in others)


@each_form
def test_many_rounds(form: str) -> None:
    """Buffers are used again and again, by operations of all kinds, some of which not all have to wait for."""

    def work(group: Group) -> None:
        for number in range(200):
            root = number % group.size
            told = group.broadcast_(torch.tensor([number if group.index == root else -1]), root)
            assert int(told) == number
            assert int(group.all_reduce_(torch.tensor([number + group.index]))) == 3 * number + 3
            assert [int(one) for one in group.all_gather(torch.tensor([group.index]))] == [0, 1, 2]

    run(form, 3, work)


@each_form
def test_messages_arrive_by_tag_and_in_order(form: str) -> None:
    """All send everything before they receive anything: more than letters that fit, and one of many pieces."""
    count = 2 * MOST_LETTERS + 5
    large = LARGEST_KEPT_BYTES + 4321

    def work(group: Group) -> None:
        others = [index for index in range(group.size) if index != group.index]
        transfers, sent = [], []
        for other in others:
            for number in range(count):
                sent.append(torch.tensor([group.index, number]))
                transfers.append(group.send(sent[-1], other, tag=number % 3))
            for content in (values(group.index, large, torch.uint8), torch.empty(0), torch.tensor(True)):
                sent.append(content)
                transfers.append(group.send(content, other, tag=7))
        for other in others:
            for tag in (2, 0, 1):
                for number in range(tag, count, 3):
                    group.receive(room := torch.zeros(2, dtype=torch.int64), other, tag).wait()
                    assert room.tolist() == [other, number]
            rooms = [torch.empty(large, dtype=torch.uint8), torch.empty(0), torch.tensor(False)]
            for awaited in [group.receive(room, other, 7) for room in rooms]:
                awaited.wait()
            assert torch.equal(rooms[0], values(other, large, torch.uint8)) and bool(rooms[2])
        for transfer in transfers:
            transfer.wait()

    run(form, 3, work)


@each_form
def test_lines_of_a_grid_are_groups_of_their_own(form: str) -> None:
    rows, columns = [(0, 1), (2, 3)], [(0, 2), (1, 3)]

    def work(group: Group) -> list[int]:
        along, across = group.split(rows), group.split(columns)
        assert (along.ranks, across.ranks) == (rows[group.index // 2], columns[group.index % 2])
        assert (along.index, across.index) == (group.index % 2, group.index // 2)
        found = []
        for _ in range(3):
            found.append(int(along.all_reduce_(torch.tensor([group.index]))))
            found.append(int(across.all_reduce_(torch.tensor([group.index]))))
            found.append(int(group.all_reduce_(torch.tensor([group.index]))))
        leaving = along.send(torch.tensor([group.index]), 1 - along.index)
        along.receive(room := torch.tensor([-1]), 1 - along.index).wait()
        leaving.wait()
        across.broadcast_(last := torch.tensor([group.index]), 1)
        alone = group.split([(rank,) for rank in range(4)])
        assert alone.size == 1 and int(alone.all_reduce_(torch.tensor([5]))) == 5
        whole = group.split([range(4)])
        return [*found, int(room), int(last), int(whole.all_reduce_(torch.ones(1)))]

    found = run(form, 4, work)
    assert [one[:3] for one in found] == [[1, 2, 6], [1, 4, 6], [5, 2, 6], [5, 4, 6]]
    assert [one[9:] for one in found] == [[1, 2, 4], [0, 3, 4], [3, 2, 4], [2, 3, 4]]


def test_one_worker_talks_to_itself() -> None:
    group = LoneGroup(3)
    assert (group.ranks, group.index, group.size) == ((3,), 0, 1)
    kept = torch.arange(4.0)
    assert torch.equal(group.all_reduce_(kept.clone()), kept) and torch.equal(group.reduce_scatter([kept]), kept)
    group.send(kept, 0).wait()
    group.receive(room := torch.zeros(4), 0).wait()
    assert torch.equal(room, kept)


class GaveUp(Exception):
    """What a caller's `on_idle` raises."""


WAITS: dict[str, Work] = {
    "a sum": lambda group: group.all_reduce_(torch.ones(3)),
    "a large sum": lambda group: group.all_reduce_(torch.ones(LARGE)),
    "what another has": lambda group: group.broadcast_(torch.ones(3), 1),
    "parts": lambda group: group.reduce_scatter([torch.ones(2), torch.ones(2)]),
    "a barrier": lambda group: group.barrier(),
    "a message": lambda group: group.receive(torch.ones(1), 1).wait(),
    "a message to be taken": lambda group: group.send(torch.ones(1), 1).wait(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_who_waits_for_a_dead_peer_can_leave(wait: Work) -> None:
    """In shared memory nobody sees a peer's end; the caller does, and says so."""

    is_lost: list[bool] = []

    def on_idle() -> None:
        if is_lost:
            raise GaveUp

    def work(group: Group) -> None:
        group.all_reduce_(torch.ones(1))
        if group.index == 0:
            is_lost.append(True)
            with pytest.raises(GaveUp):
                wait(group)

    unclosed("memory", work, on_idle)


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_who_waits_for_another_host_can_leave(wait: Work) -> None:
    segments = [os.memfd_create("shoal-host") for _ in range(2)]
    is_lost: list[bool] = []

    def on_idle() -> None:
        if is_lost:
            raise GaveUp

    def work(world: World) -> None:
        group = opened_over_hosts(world, segments, on_idle)
        group.all_reduce_(torch.ones(1))
        if group.index == 0:
            is_lost.append(True)
            with pytest.raises(GaveUp):
                wait(group)

    in_processes(2, work)
    for segment in segments:
        os.close(segment)


def test_who_waits_for_a_host_that_is_gone_learns_it() -> None:
    segments = [os.memfd_create("shoal-host") for _ in range(2)]

    def work(world: World) -> None:
        group = opened_over_hosts(world, segments)
        group.all_reduce_(torch.ones(1))
        if group.index:
            group._mail.transport.abort()
        else:
            with pytest.raises(PeerLost):
                group.all_reduce_(torch.ones(LARGE))

    in_processes(2, work)
    for segment in segments:
        os.close(segment)


def test_who_waits_inside_its_host_still_takes_what_others_send() -> None:
    """The first sends more than may be under way before it says what the one is waiting for."""
    count = 600

    def work(group: Group) -> list[int]:
        inside = group.split([(0,), (1, 2)])
        if group.index == 0:
            sent = [torch.tensor([number]) for number in range(count)]
            for one in sent:
                group.send(one, 1)
            group.send(torch.tensor([7]), 2).wait()
            return []
        if group.index == 2:
            group.receive(room := torch.tensor([0]), 0).wait()
            inside.send(room, 0).wait()
            return [int(room)]
        inside.receive(room := torch.tensor([0]), 1).wait()
        found = [int(room)]
        for _ in range(count):
            group.receive(room, 0).wait()
            found.append(int(room))
        return found

    assert run("2 hosts", 3, work) == [[], [7, *range(count)], [7]]


@pytest.mark.parametrize("size", [3, 4])
def test_between_hosts_numbers_may_be_rounded_and_all_get_the_same(size: int) -> None:
    segments = [os.memfd_create("shoal-host") for _ in range(3)]

    def work(world: World) -> str:
        group = opened_over_hosts(world, segments)
        assert isinstance(group, HierarchicalGroup)
        group._cast = torch.bfloat16
        given = [torch.randn(LARGE, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
        total = group.all_reduce_(given[group.index].clone())
        exact = torch.stack(given).double().sum(0)
        assert torch.equal(total, total.bfloat16().float()) and not torch.equal(total, exact.float())
        assert float((total - exact).abs().max()) < 0.1
        whole = group.all_reduce_(torch.tensor([2**24 + group.index], dtype=torch.int64))
        assert int(whole) == size * 2**24 + sum(range(size)), "only float32 is rounded"
        return hashlib.sha256(total.numpy().tobytes()).hexdigest()

    assert len(set(in_processes(size, work))) == 1
    for segment in segments:
        os.close(segment)


def unclosed(form: str, work: Work, on_idle: Callable[[], None] | None = None) -> None:
    """Two workers that leave in the middle: at its end a group would wait until its letters are taken."""
    in_processes(2, lambda world: work(opened(form, world, on_idle)))


@pytest.mark.parametrize("form", ["memory", "sockets"])
def test_a_message_of_another_size_is_refused(form: str) -> None:
    def work(group: Group) -> None:
        if group.index == 0:
            group.send(torch.ones(4), 1)
        else:
            with pytest.raises(ProtocolError, match="Worker 0 sent 16 bytes where 8 were awaited"):
                group.receive(torch.ones(2), 0).wait()

    unclosed(form, work)


def test_memory_that_all_of_a_group_map() -> None:
    def work(group: Group) -> list[list[float]]:
        found = []
        for part in (group, group.split([(0, 2), (1, 3)])):
            segment = part.share({"row": 4 * part.size, "more": 8192})
            assert segment is not None and segment.nbytes == 4096 + 8192
            row = segment.tensor("row", torch.float32)
            row[part.index] = 10.0 + group.index
            part.barrier()
            found.append(row.tolist())
        return found

    everywhere = run("memory", 4, work)
    assert all(one[0] == [10.0, 11.0, 12.0, 13.0] for one in everywhere)
    assert [one[1] for one in everywhere] == [[10.0, 12.0], [11.0, 13.0]] * 2


def test_a_group_takes_as_much_memory_as_it_says() -> None:
    def work(world: World) -> int:
        opened("memory", world)
        assert world.arena_fd is not None
        return os.fstat(world.arena_fd).st_size

    assert in_processes(3, work) == [group_bytes(3)] * 3
    assert group_bytes(1) == 0
