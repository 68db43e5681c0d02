"""Scores over a vocabulary of which each worker has a part, and a cross entropy that never puts them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from shoal.comm.group import Group
from shoal.strategies.mesh.splits import Split
from shoal.strategies.mesh.tensor.collectives import gather

_LAST = Split(-1)


class VocabularyScores(torch.Tensor):
    """Looks like the whole scores, and holds this worker's part of their last dimension.

    Reshapes that leave the last dimension alone, casts and `F.cross_entropy` work on the part; whatever else is
    done with it, it is gathered first. All workers must do the same with it, as they do with everything.
    """

    local: torch.Tensor
    workers: Group

    @staticmethod
    def wrap(local: torch.Tensor, workers: Group) -> VocabularyScores:
        """The scores of which this worker has `local`."""
        shape = (*local.shape[:-1], local.shape[-1] * workers.size)
        scores = torch.Tensor._make_wrapper_subclass(
            VocabularyScores, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        scores.local, scores.workers = local, workers
        return scores

    def whole(self) -> torch.Tensor:
        """All scores, as an ordinary tensor."""
        return gather(self.local, _LAST, self.workers)

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
        handler = _ON_PARTS.get(func)
        if handler is not None and isinstance(args[0], VocabularyScores):
            found = handler(*args, **kwargs)
            if found is not None:
                return found
        return func(*tree_map(_whole, tuple(args)), **tree_map(_whole, dict(kwargs)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Reached only past `__torch_function__`, by code that is not Python."""
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"VocabularyScores(shape={tuple(self.shape)}, part {self.workers.index} of {self.workers.size})"


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, VocabularyScores) else value


def _cast(scores: VocabularyScores, *args: Any, **kwargs: Any) -> VocabularyScores | None:
    if any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
        return None
    return VocabularyScores.wrap(scores.local.to(*args, **kwargs), scores.workers)


def _as_float(scores: VocabularyScores) -> VocabularyScores:
    return VocabularyScores.wrap(scores.local.float(), scores.workers)


def _same(scores: VocabularyScores, **_: Any) -> VocabularyScores:
    return scores


def _register_hook(scores: VocabularyScores, hook: Callable[[torch.Tensor], Any]) -> Any:
    """A backward pass comes by the part alone."""
    return scores.local.register_hook(hook)


def _reshape(scores: VocabularyScores, *sizes: Any, **kwargs: Any) -> VocabularyScores | None:
    shape = list(sizes[0] if sizes and isinstance(sizes[0], (tuple, list)) else sizes)
    if kwargs or not shape or not all(isinstance(size, int) for size in shape):
        return None
    if shape.count(-1) == 1:
        known = -torch.Size(shape).numel()
        if known <= 0 or scores.numel() % known:
            return None
        shape[shape.index(-1)] = scores.numel() // known
    if shape[-1] != scores.shape[-1]:
        return None
    return VocabularyScores.wrap(scores.local.reshape(*shape[:-1], scores.local.shape[-1]), scores.workers)


def _flatten(scores: VocabularyScores, start_dim: int = 0, end_dim: int = -1) -> VocabularyScores | None:
    if end_dim % scores.dim() == scores.dim() - 1:
        return None
    return VocabularyScores.wrap(scores.local.flatten(start_dim, end_dim), scores.workers)


def _select(scores: VocabularyScores, index: Any) -> VocabularyScores | None:
    """Some of the rows, as `scores[:, :-1]` or `scores[..., :-1, :]` choose them."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(item, (slice, type(...))) for item in items) or items.count(...) > 1:
        return None
    named = len(items) - items.count(...)
    reaches_last = ... in items or named == scores.dim()
    if reaches_last and items[-1] is not ... and items[-1] != slice(None):
        return None
    return VocabularyScores.wrap(scores.local[index], scores.workers)


def _cross_entropy(
    scores: VocabularyScores,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not is_plain or scores.dim() != 2 or target.dim() != 1:
        return None
    local = scores.local.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores.local
    losses = ParallelCrossEntropy.apply(local, target, ignore_index, scores.workers)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


class ParallelCrossEntropy(Function):
    """By row, from each worker's part of the scores; what is ignored counts zero. Two small sums pass between
    workers, whatever the size of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, target: torch.Tensor, ignored: int, workers: Group) -> torch.Tensor:
        columns = local.shape[-1]
        highest = workers.max_(local.amax(-1))
        powers = (local - highest.unsqueeze(-1)).exp()
        counts = target != ignored
        own = target - workers.index * columns
        is_here = counts & (own >= 0) & (own < columns)
        own = own.masked_fill(~is_here, 0)
        picked = local.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0)
        total, score = workers.all_reduce_(torch.stack([powers.sum(-1), picked])).unbind()
        ctx.save_for_backward(powers.div_(total.unsqueeze(-1)), own, is_here, counts)
        return (total.log() + highest - score).masked_fill(~counts, 0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        shares, own, is_here, counts = ctx.saved_tensors
        each = (grads[0] * counts).unsqueeze(-1)
        found = shares * each
        found.scatter_add_(-1, own.unsqueeze(-1), -each * is_here.unsqueeze(-1))
        return found, None, None, None


_ON_PARTS: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.view: _reshape,
    torch.Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    torch.Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    torch.Tensor.__getitem__: _select,
    torch.Tensor.contiguous: _same,
    torch.Tensor.float: _as_float,
    torch.Tensor.to: _cast,
    torch.Tensor.register_hook: _register_hook,
    F.cross_entropy: _cross_entropy,
}
_ABOUT = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda")
    ),
}
"""Questions that the whole's shape and type answer."""
