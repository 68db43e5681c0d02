"""Losses that are means over samples, and some that are not."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import shoal

PADDING = -100


def _texts(count: int = 64, length: int = 12) -> TensorDataset:
    chance = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, 50, (count, length), generator=chance)
    target = tokens.clone()
    for row, end in enumerate(torch.randint(1, length, (count,), generator=chance).tolist()):
        target[row, end:] = PADDING
    return TensorDataset(tokens, target)


def _points(count: int = 64) -> TensorDataset:
    chance = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 8, generator=chance)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long())


def tokens(counted: bool = False, objective: bool = False) -> shoal.Task:
    """A mean over the tokens of padded texts."""

    def loss(scores, wanted):
        return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=PADDING)

    how = {"objective": lambda model, batch: loss(model(batch[0]), batch[1])} if objective else {"loss": loss}
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Embedding(50, 16), nn.Dropout(0.2), nn.Linear(16, 50)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        weight=(lambda batch: float((batch[1] != PADDING).sum())) if counted else None,
        train=_texts(),
        batch_size=16,
        **how,
    )


def classes(counted: bool = False) -> shoal.Task:
    """Rare classes weigh more; batches are dictionaries."""
    weights = torch.tensor([1.0, 3.0, 10.0])

    def collate(samples):
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)),
        objective=lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"], weight=weights),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        weight=(lambda batch: float(weights[batch["y"]].sum())) if counted else None,
        collate=collate,
        train=_points(),
        batch_size=16,
    )


def negatives() -> shoal.Task:
    """Every other sample of the batch is a wrong answer."""

    def loss(output, _):
        places = functional.normalize(output, dim=1)
        return functional.cross_entropy(places @ places.T / 0.1, torch.arange(len(places)))

    return shoal.Task(
        model=lambda: nn.Linear(8, 4),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=_points(),
        batch_size=16,
    )


def known() -> shoal.Task:
    """Rare classes weigh more in a loss of torch's own."""
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)),
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 10.0])),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=_points(),
        test=_points(),
        batch_size=16,
    )
