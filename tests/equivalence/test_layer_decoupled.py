"""`layer:decoupled=on` in real processes computes what a plain loop with the same losses computes, and goes on."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import layer_tasks
import pytest
import torch
from torch import nn

import shoal
from helpers.training import Train, Trained, largest_difference
from shoal.checkpoint.aside import split_aside
from shoal.checkpoint.listing import read_manifest
from shoal.errors import ShoalError
from shoal.launch.owner import ZygoteProcess
from shoal.launch.resuming import left_out
from shoal.ledger import Order
from shoal.ledger.order import mix
from shoal.observe.checkpoint_names import find_checkpoint
from shoal.strategies.layer.heads import AuxiliaryHead

TASKS = Path(__file__).with_name("layer_tasks.py")
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
BOUND = 1e-9


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(TASKS, tmp_path, zygote)


def decoupled_loop(
    task: shoal.Task, borders: tuple[int, ...], weights: tuple[float, ...]
) -> tuple[nn.Sequential, list[AuxiliaryHead]]:
    """The loop that anybody would write for layers in a line: groups that end at `borders`, each with its own loss
    on what the one before it has made, detached."""
    torch.manual_seed(task.seed)
    model = task.model().double()
    groups = [model[start:stop] for start, stop in pairwise((0, *borders, len(model)))]
    inputs, target = task.train.tensors
    inputs = inputs.double()
    heads = _make_heads(task.seed, groups, inputs[:2])
    optimizers = [task.optimizer(list(module.parameters())) for module in (model, nn.ModuleList(heads))]
    schedulers = [task.scheduler(optimizer) for optimizer in optimizers]
    order = Order(len(inputs), task.seed, shuffle=True)
    starts = [(epoch, start) for epoch in range(task.epochs) for start in range(0, len(inputs), task.batch_size)]
    for epoch, start in starts[: task.max_steps]:
        rows = torch.from_numpy(order.samples(epoch, start, min(start + task.batch_size, len(inputs))))
        features = inputs[rows]
        for group, head, weight in zip(groups, [*heads, nn.Identity()], weights, strict=True):
            output = group(features.detach())
            (weight * task.loss(head(output), target[rows])).backward()
            features = output
        nn.utils.clip_grad_norm_([*model.parameters(), *nn.ModuleList(heads).parameters()], task.clip_norm)
        for moved in (*optimizers, *schedulers):
            moved.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return model, heads


def _make_heads(seed: int, groups: list[nn.Sequential], sample: torch.Tensor) -> list[AuxiliaryHead]:
    passed = [sample]
    with torch.no_grad():
        for group in groups:
            passed.append(group.eval()(passed[-1]))
            group.train()
    heads = []
    for rank, features in enumerate(passed[1:-1]):
        torch.manual_seed(mix(seed, rank) >> 1)
        heads.append(AuxiliaryHead(features, passed[-1]))
    return heads


def values_of_heads(run: Trained) -> dict[str, torch.Tensor]:
    """By the step whose result a head reads, and the parameter's name."""
    _, aside = split_aside(run.state)
    return {
        name.removeprefix("head/").removesuffix("/value"): value
        for name, value in aside.items()
        if name.endswith("/value")
    }


def borders_of(run: Trained) -> tuple[int, ...]:
    """Where each worker's layers end, as the run told; the last ones end the model."""
    told = (line["text"] for line in run.told("line"))
    layers = [re.findall(r"\d+", text) for text in told if "layer: worker" in text]
    return tuple(int(numbers[-1]) + 1 for numbers in layers[:-1])


@pytest.mark.parametrize(
    ("optimizer", "workers"), [("adamw", 3), pytest.param("momentum", 2, marks=pytest.mark.long)]
)
def test_decoupled_groups_compute_what_one_process_with_their_losses_computes(train, optimizer, workers):
    weights = (0.3, 0.5, 1.0)[-workers:]
    written = "+".join(str(weight) for weight in weights)
    ours = train(
        "images",
        workers=workers,
        strategy=f"layer:decoupled=on,weights={written}",
        optimizer=optimizer,
        numerics="float64",
    )
    borders = borders_of(ours)
    model, heads = decoupled_loop(layer_tasks.images(optimizer=optimizer), borders, weights)
    assert largest_difference(ours.model, dict(model.state_dict())) <= BOUND
    read = [f"_{border - 1}" for border in borders]
    expected = {
        f"{name}/{key}": value
        for name, head in zip(read, heads, strict=True)
        for key, value in head.state_dict().items()
    }
    assert largest_difference(values_of_heads(ours), expected) <= BOUND


def test_a_decoupled_run_goes_on_with_its_heads_and_others_leave_them_out(train):
    whole = train("images", workers=2, strategy="layer:decoupled=on", checkpoint="every=3", steps=6)
    resumed = train.resume(whole, 3)
    assert resumed.digests() == whole.digests()
    assert any(name.startswith("aside/head/") for name in whole.state)

    plain = train.resume(whole, 3, strategy="data", cluster={"workers": 1})
    assert set(plain.state) == set(split_aside(whole.state)[0])
    manifest = read_manifest(find_checkpoint(f"{whole.job.run_dir}@3"))
    assert left_out(resumed.job, manifest) == ""
    assert left_out(plain.job, manifest) == "left out: 16 tensors of heads that only layer:decoupled=on trains"


@pytest.mark.long
def test_a_run_with_other_groups_begins_with_new_heads(train):
    whole = train("images", workers=2, strategy="layer:decoupled=on", checkpoint="every=3", steps=6)
    resumed = train.resume(whole, 3, cluster={"workers": 3})
    told = [line["text"] for line in resumed.told("line")]
    assert [text for text in told if "begins anew" in text] == [
        "layer: the checkpoint has no head that reads _2, so it begins anew"
    ]
    assert len({name.split("/")[0] for name in values_of_heads(resumed)}) == 2


def test_decoupled_groups_train_at_the_same_time(train, tmp_path):
    """Each group waits in its backward pass until the next has begun its forward pass: for ever, if it needed a
    gradient from there."""
    strategy = "layer:decoupled=on,weights=0.3+0.3+1"
    run = train("following", workers=3, strategy=strategy, folder=str(tmp_path), steps=3)
    seen = [layer_tasks.processes(tmp_path, mark, 3) for mark in ("first-back", "second-back", "end")]
    assert [len(one) for one in seen] == [1, 1, 1]
    assert len(set.union(*seen)) == 3
    assert set(run.model) == {f"{number}.layer.{kind}" for number in range(3) for kind in ("weight", "bias")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("tasks", "factory", "overrides"), [(TASKS, "deep", {"max_steps": 60}), (DIGITS, "task", {"epochs": 3})]
)
def test_decoupled_training_learns_as_well(train, tasks, factory, overrides):
    train = replace(train, tasks=tasks)
    ours = train(factory, workers=2, strategy="layer:decoupled=on", overrides=overrides)
    plain = train(factory, strategy="data", overrides=overrides)
    assert plain.results["results"]["accuracy"] > 0.6
    assert ours.results["results"]["accuracy"] > plain.results["results"]["accuracy"] - 0.04


def test_an_objective_is_refused(train):
    with pytest.raises(
        ShoalError, match=r"objective= .* with strategy=layer:decoupled=on each group .* of its own; use loss="
    ):
        train("by_objective", workers=2, strategy="layer:decoupled=on")
