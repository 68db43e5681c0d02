"""The cross entropy of a large vocabulary, together with the linear layer before it, a piece of rows at a time.

The scores of all rows for all words are often the largest thing in a step. Here those of a piece are made, and all
that follows from them (losses, and the gradients of the layer's input and weight) before the next piece takes
their memory: they never exist as a whole. Gradients are made in the forward pass, for a loss that counts once; the
backward pass multiplies them by what it counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from shoal.errors import SpecError

_PIECE_BYTES = {"cpu": 8 << 20, "cuda": 2 << 30}
"""Of the scores of a piece: on a CPU they stay in its cache; on a GPU they are enough to keep it busy."""
_FEWEST_ROWS = 64
IGNORED = -100

Piece = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    rows: int | None = None,
) -> torch.Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), target)` with little memory, and often faster.

    `hidden` has a row of numbers for each target, in any number of dimensions. `rows` are taken at a time; by
    default as many as fit well. Under autocast products are computed as `F.linear` would.
    """
    if reduction not in ("mean", "sum"):
        raise SpecError(f"linear_cross_entropy: reduction must be mean or sum, found {reduction!r}.")
    if hidden.shape[:-1] != target.shape:
        raise SpecError(
            f"linear_cross_entropy: hidden must have a row for each target, found shapes {tuple(hidden.shape)} "
            f"and {tuple(target.shape)}."
        )
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    if rows is None:
        rows = piece_rows(weight.shape[0], hidden.device.type)
    total: torch.Tensor = _InPieces.apply(flat, weight, bias, wanted, ignore_index, rows)
    return total if reduction == "sum" else total / (wanted != ignore_index).sum()


def piece_rows(vocabulary: int, device: str) -> int:
    """Rows of one piece: a power of two."""
    fitting = _PIECE_BYTES.get(device, _PIECE_BYTES["cpu"]) // (4 * vocabulary)
    return 1 << max(fitting, _FEWEST_ROWS).bit_length() - 1


class _InPieces(torch.autograd.Function):
    """The sum of the losses of all rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        ignored: int,
        rows: int,
    ) -> torch.Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        with torch.autocast(kind, enabled=False):
            found = _all_pieces(hidden.to(dtype), weight, bias, target, ignored, rows, ctx.needs_input_grad)
        total, *gradients = found
        like = (hidden, weight, bias)
        gradients = [g if g is None or t is None else g.to(t.dtype) for g, t in zip(gradients, like, strict=True)]
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        scaled = (None if saved is None else saved * gradient for saved in ctx.saved_tensors)
        return *scaled, None, None, None


def _all_pieces(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignored: int,
    rows: int,
    needs: tuple[bool, ...],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    narrow = weight.detach().to(hidden.dtype)
    added = None if bias is None else bias.detach().to(hidden.dtype)
    for_hidden = torch.empty_like(hidden) if needs[0] else None
    for_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs[1] else None
    for_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if bias is not None else None
    total = torch.zeros((), dtype=wide, device=hidden.device)
    room = None
    if hidden.dtype == wide and hidden.device.type == "cpu":
        room = hidden.new_empty(min(rows, len(hidden)), len(narrow))
    for start in range(0, len(hidden), rows):
        part = hidden[start : start + rows]
        scores = _scores(part, narrow, added, None if room is None else room[: len(part)])
        loss, slopes = _piece(scores, target[start : start + rows], ignored)
        total += loss
        slopes = slopes.to(hidden.dtype)
        if for_hidden is not None:
            torch.mm(slopes, narrow, out=for_hidden[start : start + rows])
        if for_weight is not None and for_weight.dtype == slopes.dtype:
            for_weight.addmm_(slopes.t(), part)
        elif for_weight is not None:
            for_weight += slopes.t() @ part
        if for_bias is not None:
            for_bias += slopes.sum(0, dtype=wide)
    return total, for_hidden, for_weight, for_bias


def _scores(
    part: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, room: torch.Tensor | None
) -> torch.Tensor:
    if room is None:
        return F.linear(part, weight, bias)
    torch.mm(part, weight.t(), out=room)
    return room if bias is None else room.add_(bias)


def _piece(scores: torch.Tensor, target: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of losses, and the scores' gradients, in their memory where they are wide enough."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    counts = target != ignored
    wanted = torch.where(counts, target, 0)[:, None]
    norms = torch.logsumexp(scores, 1, keepdim=True)
    loss = torch.where(counts, (norms - scores.gather(1, wanted)).squeeze(1), 0.0).sum()
    slopes = scores.sub_(norms).exp_()
    slopes.scatter_add_(1, wanted, torch.full_like(norms, -1.0))
    return loss, slopes.mul_(counts[:, None])


def fuse_pieces() -> None:
    """Let torch compile what is done with a piece's scores; for GPUs, where that is many passes over memory."""
    global _piece
    if not hasattr(_piece, "_torchdynamo_orig_callable"):
        _piece = torch.compile(_fusible_piece, dynamic=False)


def _fusible_piece(scores: torch.Tensor, target: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_piece`, with nothing written in its place, and the gradients as narrow as the scores."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    counts = target != ignored
    wanted = torch.where(counts, target, 0)[:, None]
    norms = torch.logsumexp(wide, 1, keepdim=True)
    loss = torch.where(counts, (norms - wide.gather(1, wanted)).squeeze(1), 0.0).sum()
    words = torch.arange(wide.shape[1], device=wide.device)
    slopes = (torch.exp(wide - norms) - (words == wanted).to(wide.dtype)) * counts[:, None]
    return loss, slopes.to(scores.dtype)
