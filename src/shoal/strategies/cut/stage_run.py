"""One stage's passes over the micro-batches of a step: what is kept between forward and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from shoal.strategies.cut.packing import tensors_in

StageCall = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""What a stage computes, from what other stages carry over, and what the model is given."""
Gradient = torch.Tensor | float | None
"""A number is the gradient of every element: a loss's share of the whole batch's. None: nobody has found one."""


@dataclass
class _Kept:
    """Of one micro-batch."""

    entered: list[list[torch.Tensor]]
    """By result that came in: what of it is differentiable."""
    left: list[torch.Tensor]
    """What went out and is differentiable."""
    gradients: Sequence[Gradient] = ()
    """Of what went out, where the whole backward pass is left to the weights' part."""
    groups: list[dict[str, Any]] | None = None
    """What the weights' part of the backward pass begins with."""

    @property
    def all_entered(self) -> list[torch.Tensor]:
        return [tensor for result in self.entered for tensor in result]


class StageRun:
    """A stage's computations; it talks to nobody."""

    def __init__(self, stage: StageCall, weights: Callable[[], Iterable[nn.Parameter]]) -> None:
        """`weights` is asked when they are needed: layers get other ones while a model is cut."""
        self._stage = stage
        self._parameters = weights
        self._kept: dict[int, _Kept] = {}
        self._splits: bool | None = None

    @property
    def _weights(self) -> Iterator[nn.Parameter]:
        return (p for p in self._parameters() if p.requires_grad)

    def forward(
        self,
        number: int,
        entered: Sequence[Sequence[Any]],
        given: Mapping[str, Any],
        finish: Callable[[Any], Any] = lambda result: result,
    ) -> Any:
        """What the stage makes of a micro-batch, from the results of other stages; `finish` is the end of it, such
        as the loss."""
        left = finish(self._stage([value for result in entered for value in result], given))
        if torch.is_grad_enabled():
            self._kept[number] = _Kept([_differentiable(result) for result in entered], _differentiable(left))
        return left

    def num_left(self, number: int) -> int:
        """How many tensors went out that a gradient may come back for."""
        return len(self._kept[number].left)

    def backward(self, number: int, gradients: Sequence[Gradient]) -> list[list[Gradient]]:
        """The gradients of the weights, and of what came in, by result."""
        return _whole_backward(self._kept.pop(number), gradients)

    def backward_input(self, number: int, gradients: Sequence[Gradient]) -> list[list[Gradient]]:
        """The gradients of what came in; the weights' are left for later."""
        kept = self._kept[number]
        if not kept.all_entered:
            kept.gradients = gradients  # nobody waits for any part of it
            return [[] for _ in kept.entered]
        if not kept.left or not self._can_split(kept):
            found, kept.left = _whole_backward(kept, gradients), []
            return found
        # Torch detaches them in place, which a view cannot be, nor what a layer (a ReLU) has saved for itself.
        left, grads = _with_gradients([tensor.clone() for tensor in kept.left], gradients)
        _, kept.groups = stage_backward_input(left, grads, kept.all_entered, self._weights)
        kept.left = []
        return _take_gradients(kept.entered)

    def backward_weight(self, number: int) -> None:
        """What `backward_input` has left."""
        kept = self._kept.pop(number)
        if kept.groups is not None:
            stage_backward_weight(self._weights, kept.groups)
        elif kept.left:
            _whole_backward(kept, kept.gradients)

    def _can_split(self, kept: _Kept) -> bool:
        """Whether all that went out depends on what came in: torch's split forgets weights where it does not."""
        if self._splits is None:
            self._splits = all(_depends(tensor, kept.all_entered) for tensor in kept.left)
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


def _whole_backward(kept: _Kept, gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    if kept.left:
        left, grads = _with_gradients(kept.left, gradients)
        if left:
            torch.autograd.backward(left, grads)
    return _take_gradients(kept.entered)


def _with_gradients(
    left: Sequence[torch.Tensor], gradients: Sequence[Gradient]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that have a gradient, and these."""
    pairs = [(tensor, grad) for tensor, grad in zip(left, gradients, strict=True) if grad is not None]
    return [tensor for tensor, _ in pairs], [
        grad if isinstance(grad, torch.Tensor) else torch.full_like(tensor, grad) for tensor, grad in pairs
    ]


def _take_gradients(entered: Sequence[Sequence[torch.Tensor]]) -> list[list[Gradient]]:
    found: list[list[Gradient]] = [[tensor.grad for tensor in result] for result in entered]
    for result in entered:
        for tensor in result:
            tensor.grad = None
    return found
