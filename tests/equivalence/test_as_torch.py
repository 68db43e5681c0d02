"""What Shoal computes is what a plain torch loop computes."""

from __future__ import annotations

import pytest
import small_tasks
import torch
from torch import nn

import shoal
from helpers.training import Train, largest_difference
from shoal.ledger import Order


def plain_loop(task: shoal.Task) -> nn.Module:
    """The loop that anybody would write, on the whole batch."""
    torch.manual_seed(task.seed)
    model = task.model()
    optimizer = task.optimizer(list(model.parameters()))
    scheduler = task.scheduler(optimizer) if task.scheduler else None
    inputs, target = task.train.tensors
    order = Order(len(inputs), task.seed, shuffle=task.shuffle)
    step = epoch = 0
    while step < task.max_steps:
        for start in range(0, len(inputs), task.batch_size):
            if step == task.max_steps:
                break
            step += 1
            rows = torch.from_numpy(order.samples(epoch, start, min(start + task.batch_size, len(inputs))))

            def evaluate(rows: torch.Tensor = rows) -> torch.Tensor:
                optimizer.zero_grad()
                loss = task.loss(model(inputs[rows]), target[rows])
                loss.backward()
                if task.clip_norm:
                    nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
            if scheduler:
                scheduler.step()
        epoch += 1
    return model


def test_token_weighted_losses(train: Train) -> None:
    expected = dict(plain_loop(small_tasks.padded()).state_dict())
    for workers, strategy in ((1, "data"), (2, "data"), (3, "data:via=ring"), (2, "data:via=backend")):
        ours = train("padded", workers=workers, strategy=strategy)
        assert largest_difference(ours.model, expected) < 1e-5, strategy


def test_decay_groups_by_dimension(train: Train) -> None:
    expected = plain_loop(small_tasks.gpt_quiet(optimizer="momentum")).state_dict()
    ours = train("gpt_quiet", workers=2, optimizer="momentum")
    assert largest_difference(ours.model, dict(expected)) < 1e-4


def test_unused_parameters_stay(train: Train) -> None:
    """Momentum and decay must not move a parameter that got no gradient, in this step or ever."""
    torch.manual_seed(0)
    initial = small_tasks.Awkward().state_dict()
    expected = dict(plain_loop(small_tasks.branching()).state_dict())
    for workers in (1, 2):
        ours = train("branching", workers=workers)
        assert torch.equal(ours.model["never.weight"], initial["never.weight"])
        assert torch.equal(ours.model["frozen.weight"], initial["frozen.weight"])
        assert not torch.equal(ours.model["sometimes.weight"], initial["sometimes.weight"])
        assert largest_difference(ours.model, expected) < 2e-2  # a bfloat16 layer is part of it
        for name in ("first.weight", "last.weight", "sometimes.weight"):
            assert float((ours.model[name] - expected[name]).abs().max()) < 1e-3, name


@pytest.mark.parametrize(
    "optimizer",
    ["SGD", "Adam", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "SAG"],
)
def test_every_elementwise_optimizer(train: Train, optimizer: str) -> None:
    task = small_tasks.mlp_quiet(optimizer=optimizer, steps=6, width=40)
    expected = dict(plain_loop(task).state_dict())
    ours = train("mlp_quiet", workers=2, optimizer=optimizer, steps=6, width=40)
    # Rprop takes the sign of a gradient: where it is a rounding error, the step may differ.
    bound = 5e-2 if optimizer == "Rprop" else 2e-4
    assert largest_difference(ours.model, expected) < bound


@pytest.mark.parametrize("optimizer", ["muon_like", "lbfgs"])
def test_other_optimizers_update_the_whole_model(train: Train, optimizer: str) -> None:
    task = small_tasks.mlp_quiet(optimizer=optimizer, steps=6, width=40)
    expected = dict(plain_loop(task).state_dict())
    ours = train("mlp_quiet", workers=2, optimizer=optimizer, steps=6, width=40)
    assert largest_difference(ours.model, expected) < 1e-3
    lines = [event.values["text"] for event in ours.events if event.kind == "line"]
    assert any("updates the whole model" in line for line in lines)


def test_clipping(train: Train) -> None:
    expected = dict(plain_loop(small_tasks.mlp_quiet(clip=0.05)).state_dict())
    for strategy in ("data", "data:via=ring"):
        ours = train("mlp_quiet", workers=2, strategy=strategy, clip=0.05)
        assert largest_difference(ours.model, expected) < 1e-4


def test_accumulation_and_channels_last(train: Train) -> None:
    plain = train("mlp_quiet", workers=2)
    pieces = train("mlp_quiet", workers=2, overrides={"accumulate": 3})
    assert plain.digests() != pieces.digests()
    assert largest_difference(plain.model, pieces.model) < 1e-4
    contiguous = train("conv", workers=2)
    last = train("conv", workers=2, channels_last=True)
    assert largest_difference(contiguous.model, last.model) < 1e-3
