"""The small task `mlp` with every way to choose, read and order its samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from small_tasks import mlp
from torch import nn
from torch.nn import functional as F

import shoal

ROWS, LABELS = mlp().train.tensors


class OddFirst:
    """An order of one's own: a third of the samples, another one each epoch."""

    def order(self, epoch: int) -> np.ndarray:
        return np.arange(epoch % 3, len(ROWS), 3)


SAMPLERS = {
    "weighted": lambda: shoal.Weighted(1 + np.arange(len(ROWS)) % 5),
    "once": lambda: shoal.Weighted(1 + np.arange(len(ROWS)) % 5, replacement=False, num_samples=90),
    "stratified": lambda: shoal.Stratified(LABELS),
    "function": lambda: lambda epoch, seed: np.random.Generator(np.random.PCG64([seed, epoch])).permutation(150),
    "object": OddFirst,
}


def sampled(sampler: str, optimizer: str = "momentum") -> shoal.Task:
    return replace(mlp(optimizer, steps=14), sampler=SAMPLERS[sampler]())


def read_shard(first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Twenty samples, or what is left."""
    yield from zip(ROWS[first : first + 20], LABELS[first : first + 20], strict=True)


def streamed() -> shoal.Task:
    firsts = range(0, len(ROWS), 20)
    lengths = [min(20, len(ROWS) - first) for first in firsts]
    return replace(mlp(steps=14), train=shoal.datasets.Stream(firsts, read_shard, lengths, buffer=8))


def misdeclared() -> shoal.Task:
    return replace(mlp(), train=shoal.datasets.Stream([0, 20], read_shard, [20, 25], buffer=8))


def pad(sentences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences of different lengths as one batch; padding has no target."""
    tokens = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    target = nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=-100)
    return tokens, target


def sentences() -> shoal.Task:
    """Samples that differ in shape; a batch counts by its tokens."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 15, (60,), generator=generator).tolist()
    texts = [torch.randint(0, 40, (length,), generator=generator) for length in lengths]
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Embedding(40, 12), nn.Dropout(0.1), nn.Linear(12, 40)),
        loss=lambda scores, wanted: F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=-100),
        weight=lambda batch: float((batch[1] != -100).sum()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        train=texts,
        test=texts[:17],
        collate=pad,
        batch_size=16,
        epochs=3,
    )


def sentences_without_dropout() -> shoal.Task:
    task = sentences()
    return replace(task, model=lambda: nn.Sequential(nn.Embedding(40, 12), nn.Linear(12, 40)))
