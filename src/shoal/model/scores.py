"""Scores that are made when somebody looks at them: a cross entropy does not, and takes them in pieces.

A linear layer at the end of a model gives these in place of a tensor. They can be reshaped, as losses of tokens
do, and given to `F.cross_entropy`; whatever else is asked of them, or done with them, gets the tensor that they
stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.model.vocabulary_loss import IGNORED, linear_cross_entropy

SMALLEST_VOCABULARY = 1024
"""With fewer words scores are not what fills the memory."""


class Scores:
    """What a linear layer would give for these rows."""

    def __init__(self, hidden: torch.Tensor, layer: nn.Linear) -> None:
        self._hidden = hidden
        self._layer = layer

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._layer.out_features))

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def ndim(self) -> int:
        return self._hidden.ndim

    def dim(self) -> int:
        return self._hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def whole(self) -> torch.Tensor:
        """All of them."""
        return F.linear(self._hidden, self._layer.weight, self._layer.bias)

    # What rows can do without being made.

    def contiguous(self) -> Scores:
        return self

    def float(self) -> Any:
        # Losses are computed in float32 from narrower scores anyway.
        return self if self._hidden.dtype != torch.float64 else self.whole().float()

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        first, last = start_dim % self.ndim, end_dim % self.ndim
        if last == self.ndim - 1:  # words would be flattened, too
            return self.whole().flatten(start_dim, end_dim)
        return Scores(self._hidden.flatten(first, last), self._layer)

    def reshape(self, *shape: Any) -> Any:
        wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        words, num_rows = self._layer.out_features, math.prod(self.shape[:-1])
        if wanted[-1] == -1 and math.prod(wanted[:-1]) == num_rows:
            wanted = (*wanted[:-1], words)
        if wanted[-1] != words:
            return self.whole().reshape(wanted)
        return Scores(self._hidden.reshape(*wanted[:-1], self._hidden.shape[-1]), self._layer)

    view = reshape

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        keeps_words = parts[-1] is Ellipsis or (len(parts) < self.ndim and Ellipsis not in parts)
        if len(parts) > 1 and parts[-1] == slice(None) and (Ellipsis in parts or len(parts) == self.ndim):
            keeps_words = True
        if not keeps_words or any(isinstance(part, torch.Tensor) for part in parts):
            return self.whole()[index]
        return Scores(self._hidden[index], self._layer)

    def loss(self, target: torch.Tensor, ignore_index: int, reduction: str) -> torch.Tensor:
        """Their cross entropy, in pieces."""
        return linear_cross_entropy(
            self._hidden,
            self._layer.weight,
            target,
            self._layer.bias,
            ignore_index=ignore_index,
            reduction=reduction,
        )

    # All else is done with the tensor.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and (found := _in_pieces(*args, **kwargs)) is not None:
            return found
        made = [arg.whole() if isinstance(arg, Scores) else arg for arg in args]
        return func(*made, **{name: v.whole() if isinstance(v, Scores) else v for name, v in kwargs.items()})


def _operator(name: str) -> Callable[..., Any]:
    def act(self: Scores, *others: Any) -> Any:
        return getattr(self.whole(), name)(*others)

    return act


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "matmul", "pow", "len"):
    setattr(Scores, f"__{_name}__", _operator(f"__{_name}__"))


def _in_pieces(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = IGNORED,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """The loss of `F.cross_entropy`, called so; None where it can be had from the tensor alone."""
    is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not isinstance(input, Scores) or not is_plain or reduction not in ("mean", "sum"):
        return None
    if not isinstance(target, torch.Tensor) or target.is_floating_point() or input.shape[:-1] != target.shape:
        return None
    if input.ndim > 2:  # words are to be in the second dimension there
        return None
    _taken.append(input._layer)
    return input.loss(target, ignore_index, reduction)


_taken: list[nn.Linear] = []
"""Layers whose scores have lately been taken in pieces; emptied by whoever looks."""


def candidates(module: nn.Module) -> list[nn.Linear]:
    """Layers that may be the last one before such a loss, the widest first."""
    found = [
        layer
        for layer in module.modules()
        if type(layer) is nn.Linear and layer.out_features >= SMALLEST_VOCABULARY
    ]
    return sorted(found, key=lambda layer: -layer.out_features)


def stand_in(layer: nn.Linear) -> None:
    """Let a layer give `Scores` in passes with gradients."""
    layer.forward = torch.compiler.disable(partial(_forward, layer))  # type: ignore[method-assign]


def take_back(layer: nn.Linear) -> None:
    """Let it give tensors again."""
    layer.__dict__.pop("forward", None)


def _forward(layer: nn.Linear, x: torch.Tensor) -> Any:
    if not torch.is_grad_enabled() or not layer.training:
        return F.linear(x, layer.weight, layer.bias)
    return Scores(x, layer)


def is_taken_in_pieces(layer: nn.Linear, make_loss: Callable[[], Any]) -> bool:
    """Whether a pass takes the scores of a layer in pieces, and only there."""
    _taken.clear()
    before = layer.__dict__.get("forward")  # others may have changed the layer, too
    stand_in(layer)
    try:
        make_loss()
        return bool(_taken)
    finally:
        take_back(layer)
        if before is not None:
            layer.forward = before  # type: ignore[method-assign]
        _taken.clear()
