"""Averaging is what a hand-written loop over several models does, is cut nowhere, and goes on exactly."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import small_tasks
import torch

from helpers.training import Train, Trained, largest_difference
from shoal.checkpoint.listing import list_entries, read_manifest
from shoal.launch import load
from shoal.launch.messages import Load
from shoal.launch.owner import ZygoteProcess
from shoal.launch.resuming import left_out
from shoal.observe import RunFolder
from shoal.roles.training.training import make_schedule
from shoal.spec import Average, Cluster, Task, parse_strategy

STEPS = 20


@pytest.fixture
def resumed(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("resumed_tasks.py"), tmp_path, zygote)


def by_hand(task: Task, spec: Average, workers: int) -> dict[str, torch.Tensor]:
    """Local steps and agreements over models in one process, in float64 and without dropout."""
    torch.manual_seed(task.seed)
    model = task.model().double().eval()
    models = [copy.deepcopy(model) for _ in range(workers)]
    optimizers = [task.optimizer(list(each.parameters())) for each in models]
    schedulers = [task.scheduler(each) for each in optimizers]
    schedule = make_schedule(task, task.train, workers, workers)
    agreed = [param.detach().clone() for param in model.parameters()]
    velocity = [torch.zeros_like(param) for param in agreed]
    weights = torch.zeros(workers, dtype=torch.float64)
    for step in range(1, schedule.total_steps + 1):
        for index, cut in enumerate(schedule.cuts(step, range(workers))):
            inputs, targets = task.train[cut.samples]
            optimizers[index].zero_grad()
            task.loss(models[index](inputs.double()), targets).backward()
            optimizers[index].step()
            schedulers[index].step()
            weights[index] += len(cut.samples) if spec.weight == "samples" else 1
        if step % spec.every and step < schedule.total_steps:
            continue
        is_whole = step % spec.every == 0  # else it is the mean that is saved
        with torch.no_grad():
            for number, (base, pace) in enumerate(zip(agreed, velocity, strict=True)):
                each = torch.stack([list(m.parameters())[number] - base for m in models])
                mean = (each * (weights / weights.sum()).view(-1, *[1] * base.dim())).sum(0)
                if spec.outer == "nesterov" and is_whole:
                    pace.mul_(spec.momentum).add_(mean)
                    mean = spec.outer_rate * (mean + spec.momentum * pace)
                base.add_(mean)
                for m in models:
                    list(m.parameters())[number].copy_(base)
        weights.zero_()
    return {name: param.detach() for name, param in models[0].named_parameters()}


@pytest.mark.parametrize(
    "workers", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)]
)
def test_agreeing_after_every_step_is_synchronous_training(train: Train, workers: int) -> None:
    alone = train.once("mlp", strategy="data", optimizer="SGD", numerics="float64")
    averaged = train("mlp", workers=workers, strategy="average:every=1", optimizer="SGD", numerics="float64")
    assert largest_difference(averaged.model, alone.model) < 1e-9
    assert averaged.results["results"]["loss"] == pytest.approx(alone.results["results"]["loss"], abs=1e-9)
    assert averaged.results["audit"]["clean"] and averaged.results["agreements"] == STEPS


@pytest.mark.parametrize(
    ("strategy", "workers", "optimizer"),
    [
        ("average:every=5,outer=nesterov,rate=0.5,momentum=0.8,weight=even", 2, "adamw"),
        pytest.param("average:every=5", 2, "adamw", marks=pytest.mark.long),
        pytest.param("average:every=6", 3, "momentum", marks=pytest.mark.long),
        pytest.param("average:every=3,weight=even", 4, "momentum", marks=pytest.mark.long),
    ],
)
def test_it_is_what_a_loop_over_models_does(train: Train, strategy: str, workers: int, optimizer: str) -> None:
    ours = train("mlp", workers=workers, strategy=strategy, numerics="float64", optimizer=optimizer)
    spec = parse_strategy(strategy)
    assert isinstance(spec, Average)
    expected = by_hand(small_tasks.mlp(optimizer=optimizer), spec, workers)
    assert largest_difference(ours.model, expected) < 1e-9


def test_parameters_are_clipped_as_differences_are(train: Train) -> None:
    """As they are before the mean: after the last agreement none is larger."""
    how = {"workers": 2, "numerics": "float64", "optimizer": "adamw"}
    strategy = "average:every=5,clip=value:0.05,clips=parameters"
    clipped, apart = (train("mlp", strategy=f"{strategy}{via}", **how) for via in ("", ",via=sockets"))
    assert max(float(one.abs().max()) for one in clipped.model.values()) == pytest.approx(0.05, abs=1e-9)
    assert clipped.results["digest"] == apart.results["digest"]


def test_an_outer_step_of_one_is_the_mean(train: Train) -> None:
    plain, outer = (
        train("mlp", workers=2, strategy=f"average:every=4{keys}", numerics="float64", optimizer="adamw")
        for keys in ("", ",outer=momentum,rate=1,momentum=0")
    )
    assert largest_difference(plain.model, outer.model) < 1e-12


def test_evaluations_in_the_middle_of_a_round_change_nothing(resumed: Train) -> None:
    often, never = (
        resumed("everything", workers=2, strategy="average:every=8", overrides={"evaluate_every": every})
        for every in (3, 99)
    )
    assert often.digests() == never.digests()
    assert often.losses() == never.losses() and len(often.losses()) == STEPS
    assert [told["step"] for told in often.told("evaluation")] == [3, 6, 9, 12, 15, 18, 20]


def test_synchronous_steps_come_first(train: Train) -> None:
    together = train.once("mlp", strategy="data", numerics="float64", optimizer="adamw")
    averaged = train("mlp", workers=2, strategy=f"average:after={STEPS}", numerics="float64", optimizer="adamw")
    assert largest_difference(averaged.model, together.model) < 1e-9
    half = train("mlp", workers=2, strategy="average:after=8,every=4", numerics="float64", optimizer="adamw")
    assert half.results["agreements"] == 3 and half.results["audit"]["clean"]
    assert largest_difference(half.model, together.model) > 1e-9


def assert_goes_on(whole: Trained, resumed: Trained, since: int) -> None:
    assert resumed.losses() == {step: loss for step, loss in whole.losses().items() if step > since}
    assert resumed.digests() == whole.digests()
    assert resumed.results["results"] == whole.results["results"]
    assert resumed.results["audit"]["clean"]


@pytest.mark.parametrize(
    ("keys", "saved_at"),
    [
        ("every=3,outer=adam,clip=norm:1", [8, 15, 20]),
        ("after=8,every=3", [7, 14, 20]),
        pytest.param("every=4,outer=nesterov", [8, 16, 20], marks=pytest.mark.long),
        pytest.param("every=3,with=ring", [8, 15, 20], marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_equals_the_unbroken_one(resumed: Train, keys: str, saved_at: list[int]) -> None:
    """A checkpoint that is due in the middle of a round is written when workers speak next: where
    that ends, or before an evaluation."""
    saved = resumed("everything", workers=2, strategy=f"average:{keys}", checkpoint="every=7")
    assert [told["step"] for told in saved.told("checkpoint")] == saved_at
    assert_goes_on(saved, resumed.resume(saved, saved_at[0]), saved_at[0])


def test_a_run_that_ended_in_the_middle_of_a_round_goes_on_there(resumed: Train) -> None:
    strategy = "average:every=6,outer=momentum"
    whole = resumed("everything", workers=2, strategy=strategy)
    short = resumed(
        "everything", workers=2, strategy=strategy, checkpoint="every=100", overrides={"max_steps": 10}
    )
    assert [told["step"] for told in short.told("checkpoint")] == [10]
    assert_goes_on(whole, resumed.resume(short, 10, overrides={"max_steps": STEPS}), 10)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("keys", "precision", "optimizer"),
    [
        ("every=6,outer=momentum", "adaptive", "AdamW"),
        pytest.param("every=3,with=ring", "fp32", "Adafactor", marks=pytest.mark.long),
        pytest.param("every=4,combine=ensemble", "fp32", "AdamW", marks=pytest.mark.long),
        pytest.param("every=6,init=own", "adaptive", "Adafactor", marks=pytest.mark.long),
    ],
)
def test_fewer_processes_train_as_many_models(
    resumed: Train, monkeypatch: pytest.MonkeyPatch, keys: str, precision: str, optimizer: str, processes: int
) -> None:
    """From the first step on, and from a checkpoint that others have left in the middle of a round."""
    monkeypatch.setattr(load, "starting_workers", lambda cluster: processes)
    monkeypatch.setattr(load, "read_load", lambda: Load(idle_cores=0.0, waiting=0.0))
    how = {"strategy": f"average:{keys}", "precision": precision, "optimizer": optimizer}
    whole = resumed("everything", cluster=Cluster(workers=3, threads=1), **how)
    elastic = Cluster(workers="1:3", threads=1)
    few = resumed("everything", cluster=elastic, checkpoint="every=100", overrides={"max_steps": 10}, **how)
    assert few.told("world")[0]["workers"] == processes
    assert few.results["audit"]["clean"]
    assert_goes_on(whole, resumed.resume(few, 10, overrides={"max_steps": STEPS}), 10)
    monkeypatch.setattr(load, "starting_workers", lambda cluster: 3 - processes)
    assert_goes_on(whole, resumed.resume(few, 10, overrides={"max_steps": STEPS}), 10)


def test_other_workers_and_other_strategies_go_on(resumed: Train) -> None:
    saved = resumed("everything", workers=2, strategy="average:every=4", checkpoint="every=7")
    more = resumed.resume(saved, 8, cluster={"workers": 3})
    assert more.results["steps"] == STEPS and more.results["audit"]["clean"]
    assert [line for line in more.told("line") if "the checkpoint is of 2 workers" in line["text"]]
    plain = resumed.resume(saved, 8, strategy="data:via=arena")
    assert plain.results["steps"] == STEPS
    path = RunFolder(Path(saved.job.run_dir)).checkpoints
    manifest = read_manifest(list_entries(path)[0].path)
    assert "workers' own, with which only average goes on" in left_out(plain.job, manifest)
    assert left_out(saved.job, manifest) == ""


def test_a_plateau_ends_it_between_agreements(train: Train) -> None:
    run = train("soon_enough", workers=2, strategy="average:every=50")
    assert run.results["reason"] == "plateau" and run.results["audit"]["clean"]


def test_a_part_without_samples_is_no_step(train: Train) -> None:
    """The last batch of an epoch has one sample for two workers."""
    run = train("mlp", workers=2, strategy="average:every=3", overrides={"batch_size": 40})
    assert run.results["audit"]["clean"] and run.results["steps"] == STEPS


@pytest.mark.parametrize("form", ["ring", "pairs"])
def test_neighbours_keep_the_mean_and_come_together(train: Train, form: str) -> None:
    """With plain SGD at a rate of nearly nothing, only agreements move models."""
    run = train("mlp", workers=3, strategy=f"average:every=1,with={form}", optimizer="SGD", numerics="float64")
    alone = train.once("mlp", strategy="data", optimizer="SGD", numerics="float64")
    assert run.results["audit"]["clean"]
    assert largest_difference(run.model, alone.model) < (1e-9 if form == "ring" else 1e-2)
