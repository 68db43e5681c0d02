"""Horovod's functions for torch, in real processes that share memory."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal.horovod.torch as hvd
from helpers.forked import in_processes
from helpers.horovod_worlds import OnTwoHosts, among, each_size, init_in, on_two_hosts
from shoal.horovod.reductions import adasum
from shoal.spec import World

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NUMBERS = (*FLOATS, *WHOLE, torch.complex64, torch.complex128)
MOVED = (*NUMBERS, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
SHAPES = ((), (0,), (5,), (3, 4), (2, 0, 3), (17, 5, 2))


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers, so that sums and products of a few are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * rank + len(shape))
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def of_all(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.stack([values(rank, shape, dtype) for rank in range(hvd.size())])


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, (found, expected)
    # By bytes: not every dtype can be compared.
    ours, theirs = (one.contiguous().view(-1).view(torch.uint8) for one in (found, expected))
    assert torch.equal(ours, theirs), (found, expected)


@each_size
def test_ranks_and_sizes(size):
    def work() -> list[int]:
        assert hvd.is_initialized() and hvd.is_homogeneous()
        assert (hvd.gloo_enabled(), hvd.mpi_enabled(), hvd.nccl_built()) == (True, False, 0)
        hvd.barrier()
        return [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]

    hosts = 2 if isinstance(size, OnTwoHosts) else 1
    each = size // hosts
    assert among(size, work) == [[rank, size, rank % each, each, rank // each, hosts] for rank in range(size)]


@each_size
def test_allreduce_of_every_dtype_shape_and_operation(size):
    def work() -> None:
        for dtype in NUMBERS:
            for shape in SHAPES:
                given, own = of_all(shape, dtype), values(hvd.rank(), shape, dtype)
                total = given.sum(0).to(dtype)
                assert_same(hvd.allreduce(own, op=hvd.Sum), total)
                assert_same(own, given[hvd.rank()])
                if dtype in WHOLE:
                    assert_same(hvd.allreduce(own), torch.div(total, size, rounding_mode="floor"))
                else:
                    assert_same(hvd.allreduce(own), (total * (1 / size)).to(dtype))
                assert_same(hvd.allreduce(own, op=hvd.Product), given.prod(0).to(dtype))
                if not dtype.is_complex:
                    assert_same(hvd.allreduce(own, op=hvd.Min), given.amin(0))
                    assert_same(hvd.allreduce(own, op=hvd.Max), given.amax(0))
                in_place = own.clone()
                assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
                assert_same(in_place, total)
                scaled = hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
                assert_same(scaled, total)
        booleans = torch.tensor([hvd.rank() == 0, False])
        assert hvd.allreduce(booleans, op=hvd.Sum).tolist() == [True, False]
        assert hvd.allreduce(torch.full((), 1.0), average=False).item() == size

    among(size, work)


@each_size
def test_large_tensors_and_those_with_gaps(size):
    def work() -> None:
        large = torch.arange(600_000, dtype=torch.float64) + hvd.rank()
        expected = torch.arange(600_000, dtype=torch.float64) + (size - 1) / 2
        assert torch.equal(hvd.allreduce(large), expected)
        columns = torch.zeros(40, 40)
        view = columns.t()[::2]
        view += hvd.rank() + 1
        hvd.allreduce_(view, op=hvd.Sum)
        assert columns[:, ::2].eq(sum(range(1, size + 1))).all() and columns[:, 1::2].eq(0).all()

    among(size, work)


@each_size
def test_handles_may_be_waited_for_in_any_order(size):
    def work() -> None:
        order = range(8) if hvd.rank() % 2 else range(7, -1, -1)
        handles = {
            number: hvd.allreduce_async(torch.full((3,), float(number)), name=f"t{number}") for number in order
        }
        for number in sorted(handles, key=lambda one: (one * 5) % 8):
            assert hvd.synchronize(handles[number]).tolist() == [number] * 3
        last = hvd.allreduce_async(torch.zeros(1))
        while not hvd.poll(last):
            time.sleep(0.001)
        hvd.synchronize(last)
        with pytest.raises(ValueError, match="no handle"):
            hvd.synchronize(last)

    among(size, work)


@each_size
def test_groups_sparse_tensors_and_adasum(size):
    def work() -> None:
        tensors = [torch.full((3,), float(hvd.rank())), torch.full((2, 2), hvd.rank(), dtype=torch.int64)]
        total = sum(range(size))
        for found in (hvd.grouped_allreduce(tensors, op=hvd.Sum), hvd.grouped_allreduce_(tensors, op=hvd.Sum)):
            assert found[0].tolist() == [total] * 3 and found[1].tolist() == [[total] * 2] * 2
        rows = torch.sparse_coo_tensor([[0, hvd.rank() + 1]], [[1.0, 1.0], [2.0, 2.0]], (6, 2))
        found = hvd.synchronize(hvd.sparse_allreduce_async(rows, "rows", hvd.Sum)).to_dense()
        expected = torch.zeros(6, 2)
        expected[0], expected[1 : size + 1] = size, 2
        assert torch.equal(found, expected)
        mean = hvd.synchronize(hvd.sparse_allreduce_async(rows, "rows"))
        assert torch.equal(mean.to_dense(), expected / size)
        vectors = torch.randn(size, 50, generator=torch.Generator().manual_seed(1))
        assert_same(hvd.allreduce(vectors[hvd.rank()], op=hvd.Adasum), adasum(list(vectors)))

    among(size, work)
    same, apart = torch.ones(3), torch.tensor([1.0, 0, 0])
    assert torch.allclose(adasum([same, same]), same), "what is parallel is averaged"
    assert torch.allclose(adasum([apart, apart.flip(0)]), apart + apart.flip(0)), "what is orthogonal is added"


@each_size
def test_allgather_broadcast_and_alltoall_of_every_dtype(size):
    def work() -> None:
        rank = hvd.rank()
        for dtype in MOVED:
            rows = [values(other, (other, 3), dtype) for other in range(size)]  # the first has none
            whole = torch.cat([one.view(torch.uint8) for one in rows]).view(dtype)
            assert_same(hvd.allgather(rows[rank]), whole)
            for shape in SHAPES:
                for root in (0, size - 1):
                    expected = values(root, shape, dtype)
                    assert_same(hvd.broadcast(values(rank, shape, dtype), root), expected)
                    own = values(rank, shape, dtype)
                    assert hvd.broadcast_(own, root) is own
                    assert_same(own, expected)
            # Rank r sends r + o rows to rank o.
            splits = [[sender + other for other in range(size)] for sender in range(size)]
            given = [values(sender, (sum(splits[sender]), 2), dtype) for sender in range(size)]
            found, received = hvd.alltoall(given[rank], splits=torch.tensor(splits[rank]))
            assert received.tolist() == [split[rank] for split in splits]
            parts = [one.view(torch.uint8).split(split)[rank] for one, split in zip(given, splits, strict=True)]
            assert_same(found, torch.cat(parts).view(dtype))
        assert hvd.alltoall(torch.arange(size) + 10 * rank).tolist() == [
            10 * other + rank for other in range(size)
        ]
        found = hvd.grouped_allgather([torch.full((1,), rank), torch.full((rank, 2), 1.5)])
        assert found[0].tolist() == list(range(size)) and found[1].shape == (sum(range(size)), 2)

    among(size, work)


@each_size
def test_reducescatter(size):
    def work() -> None:
        rank = hvd.rank()
        for dtype in NUMBERS:
            for rows in (0, 1, size, 2 * size + 1):
                whole = torch.arange(rows * 3).view(rows, 3).to(dtype)
                shares = [rows // size + (index < rows % size) for index in range(size)]
                own = whole.split(shares)[rank]
                assert_same(hvd.reducescatter(whole, op=hvd.Sum), own * size)
                assert_same(hvd.reducescatter(whole), own)
                if not dtype.is_complex:
                    assert_same(hvd.reducescatter(whole, op=hvd.Max), own)
        first, second = hvd.grouped_reducescatter([torch.ones(size), torch.ones(size, 2)], op=hvd.Average)
        assert first.tolist() == [1] and second.tolist() == [[1, 1]]

    among(size, work)


@each_size
def test_gradients_go_through_collectives(size):
    def gradient(function: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        given = given.clone().requires_grad_()
        (function(given) * (hvd.rank() + 1.0)).sum().backward()
        assert given.grad is not None
        return given.grad

    def work() -> None:
        rank, total = hvd.rank(), sum(range(1, size + 1))
        assert gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), torch.ones(3)).tolist() == [total] * 3
        assert gradient(lambda x: hvd.allreduce(x), torch.ones(3)).tolist() == [total / size] * 3
        assert gradient(hvd.allgather, torch.ones(rank + 1, 2)).tolist() == [[total] * 2] * (rank + 1)
        assert gradient(lambda x: hvd.broadcast(x, 1), torch.ones(2)).tolist() == [total * (rank == 1)] * 2
        assert gradient(hvd.alltoall, torch.ones(size)).tolist() == list(range(1, size + 1))
        expected = [float(index + 1) for index in range(size)]
        assert gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), torch.ones(size)).tolist() == expected

    among(size, work)


@each_size
def test_process_sets_go_their_own_way(size):
    def work() -> list[Any]:
        rank = hvd.rank()
        even = hvd.add_process_set([other for other in range(size) if other % 2 == 0])
        odd = hvd.add_process_set(hvd.ProcessSet([other for other in range(size) if other % 2]))
        everybody = hvd.add_process_set(range(size))
        mine, other = (odd, even) if rank % 2 else (even, odd)
        assert mine.included() and not other.included() and other.rank() == -1
        found = [mine.size(), mine.rank()]
        for _ in range(3 + rank % 2 * 4):  # sets go at their own pace
            total = hvd.allreduce(torch.tensor(rank), op=hvd.Sum, process_set=mine)
        found += [int(total), hvd.allgather_object(rank, process_set=mine)]
        assert int(hvd.broadcast(torch.tensor(rank), mine.ranks[-1], process_set=mine)) == mine.ranks[-1]
        assert int(hvd.allreduce(torch.tensor(1), op=hvd.Sum, process_set=everybody)) == size
        with pytest.raises(ValueError, match="is not in"):
            hvd.allreduce(torch.zeros(1), process_set=other)
        with pytest.raises(ValueError, match="exists already"):
            hvd.add_process_set(even.ranks)
        assert hvd.remove_process_set(even) and not hvd.remove_process_set(hvd.global_process_set)
        with pytest.raises(ValueError, match="is not known"):
            hvd.allreduce(torch.zeros(1), process_set=even)
        hvd.barrier()
        return found

    for rank, (count, index, total, objects) in enumerate(among(size, work)):
        members = [other for other in range(size) if other % 2 == rank % 2]
        assert (count, index, total, objects) == (len(members), members.index(rank), sum(members), members)


@each_size
def test_each_function_in_process_sets(size):
    """Even and odd ranks call the same at the same time, and hear nothing of each other."""

    def work() -> None:
        rank = hvd.rank()
        even, odd = (hvd.add_process_set(range(first, size, 2)) for first in (0, 1))
        mine = odd if rank % 2 else even
        ranks, own = mine.ranks, {"process_set": mine}
        rows = {other: torch.full((other, 2), float(other)) for other in range(size)}  # uneven; the first has none
        total, three = sum(ranks), torch.full((3,), float(rank))
        for op, expected in {
            hvd.Sum: total,
            hvd.Average: total / len(ranks),
            hvd.Min: ranks[0],
            hvd.Max: ranks[-1],
            hvd.Product: torch.tensor(ranks).prod(),
        }.items():
            assert hvd.allreduce(three, op=op, **own).tolist() == [float(expected)] * 3
            assert [one.tolist() for one in hvd.grouped_allreduce([three] * 2, op=op, **own)] == [
                [expected] * 3
            ] * 2
        assert (
            hvd.allreduce(three, op=hvd.Adasum, **own).tolist()
            == adasum([three * 0 + one for one in ranks]).tolist()
        )
        sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
        found = hvd.synchronize(hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum, **own)).to_dense()
        assert found.tolist() == [float(other in ranks) for other in range(size)]
        together = torch.cat([rows[other] for other in ranks])
        assert torch.equal(hvd.allgather(rows[rank], **own), together)
        first, second = hvd.grouped_allgather([rows[rank], three], **own)
        assert torch.equal(first, together) and second.tolist() == [other for other in ranks for _ in range(3)]
        assert hvd.broadcast(three, ranks[-1], **own).tolist() == [ranks[-1]] * 3
        assert hvd.broadcast_object([rank], ranks[-1], **own) == [ranks[-1]]
        assert hvd.allgather_object({rank}, **own) == [{other} for other in ranks]
        splits = [0] * (len(ranks) - 1) + [rank]  # all of it to the last
        found, received = hvd.alltoall(rows[rank], splits=splits, **own)
        is_last = rank == ranks[-1]
        assert torch.equal(found, together if is_last else together[:0])
        assert received.tolist() == [other if is_last else 0 for other in ranks]
        whole = torch.arange(2.0 * len(ranks) + 1)
        share = whole.split(
            [len(whole) // len(ranks) + (at < len(whole) % len(ranks)) for at in range(len(ranks))]
        )
        for found in (
            hvd.reducescatter(whole, op=hvd.Average, **own),
            *hvd.grouped_reducescatter([whole] * 2, op=hvd.Average, **own),
        ):
            assert torch.equal(found, share[mine.rank()])
        hvd.barrier(process_set=mine)

    among(size, work)


@each_size
def test_what_does_not_fit_is_an_error_on_every_rank(size):
    """And what follows it goes on."""

    def refused(act: Callable[[int], Any]) -> str:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            act(hvd.rank())
        after = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="after")  # ranks that differ count calls otherwise
        assert after.tolist() == [size, size]
        return str(caught.value)

    def work() -> list[str]:
        return [
            refused(lambda rank: hvd.allreduce(torch.zeros(3 + (rank == 1)))),
            refused(lambda rank: hvd.allreduce(torch.zeros(3, dtype=torch.int32 if rank == 1 else torch.float32))),
            refused(lambda rank: hvd.allgather(torch.zeros(3, 1 + (rank == 1)))),
            refused(lambda rank: hvd.broadcast(torch.zeros(3), int(rank == 1))),
            refused(lambda rank: hvd.broadcast(torch.zeros(3), size)),
            refused(lambda rank: hvd.allreduce(torch.zeros(3), op=hvd.Min if rank == 1 else hvd.Max)),
            refused(lambda rank: hvd.allreduce(torch.zeros(3, dtype=torch.complex64), op=hvd.Min)),
            refused(lambda rank: hvd.allreduce(torch.zeros(3), name="right" if rank == 1 else "left")),
            refused(lambda rank: hvd.allgather(torch.zeros(1)) if rank == 1 else hvd.allreduce(torch.zeros(1))),
        ]

    found = among(size, work)
    assert all(one == found[0] for one in found)
    expected = [
        "tensor shapes",
        "data types",
        "tensor shapes",
        "root ranks",
        "root rank",
        "reduction",
        "cannot compute",
    ]
    assert all(word in text for word, text in zip(expected, found[0], strict=False))
    assert "rank 1 waits for 'allreduce.right'" in found[0][7] and "rank 0 waits for" in found[0][8]


def test_a_name_that_is_under_way_already_is_refused():
    def work() -> None:
        if hvd.rank() == 0:  # Before the other has said that it may begin, nothing of that name can be over.
            handle = hvd.allreduce_async(torch.zeros(1), name="one")
            with pytest.raises(ValueError, match="Duplicate tensor name"):
                hvd.allreduce_async(torch.zeros(1), name="one")
            hvd.barrier()
            hvd.synchronize(handle)
        else:
            hvd.barrier()
            hvd.allreduce(torch.zeros(1), name="one")

    among(2, work)


def test_misuse_is_refused_where_it_happens():
    def work() -> None:
        with pytest.raises(ValueError, match="scalar"):
            hvd.allgather(torch.tensor(1))
        with pytest.raises(ValueError, match="splits say"):
            hvd.alltoall(torch.zeros(4), splits=[1, 1])
        with pytest.raises(ValueError, match="supersedes average"):
            hvd.allreduce(torch.zeros(1), average=True, op=hvd.Sum)
        with pytest.raises(ValueError, match="booleans"):
            hvd.allreduce(torch.zeros(1, dtype=torch.bool))

    # Alone: nobody else has to keep in step with what is refused.
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"use hvd.init\(\)"):
        hvd.rank()
    hvd.init(world=World())
    try:
        work()
        assert hvd.allreduce(torch.ones(2)).tolist() == [1, 1] and hvd.join() == 0
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("size", [2, on_two_hosts(2)])
def test_a_rank_that_has_left_or_never_comes_is_named(size, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.2")

    def left(world: World) -> str:
        init_in(world, size)
        hvd.barrier()
        if hvd.rank() == 1:
            hvd.shutdown()
            return ""
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.zeros(1))
        return str(caught.value)

    assert "rank 1 has left" in in_processes(2, left)[0]

    said = tmp_path / "said"

    def late(world: World) -> None:
        init_in(world, size)
        if hvd.rank() == 0:
            sys.stderr = said.open("w")
        while hvd.rank() == 1 and not (said.exists() and said.read_text()):
            time.sleep(0.01)  # until the other has complained; the helper's guard ends it
        hvd.allreduce(torch.zeros(1), name="awaited")
        hvd.shutdown()

    in_processes(2, late)
    assert "Rank 0 has waited" in said.read_text() and "for rank 1, which" in said.read_text()
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.4")

    def never(world: World) -> str:
        init_in(world, size)
        if hvd.rank() == 1:
            return ""
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.zeros(1), name="awaited")
        return str(caught.value)

    found = in_processes(2, never)[0]
    assert "for rank 1, which has asked for nothing" in found and "allreduce.awaited" in found


@each_size
def test_ranks_with_less_data_join(size):
    def work() -> list[float]:
        rank = hvd.rank()
        sums = []
        for step in range(2 + rank):
            sums.append(float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum, name=f"step.{step}")))
        assert hvd.join() == size - 1
        hvd.barrier()
        return sums

    found = among(size, work)
    longest = [float(sum(1 for rank in range(size) if step < 2 + rank)) for step in range(size + 1)]
    assert found == [longest[: 2 + rank] for rank in range(size)]


@each_size
def test_objects_parameters_and_optimizer_state(size):
    def work() -> None:
        rank = hvd.rank()
        found = hvd.broadcast_object({"rank": rank, "more": [rank] * rank}, root_rank=1)
        assert found == {"rank": 1, "more": [1]} and hvd.broadcast_object_fn(0)(rank) == 0
        assert hvd.allgather_object("x" * rank) == ["x" * other for other in range(size)]
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
        if rank == 0:  # the others have taken no step
            model(torch.randn(5, 3)).sum().backward()
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        states = [hvd.allgather_object(one) for one in (model.state_dict(), optimizer.state_dict()["state"])]
        for state in states:
            assert all(str(one) == str(state[0]) for one in state) and state[0]
        assert optimizer.param_groups[0]["lr"] == 0.1

    among(size, work)


def test_a_timeline_is_written(tmp_path):
    path = tmp_path / "timeline.json"

    def work() -> None:
        hvd.start_timeline(str(path))
        hvd.allreduce(torch.zeros(3), name="mine")
        hvd.allgather(torch.zeros(3), name="rows")
        hvd.stop_timeline()

    among(2, work)
    events = json.loads(path.read_text())
    phases = {event["name"] for event in events if event["ph"] == "X"}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "ALLGATHER"} <= phases
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        "allreduce.mine",
        "allgather.rows",
    }
