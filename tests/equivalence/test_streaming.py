"""Parameters that are agreed on part by part, while training goes on: what a loop over models does, and exact."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import small_tasks
import torch
from test_average import assert_goes_on

from helpers.training import Train, largest_difference
from shoal.errors import SpecError
from shoal.launch.owner import ZygoteProcess
from shoal.roles.training.training import make_schedule
from shoal.spec import Average, Cluster, Job, Task, parse_strategy
from shoal.strategies.average.parts import cut_in_parts
from shoal.strategies.groups.vectors import ValueSpan

WORKERS = 2


@pytest.fixture
def resumed(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("resumed_tasks.py"), tmp_path, zygote)


def spans_of(model: torch.nn.Module) -> list[ValueSpan]:
    found, at = [], 0
    for name, param in model.named_parameters():
        found.append(ValueSpan(name=name, kind=torch.float64, start=at, shape=param.shape))
        at += param.numel()
    return found


def by_hand(task: Task, spec: Average) -> dict[str, torch.Tensor]:
    """Long vectors of all parameters, of which a part at a time is sent, and comes to all so many steps later."""
    torch.manual_seed(task.seed)
    model = task.model().double().eval()
    models = [copy.deepcopy(model) for _ in range(WORKERS)]
    optimizers = [task.optimizer(list(each.parameters())) for each in models]
    schedulers = [task.scheduler(each) for each in optimizers]
    schedule = make_schedule(task, task.train, WORKERS, WORKERS)
    ranges = [slice(rows[0].span.start, rows[-1].span.stop) for rows in cut_in_parts(spans_of(model), spec.parts)]
    agreed = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    velocity = torch.zeros_like(agreed)
    counts = torch.zeros(spec.parts, WORKERS, dtype=torch.float64)
    flying: list[tuple[int, slice, torch.Tensor, list[torch.Tensor]]] = []
    for step in range(1, schedule.total_steps + 1):
        for index, cut in enumerate(schedule.cuts(step, range(WORKERS))):
            inputs, targets = task.train[cut.samples]
            optimizers[index].zero_grad()
            task.loss(models[index](inputs.double()), targets).backward()
            optimizers[index].step()
            schedulers[index].step()
            counts[:, index] += len(cut.samples)
        now = [torch.nn.utils.parameters_to_vector(each.parameters()).detach() for each in models]
        for part, where in enumerate(ranges):
            if step % spec.every == spec.every * (part + 1) // spec.parts % spec.every:
                sent = [vector[where].clone() for vector in now]
                shares = counts[part] / counts[part].sum()
                mean = sum(share * (one - agreed[where]) for share, one in zip(shares, sent, strict=True))
                counts[part] = 0
                flying.append((step + spec.delay, where, mean, sent))
        for _, where, mean, sent in [flight for flight in flying if flight[0] == step]:
            if spec.outer == "nesterov":
                velocity[where] = spec.momentum * velocity[where] + mean
                mean = spec.outer_rate * (mean + spec.momentum * velocity[where])
            agreed[where] += mean
            for vector, one in zip(now, sent, strict=True):
                vector[where] = agreed[where] + (vector[where] - one)
        with torch.no_grad():
            for each, vector in zip(models, now, strict=True):
                torch.nn.utils.vector_to_parameters(vector, each.parameters())
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(sum(now) / WORKERS, model.parameters())
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    "strategy",
    [
        "average:every=6,parts=4,delay=2,outer=nesterov,rate=0.5",
        pytest.param("average:every=5,delay=4", marks=pytest.mark.long),
        pytest.param("average:every=4,parts=4", marks=pytest.mark.long),
    ],
)
def test_it_is_what_a_loop_over_models_does(train: Train, strategy: str) -> None:
    run = train("mlp", workers=WORKERS, strategy=strategy, numerics="float64", optimizer="adamw")
    spec = parse_strategy(strategy)
    assert isinstance(spec, Average)
    assert largest_difference(run.model, by_hand(small_tasks.mlp(optimizer="adamw"), spec)) < 1e-9
    assert run.results["audit"]["clean"]


@pytest.mark.parametrize(
    "keys",
    [
        "every=6,parts=3,delay=3,outer=adam,via=sockets,compress=topk:0.1",
        pytest.param("every=4,parts=4,delay=3,clip=norm:1", marks=pytest.mark.long),
        pytest.param("every=5,delay=4,outer=momentum,after=2", marks=pytest.mark.long),
    ],
)
def test_it_goes_on_exactly_with_parts_under_way(resumed: Train, keys: str) -> None:
    saved = resumed(
        "everything",
        workers=WORKERS,
        strategy=f"average:{keys}",
        checkpoint="every=7",
        overrides={"evaluate_every": 7},
    )
    assert next(told["step"] for told in saved.told("checkpoint")) == 7
    assert_goes_on(saved, resumed.resume(saved, 7), 7)


def test_parts_are_of_one_size_and_cut_between_rows() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 100), torch.nn.Linear(100, 3), torch.nn.Linear(3, 1))
    spans = spans_of(model)
    for count in (1, 2, 3, 7):
        parts = cut_in_parts(spans, count)
        pieces = [row.span for rows in parts for row in rows]
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == spans[-1].stop
        sizes = [sum(row.span.shape.numel() for row in rows) for rows in parts]
        assert max(sizes) - min(sizes) <= 2 * 100  # a row is not cut
        assert all(row.span.shape[1:] == dict(model.named_parameters())[row.tensor].shape[1:] for row in parts[0])


@pytest.mark.parametrize("keys", ["every=4,parts=5", "every=4,delay=4", "delay=2,via=backend"])
def test_what_cannot_be_sent_so_is_refused(keys: str) -> None:
    with pytest.raises(SpecError, match="parts"):
        parse_strategy(f"average:{keys}")


def test_on_a_gpu_we_must_send_ourselves() -> None:
    with pytest.raises(SpecError, match="add via=sockets"):
        Job(target="a.py", strategy="average:parts=2", cluster=Cluster(workers=2, device="cuda"))
