"""Layers of which each worker has a part. Parameters have the names that they have in the whole layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.strategies.mesh.splits import Split
from shoal.strategies.mesh.tensor.collectives import gather, scatter, sum_out
from shoal.strategies.mesh.tensor.loss import VocabularyScores
from shoal.strategies.mesh.tensor.narrowed import unwrapped
from shoal.strategies.mesh.tensor.sequence import SequencePart, can_be_cut, entered, whole_of
from shoal.strategies.mesh.tensor.sequence_collectives import leave_rows

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A layer's function of input, weight and bias."""

ROWS = Split(0)
LAST = Split(-1)


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `nn.Linear` computes it."""
    return F.linear(inputs, weight, bias)


def transposed_linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As Hugging Face's `Conv1D` does, whose weight is the transposed one."""
    return F.linear(inputs, weight.t(), bias)


class ColumnLayer(nn.Module):
    """Each worker computes some of the outputs (features of a linear layer, channels of a convolution)."""

    def __init__(
        self,
        compute: Compute,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        workers: Group,
        *,
        gathered: Split | None = None,
    ) -> None:
        """`gathered`: how the parts of the output are put together, where what follows needs the whole."""
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._compute, self._workers, self._gathered = compute, workers, gathered

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        part = self._compute(entered(inputs, self._workers), self.weight, self.bias)
        return part if self._gathered is None else gather(part, self._gathered, self._workers)


class RowLayer(nn.Module):
    """Each worker has some of the inputs; the bias, which every worker has whole, is added to the sum."""

    def __init__(
        self,
        compute: Compute,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        workers: Group,
        *,
        features: Split = LAST,
        scattered: bool = False,
        in_rows: bool = False,
    ) -> None:
        """`features`: the inputs' dimension that is cut; `scattered`: here, for it comes whole. `in_rows`: each
        worker gets a part of the sequence of the output, where there is one."""
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._compute, self._workers = compute, workers
        self._features, self._is_scattered, self._in_rows = features, scattered, in_rows

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._is_scattered:
            inputs = scatter(whole_of(unwrapped(inputs)), self._features, self._workers)
        part = self._compute(inputs, self.weight, None)
        if self._in_rows and can_be_cut(part, self._workers):
            bias = None if self.bias is None else self.bias.to(part.dtype)
            return SequencePart.wrap(leave_rows(part, bias, self._workers), part.shape[-2], self._workers)
        total = sum_out(part, self._workers)
        if self.bias is None:
            return total
        shape = [1] * total.dim()
        shape[self._features.dim] = -1
        return total + self.bias.to(total.dtype).view(shape)


class GroupsLayer(nn.Module):
    """Each worker has some groups of a convolution, from their inputs to their outputs."""

    def __init__(
        self,
        compute: Compute,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        workers: Group,
        *,
        channels: Split | None = None,
    ) -> None:
        """`channels`: the dimension that is cut here and gathered again, where neighbours are whole."""
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._compute, self._workers, self._channels = compute, workers, channels

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._channels is None:
            return self._compute(inputs, self.weight, self.bias)
        part = self._compute(scatter(inputs, self._channels, self._workers), self.weight, self.bias)
        return gather(part, self._channels, self._workers)


class ScoresLayer(ColumnLayer):
    """An output layer: its scores stay where they are, each worker having those of its part of the vocabulary."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return VocabularyScores.wrap(super().forward(inputs), self._workers)


class VocabularyEmbedding(nn.Module):
    """Each worker has the entries of a range of numbers; whoever has the one that is asked for tells it."""

    def __init__(
        self, weight: nn.Parameter, workers: Group, padding: int | None, *, in_rows: bool = False
    ) -> None:
        """`in_rows`: each worker gets a part of the sequence of what is found."""
        super().__init__()
        self.weight = weight
        self._workers, self._in_rows = workers, in_rows
        self._first = workers.index * len(weight)
        here = padding is not None and 0 <= padding - self._first < len(weight)
        self._padding = padding - self._first if here and padding is not None else None

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        local = numbers - self._first
        elsewhere = (local < 0) | (local >= len(self.weight))
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self._padding)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        if self._in_rows and can_be_cut(found, self._workers):
            return SequencePart.wrap(leave_rows(found, None, self._workers), found.shape[-2], self._workers)
        return sum_out(found, self._workers)


class NarrowEmbedding(nn.Module):
    """Each worker has some of the features of every entry: for a vocabulary that cannot be shared out evenly."""

    def __init__(self, weight: nn.Parameter, workers: Group, padding: int | None) -> None:
        super().__init__()
        self.weight = weight
        self._workers, self._padding = workers, padding

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return gather(F.embedding(numbers, self.weight, self._padding), LAST, self._workers)
