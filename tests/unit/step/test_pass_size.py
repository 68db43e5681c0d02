"""What a pass takes, seen on tensors without values: activations, gradients, temporaries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.spec import Task
from shoal.step.pass_size import measure_pass, pass_without_values

WIDTH, DEPTH, ROWS = 512, 6, 300
BATCH = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.int64)
TASK = Task(
    model=lambda: nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))),
    loss=nn.functional.cross_entropy,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    train=TensorDataset(*BATCH),
    batch_size=ROWS,
)
RESULT = 4 * ROWS * WIDTH
WEIGHT = 4 * WIDTH * WIDTH


def test_activations_gradients_and_the_widest_result() -> None:
    found = pass_without_values(TASK, BATCH)

    assert found is not None
    # Each Tanh keeps its result; at the turn of the pass there are a few temporaries besides.
    assert DEPTH * RESULT <= found.activations <= (DEPTH + 5) * RESULT + WEIGHT
    gradients = DEPTH * (WEIGHT + 4 * WIDTH)
    assert gradients <= found.with_gradients <= gradients + (DEPTH + 5) * RESULT
    assert found.widest == RESULT and found.batch == RESULT + 8 * ROWS


def test_values_make_no_difference() -> None:
    assert measure_pass(TASK, TASK.model(), BATCH) == pass_without_values(TASK, BATCH)


def test_nothing_is_made_that_has_values() -> None:
    large = replace(TASK, model=lambda: nn.Linear(WIDTH, 1 << 30))  # 2 TiB
    found = pass_without_values(large, BATCH)
    assert found is not None and found.with_gradients > 4 * WIDTH << 30


def test_what_is_computed_again_is_not_kept() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(x)))

    task = replace(TASK, model=lambda: nn.Sequential(*(Block() for _ in range(DEPTH))))
    kept, again = pass_without_values(task, BATCH), pass_without_values(task, BATCH, recompute=True)
    assert kept is not None and again is not None
    assert again.activations < 0.6 * kept.activations


class AsksForValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if float(x.sum()) > -1.0 else x


def test_a_model_that_asks_for_values_must_have_some() -> None:
    task = replace(TASK, model=AsksForValues)
    assert pass_without_values(task, BATCH) is None
    assert measure_pass(task, AsksForValues(), BATCH).with_gradients >= WEIGHT


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_keeps_half(precision: str) -> None:
    whole, half = pass_without_values(TASK, BATCH), pass_without_values(TASK, BATCH, precision=precision)
    assert whole is not None and half is not None
    assert half.widest == RESULT // 2
