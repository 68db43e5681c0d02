"""Replicas that begin apart: averaged as others are, or kept as an ensemble, which is used as one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_tasks
import torch
from test_average import assert_goes_on

from helpers.training import Train, largest_difference
from shoal.errors import ShoalError, SpecError, TaskError
from shoal.launch.owner import ZygoteProcess
from shoal.launch.taking import load_module
from shoal.ledger.order import mix
from shoal.model.ensemble import Ensemble, mean_output, members_of
from shoal.roles.training.training import make_schedule
from shoal.spec import Average, Task

WORKERS = 2


@pytest.fixture
def resumed(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("resumed_tasks.py"), tmp_path, zygote)


def made(task: Task, index: int) -> torch.nn.Module:
    """What a worker begins with."""
    torch.manual_seed(mix(task.seed, 1 << 33, index) if index else task.seed)
    return task.model().double().eval()


def by_hand(task: Task, every: int) -> list[torch.nn.Module]:
    """Models that begin apart, each trained on its part of every batch; their mean now and then, or never."""
    models = [made(task, index) for index in range(WORKERS)]
    optimizers = [task.optimizer(list(each.parameters())) for each in models]
    schedulers = [task.scheduler(each) for each in optimizers]
    schedule = make_schedule(task, task.train, WORKERS, WORKERS)
    counts = [0] * WORKERS
    for step in range(1, schedule.total_steps + 1):
        for index, cut in enumerate(schedule.cuts(step, range(WORKERS))):
            inputs, targets = task.train[cut.samples]
            optimizers[index].zero_grad()
            task.loss(models[index](inputs.double()), targets).backward()
            optimizers[index].step()
            schedulers[index].step()
            counts[index] += len(cut.samples)
        if every and step % every == 0:
            with torch.no_grad():
                for params in zip(*(each.parameters() for each in models), strict=True):
                    mean = sum(count * p for count, p in zip(counts, params, strict=True)) / sum(counts)
                    for param in params:
                        param.copy_(mean)
            counts = [0] * WORKERS
    return models


def test_an_ensemble_is_each_worker_by_itself_and_is_used_as_one_model(train: Train) -> None:
    strategy = "average:every=6,combine=ensemble"
    run = train("mlp", workers=WORKERS, strategy=strategy, numerics="float64", optimizer="adamw")
    task = small_tasks.mlp(optimizer="adamw")
    expected = by_hand(task, every=0)
    for found, one in zip(members_of(run.model), expected, strict=True):
        assert largest_difference(found, one.state_dict()) < 1e-9
    inputs, targets = task.test[:]
    scores = torch.stack([one(inputs.double()) for one in expected]).mean(0).detach()
    assert run.results["results"]["loss"] == pytest.approx(float(task.loss(scores, targets)), abs=1e-9)
    assert run.results["audit"]["clean"] and run.results["members"] == WORKERS
    loaded = load_module(run.job.run_dir, trust=True)
    assert isinstance(loaded, Ensemble)
    assert torch.allclose(loaded(inputs).double(), scores, atol=1e-5)


def test_replicas_that_begin_apart_are_averaged(train: Train) -> None:
    run = train("mlp", workers=WORKERS, strategy="average:every=5,init=own", numerics="float64", optimizer="adamw")
    expected = by_hand(small_tasks.mlp(optimizer="adamw"), every=5)[0].state_dict()
    assert largest_difference(run.model, expected) < 1e-9


def test_an_ensemble_goes_on_exactly(resumed: Train) -> None:
    """Also where workers talk over sockets, which is the same to the bit."""
    strategy = "average:every=3,combine=ensemble"
    saved = resumed("everything", workers=WORKERS, strategy=strategy, checkpoint="every=7")
    assert_goes_on(saved, resumed.resume(saved, 8), 8)
    apart = resumed.resume(saved, 8, strategy=f"{strategy},via=sockets")
    assert apart.results["digest"] == saved.results["digest"]
    with pytest.raises(ShoalError, match="resume it with combine=ensemble"):
        resumed.resume(saved, 8, strategy="data")
    with pytest.raises(ShoalError, match="ensemble of 2, and there are 3 workers"):
        resumed.resume(saved, 8, cluster={"workers": 3})


@pytest.mark.long
@pytest.mark.parametrize("via", ["auto", "sockets"])
def test_replicas_that_began_apart_go_on_exactly(resumed: Train, via: str) -> None:
    """From before they have agreed for the first time."""
    strategy = f"average:every=10,init=own,outer=nesterov,via={via}"
    saved = resumed(
        "everything", workers=WORKERS, strategy=strategy, checkpoint="every=8", overrides={"evaluate_every": 4}
    )
    assert_goes_on(saved, resumed.resume(saved, 8), 8)


def test_outputs_of_any_structure_have_a_mean() -> None:
    one, other = torch.tensor([1.0, 3.0]), torch.tensor([3.0, 5.0])
    found = mean_output([{"scores": one, "both": (one, None)}, {"scores": other, "both": (other, None)}])
    assert found["scores"].tolist() == [2.0, 4.0] and found["both"][0].tolist() == [2.0, 4.0]
    with pytest.raises(TaskError, match="whole numbers"):
        mean_output([torch.tensor([1]), torch.tensor([2])])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"init": "own", "after": 4}, "leave one of them out"),
        ({"combine": "ensemble", "clients": 4, "partition": "own"}, "leave init and combine out"),
        ({"combine": "best"}, "combine"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Average(**keys)
