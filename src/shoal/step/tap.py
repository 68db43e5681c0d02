"""Take each gradient as soon as autograd has it and put it where the other processes can read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.model.products import Products


class GradientTap:
    """Hooks on the parameters that move gradients to a slot's views.

    Autograd hands over a fresh buffer for each gradient; copying it out while it is warm and letting it go
    costs less than accumulating into a zeroed view, and shows which parameters got a gradient at all.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._handles = [
            param.register_post_accumulate_grad_hook(self._taker(number)) for number, param in enumerate(params)
        ]
        self._views: list[torch.Tensor] = []
        self._touched: Any = None
        self._in_backward = False
        self.on_taken: Callable[[int], None] | None = None
        """Told the number of each parameter whose gradient is complete, in the order of the backward pass."""

    def aim(self, views: list[torch.Tensor], touched: Any) -> None:
        """Send gradients to these views from now on; `touched` remembers which came."""
        touched[:] = 0
        self._views, self._touched = views, touched

    def keep(self) -> Callable[[], None]:
        """Note where gradients go; what is returned sends them there again."""
        aim = self._views, self._touched, self._in_backward

        def put_back() -> None:
            self._views, self._touched, self._in_backward = aim

        return put_back

    def _taker(self, number: int) -> Callable[[torch.Tensor], None]:
        def take(param: torch.Tensor) -> None:
            gradient, param.grad = param.grad, None
            if gradient is not None:  # else it has been taken as a product
                self._store(number, gradient)
            if self.on_taken is not None:
                if param.is_cuda:
                    torch.cuda.current_stream().synchronize()  # it is to be sent now
                self.on_taken(number)

        return take

    def _store(self, number: int, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        # Pieces of a slot add up in their order, as autograd adds them up in one process; the first is copied,
        # since adding it to zeros would make 0.0 of -0.0.
        view = self._views[number]
        if self._touched[number]:
            view.add_(gradient.to(view.device))  # what a GPU sent before is there when this is
        else:
            view.copy_(gradient, non_blocking=True)  # a GPU sends it while it computes the next ones
            self._touched[number] = 1

    def backward(self, loss: torch.Tensor, share: torch.Tensor | None) -> None:
        """The strategy's own backward pass: the one whose gradients belong in the views."""
        self._in_backward = True
        try:
            loss.backward(share)
        finally:
            self._in_backward = False
        if loss.is_cuda:
            torch.cuda.current_stream().synchronize()

    def take_product(self, number: int, products: Products, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Compute a gradient `left @ right` in its place; False where autograd must have it.

        That is in a pass of the user's own (inside a forward or an objective), and while a graph of the
        backward pass is being made.
        """
        if not self._in_backward or torch.is_grad_enabled():
            return False
        view = self._views[number]
        if self._touched[number]:
            products.add(view, left, right)
        else:
            products.put(view, left, right)
            self._touched[number] = 1
        return True

    def close(self) -> None:
        """Let autograd keep its gradients again."""
        for handle in self._handles:
            handle.remove()
