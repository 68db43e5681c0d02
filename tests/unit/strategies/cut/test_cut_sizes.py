"""How strategies cut a model, told as sizes from a model without values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shoal.model.blueprint import Blueprint, cut_of, model_size, whole_state_bytes
from shoal.spec import Task, parse_strategy

WIDTH = 64
LAYER = 4 * WIDTH * WIDTH


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


class Tied(nn.Module):
    """Its last layer has the weights of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = layers(3)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))


TASK = Task(
    model=lambda: layers(6),
    loss=nn.functional.mse_loss,
    optimizer=torch.optim.AdamW,
    train=[0],
    batch_size=1,
)


def drawn(task: Task) -> Blueprint:
    found = Blueprint.drawn(task)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("strategy", "workers", "parts"),
    [
        ("layer:place=0@0+2@1", 2, (2, 4)),
        ("layer:place=0@1+3@0+5@2", 3, (2, 3, 1)),
        ("layer:decoupled=on", 3, (2, 2, 2)),
        ("layer:phases=2", 2, ()),
    ],
)
def test_layers_of_each_worker(strategy: str, workers: int, parts: tuple[int, ...]) -> None:
    found = cut_of(parse_strategy(strategy), drawn(TASK), workers)
    assert found.parts == tuple(part * LAYER for part in parts)


def test_what_two_workers_use_counts_at_both() -> None:
    found = cut_of(parse_strategy("layer:place=first@0+last@1"), drawn(replace(TASK, model=Tied)), 2)
    assert found.parts == (2 * LAYER, LAYER)


def test_blocks_that_are_gathered_together() -> None:
    blueprint = drawn(replace(TASK, model=lambda: nn.Sequential(layers(4), nn.LayerNorm(WIDTH))))
    found = cut_of(parse_strategy("sharded"), blueprint, 2)
    *blocks, rest = found.units
    assert blocks == [LAYER] * 4 and rest == 2 * 4 * WIDTH
    assert cut_of(parse_strategy("pipeline"), blueprint, 2).units == ()


def test_what_has_no_width_to_cut() -> None:
    odd = nn.Linear(WIDTH + 1, WIDTH + 1, bias=False)
    blueprint = drawn(replace(TASK, model=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH + 1, bias=False), odd)))
    cut, whole = WIDTH * (WIDTH + 1), (WIDTH + 1) ** 2
    assert cut_of(parse_strategy("tensor"), blueprint, 2).uncut == pytest.approx(whole / (cut + whole))
    assert cut_of(parse_strategy("tensor"), drawn(TASK), 4).uncut == 0.0


def test_what_an_optimizer_of_the_users_own_keeps() -> None:
    class Own(torch.optim.AdamW):
        """Might do anything."""

    blueprint = drawn(replace(TASK, optimizer=Own))
    assert model_size(blueprint).whole_state == 0 and model_size(blueprint).mirrored == ()
    assert 2 * 6 * LAYER <= whole_state_bytes(blueprint) <= 2 * 6 * LAYER + 1024
    assert not blueprint.optimizer.state and all(p.grad is None for p in blueprint.trained.values())
    closure = drawn(replace(TASK, optimizer=torch.optim.LBFGS))
    assert whole_state_bytes(closure) == 0


def test_lazy_layers_have_no_sizes_yet() -> None:
    assert Blueprint.drawn(replace(TASK, model=lambda: nn.LazyLinear(3))) is None
