"""Torch's own attention, of which each worker has some heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.strategies.mesh.splits import Split
from shoal.strategies.mesh.tensor.collectives import copy_in, gather, scatter, sum_out
from shoal.strategies.mesh.tensor.layers import RowLayer
from shoal.strategies.mesh.tensor.sequence import entered

PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Where query, key and value are of different widths; else `in_proj_weight` holds all three."""
HEADS = Split(1)
"""Of scores and masks: (batch, heads, length, source)."""


class HeadsAttention(nn.Module):
    """In the place of `nn.MultiheadAttention`, whose code counts on all heads: each worker computes its heads, and
    the output is the sum over workers. Inputs, outputs and masks are whole ones.

    Seen from outside, it has the numbers of the whole, for users make masks by them."""

    def __init__(
        self,
        whole: nn.MultiheadAttention,
        parameters: dict[str, nn.Parameter | None],
        out_proj: RowLayer,
        workers: Group,
    ) -> None:
        """`parameters`: this worker's parts of those that `whole` itself has, by name."""
        super().__init__()
        for name, param in parameters.items():
            self.register_parameter(name, param)
        self.out_proj = out_proj
        self.embed_dim, self.num_heads, self.head_dim = whole.embed_dim, whole.num_heads, whole.head_dim
        self.batch_first, self.dropout = whole.batch_first, whole.dropout
        self._workers = workers

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As that of the whole. `is_causal` only says what `attn_mask` must say, too."""
        is_batched = query.dim() == 3
        queries, keys, values = (self._by_head(each) for each in self._projected(query, key, value))
        if key_padding_mask is not None and not is_batched:
            key_padding_mask = key_padding_mask[None]
        mask = self._mask(attn_mask, key_padding_mask, queries.dtype)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = queries @ keys.transpose(-2, -1) * self.head_dim**-0.5
            parts = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            mixed = parts @ values
            weights = self._whole_weights(parts, average=average_attn_weights)
        else:
            mixed = F.scaled_dot_product_attention(queries, keys, values, mask, dropout)
        mixed = mixed.transpose(1, 2).flatten(-2)
        if not is_batched:
            return self.out_proj(mixed[0]), None if weights is None else weights[0]
        return self.out_proj(mixed if self.batch_first else mixed.transpose(0, 1)), weights

    def _projected(self, *wholes: torch.Tensor) -> Sequence[torch.Tensor]:
        """Query, key and value, (batch, length, features of this worker's heads) each."""
        different = {id(each): self._entered(each) for each in wholes}
        inputs = [different[id(each)] for each in wholes]
        fused, bias = self._parameters["in_proj_weight"], self._parameters["in_proj_bias"]
        if fused is not None and len(different) == 1:
            return F.linear(inputs[0], fused, bias).chunk(3, -1)
        weights = [self._parameters[name] for name in PROJECTIONS] if fused is None else fused.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return [F.linear(*each) for each in zip(inputs, weights, biases, strict=True)]  # type: ignore[arg-type]

    def _entered(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = entered(inputs, self._workers)
        if inputs.dim() == 2:
            return inputs[None]
        return inputs if self.batch_first else inputs.transpose(0, 1)

    def _by_head(self, features: torch.Tensor) -> torch.Tensor:
        return features.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _mask(
        self, attention: torch.Tensor | None, padding: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """What is added to the scores of this worker's heads."""
        found = []
        if attention is not None:
            added = _added(attention, dtype)
            found.append(added[None, None] if added.dim() == 2 else added.unflatten(0, (-1, self.num_heads)))
        if padding is not None:
            found.append(_added(padding, dtype)[:, None, None, :])
        if not found:
            return None
        mask = found[0] if len(found) == 1 else found[0] + found[1]
        if mask.shape[1] > 1:
            return scatter(mask, HEADS, self._workers)
        return copy_in(mask, self._workers) if mask.requires_grad else mask

    def _whole_weights(self, parts: torch.Tensor, *, average: bool) -> torch.Tensor:
        if average:
            return sum_out(parts.sum(1), self._workers) / self.num_heads
        return gather(parts, HEADS, self._workers)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """True hides."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)
