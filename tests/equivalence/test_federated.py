"""Clients that are simulated in turn are what a loop over clients does, and go on exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import resumed_tasks
import small_tasks
import torch
from test_average import assert_goes_on

from helpers.training import Train, largest_difference
from shoal.errors import SpecError
from shoal.launch.owner import ZygoteProcess
from shoal.ledger.clients import held_of
from shoal.roles.training.training import make_schedule
from shoal.spec import Average, Cluster, Job, Task, parse_strategy


@pytest.fixture
def resumed(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("resumed_tasks.py"), tmp_path, zygote)


def clients_by_hand(task: Task, spec: Average, workers: int) -> dict[str, torch.Tensor]:
    """Clients one after the other in one process, each from what was agreed on and with a fresh optimizer."""
    torch.manual_seed(task.seed)
    model = task.model().double().eval()
    params = list(model.parameters())
    optimizer = task.optimizer(params)
    rounds = spec.clients_on(workers)
    assert rounds is not None
    schedule = make_schedule(task, task.train, workers, workers, rounds)
    rates = rates_of(task, schedule.total_steps)
    agreed = [param.detach().clone() for param in params]
    past = [[value.clone() for value in agreed]]
    controls = [[torch.zeros_like(param) for param in agreed] for _ in range(spec.clients)]
    for begin in range(1, schedule.total_steps + 1, rounds.steps):
        moved = [torch.zeros_like(param) for param in agreed]
        control = [torch.stack(each).mean(0) for each in zip(*controls, strict=True)]
        for first in range(begin, begin + rounds.steps, spec.every):
            for slot in range(workers):
                age = schedule.order.roster.age(first - 1, slot)
                begun, counts = past[-1 - age], (1 + age) ** -0.5
                own = controls[schedule.order.roster.client(first - 1, slot)]
                optimizer.state.clear()
                for param, value in zip(params, begun, strict=True):
                    param.data.copy_(value)
                for step in range(first, first + spec.every):
                    (cut,) = schedule.cuts(step, [slot])
                    inputs, targets = task.train[cut.samples]
                    optimizer.zero_grad()
                    task.loss(model(inputs.double()), targets).backward()
                    for param, value, mine, all_ in zip(params, begun, own, control, strict=True):
                        param.grad += spec.prox * (param.detach() - value)
                        param.grad += spec.scaffold * (all_ - mine)
                    optimizer.param_groups[0]["lr"] = rates[step - 1]
                    optimizer.step()
                for total, param, value in zip(moved, params, begun, strict=True):
                    total += counts * (param.detach() - value) / rounds.per_round
                for mine, all_, param, value in zip(own, control, params, begun, strict=True):
                    # The paper's, for plain SGD at one rate.
                    mine += (value - param.detach()) / (spec.every * rates[0]) - all_
        for value, total in zip(agreed, moved, strict=True):
            value += total
        past.append([value.clone() for value in agreed])
    return dict(zip(dict(model.named_parameters()), agreed, strict=True))


def rates_of(task: Task, steps: int) -> list[float]:
    """By step: the learning rate."""
    optimizer = task.optimizer([torch.nn.Parameter(torch.zeros(2, 2))])
    scheduler, found = task.scheduler and task.scheduler(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler:
            scheduler.step()
    return found


@pytest.mark.parametrize(
    ("name", "optimizer", "keys"),
    [
        ("mlp", "momentum", "every=5,prox=0.1"),
        ("plain", "SGD", "every=2,scaffold=on"),
        ("mlp", "adamw", "every=2,prox=0.1,buffer=2,oldest=3"),
    ],
)
def test_clients_in_turn_are_what_a_loop_over_clients_does(
    train: Train, name: str, optimizer: str, keys: str
) -> None:
    strategy = f"average:clients=6,share=0.67,partition=dirichlet:0.5,{keys}"
    ours = train(name, workers=2, strategy=strategy, numerics="float64", optimizer=optimizer)
    spec = parse_strategy(strategy)
    assert isinstance(spec, Average)
    expected = clients_by_hand(getattr(small_tasks, name)(optimizer=optimizer), spec, 2)
    assert largest_difference(ours.model, expected) < 1e-9
    assert (ours.results.get("mean_age", 0) > 0) == (spec.buffer > 0)
    assert ours.results["agreements"] == 20 // spec.round_steps(2) and ours.results["audit"]["clean"]


@pytest.mark.parametrize("keys", ["outer=yogi,held=0.2", "scaffold=on", "buffer=2,outer=momentum"])
def test_rounds_of_clients_go_on_exactly(resumed: Train, keys: str) -> None:
    strategy = f"average:clients=8,share=0.5,partition=own,every=2,{keys}"
    saved = resumed("everything", workers=2, strategy=strategy, checkpoint="every=7")
    assert [told["step"] for told in saved.told("checkpoint")] == [8, 14 if "buffer" in keys else 16, 20]
    assert_goes_on(saved, resumed.resume(saved, 8), 8)


def test_what_clients_saw_goes_on_with_other_workers(resumed: Train) -> None:
    """Who trained a client before does not matter; the controls are by client."""
    strategy = "average:clients=8,share=0.5,partition=own,every=2,scaffold=on"
    saved = resumed("everything", workers=2, strategy=strategy, checkpoint="every=7")
    more = resumed.resume(saved, 8, cluster={"workers": 4})
    assert more.results["steps"] == 20 and more.results["audit"]["clean"]
    kept = {name for name in more.state if "/control/" in name}
    assert kept >= {name for name in saved.state if "/control/" in name} != set()


def test_clients_are_evaluated_on_what_they_hold_back(resumed: Train) -> None:
    """As the saved model does on these samples; the one of them that fares worst is named."""
    strategy = "average:clients=6,partition=dirichlet:0.5,every=2,held=0.3"
    run = resumed("everything", workers=2, strategy=strategy, overrides={"max_steps": 18, "evaluate_every": 6})
    task = replace(resumed_tasks.everything(), max_steps=18)
    model = task.model().eval()
    model.load_state_dict(run.model)
    spec = parse_strategy(strategy)
    assert isinstance(spec, Average)
    held = held_of(make_schedule(task, task.train, 2, 2, spec.clients_on(2)).order)
    *_, last = run.told("evaluation")
    assert last["step"] == 18 and last["by_client"]["client"] == list(range(6))
    assert last["by_client"]["weight"] == [len(part) for part in held]
    for part, loss, accuracy in zip(
        held, *(last["by_client"][name] for name in ("loss", "accuracy")), strict=True
    ):
        inputs, targets = task.train[part]
        assert accuracy == pytest.approx(task.metrics["accuracy"](model(inputs), targets))
        assert loss == pytest.approx(float(task.loss(model(inputs), targets).detach()), rel=1e-5)
    told, weights = last["results"], last["by_client"]["weight"]
    assert told["client_accuracy"] == pytest.approx(np.average(last["by_client"]["accuracy"], weights=weights))
    assert told["lowest_client_accuracy"] == min(last["by_client"]["accuracy"])
    assert told["highest_client_loss"] == max(last["by_client"]["loss"])


@pytest.mark.parametrize(
    ("keys", "job", "why"),
    [
        ("held=0.2,secure=on", {}, "held=0.2 how each one fares"),
        ("held=0.2", {"privacy": "epsilon=8,delta=1e-5"}, "held=0.2 tells how each client fares"),
        ("buffer=4,scaffold=on", {}, "scaffold and secure are about all of a round"),
        ("buffer=4", {"privacy": "epsilon=8,delta=1e-5"}, "buffer=4 takes clients as they come"),
        ("buffer=4,share=0.25", {}, "are 2 clients that train at a time"),
        ("scaffold=on,prox=0.1", {}, "prox=0.1 draws steps back"),
        ("scaffold=on,secure=on", {}, "secure=on hides"),
        ("scaffold=on", {"privacy": "epsilon=8,delta=1e-5"}, "scaffold=on tells clients each other's"),
    ],
)
def test_what_contradicts_it_is_refused(keys: str, job: dict[str, str], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        strategy = f"average:clients=8,partition=own,{keys}"
        _ = Job(target="x.py", strategy=strategy, cluster=Cluster(workers=4), **job).conduct
