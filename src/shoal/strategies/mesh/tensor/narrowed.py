"""For attention that takes its width from the shape of its input, as in `batch, length, width = x.shape`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


class NarrowedInput(torch.Tensor):
    """Says that its last dimension is as wide as one worker's part, and is whole in everything else."""

    whole: torch.Tensor

    @staticmethod
    def wrap(whole: torch.Tensor, count: int) -> NarrowedInput:
        """The input of a block that so many workers share."""
        shape = (*whole.shape[:-1], whole.shape[-1] // count)
        narrowed = torch.Tensor._make_wrapper_subclass(
            NarrowedInput, shape, dtype=whole.dtype, device=whole.device, requires_grad=whole.requires_grad
        )
        narrowed.whole = whole
        return narrowed

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.Tensor.size, getattr(torch.Tensor.shape, "__get__", None)):
            return super().__torch_function__(func, types, args, kwargs or {})
        return func(*tree_map(unwrapped, tuple(args)), **tree_map(unwrapped, dict(kwargs or {})))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reached only past `__torch_function__`, by code that is not Python."""
        return func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))


def unwrapped(value: Any) -> Any:
    """The whole tensor."""
    return value.whole if isinstance(value, NarrowedInput) else value


def narrow_inputs(block: nn.Module, width: int, count: int) -> Any:
    """Let a block see inputs of this width as narrow as its parts are; what is returned can be removed."""

    def narrow(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[-1:] == (width,):
            return NarrowedInput.wrap(value, count)
        return value

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tree_map(narrow, args), tree_map(narrow, kwargs)

    return block.register_forward_pre_hook(hook, with_kwargs=True)
