"""Which layers can be cut, and along which dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.strategies.mesh.splits import Split
from shoal.strategies.mesh.tensor.layers import Compute, linear, transposed_linear

_CONVOLUTIONS = {nn.Conv1d: (F.conv1d, 1), nn.Conv2d: (F.conv2d, 2), nn.Conv3d: (F.conv3d, 3)}


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A layer that multiplies its inputs by a weight."""

    inputs: int
    outputs: int
    compute: Compute
    out_dim: int = 0
    """The weight's dimension of outputs."""
    in_dim: int = 1
    """The weight's dimension of inputs."""
    feature_dim: int = -1
    """The dimension of features or channels in what goes in and comes out."""

    @property
    def is_convolution(self) -> bool:
        return self.feature_dim != -1


@dataclass(frozen=True, kw_only=True)
class GroupedShape:
    """A convolution whose channels are in groups that know nothing of each other."""

    inputs: int
    outputs: int
    groups: int
    feature_dim: int


def shape_of(layer: nn.Module) -> LayerShape | None:
    """None where it is no such layer, or does more than its class says (hooks, a subclass's own ways)."""
    if _has_hooks(layer):
        return None
    if type(layer) is nn.Linear:
        return LayerShape(inputs=layer.in_features, outputs=layer.out_features, compute=linear)
    if is_transposed_linear(layer):
        weight = layer._parameters["weight"]
        assert weight is not None
        inputs, outputs = weight.shape
        return LayerShape(inputs=inputs, outputs=outputs, compute=transposed_linear, out_dim=1, in_dim=0)
    if _is_convolution(layer) and layer.groups == 1:
        return LayerShape(
            inputs=layer.in_channels,
            outputs=layer.out_channels,
            compute=convolving(layer, 1),
            feature_dim=_channel_dim(layer),
        )
    return None


def grouped_shape_of(layer: nn.Module) -> GroupedShape | None:
    """None where it is no convolution with groups, or does more than its class says."""
    if not _is_convolution(layer) or layer.groups == 1 or _has_hooks(layer):
        return None
    return GroupedShape(
        inputs=layer.in_channels,
        outputs=layer.out_channels,
        groups=layer.groups,
        feature_dim=_channel_dim(layer),
    )


def convolving(layer: nn.Conv2d, groups: int) -> Compute:
    """What the convolution does, for so many of its groups."""
    function, _ = _CONVOLUTIONS[type(layer)]
    return partial(function, stride=layer.stride, padding=layer.padding, dilation=layer.dilation, groups=groups)


def _is_convolution(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Of any number of dimensions; the type stands for all."""
    return type(layer) in _CONVOLUTIONS and layer.padding_mode == "zeros"


def _channel_dim(layer: nn.Conv2d) -> int:
    return -1 - _CONVOLUTIONS[type(layer)][1]


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


def is_transposed_linear(layer: nn.Module) -> bool:
    """Whether this is Hugging Face's `Conv1D`, told without importing it."""
    return (
        type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") and set(layer._parameters) == {"weight", "bias"}
    )


def is_embedding(layer: nn.Module) -> bool:
    """Whether this is a table that looks entries up and does nothing else."""
    if type(layer) is not nn.Embedding or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    return layer.max_norm is None and not layer.scale_grad_by_freq


def is_attention(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Whether this is torch's own attention, without the keys and values that it may add to those it gets."""
    return (
        type(module) is nn.MultiheadAttention
        and not any(_has_hooks(each) for each in module.modules())
        and module.bias_k is None
        and not module.add_zero_attn
    )


def channels_of(norm: nn.Module) -> int | None:
    """The channels of a norm that treats each (or each group) by itself; None for everything else."""
    if isinstance(norm, _BatchNorm):
        return norm.num_features
    return norm.num_channels if type(norm) is nn.GroupNorm else None


def is_token_norm(module: nn.Module) -> bool:
    """Whether this looks like a norm of each token's features: torch's own, or a class that is called so."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    is_called_so = type(module).__name__.endswith("Norm") and not type(module).__module__.startswith("torch.nn")
    params = list(module.parameters())
    return is_called_so and bool(params) and all(param.dim() == 1 for param in params)


def fits(size: int, count: int, blocks: tuple[int, ...] = ()) -> bool:
    """Whether so many workers can have equal parts."""
    return Split(0, blocks).fits(size, count)
