"""A task whose metrics are no means, for every strategy."""

import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import shoal

CHANCE = torch.Generator().manual_seed(6)
INPUTS = torch.randn(118, 6, generator=CHANCE)
TARGETS = (INPUTS[:, :3] + 0.5 * torch.randn(118, 3, generator=CHANCE)).argmax(1)
TRAIN, TEST = TensorDataset(INPUTS[:64], TARGETS[:64]), TensorDataset(INPUTS[64:], TARGETS[64:])


class Ranks:
    """As an object of torchmetrics is: shown batches, then asked. It depends on the order of the samples."""

    def __init__(self):
        self.seen = []

    def __call__(self, output, target):
        raise AssertionError("it is no mean")

    def reset(self):
        self.seen = []

    def update(self, output, target):
        self.seen.append((output.argmax(1) == target).double())

    def compute(self):
        hits = torch.cat(self.seen)
        return hits @ torch.arange(1, len(hits) + 1).double()


def task(objective: bool = False, every: int = 4) -> shoal.Task:
    loss = functional.cross_entropy
    how = {"objective": lambda model, batch: loss(model(batch[0]), batch[1])} if objective else {"loss": loss}
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.9),
        train=TRAIN,
        test=TEST,
        batch_size=16,
        epochs=4,
        evaluate_every=every,
        metrics={
            "f1": shoal.metrics.whole(f1_score, average="macro"),
            "accuracy": shoal.metrics.accuracy,
            "auc": shoal.metrics.whole(roc_auc_score, multi_class="ovr"),
            "ranks": Ranks(),
        },
        **how,
    )
