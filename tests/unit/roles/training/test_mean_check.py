"""Losses that are no means over samples are found on one batch; all others are left in peace, to the last bit."""

from __future__ import annotations

import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal.feed.parts import Part
from shoal.model.replica import Replica
from shoal.roles.training.mean_check import MeanCheck, compare, rows_of, seen_in
from shoal.spec import Task

PADDING = -100
Pair = namedtuple("Pair", "first second")


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def replica_of(model, **fields):
    return Replica(Task(model=model, optimizer=sgd, train=range(2), **fields))


def texts(count=8, length=12):
    """Token numbers, and the next ones, of sentences that grow longer."""
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 20, (count, length + 1), generator=chance)
    targets = tokens[:, 1:].clone()
    for row in range(count):
        targets[row, 2 + row * (length - 2) // count :] = PADDING
    return tokens[:, :-1], targets


def reader():
    return nn.Sequential(nn.Embedding(20, 8), nn.Dropout(0.5), nn.Linear(8, 20))


def token_mean(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)


def count_tokens(batch):
    return int((batch[1] != PADDING).sum())


def points(count=10):
    chance = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, 6, generator=chance)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.2])


def weighted_classes(output, target):
    return functional.cross_entropy(output, target, weight=CLASS_WEIGHTS)


def in_batch_negatives(output, target):
    scores = functional.normalize(output, dim=1) @ functional.normalize(output, dim=1).T
    return functional.cross_entropy(scores / 0.1, torch.arange(len(scores)))


def net():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


WRONG = {
    "mean over tokens": (reader, texts, {"loss": token_mean}),
    "class weights": (net, points, {"loss": weighted_classes}),
    "negatives from the batch": (net, points, {"loss": in_batch_negatives}),
    "sum": (net, points, {"loss": lambda o, t: functional.cross_entropy(o, t, reduction="sum")}),
}
RIGHT = {
    "tokens counted": (reader, texts, {"loss": token_mean, "weight": count_tokens}),
    "class weights counted": (
        net,
        points,
        {"loss": weighted_classes, "weight": lambda batch: float(CLASS_WEIGHTS[batch[1]].sum())},
    ),
    "plain": (net, points, {"loss": functional.cross_entropy}),
    "objective": (
        net,
        points,
        {"objective": lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])},
    ),
    "large": (net, points, {"loss": lambda o, t: functional.mse_loss(o * 1e6, functional.one_hot(t, 3) * 1e6)}),
    "small difference of large numbers": (
        net,
        points,
        {"loss": lambda o, t: (o + 3e4).square().mean() - (o * 0 + 3e4).square().mean()},
    ),
    "tiny": (net, points, {"loss": lambda o, t: functional.cross_entropy(o, t) * 1e-20}),
    "half precision": (
        lambda: net().bfloat16(),
        lambda: (points()[0].bfloat16(), points()[1]),
        {"loss": functional.cross_entropy},
    ),
}
SKIPPED = {
    "one sample": (net, lambda: points(1), {"loss": in_batch_negatives}),
    "draws": (net, points, {"loss": lambda o, t: (o * torch.rand(())).sum()}),
    "draws from numpy": (net, points, {"loss": lambda o, t: o.sum() * np.random.rand()}),
    "not a number": (net, points, {"loss": lambda o, t: o.sum() * float("nan")}),
    "statistics of the batch": (
        lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False)),
        points,
        {"loss": lambda o, t: o.square().sum()},
    ),
}


def look(model, make_batch, fields, samples=None):
    batch = make_batch()
    return compare(replica_of(model, **fields), batch, samples or len(batch[0]))


@pytest.mark.parametrize("kind", WRONG)
def test_a_loss_that_is_no_mean_differs(kind):
    assert look(*WRONG[kind]).differs


@pytest.mark.parametrize("kind", RIGHT)
def test_a_mean_does_not(kind):
    found = look(*RIGHT[kind])
    assert found is not None and not found.differs, found


@pytest.mark.parametrize("kind", SKIPPED)
def test_where_nothing_can_be_said_nothing_is(kind):
    assert look(*SKIPPED[kind]) is None


def test_rows_of_every_kind_of_batch():
    tensor, array = torch.arange(12).reshape(4, 3), np.arange(4)
    batch = {"a": (tensor, [array, None]), "b": Pair(tensor, ["w", "x", "y", "z"]), "c": "name"}
    found = rows_of(batch, 4, range(2, 4))
    assert found["a"][0].tolist() == tensor[2:].tolist() and found["a"][1][0].tolist() == [2, 3]
    assert found["a"][1][1] is None and found["c"] == "name"
    assert isinstance(found["b"], Pair) and found["b"].first.shape == (2, 3)
    ragged = [torch.zeros(length) for length in (5, 1, 3, 2)]
    assert [len(row) for row in rows_of((ragged, tensor), 4, range(2))[0]] == [5, 1]


@pytest.mark.parametrize(
    "batch",
    [torch.zeros(()), torch.zeros(5, 4), 7, (torch.zeros(4), 3), object(), [torch.zeros(5), torch.zeros(4)]],
)
def test_what_has_no_row_for_each_sample_is_not_cut(batch):
    with pytest.raises(ValueError, match="row"):
        rows_of(batch, 4, range(2))


def test_nothing_is_left_of_it():
    """Modes, buffers and generators are as they were, also where the model changes buffers whenever it runs."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.net[1].eval()  # frozen by its owner
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("last", torch.zeros(1))

        def forward(self, inputs):
            self.calls += 1
            self.last = inputs.sum()[None]
            random.random()
            return self.net(inputs)

    replica = replica_of(Counting, loss=functional.cross_entropy)
    replica.module.train()
    replica.module.net[1].eval()
    torch.manual_seed(3)

    def state():
        kept = {name: value.clone() for name, value in replica.module.state_dict(keep_vars=True).items()}
        modes = [module.training for module in replica.module.modules()]
        return kept, modes, torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()

    before, buffer = state(), replica.module.last
    told = []
    part = Part(0, lambda: iter([(points(), 10.0, 10)]), 10.0)
    assert len(list(MeanCheck(replica, 2, told.append).watch(part).load())) == 1
    after = state()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert (before[1], before[3], before[4]) == (after[1], after[3], after[4]) and torch.equal(before[2], after[2])
    assert replica.module.last is buffer and not told
    assert all(p.grad is None for p in replica.module.parameters())


def test_it_looks_once_and_says_what_to_do():
    model, make_batch, fields = WRONG["mean over tokens"]
    told = []
    check = MeanCheck(replica_of(model, **fields), 4, told.append)
    part = Part(0, lambda: iter([(make_batch(), 8.0, 8)] * 2), 8.0)
    for _ in range(2):
        assert len(list(check.watch(part).load())) == 2
    assert len(told) == 1 and "weight=" in told[0] and "shoal verify" in told[0] and "4 parts" in told[0]


def shifted_texts():
    tokens, targets = texts()
    return {"input_ids": tokens, "labels": targets, "mask": targets != PADDING}


def shifted_mean(model, batch):
    scores, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def masked_mean(model, batch):
    each = functional.cross_entropy(model(batch["input_ids"]).movedim(2, 1), batch["input_ids"], reduction="none")
    return (each * batch["mask"]).sum() / batch["mask"].sum()


CAUSES = {
    "mean over tokens": (*WRONG["mean over tokens"], "set weight=lambda batch: float((batch[1] != -100).sum())"),
    "class weights": (*WRONG["class weights"], "some samples count more than others"),
    "negatives from the batch": (*WRONG["negatives from the batch"], "depends on the others in its batch"),
    "sum": (*WRONG["sum"], "it is a sum over samples"),
    "first label left out": (
        reader,
        shifted_texts,
        {"objective": shifted_mean},
        "set weight=lambda batch: float((batch['labels'][:, 1:] != -100).sum())",
    ),
    "mask": (reader, shifted_texts, {"objective": masked_mean}, "set weight=lambda batch: float((batch["),
    "weight that is not needed": (
        net,
        points,
        {"loss": functional.cross_entropy, "weight": lambda batch: float(1 + batch[1][0])},
        "leave weight= out",
    ),
}


@pytest.mark.parametrize("kind", CAUSES)
def test_why_it_is_none_is_found_by_trying(kind):
    model, make_batch, fields, expected = CAUSES[kind]
    batch = make_batch()
    samples = len(batch["labels"] if isinstance(batch, dict) else batch[0])
    seen, cause = seen_in(replica_of(model, **fields), batch, samples)
    assert "no mean over samples" in seen and expected in cause, cause


@pytest.mark.parametrize("kind", ["mean over tokens", "first label left out", "mask"])
def test_what_is_to_be_set_mends_it(kind):
    model, make_batch, fields, _ = CAUSES[kind]
    batch = make_batch()
    samples = len(batch["labels"] if isinstance(batch, dict) else batch[0])
    _, cause = seen_in(replica_of(model, **fields), batch, samples)
    weight = eval(cause.partition("weight=")[2])
    assert seen_in(replica_of(model, **fields, weight=weight), batch, samples) is None


@pytest.mark.parametrize("batch", [object(), (torch.zeros(9, 6), torch.zeros(10)), (torch.zeros(10, 6), None)])
def test_what_fails_is_passed_on_as_it_is(batch):
    told = []
    check = MeanCheck(replica_of(net, loss=functional.cross_entropy), 2, told.append)
    part = Part(0, lambda: iter([(batch, 10.0, 10)]), 10.0)
    assert list(check.watch(part).load()) == [(batch, 10.0, 10)] and not told
