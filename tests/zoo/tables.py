"""Models of rows with columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from zoo_data import CLASSES, COLUMNS, adamw, classes_of, drawn, table, task

import shoal


def perceptron(inputs: int = COLUMNS, outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def linear_regression() -> shoal.Task:
    inputs = table()
    amounts = inputs.sum(1, keepdim=True)
    return task(
        lambda: nn.Linear(COLUMNS, 1),
        inputs,
        amounts,
        loss=F.mse_loss,
        test=TensorDataset(inputs, amounts),
        metrics={"distance": shoal.metrics.mean_absolute_error},
    )


class MixedColumns(nn.Module):
    """Numbers, and kinds that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.colours = nn.Embedding(5, 4)
        self.sizes = nn.Embedding(3, 4)
        self.mix = perceptron(COLUMNS + 8)

    def forward(self, numbers: Tensor, colour: Tensor, size: Tensor) -> Tensor:
        return self.mix(torch.cat([numbers, self.colours(colour), self.sizes(size)], 1))


def mixed_columns() -> shoal.Task:
    """Rows are dicts."""
    numbers = table()
    rows = [
        ({"numbers": row, "colour": number % 5, "size": number % 3}, int(target))
        for number, (row, target) in enumerate(zip(numbers, classes_of(numbers), strict=True))
    ]
    return task(MixedColumns, train=rows, test=rows[:20], metrics={"accuracy": shoal.metrics.accuracy})


def quantiles() -> shoal.Task:
    """How high three of them lie."""
    shares = torch.tensor([0.1, 0.5, 0.9])

    def pinball(found: Tensor, target: Tensor) -> Tensor:
        above = target[:, None] - found
        return torch.maximum(shares * above, (shares - 1) * above).mean()

    inputs = table()
    return task(lambda: perceptron(outputs=3), inputs, inputs.sum(1) + drawn(seed=7), loss=pinball)


class RadialBasis(nn.Module):
    """Parameters that belong to no layer."""

    def __init__(self, centres: int = 12) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(centres, COLUMNS))
        self.widths = nn.Parameter(torch.zeros(centres))
        self.mix = nn.Linear(centres, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        apart = (x[:, None] - self.centres).square().mean(-1)
        return self.mix(torch.exp(-apart * self.widths.exp()))


def radial_basis() -> shoal.Task:
    inputs = table()
    return task(RadialBasis, inputs, classes_of(inputs))


class TwoHeads(nn.Module):
    """What it is, and how much."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(COLUMNS, 16), nn.ReLU())
        self.kind = nn.Linear(16, CLASSES)
        self.amount = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = self.body(x)
        return {"kind": self.kind(seen), "amount": self.amount(seen).squeeze(1)}


def two_heads() -> shoal.Task:
    """Outputs, targets and losses have names."""
    inputs = table()
    rows = [
        (row, {"kind": kind, "amount": amount})
        for row, kind, amount in zip(inputs, classes_of(inputs), inputs.sum(1), strict=True)
    ]

    def loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> dict[str, Tensor]:
        kind = F.cross_entropy(output["kind"], target["kind"])
        amount = F.mse_loss(output["amount"], target["amount"])
        return {"loss": kind + 0.1 * amount, "kind": kind, "amount": amount}

    return task(TwoHeads, train=rows, test=rows[:20], loss=loss)


def rare_classes() -> shoal.Task:
    """They count more, as torch's own loss has it."""
    inputs = table()
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 9.0]))
    return task(perceptron, inputs, classes_of(inputs), loss=weighted)


def rare_classes_of_its_own() -> shoal.Task:
    """The same in the user's own words, which say what a batch counts, and know no other numbers than float32."""
    inputs, weights = table(), torch.tensor([1.0, 2.0, 9.0])
    return task(
        perceptron,
        inputs,
        classes_of(inputs),
        objective=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weight=weights),
        weight=lambda batch: float(weights[batch[1]].sum()),
    )


def share_found(scores: Tensor, wanted: Tensor) -> float:
    """Of all labels of all samples: no mean over batches."""
    return float(((scores > 0) & (wanted > 0)).sum() / wanted.sum())


def many_labels() -> shoal.Task:
    """Several at a time; the best model by a number of the whole test set is kept."""
    inputs = table()
    labels = (inputs[:, :4] > 0.3).float()
    return task(
        lambda: perceptron(outputs=4),
        inputs,
        labels,
        loss=nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 2.0, 3.0])),
        optimizer=adamw,
        test=TensorDataset(inputs, labels),
        metrics={"found": shoal.metrics.whole(share_found)},
        keep_best="found",
        evaluate_every=3,
    )


class Routed(nn.Module):
    """Each row goes to one expert, so that some may get none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                made = made.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return x + made


def routed_experts() -> shoal.Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(COLUMNS, 12), nn.Tanh(), Routed(12), nn.Linear(12, CLASSES))

    inputs = table()
    return task(model, inputs, classes_of(inputs))
