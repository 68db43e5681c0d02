"""One stage's passes over the micro-batches of a step: what is kept between forward and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from shoal.strategies.cut.packing import tensors_in

Gradient = torch.Tensor | float
"""A number is the gradient of every element: a loss's share of the whole batch's."""


@dataclass
class _Kept:
    """Of one micro-batch."""

    entered: list[torch.Tensor]
    """What came in and is differentiable."""
    left: list[torch.Tensor]
    """What went out and is differentiable."""
    gradients: list[Gradient] = field(default_factory=list)
    """Of what went out, where the whole backward pass is left to the weights' part."""
    groups: list[dict[str, Any]] | None = None
    """What the weights' part of the backward pass begins with."""


class StageRun:
    """A stage's computations; it talks to nobody."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._kept: dict[int, _Kept] = {}
        self._splits: bool | None = None

    @property
    def _weights(self) -> list[nn.Parameter]:
        """Looked up when they are needed: layers get other ones while a model is cut."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def forward(
        self, number: int, entered: Sequence[Any], given: Mapping[str, Any], finish: Callable[[Any], Any] | None
    ) -> Any:
        """What the stage makes of a micro-batch; `finish` is the end of it, such as the loss."""
        left = self.module(entered, given)
        if finish is not None:
            left = finish(left)
        if torch.is_grad_enabled():
            self._kept[number] = _Kept(_differentiable(entered), _differentiable(left))
        return left

    def backward(self, number: int, gradients: Sequence[Gradient]) -> list[torch.Tensor]:
        """The gradients of the weights, and of what came in."""
        return _whole_backward(self._kept.pop(number), gradients)

    def backward_input(self, number: int, gradients: Sequence[Gradient]) -> list[torch.Tensor]:
        """The gradients of what came in; the weights' are left for later."""
        kept = self._kept[number]
        if not kept.entered:
            kept.gradients = list(gradients)  # nobody waits for any part of it
            return []
        if not kept.left or not self._can_split(kept):
            found, kept.left = _whole_backward(kept, gradients), []
            return found
        # Torch detaches them in place, which a view cannot be, nor what a layer (a ReLU) has saved for itself.
        left = [tensor.clone() for tensor in kept.left]
        _, kept.groups = stage_backward_input(
            left, _as_tensors(gradients, left), list(kept.entered), iter(self._weights)
        )
        kept.left = []
        return _take_gradients(kept.entered)

    def backward_weight(self, number: int) -> None:
        """What `backward_input` has left."""
        kept = self._kept.pop(number)
        if kept.groups is not None:
            stage_backward_weight(iter(self._weights), kept.groups)
        elif kept.left:
            _whole_backward(kept, kept.gradients)

    def _can_split(self, kept: _Kept) -> bool:
        """Whether all that went out depends on what came in: torch's split forgets weights where it does not."""
        if self._splits is None:
            self._splits = all(_depends(tensor, kept.entered) for tensor in kept.left)
        return self._splits


def _differentiable(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def _depends(tensor: torch.Tensor, on: Sequence[torch.Tensor]) -> bool:
    sought = {get_gradient_edge(one).node for one in on}
    seen: set[Node] = set()
    rest = [get_gradient_edge(tensor).node]
    while rest:
        node = rest.pop()
        if node in sought:
            return True
        if node not in seen:
            seen.add(node)
            rest += [before for before, _ in node.next_functions if before is not None]
    return False


def _whole_backward(kept: _Kept, gradients: Sequence[Gradient]) -> list[torch.Tensor]:
    if kept.left:
        torch.autograd.backward(kept.left, _as_tensors(gradients, kept.left))
    return _take_gradients(kept.entered)


def _as_tensors(gradients: Sequence[Gradient], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        gradient if isinstance(gradient, torch.Tensor) else torch.full_like(tensor, gradient)
        for gradient, tensor in zip(gradients, like, strict=True)
    ]


def _take_gradients(entered: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in entered]
    for tensor in entered:
        tensor.grad = None
    return found
