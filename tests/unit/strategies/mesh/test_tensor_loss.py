"""Scores that are cut by vocabulary: the loss is computed on parts, everything else on the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import ThreadGroup, together
from shoal.strategies.mesh.tensor.loss import VocabularyScores

SCORES = 4 * torch.randn(3, 5, 12, dtype=torch.float64)
TARGET = torch.tensor([[0, 11, 3, -100, 6], [7, 2, 2, 5, 9], [-100, 1, 4, 10, 8]])


class Counting:
    """A worker that counts how many numbers pass between it and the others."""

    def __init__(self, worker: ThreadGroup) -> None:
        self._worker = worker
        self.index, self.size = worker.index, worker.size
        self.gathered = 0

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        return self._worker.all_reduce_(tensor)

    def max_(self, tensor: Tensor) -> Tensor:
        return self._worker.max_(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self.gathered += tensor.numel()
        return self._worker.all_gather(tensor)


def on_parts(use: Callable[[Tensor], Tensor], count: int) -> list[tuple[Tensor, Tensor, int]]:
    """What is made of cut scores, the gradient of each worker's part, and how many numbers were gathered."""

    def act(worker: ThreadGroup) -> tuple[Tensor, Tensor, int]:
        local = SCORES.chunk(count, -1)[worker.index].clone().requires_grad_()
        counting = Counting(worker)
        found = use(VocabularyScores.wrap(local, counting))
        grad = torch.zeros_like(local)
        if found.requires_grad:
            (grad,) = torch.autograd.grad(found.sum(), [local])
        return found.detach(), grad, counting.gathered

    return together(count, act)


def require_same(use: Callable[[Tensor], Tensor], count: int, *, gathers: bool) -> None:
    whole = SCORES.clone().requires_grad_()
    wanted = use(whole)
    grad = torch.zeros_like(whole)
    if wanted.requires_grad:
        (grad,) = torch.autograd.grad(wanted.sum(), [whole])
    for index, (found, part, gathered) in enumerate(on_parts(use, count)):
        torch.testing.assert_close(found, wanted.detach())
        torch.testing.assert_close(part, grad.chunk(count, -1)[index])
        assert bool(gathered) is gathers


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda scores: F.cross_entropy(scores.flatten(0, 1), TARGET.flatten()),
    "view": lambda scores: F.cross_entropy(scores.view(-1, scores.size(-1)), TARGET.view(-1), reduction="sum"),
    "shifted": lambda scores: F.cross_entropy(
        scores[..., :-1, :].contiguous().view(-1, 12), TARGET[:, 1:].reshape(-1), reduction="none"
    ),
    "module": lambda scores: nn.CrossEntropyLoss(ignore_index=2)(
        scores.reshape((15, 12)), TARGET.flatten().clamp(0)
    ),
    "cast": lambda scores: F.cross_entropy(scores[:, 1:3].flatten(0, 1).float(), TARGET[:, 1:3].flatten()),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda scores: scores.argmax(-1),
    "log_softmax": lambda scores: F.nll_loss(scores.log_softmax(-1).flatten(0, 1), TARGET.flatten()),
    "smoothing": lambda scores: F.cross_entropy(scores.flatten(0, 1), TARGET.flatten(), label_smoothing=0.1),
    "transposed": lambda scores: F.cross_entropy(scores.transpose(1, 2), TARGET),
    "last dimension": lambda scores: scores[..., :7] * 2,
    "all flat": lambda scores: scores.flatten(1),
    "arithmetic": lambda scores: 3 - scores / scores.abs().max(),
}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_on_parts(name: str, count: int) -> None:
    require_same(LOSSES[name], count, gathers=False)


@pytest.mark.parametrize("name", OTHERS)
def test_other_uses_see_the_whole(name: str) -> None:
    require_same(OTHERS[name], 2, gathers=True)


def test_it_looks_whole() -> None:
    def act(worker: ThreadGroup) -> None:
        scores = VocabularyScores.wrap(SCORES.chunk(2, -1)[worker.index], worker)
        assert scores.shape == SCORES.shape and scores.dtype == SCORES.dtype and len(scores) == 3
        assert isinstance(scores, Tensor) and "part" in repr(scores)

    together(2, act)
