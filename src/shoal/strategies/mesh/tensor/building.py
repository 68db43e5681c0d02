"""Makes a worker's part of a layer from the whole one."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm.group import Group
from shoal.layout.tensor_plan import LayerCut, Way
from shoal.strategies.mesh.splits import Split
from shoal.strategies.mesh.tensor.attention import PROJECTIONS, HeadsAttention
from shoal.strategies.mesh.tensor.layers import (
    ColumnLayer,
    GroupsLayer,
    NarrowEmbedding,
    RowLayer,
    ScoresLayer,
    VocabularyEmbedding,
    linear,
)
from shoal.strategies.mesh.tensor.shapes import LayerShape, convolving, grouped_shape_of, shape_of


class Parts:
    """This worker's parts of whole tensors. What is shared by several layers is cut once, and stays shared."""

    def __init__(self, workers: Group) -> None:
        self.workers = workers
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor, Split]] = {}

    def parameter(self, whole: torch.Tensor | None, split: Split) -> nn.Parameter | None:
        """The part of a parameter."""
        if whole is None:
            return None
        if id(whole) not in self._made:
            part = nn.Parameter(self._cut(whole, split), requires_grad=whole.requires_grad)
            self._made[id(whole)] = (whole, part, split)
        _, made, known = self._made[id(whole)]
        if known != split:
            raise ValueError(f"one parameter cannot be cut both as {known} and as {split}")
        assert isinstance(made, nn.Parameter)
        return made

    def buffer(self, whole: torch.Tensor, split: Split) -> torch.Tensor:
        """The part of a buffer."""
        part = self._cut(whole, split)
        self._made[id(whole)] = (whole, part, split)
        return part

    def _cut(self, whole: torch.Tensor, split: Split) -> torch.Tensor:
        return split.cut(whole.detach(), self.workers.index, self.workers.size)

    def splits(self) -> dict[int, Split]:
        """By identity of the whole tensor: how it was cut."""
        return {key: split for key, (_, _, split) in self._made.items()}


def build(layer: nn.Module, cut: LayerCut, parts: Parts) -> nn.Module:
    """This worker's part of a layer."""
    if isinstance(layer, nn.Embedding):
        return _embedding(layer, cut, parts)
    if isinstance(layer, nn.MultiheadAttention):
        return _attention(layer, cut, parts)
    if cut.way is Way.CHANNELS:
        return _norm(layer, parts)
    if cut.way is Way.GROUPS:
        return _grouped(layer, cut, parts)
    shape = shape_of(layer)
    assert shape is not None
    return _row(layer, shape, cut, parts) if cut.way is Way.ROW else _column(layer, shape, cut, parts)


def _embedding(layer: nn.Embedding, cut: LayerCut, parts: Parts) -> nn.Module:
    weight = parts.parameter(layer.weight, Split(0 if cut.way is Way.VOCABULARY else 1))
    assert weight is not None
    if cut.way is Way.VOCABULARY:
        return VocabularyEmbedding(weight, parts.workers, layer.padding_idx, in_rows=cut.in_rows)
    return NarrowEmbedding(weight, parts.workers, layer.padding_idx)


def _column(layer: nn.Module, shape: LayerShape, cut: LayerCut, parts: Parts) -> nn.Module:
    weight = parts.parameter(layer._parameters["weight"], Split(shape.out_dim, cut.blocks))
    bias = parts.parameter(layer._parameters["bias"], Split(0, cut.blocks))
    assert weight is not None
    if cut.way is Way.VOCABULARY:
        return ScoresLayer(shape.compute, weight, bias, parts.workers)
    gathered = Split(shape.feature_dim, cut.blocks) if cut.alone else None
    return ColumnLayer(shape.compute, weight, bias, parts.workers, gathered=gathered)


def _row(layer: nn.Module, shape: LayerShape, cut: LayerCut, parts: Parts) -> nn.Module:
    weight = parts.parameter(layer._parameters["weight"], Split(shape.in_dim))
    assert weight is not None
    return RowLayer(
        shape.compute,
        weight,
        layer._parameters["bias"],
        parts.workers,
        features=Split(shape.feature_dim),
        scattered=cut.alone,
        in_rows=cut.in_rows,
    )


def _grouped(layer: nn.Module, cut: LayerCut, parts: Parts) -> nn.Module:
    shape = grouped_shape_of(layer)
    assert shape is not None
    weight = parts.parameter(layer._parameters["weight"], Split(0))
    assert weight is not None
    return GroupsLayer(
        convolving(layer, shape.groups // parts.workers.size),  # type: ignore[arg-type]
        weight,
        parts.parameter(layer._parameters["bias"], Split(0)),
        parts.workers,
        channels=Split(shape.feature_dim) if cut.alone else None,
    )


def _attention(whole: nn.MultiheadAttention, cut: LayerCut, parts: Parts) -> nn.Module:
    fused = Split(0, (whole.embed_dim,) * 3)
    splits = {"in_proj_weight": fused, **dict.fromkeys(PROJECTIONS, Split(0)), "in_proj_bias": fused}
    weight = parts.parameter(whole.out_proj.weight, Split(1))
    assert weight is not None
    return HeadsAttention(
        whole,
        {name: parts.parameter(whole._parameters[name], split) for name, split in splits.items()},
        RowLayer(linear, weight, whole.out_proj._parameters["bias"], parts.workers, in_rows=cut.in_rows),
        parts.workers,
    )


def _norm(norm: nn.Module, parts: Parts) -> nn.Module:
    """The same kind of norm, for this worker's channels."""
    split = Split(0)
    part = copy.copy(norm)
    part._parameters = {name: parts.parameter(param, split) for name, param in norm._parameters.items()}
    part._buffers = {
        name: parts.buffer(buffer, split) if buffer is not None and buffer.dim() else buffer
        for name, buffer in norm._buffers.items()
    }
    if isinstance(part, _BatchNorm):
        part.num_features //= parts.workers.size
    else:
        assert isinstance(part, nn.GroupNorm)
        part.num_channels //= parts.workers.size
        part.num_groups //= parts.workers.size
    return part
