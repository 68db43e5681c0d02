"""One suite for every strategy, in real processes: the loop must not notice which one it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from helpers.forked import in_processes, on_hosts
from helpers.supplying import OneBatch
from shoal.checkpoint.aside import split_aside
from shoal.errors import SpecError, TaskError
from shoal.feed.parts import LoadedBatch, Part
from shoal.model.replica import Replica
from shoal.model.start import Start
from shoal.spec import Cluster, Conduct, Task, World, parse_strategy
from shoal.spec.conduct import even_fills
from shoal.step.work import Work
from shoal.strategies import Strategy, make_strategy
from shoal.strategies.base import Company, Extent, Setting, StepResult

CASES = [
    ("data", 1),
    ("data:via=arena", 1),
    ("data:via=arena", 2),
    ("data:via=arena,journal=off", 3),
    ("data:via=ring", 1),
    ("data:via=ring", 3),
    ("data:via=tree", 3),
    ("data:via=central", 2),
    ("data:via=allgather", 2),
    ("data:via=backend", 2),
    ("data:via=chain", 2),
    ("data:via=chain", 3),
    ("data:via=chain", 4),
]
CUT_CASES = [
    ("sharded", 2),
    ("sharded:stage=1", 2),
    ("sharded:via=backend", 2),
    ("pipeline", 2),
    pytest.param(("pipeline:via=backend", 2), marks=pytest.mark.long),
    pytest.param(("sharded:stage=1,via=backend", 2), marks=pytest.mark.long),
    ("layer:place=norm@0+last@1", 2),
    pytest.param(("tensor", 2), marks=pytest.mark.long),
    pytest.param(("mesh:data=2,shard=2", 4), marks=pytest.mark.long),
]
"""Here the model is cut, and whole only where it is asked for."""
PHASED = ("layer:phases=2", 2)
"""Trains a part of the model at a time, so that it is not compared with one process here."""
AVERAGED = [
    ("average:every=1", 2),
    ("average:every=1,inside=sharded,groups=2", 4),
    pytest.param(("average:every=1,inside=mesh:pipeline:2,data:1", 4), marks=pytest.mark.long),
    pytest.param(("average:every=1,inside=tensor,groups=2", 4), marks=pytest.mark.long),
]
"""Each has an optimizer of its own, so that their states are not those of one process."""
RELAY = ("data:partition=relay", 2)
"""Who takes a step decides on it alone, so that others are not asked."""
BATCH = 12
STEPS = 5


class Net(nn.Module):
    """A frozen layer, BatchNorm, a layer that is never used, two dtypes, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)
        self.shift = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.unused = nn.Linear(2, 2)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.frozen(x))) + self.shift


GENERATOR = torch.Generator().manual_seed(4)
INPUTS = torch.randn(BATCH, 4, generator=GENERATOR)
TARGETS = torch.randint(0, 3, (BATCH,), generator=GENERATOR)
TASK = Task(
    model=Net,
    loss=F.cross_entropy,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    train=TensorDataset(INPUTS, TARGETS),
)

DENSE_TASK = replace(TASK, model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3)))


@dataclass
class Seat:
    """One process's strategy, opened."""

    strategy: Strategy
    replica: Replica
    setting: Setting
    task: Task

    @classmethod
    def take(cls, world: World, written: str, task: Task = TASK, **setting: Any) -> Seat:
        spec, size = parse_strategy(written), world.world_size
        slots = setting.pop("slots", slots_of(written, size))
        meet, hosts, start = None, setting.pop("hosts", 0), setting.pop("start", None)
        if "chain" in written and size > 1:
            hosts = min(size, 3) if size != 4 else 2
        if hosts:
            world, meet = on_hosts(world, hosts)
        seat = cls(
            make_strategy(spec, world, slots),
            Replica(task, start=start),
            Setting(
                world=world,
                conduct=spec.conduct(Cluster(workers=size), slots),
                extent=Extent(
                    total_steps=STEPS,
                    tables=2,
                    table_rows=world.world_size,
                    table_columns=3,
                    steps_per_epoch=STEPS,
                ),
                company=Company(report=lambda line: None, meet=meet),
                supply=OneBatch((INPUTS, TARGETS)),
                **setting,
            ),
            task,
        )
        seat.strategy.open(seat.replica, seat.setting)
        seat.replica.train_mode()
        return seat

    def model(self) -> dict[str, Any]:
        """The whole model's state as plain data; where it is cut, the first process alone has it."""
        state = dict(self.strategy.model_stream(self.replica).tensors)
        return {name: value.float().tolist() for name, value in state.items()}

    def step(self, number: int, *, stop: bool = False, weighted: bool = False) -> StepResult:
        """Every slot takes its rows of the one batch there is."""
        slots = self.setting.slots

        def parts(chosen: range) -> tuple[Part, ...]:
            return tuple(
                Part(slot, rows_of(slot, slots, weighted), None if weighted else float(BATCH)) for slot in chosen
            )

        mine = self.setting.slots_at(number, self.setting.world.global_rank)
        work = Work(number, parts(mine), 0, stop, all_parts=lambda: parts(range(slots)))
        return self.strategy.take(work).result()


def slots_of(written: str, workers: int) -> int:
    """Parts of a batch: one for each worker, but for those that share one."""
    return parse_strategy(written).conduct(Cluster(workers=workers)).slots


def rows_of(slot: int, slots: int, weighted: bool) -> Callable[[], Iterator[LoadedBatch]]:
    first, last = BATCH * slot // slots, BATCH * (slot + 1) // slots

    def load() -> Iterator[LoadedBatch]:
        weight = float(last - first) * (10.0 if weighted else 1.0)
        yield (INPUTS[first:last], TARGETS[first:last]), weight, last - first

    return load


def named(case: tuple[str, int]) -> str:
    return f"{case[0]} x{case[1]}"


@pytest.fixture(params=[*CASES, *CUT_CASES, PHASED, *AVERAGED], ids=named)
def case(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


@pytest.mark.parametrize("case", [*CASES, *CUT_CASES, RELAY], ids=named)
def test_steps_train_the_same_model_everywhere(case: tuple[str, int]) -> None:
    """Losses, parameters, buffers and state agree on all processes, and with one process on the same slots."""

    def train(written: str, slots: int) -> Callable[[World], dict[str, Any]]:
        def work(world: World) -> dict[str, Any]:
            seat = Seat.take(world, written, slots=slots)
            results = [seat.step(number) for number in range(1, STEPS + 1)]
            found = {
                "losses": [result.loss for result in results],
                "weights": [result.weight for result in results],
                "counts": [list(result.counts) for result in results],
                "model": seat.model(),
                "state": {name: value.tolist() for name, value in seat.strategy.state_stream().tensors},
            }
            seat.strategy.close()
            return found

        return work

    written, size = case
    slots = slots_of(written, size)
    answers = in_processes(size, train(written, slots))
    (expected,) = in_processes(1, train("data:via=arena", slots))
    for answer in answers:
        assert answer["losses"] == answers[0]["losses"]
        assert answer["weights"] == [float(BATCH)] * STEPS
        assert answer["counts"] == [[BATCH // slots] * slots] * STEPS
        assert answer["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        if answer["model"]:  # all of it at the first, and nothing at others, where it is cut
            assert answer["model"] == answers[0]["model"]
    assert _close(answers[0]["model"], expected["model"])
    assert answers[0]["losses"][-1] < answers[0]["losses"][0]
    assert answers[0]["model"]["norm.num_batches_tracked"] == STEPS
    # Whole-parameter names, of trained parameters that ever had a gradient; rank 0 speaks for all.
    named = {
        f"{name}/momentum_buffer" for name in ("norm.weight", "norm.bias", "last.weight", "last.bias", "shift")
    }
    assert answers[0]["state"].keys() - {"nothing/momentum_buffer"} == named
    assert _close({name: answers[0]["state"][name] for name in named}, {n: expected["state"][n] for n in named})


def _close(left: dict[str, Any], right: dict[str, Any]) -> bool:
    assert left.keys() == right.keys()
    for name, value in left.items():
        narrow = name.startswith("shift")
        torch.testing.assert_close(
            torch.tensor(value), torch.tensor(right[name]), rtol=0, atol=1e-2 if narrow else 1e-3, msg=name
        )
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("task", [TASK, DENSE_TASK], ids=["some parameters unused", "all used"])
def test_over_hosts_every_bit_is_that_of_one(size: int, clip_norm: float | None, task: Task) -> None:
    """With more slots than workers, of which hosts have unequally many."""

    def train(written: str) -> Callable[[World], list[str]]:
        def work(world: World) -> list[str]:
            seat = Seat.take(world, written, task, slots=5, clip_norm=clip_norm)
            losses = [seat.step(number).loss.hex() for number in range(1, STEPS + 1)]
            state = [*seat.strategy.model_stream(seat.replica).tensors, *seat.strategy.state_stream().tensors]
            found = [f"{name} {value.flatten().tolist()}" for name, value in state]
            seat.strategy.close()
            return [*losses, *found]

        return work

    (expected,) = in_processes(1, train("data:via=arena"))
    for found in in_processes(size, train("data:via=chain")):
        assert found == expected


def averaged(written: str, hosts: int = 0) -> Callable[[World], list[Any]]:
    """What each of several workers has after a few steps and agreements: its losses, and its own values."""

    def work(world: World) -> list[Any]:
        seat = Seat.take(world, written, hosts=hosts)
        losses = [seat.step(number).loss.hex() for number in range(1, 5)]
        state = [*seat.strategy.model_stream(seat.replica).tensors, *seat.strategy.state_stream().tensors]
        found = [f"{name} {value.flatten().tolist()}" for name, value in state]
        values = {name: param.flatten().tolist() for name, param in seat.replica.trained.items()}
        seat.strategy.close()
        return [losses, values, found]

    return work


@pytest.mark.parametrize(("hosts", "size"), [(2, 4), (3, 3)])
def test_over_hosts_averages_have_the_bits_of_one_host(hosts: int, size: int) -> None:
    written = "average:every=2,outer=nesterov"
    expected = in_processes(size, averaged(written))
    found = in_processes(size, averaged(written, hosts))
    assert found == expected
    assert all(values == found[0][1] for _, values, _ in found)


@pytest.mark.parametrize(("hosts", "size", "within"), [(3, 3, 0.0), (2, 4, 1e-6)])
def test_over_hosts_parts_are_agreed_on_while_others_train(hosts: int, size: int, within: float) -> None:
    """A host adds up what its own workers have before it sends that, so sums of four run in another order."""
    written = "average:every=3,parts=2,delay=2,outer=nesterov"
    expected = in_processes(size, averaged(written))
    found = in_processes(size, averaged(written, hosts))
    for (losses, values, _), (other_losses, others, _) in zip(found, expected, strict=True):
        assert [float.fromhex(loss) for loss in losses] == pytest.approx(
            [float.fromhex(loss) for loss in other_losses], abs=within
        )
        for name in values:
            assert values[name] == pytest.approx(others[name], abs=within), name


@pytest.mark.parametrize("keys", ["every=2,outer=nesterov", "every=3,parts=2,delay=2"])
def test_over_hosts_those_of_a_host_may_train_in_lockstep(keys: str) -> None:
    """As groups of one host do."""
    expected = in_processes(4, averaged(f"average:{keys},inside=data,groups=2"))
    found = in_processes(4, averaged(f"average:{keys},inside=data", 2))
    for (losses, values, _), (other_losses, others, _) in zip(found, expected, strict=True):
        assert losses == other_losses
        for name in values:
            assert values[name] == pytest.approx(others[name], abs=1e-6), name
    assert [values for _, values, _ in found[::2]] == [values for _, values, _ in found[1::2]]


def grids(written: str, hosts: int = 0) -> Callable[[World], list[Any]]:
    """What several workers over which models are cut come to: losses, and at the first the mean and all states."""

    def work(world: World) -> list[Any]:
        seat = Seat.take(world, written, DENSE_TASK, hosts=hosts)
        losses = [seat.step(number).loss.hex() for number in range(1, STEPS + 1)]
        streams = seat.strategy.model_stream(seat.replica), seat.strategy.state_stream()
        found = [f"{name} {value.flatten().tolist()}" for stream in streams for name, value in stream.tensors]
        seat.strategy.close()
        return [losses, found]

    return work


@pytest.mark.parametrize(
    ("inside", "size", "hosts"),
    [
        ("sharded,groups=2", 4, 2),
        ("mesh:shard:2", 6, 3),
        pytest.param("sharded,groups=2", 6, 3, marks=pytest.mark.long),  # of which one has workers on two hosts
        pytest.param("pipeline,groups=2", 4, 2, marks=pytest.mark.long),
        pytest.param("mesh:data:2,shard:2", 8, 2, marks=pytest.mark.long),
    ],
)
def test_over_hosts_groups_that_cut_their_model_have_the_bits_of_one_host(
    inside: str, size: int, hosts: int
) -> None:
    """In the middle of a round, in which every group's values and all states are in the stream."""
    written = f"average:every=2,outer=nesterov,clip=norm:0.1,inside={inside}"
    expected = in_processes(size, grids(written))
    found = in_processes(size, grids(written, hosts))
    assert found == expected
    assert all(losses == found[0][0] for losses, _ in found) and not any(told for _, told in found[1:])
    assert any(name.startswith("aside/replica/1/parts/") for name in found[0][1])


def test_over_hosts_parts_of_a_model_may_travel_compressed() -> None:
    """Each host's sums of a part come to all who have it, in both groups of a host, too."""
    (losses, _), *_ = in_processes(8, grids("average:every=2,inside=sharded,groups=4"))
    found = in_processes(8, grids("average:every=2,inside=sharded,groups=4,compress=int8", 2))
    assert all(told == found[0][0] for told, _ in found)
    assert [float.fromhex(loss) for loss in found[0][0]] == pytest.approx(
        [float.fromhex(loss) for loss in losses], abs=2e-2
    )
    assert found[0][0] != losses
    unsent = [line.split("/")[2] for line in found[0][1] if "/unsent/" in line]
    assert set(unsent) == {"0", "1", "4", "5"}, "the first of each host who have a part"


def test_over_hosts_differences_may_travel_compressed() -> None:
    """All workers of all hosts end with the same bits, close to those of sums that nothing was left out of."""
    (_, exact, _), *_ = in_processes(4, averaged("average:every=2"))
    found = in_processes(4, averaged("average:every=2,compress=int8", 2))
    assert all(values == found[0][1] for _, values, _ in found)
    assert found[0][1] != exact
    for name, values in exact.items():
        assert found[0][1][name] == pytest.approx(values, abs=2e-2), name


def test_over_hosts_gradients_may_travel_rounded() -> None:
    """All get the same bits, close to those of one host."""

    def train(written: str) -> Callable[[World], list[float]]:
        def work(world: World) -> list[float]:
            seat = Seat.take(world, written, slots=4)
            losses = [seat.step(number).loss for number in range(1, STEPS + 1)]
            seat.strategy.close()
            return losses

        return work

    (exact,) = in_processes(1, train("data:via=arena"))
    first, *others = in_processes(4, train("data:via=chain,between=bf16"))
    assert all(other == first for other in others)
    assert first != exact and first == pytest.approx(exact, rel=1e-3)


def compressed(between: str, first: int, last: int, saved: dict[str, Any] | None = None) -> Callable[[World], Any]:
    """These steps of four workers on two hosts: their losses, and at the first all that a checkpoint holds."""

    def work(world: World) -> Any:
        start = Start()
        if saved is not None:
            model, state = (
                {name: torch.tensor(values).view(shape) for name, (values, shape) in saved[part].items()}
                for part in ("model", "state")
            )
            optimizer, aside = split_aside(state)
            start = Start(step=first - 1, model=model, optimizer=optimizer, aside=aside)
        seat = Seat.take(world, f"data:between={between}", DENSE_TASK, hosts=2, start=start)
        losses = [seat.step(number).loss.hex() for number in range(first, last + 1)]
        streams = {"model": seat.strategy.model_stream(seat.replica), "state": seat.strategy.state_stream()}
        kept = {
            part: {name: (value.flatten().tolist(), list(value.shape)) for name, value in stream.tensors}
            for part, stream in streams.items()
        }
        seat.strategy.close()
        return [losses, kept]

    return work


@pytest.mark.parametrize("between", ["int8", "topk:0.3"])
def test_over_hosts_gradients_may_travel_compressed_and_go_on_exactly(between: str) -> None:
    """All get the same bits; who resumes goes on with what was not sent yet."""
    whole, *others = in_processes(4, compressed(between, 1, 4))
    assert all(losses == whole[0] for losses, _ in others)
    assert len([name for name in whole[1]["state"] if name.startswith("aside/unsent/")]) > 4
    begun, *_ = in_processes(4, compressed(between, 1, 2))
    resumed, *_ = in_processes(4, compressed(between, 3, 4, begun[1]))
    assert begun[0] + resumed[0] == whole[0]
    assert resumed[1] == whole[1]


def test_weights_not_known_beforehand_give_the_same_mean(case: tuple[str, int]) -> None:
    def train(weighted: bool) -> Callable[[World], list[float]]:
        def work(world: World) -> list[float]:
            seat = Seat.take(world, written)
            losses = [seat.step(number, weighted=weighted).loss for number in range(1, 4)]
            seat.strategy.close()
            return losses

        return work

    written, size = case
    known = in_processes(size, train(False))[0]
    for losses in in_processes(size, train(True)):
        assert losses == pytest.approx(known, rel=1e-3)  # one layer is bfloat16


def test_a_step_in_which_nothing_counts_is_refused(case: tuple[str, int]) -> None:
    def train(world: World) -> str:
        seat = Seat.take(world, written)
        slot = seat.setting.slots_of(world.global_rank)[0]
        part = Part(slot, lambda: iter([((INPUTS, TARGETS), 0.0, BATCH)]), None)
        with pytest.raises(TaskError) as refused:
            seat.strategy.take(Work(1, (part,), 0))
        return str(refused.value)

    written, size = case
    assert all("of step 1 add up to 0" in answer for answer in in_processes(size, train))


@pytest.mark.parametrize("via", ["arena", "ring"])
def test_synchronised_batchnorm_needs_samples_that_count(via: str) -> None:
    seat = Seat.take(World(), f"data:batchnorm=sync,via={via}")
    part = Part(0, lambda: iter([((INPUTS, TARGETS), 0.0, BATCH)]), None)
    with pytest.raises(TaskError, match="samples of one counted nothing at step 1"):
        seat.strategy.take(Work(1, (part,), 0))
    seat.strategy.close()


def test_one_request_stops_all_at_the_same_step(case: tuple[str, int]) -> None:
    def train(world: World) -> list[bool]:
        seat = Seat.take(world, written)
        last = world.world_size - 1
        stops = [seat.step(n, stop=world.global_rank == last and n >= 3).stop for n in range(1, STEPS + 1)]
        seat.strategy.close()
        return stops

    written, size = case
    assert in_processes(size, train) == [[False, False, True, True, True]] * size


def test_everybody_gets_all_rows_of_every_table(case: tuple[str, int]) -> None:
    def share(world: World) -> list[Any]:
        seat = Seat.take(world, written)
        tables, rows = [], seat.setting.conduct.lanes(world.world_size)
        for serial in range(1, 6):

            def fill(table: Tensor, place: int, serial: int = serial) -> None:
                table[place] = torch.tensor([serial, place, 0.1], dtype=torch.float64)

            tables.append(seat.strategy.exchange(serial, (rows, 3), fill).tolist())
        seat.strategy.close()
        return tables

    written, size = case
    rows = range(slots_of(written, size))
    expected = [[[float(serial), float(row), 0.1] for row in rows] for serial in range(1, 6)]
    assert in_processes(size, share) == [expected] * size


@pytest.mark.parametrize("case", [*CASES, PHASED], ids=named)
def test_closing_leaves_an_ordinary_model(case: tuple[str, int]) -> None:
    """The last values stay, and gradients are autograd's again."""

    def leave(world: World) -> tuple[list[float], bool]:
        seat = Seat.take(world, written)
        seat.step(1)
        seat.strategy.close()
        module = seat.replica.module
        values = module.last.bias.tolist()
        module.zero_grad()
        F.cross_entropy(module(INPUTS), TARGETS).backward()
        return values, module.last.weight.grad is not None

    written, size = case
    answers = in_processes(size, leave)
    assert all(answer == answers[0] for answer in answers) and answers[0][1]


def test_clipping_bounds_the_step(case: tuple[str, int]) -> None:
    plain = replace(TASK, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))

    def clip(world: World) -> float:
        seat = Seat.take(world, written, plain, clip_norm=0.01)
        trained = list(seat.replica.trained)
        before, _, after = seat.model(), seat.step(1), seat.model()
        seat.strategy.close()
        moves = [torch.tensor(after[n]) - torch.tensor(before[n]) for n in trained if after]
        return float(torch.cat([move.flatten() for move in moves]).norm()) if moves else 0.01

    written, size = case
    for norm in in_processes(size, clip):
        # Where each clips its own step, these need not go the same way.
        assert norm == pytest.approx(0.01, rel=1e-2) or (written.startswith("average") and 0 < norm < 0.01)


@pytest.mark.parametrize(("written", "size"), [("data", 1), ("data:via=arena", 2), ("data:via=arena", 1)])
def test_a_step_of_lbfgs_tells_the_loss_it_began_with(written: str, size: int) -> None:
    task = replace(
        TASK, optimizer=lambda params: torch.optim.LBFGS(params, max_iter=3), model=lambda: nn.Linear(4, 3)
    )

    def train(world: World) -> list[float]:
        seat = Seat.take(world, written, task)
        losses = [seat.step(number).loss for number in range(1, 4)]
        seat.strategy.close()
        return losses

    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    first = F.cross_entropy(module(INPUTS), TARGETS).item()
    for losses in in_processes(size, train):
        assert losses[0] == pytest.approx(first, rel=1e-6)
        assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("via", ["auto", "arena", "ring"])
def test_synchronised_batchnorm_needs_samples_in_every_slot(via: str) -> None:
    written = f"data:batchnorm=sync,via={via}"
    setting = Setting(
        world=World(world_size=2),
        conduct=Conduct(fills=even_fills(2, 2)),
        extent=Extent(smallest_batch=3, accumulate=2),
    )
    with pytest.raises(
        SpecError, match=r"samples for all 4 micro-batches of every batch, but the last .* has only 3"
    ):
        make_strategy(parse_strategy(written), setting.world, 2).open(Replica(TASK), setting)
