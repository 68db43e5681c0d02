"""An objective is asked for what it calls the model with, and computed from what the model makes of that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import TaskError
from shoal.model.replica import Arguments, Replica, call_model
from shoal.step.objective import inputs_of, loss_from

BATCH = {"x": torch.ones(3, 2), "y": torch.zeros(3)}


def task(objective: Any) -> shoal.Task:
    return shoal.Task(
        model=lambda: nn.Linear(2, 1),
        objective=objective,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=[BATCH],
    )


def noisy(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Draws before it calls the model, and uses what it has drawn afterwards."""
    noise = torch.randn(3, 2)
    found: Tensor = getattr(model, "module", model)(batch["x"] + noise, scale=2.0)
    return (found - noise).square().mean()


def test_what_is_drawn_is_the_same_both_times_and_leaves_no_trace() -> None:
    replica = Replica(task(noisy))
    torch.manual_seed(1)
    before = torch.default_generator.get_state()
    asked = inputs_of(task(noisy), BATCH, key=7)
    assert isinstance(asked, Arguments) and asked.named == {"scale": 2.0}
    (shifted,) = asked.positional
    told = loss_from(replica, shifted - BATCH["x"], BATCH, key=7)
    assert float(told.loss) == pytest.approx(0.0, abs=1e-9)
    assert not torch.equal(inputs_of(task(noisy), BATCH, key=8).positional[0], shifted)
    assert torch.equal(torch.default_generator.get_state(), before)


def test_a_model_is_called_with_what_was_asked_for() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    model = Scaled(2, 2)
    asked = Arguments((BATCH["x"],), {"scale": 3.0})
    assert torch.equal(call_model(model, asked), model(BATCH["x"], scale=3.0))


def test_a_loss_of_output_and_target_is_asked_for_nothing() -> None:
    plain = shoal.Task(
        model=lambda: nn.Linear(2, 1),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=[(torch.ones(2), torch.zeros(2))],
    )
    batch = (torch.ones(4, 2), torch.zeros(4, 2))
    assert inputs_of(plain, batch) is batch[0]
    assert loss_from(Replica(plain), batch[0], batch).loss == 1.0


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (lambda model, batch: batch["y"].sum(), "has not called the model"),
        (lambda model, batch: model(batch["x"]) + model(batch["x"]), "calls the model twice"),
        (lambda model, batch: model(batch["x"]), r"must be one number .* found shape \(3, 1\)"),
    ],
)
def test_what_a_cut_model_cannot_be_asked(objective: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        inputs_of(task(objective), BATCH)
        loss_from(Replica(task(objective)), torch.ones(3, 1), BATCH)


def test_a_cut_model_can_only_be_called() -> None:
    with pytest.raises(
        AttributeError, match="asks the model for 'encode', but where the model is cut it can only"
    ):
        inputs_of(task(lambda model, batch: model.encode(batch["x"]).sum()), BATCH)
