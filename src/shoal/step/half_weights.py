"""The weights of linear layers in half precision, made for all layers at once before a pass.

Autocast casts each weight by itself, and each gradient back: on a GPU that is a launch for every one of them, and
a good part of a small step. Here all are cast in one go. The numbers are those of autocast: a weight is rounded
once in a pass, and its gradient is widened once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from shoal.model.replica import Replica
from shoal.step.flat_update import FlatUpdate

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class HalfWeights:
    """What the linear layers of a replica compute with, while a pass is under way."""

    def __init__(self, replica: Replica) -> None:
        self.is_in_use = False
        self.flat: FlatUpdate | None = None
        """Who takes gradients as they are, where somebody does."""
        self.rooms: Mapping[int, torch.Tensor] = {}
        """By a parameter's id: where its gradient is to lie; nothing for memory of torch's choice."""
        trained, dtype = {id(param) for param in replica.trained.values()}, _DTYPES[replica.precision.kind]
        layers = _casting_alone(replica.module, trained)
        by_number: dict[int, torch.Tensor] = {id(param): param for layer in layers for param in layer.parameters()}
        self._params = list(by_number.values())
        self._halves = [torch.zeros_like(param, dtype=dtype).requires_grad_() for param in self._params]
        by_id = {id(param): half for param, half in zip(self._params, self._halves, strict=True)}
        for layer in layers:
            bias = None if layer.bias is None else by_id[id(layer.bias)]
            layer.forward = partial(_linear, self, layer, by_id[id(layer.weight)], bias)  # type: ignore[method-assign]

    @property
    def params(self) -> list[torch.Tensor]:
        """Those whose halves the layers compute with."""
        return list(self._params)

    @property
    def dtype(self) -> torch.dtype:
        """What they are rounded to."""
        return self._halves[0].dtype

    def begin(self) -> None:
        """A pass begins: what layers compute with is rounded from what the parameters are now."""
        with torch.no_grad():
            torch._foreach_copy_(self._halves, self._params)
        self.is_in_use = True

    def end(self) -> None:
        """The backward pass is over: the parameters get the gradients."""
        self.is_in_use = False
        pairs = [
            (param, half.grad)
            for param, half in zip(self._params, self._halves, strict=True)
            if half.grad is not None
        ]
        if self.flat is not None and self.flat.take({id(param): gradient for param, gradient in pairs}):
            pairs = [(param, gradient) for param, gradient in pairs if not self.flat.has(param)]
        wide = [self._room_of(param) for param, _ in pairs]
        if wide:
            torch._foreach_copy_(wide, [gradient for _, gradient in pairs])
        for (param, _), gradient in zip(pairs, wide, strict=True):
            param.grad = gradient if param.grad is None else param.grad.add_(gradient)
        for half in self._halves:
            half.grad = None

    def _room_of(self, param: torch.Tensor) -> torch.Tensor:
        room = self.rooms.get(id(param)) if param.grad is None else None
        return torch.empty_like(param) if room is None else room


def half_weights(replica: Replica) -> HalfWeights | None:
    """Those of a replica that computes in half precision throughout; None where there are none."""
    if replica.precision.kind not in _DTYPES or replica.task.skip_loss_below is not None:
        return None
    trained = {id(param) for param in replica.trained.values()}
    return HalfWeights(replica) if _casting_alone(replica.module, trained) else None


def _casting_alone(module: nn.Module, trained: set[int]) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear) and _casts_alone(part, trained)]


def _casts_alone(layer: nn.Linear, trained: set[int]) -> bool:
    """Whether all that a layer does with its parameters is known, and nobody looks on."""
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and all(
            id(param) in trained
            and param.dtype == torch.float32
            and not param._backward_hooks
            and not param._post_accumulate_grad_hooks
            for param in layer.parameters()
        )
    )


def _linear(
    halves: HalfWeights, layer: nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor
) -> torch.Tensor:
    """A linear layer's forward pass; outside of training, and where the model asks for full precision, its own."""
    if halves.is_in_use and torch.is_autocast_enabled(inputs.device.type):
        return F.linear(inputs, weight, bias)
    return F.linear(inputs, layer.weight, layer.bias)
