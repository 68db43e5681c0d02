"""Loss and metrics of a test set, alone and by several processes: the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from shoal import metrics
from shoal.errors import TaskError
from shoal.feed.feed import Feed
from shoal.model.replica import Replica
from shoal.roles.inference.evaluator import Evaluator, Tables
from shoal.roles.training.training import make_schedule, num_tables
from shoal.spec import Conduct, Task, World
from shoal.strategies.data.single import SingleProcess

CHANCE = torch.Generator().manual_seed(4)
INPUTS = torch.randn(22, 5, generator=CHANCE)
TARGETS = torch.randint(0, 3, (22,), generator=CHANCE)


class Lanes(SingleProcess):
    """Fills the rows of several lanes, one after the other, as so many processes would."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self.shapes: list[tuple[int, int]] = []

    def exchange(self, serial: int, shape: tuple[int, int], fill: Any) -> torch.Tensor:
        self.shapes.append(shape)
        assert serial == len(self.shapes)
        table = torch.zeros(shape, dtype=torch.float64)
        for lane in reversed(range(self._lanes)):
            fill(table, lane)
        return table


def task_of(**fields: Any) -> Task:
    return Task(
        **{
            "model": lambda: nn.Linear(5, 3),
            "loss": functional.cross_entropy,
            "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
            "train": TensorDataset(INPUTS, TARGETS),
            "test": TensorDataset(INPUTS, TARGETS),
            "batch_size": 4,
            **fields,
        }
    )


def evaluate(task: Task, lanes: int, folder: Path, times: int = 1) -> tuple[dict[str, float], Lanes, Replica]:
    replica, strategy = Replica(task), Lanes(lanes)
    conduct = Conduct(fills=(range(1),) * lanes)
    evaluator = Evaluator(task, replica, len(task.test), Feed(task, task.test), conduct)
    world = World(world_size=lanes, sockets=str(folder))
    (found, *others) = [evaluator.run(strategy, world) for _ in range(times)]
    assert all(other == found for other in others)
    assert list(folder.iterdir()) == [], "nothing is left behind"
    return found, strategy, replica


def correlation(left: torch.Tensor, right: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([left.double(), right.double()]))[0, 1])


METRICS = {
    "f1": metrics.whole(f1_score, average="macro"),
    "accuracy": metrics.accuracy,
    "correlation": metrics.whole(lambda output, target: correlation(output[:, 0], target)),
}


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_what_is_no_mean_is_computed_over_all(tmp_path: Path, lanes: int) -> None:
    found, strategy, replica = evaluate(task_of(metrics=METRICS), lanes, tmp_path, times=2)
    with torch.no_grad():
        output = replica.module(INPUTS)
    assert list(found) == ["loss", "f1", "accuracy", "correlation"]
    assert found["f1"] == pytest.approx(
        f1_score(TARGETS.numpy(), output.argmax(1).numpy(), average="macro"), abs=1e-12
    )
    assert found["correlation"] == pytest.approx(correlation(output[:, 0], TARGETS), abs=1e-6)
    assert found["accuracy"] == pytest.approx(metrics.accuracy(output, TARGETS))
    assert max(columns for _, columns in strategy.shapes) <= Tables.of(task_of(metrics=METRICS)).columns
    assert len(strategy.shapes) == 4


def test_means_alone_need_one_table() -> None:
    assert Tables.of(task_of(metrics={"accuracy": metrics.accuracy})).number == 1
    for task, count in ((task_of(), 2), (task_of(metrics=METRICS, evaluate_every=2), 6)):
        assert num_tables(task, make_schedule(task, task.train, 1, 1)) == count


def test_what_counts_nothing_is_left_out(tmp_path: Path) -> None:
    """The second batch is padding alone."""
    targets = TARGETS.clone()
    targets[4:8] = metrics.IGNORED_TARGET
    task = task_of(
        metrics=METRICS | {"correlation": metrics.accuracy},
        weight=lambda batch: float((batch[1] != metrics.IGNORED_TARGET).sum()),
        test=TensorDataset(INPUTS, targets),
    )
    found, _, replica = evaluate(task, 2, tmp_path)
    counted = targets != metrics.IGNORED_TARGET
    with torch.no_grad():
        classes = replica.module(INPUTS).argmax(1)
    expected = f1_score(targets[counted].numpy(), classes[counted].numpy(), average="macro")
    assert found["f1"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["pair", "dict", "dict that the model takes"])
def test_an_objective_has_metrics_too(tmp_path: Path, kind: str) -> None:
    """Of what the model makes of the batch, beside its own loss."""

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    class Taker(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            assert labels is not None
            return type("Made", (), {"logits": super().forward(x)})()

    def collate(samples: list[Any]) -> Any:
        x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        if kind == "pair":
            return x, y
        besides = {"number": torch.arange(len(x))} if kind.endswith("takes") else {}
        return {"x": x, "labels": y, **besides}

    def objective(model: nn.Module, batch: Any) -> torch.Tensor:
        if kind == "pair":
            return functional.cross_entropy(model(batch[0]), batch[1])
        made = model(x=batch["x"], labels=batch["labels"]).logits if kind.endswith("takes") else model(batch["x"])
        return functional.cross_entropy(made, batch["labels"])

    model = Taker if kind.endswith("takes") else Net
    given = task_of(metrics=METRICS)
    task = task_of(metrics=METRICS, loss=None, objective=objective, collate=collate, model=lambda: model(5, 3))
    expected, found = (evaluate(each, 2, tmp_path)[0] for each in (given, task))
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_batch_that_hides_its_target_is_refused(tmp_path: Path) -> None:
    task = task_of(
        metrics=METRICS,
        loss=None,
        objective=lambda model, batch: model(batch["x"]).sum(),
        collate=lambda samples: {"x": torch.stack([x for x, _ in samples])},
    )
    with pytest.raises(TaskError, match="a dict with labels or label or target"):
        evaluate(task, 1, tmp_path)
