"""What passes between cut layers (a residual stream), of which each worker has a part of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shoal.comm.group import Group
from shoal.strategies.mesh.tensor.collectives import copy_in
from shoal.strategies.mesh.tensor.narrowed import unwrapped
from shoal.strategies.mesh.tensor.sequence_collectives import cut_rows, enter_rows, join_rows, rows_of
from shoal.strategies.mesh.tensor.token_wise import RowsTensor, on_parts


class SequencePart(RowsTensor):
    """Looks like the whole, and holds this worker's rows of the dimension before last.

    What treats every token by itself (norms, sums, dropout) works on the part; whatever else is done with it, it
    is gathered first. All workers must do the same with it, as they do with everything.
    """

    _whole: torch.Tensor | None
    _entered: torch.Tensor | None
    _version_seen: int
    _is_replaced: bool

    @staticmethod
    def wrap(local: torch.Tensor, length: int, workers: Group) -> SequencePart:
        """The tensor of so many rows of which this worker has `local`."""
        part: SequencePart = _Wrap.apply(local, length, workers)
        part.local = local
        return part

    @staticmethod
    def cut(whole: torch.Tensor, workers: Group) -> SequencePart:
        """The part of a tensor that all workers have."""
        return SequencePart.wrap(cut_rows(whole, workers), whole.shape[-2], workers)

    def alike(self, local: torch.Tensor) -> SequencePart:
        return SequencePart.wrap(local, self.length, self.workers)

    @property
    def is_part(self) -> bool:
        """Not once the whole has been changed in place, nor where it does not know the way back."""
        if self._is_past_functions:
            return False
        if self._whole is None:
            return True
        return not self._whole.is_inference() and self._whole._version == self._version_seen

    @property
    def _is_past_functions(self) -> bool:
        """Whether it was put out by a function with its own way back, which only the whole knows."""
        return self.requires_grad and not self.local.requires_grad

    def whole(self) -> torch.Tensor:
        """All rows, as an ordinary tensor. It is kept, for code may change it, or a view of it, in place."""
        if self._whole is None:
            # It needs its way back even where somebody looks at it without gradients first.
            with torch.set_grad_enabled(self.requires_grad):
                if self._is_past_functions:
                    self._whole = _Unwrap.apply(self)
                else:
                    self._whole = join_rows(self.local, self.length, self.workers)
            self._version_seen = 0 if self._whole.is_inference() else self._whole._version
        return self._whole

    def entered(self) -> torch.Tensor:
        """All rows, for layers of which each worker has a part; gathered once, however many these are."""
        if not self.is_part:
            return copy_in(self.whole(), self.workers)
        if self._entered is None:
            with torch.set_grad_enabled(self.local.requires_grad):
                self._entered = enter_rows(self.local, self.length, self.workers)
        return self._entered

    def replace_local(self, local: torch.Tensor) -> bool:
        """False where the whole is known to somebody already, or would have another shape."""
        if self._whole is not None or local.shape != self.local.shape:
            return False
        self.local, self._entered, self._is_replaced = local, None, True
        return True

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            return super().__torch_function__(func, types, args, kwargs)
        found = on_parts(func, args, kwargs)
        if found is not None:
            return found
        return func(*tree_map(whole_of, tuple(args)), **tree_map(whole_of, dict(kwargs)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reached only past `__torch_function__`, by code that is not Python, and by autograd itself."""
        if func is torch.ops.aten.detach.default:
            # Autograd's own, to keep it: a block that is computed again needs to know that gradients are wanted.
            local = args[0].local.detach().requires_grad_(args[0].local.requires_grad)
            return _bare(local, args[0].length, args[0].workers)
        return func(*tree_map(_checked_whole, args), **tree_map(_checked_whole, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SequencePart(shape={tuple(self.shape)}, part {self.workers.index} of {self.workers.size})"


class _Wrap(Function):
    """Ties the whole's gradient to the part, for code that does not ask `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, length: int, workers: Group) -> torch.Tensor:
        ctx.workers = workers
        return _bare(local, length, workers)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return rows_of(grads[0], ctx.workers), None, None


class _Unwrap(Function):
    """The other way round: ties the whole to what the wrapper came from."""

    @staticmethod
    def forward(ctx: Any, part: SequencePart) -> torch.Tensor:
        return join_rows(part.local, part.length, part.workers)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


def _bare(local: torch.Tensor, length: int, workers: Group) -> SequencePart:
    shape = (*local.shape[:-2], length, local.shape[-1])
    part = torch.Tensor._make_wrapper_subclass(SequencePart, shape, dtype=local.dtype, device=local.device)
    part.local, part.workers, part._whole, part._entered = local, workers, None, None
    part._version_seen, part._is_replaced = 0, False
    return part


def whole_of(value: Any) -> Any:
    """The whole of a part; all else as it is."""
    return value.whole() if isinstance(value, SequencePart) else value


def _checked_whole(value: Any) -> Any:
    if isinstance(value, SequencePart) and value._is_replaced and value.local.requires_grad:
        raise RuntimeError("a part of a sequence was changed in place before code that is not Python uses it")
    return whole_of(value)


def entered(inputs: torch.Tensor, workers: Group) -> torch.Tensor:
    """What a layer of which each worker has a part computes from: the whole, from wherever it comes."""
    inputs = unwrapped(inputs)
    return inputs.entered() if isinstance(inputs, SequencePart) else copy_in(inputs, workers)


def can_be_cut(tensor: Any, workers: Group) -> bool:
    """Whether every worker would have some of its rows."""
    return isinstance(tensor, torch.Tensor) and tensor.dim() >= 2 and tensor.shape[-2] >= workers.size


def cut_stream(block: nn.Module, width: int, workers: Group) -> Any:
    """Let a block get its part of the sequence where it is given the whole; what is returned can be removed."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        leaves, form = tree_flatten((args, kwargs))
        index = stream_of(leaves, width)
        if (
            index is not None
            and not isinstance(leaves[index], SequencePart)
            and can_be_cut(leaves[index], workers)
        ):
            leaves[index] = SequencePart.cut(leaves[index], workers)
        return tree_unflatten(leaves, form)

    return block.register_forward_pre_hook(hook, with_kwargs=True)


def stream_of(leaves: Sequence[Any], width: int) -> int | None:
    """Which of a block's arguments is the residual stream: the first of its width."""
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.shape[-1:] == (width,):
            return index if leaf.dim() >= 2 else None
    return None


def end_stream(module: nn.Module) -> Any:
    """Let what a module returns be whole; what is returned can be removed."""
    return module.register_forward_hook(lambda _, args, output: tree_map(whole_of, output))


_ABOUT = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "is_leaf", "layout")
    ),
}
"""Questions that the whole's shape and type answer."""
