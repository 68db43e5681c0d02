"""`gather`: the rows of all slots in the middle of a pass, with gradients through.

A batch is cut into slots, and a loss that compares samples with each other wants all of them. So slots bring
tensors to each other at the same points of their passes. Who carries these is a matter of whoever runs the passes,
who says so with `asked_by`; where nobody does, a batch is all that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Literal, NamedTuple, overload

import torch

from shoal.errors import TaskError


class Question(IntEnum):
    """What slots meet for: all must have come for the same."""

    ROWS = 1
    """Those of `gather`."""
    GRADIENTS = 2
    """Of what `gather` gave, in the backward pass."""
    SUMS = 3
    """Numbers to add up, of the same shape in all slots: those of synchronised BatchNorm."""


class Gathered(NamedTuple):
    """What all slots have brought."""

    parts: Sequence[torch.Tensor]
    """By slot. Others read the same tensors: nobody writes to them."""
    own: int
    """Which of them is that of who asked."""

    @property
    def total(self) -> torch.Tensor:
        """Their sum, in slot order: all slots must compute with the same bits, or their copies would part."""
        found = self.parts[0].clone()
        for part in self.parts[1:]:
            found.add_(part)
        return found


Ask = Callable[[torch.Tensor, Question], Gathered]
"""Brings a tensor to the other slots and has theirs; all must call it in the same order, and equally often."""


class Asking:
    """An `Ask` inside a forward pass: who computes a block again is given the answers of the first time.

    A second question would find the others elsewhere: each goes back through its blocks at its own pace.
    """

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        """Asks whatever pass this is: for what is never computed again."""
        self._now = ask

    def __call__(self, values: torch.Tensor, question: Question) -> Gathered:
        return self._now(values, question)

    @contextmanager
    def remembering(self, answers: list[Gathered]) -> Iterator[None]:
        """The first pass through a block: ask, and keep what is answered."""

        def ask(values: torch.Tensor, question: Question) -> Gathered:
            answers.append(self.ask(values, question))
            return answers[-1]

        with self._by(ask):
            yield

    @contextmanager
    def repeating(self, answers: Sequence[Gathered]) -> Iterator[None]:
        """The second pass: the same questions have the same answers."""
        left = iter(answers)
        with self._by(lambda values, question: next(left)):
            yield

    def keep(self) -> Callable[[], None]:
        """Note in which block a slot is; what is returned brings it back there."""
        now = self._now

        def put_back() -> None:
            self._now = now

        return put_back

    @contextmanager
    def _by(self, ask: Ask) -> Iterator[None]:
        before, self._now = self._now, ask
        try:
            yield
        finally:
            self._now = before


class Nobody:
    """Whom to ask where a batch is all there is."""

    was_asked = False

    def __call__(self, values: torch.Tensor, question: Question) -> Gathered:
        self.was_asked = True
        return Gathered((values,), 0)


# Of the process and not of a thread: `gather` is called by code that is handed nothing of ours, and torch runs
# backward passes, in which blocks are computed again, in threads of its own.
_asked: Asking | None = None


@contextmanager
def asked_by(asking: Asking) -> Iterator[None]:
    """Until the end of the block, `gather` asks these slots."""
    global _asked
    before, _asked = _asked, asking
    try:
        yield
    finally:
        _asked = before


def refuse_from_now_on(why: Callable[[], Exception]) -> None:
    """Outside of such blocks `gather` fails in a pass with gradients: whoever runs it cannot answer."""
    global _asked

    def refuse(values: torch.Tensor, question: Question) -> Gathered:
        if torch.is_grad_enabled():
            raise why()
        return Gathered((values,), 0)  # an evaluation: a batch is all that there is

    _asked = Asking(refuse)


@contextmanager
def asking_nobody() -> Iterator[Nobody]:
    """A pass that belongs to no step: `gather` gives what it is given."""
    nobody = Nobody()
    with asked_by(Asking(nobody)):
        yield nobody


def now_asked() -> Asking | None:
    """Whom `gather` asks; None outside of a step."""
    return _asked


@overload
def gather(x: torch.Tensor, *, with_own: Literal[False] = False) -> torch.Tensor: ...


@overload
def gather(x: torch.Tensor, *, with_own: Literal[True]) -> tuple[torch.Tensor, slice]: ...


def gather(x: torch.Tensor, *, with_own: bool = False) -> torch.Tensor | tuple[torch.Tensor, slice]:
    """What all slots give for `x`, one behind the other in slot order: the rows of the whole batch.

    For losses that compare samples with each other, inside an objective, a loss or a model while it trains. All
    slots call it equally often and in the same order; rows may differ in number, not in shape or type. Gradients
    flow back to the slots that the rows came from. Elsewhere, as in evaluations, it gives `x` itself.

    `with_own`: also which of the rows are those of `x`, as a slice.
    """
    if not isinstance(x, torch.Tensor) or not x.dim():
        found = "a single number" if isinstance(x, torch.Tensor) else type(x).__name__
        raise TaskError(f"shoal.gather takes a tensor with a row for each sample, found {found}.")
    if (asked := _asked) is None:
        return (x, slice(0, len(x))) if with_own else x
    parts, own = asked(x.detach(), Question.ROWS)
    _check_alike(parts, own)
    start = sum(len(part) for part in parts[:own])
    rows: torch.Tensor = _Rows.apply(x, parts, start, asked)
    return (rows, slice(start, start + len(x))) if with_own else rows


def _check_alike(parts: Sequence[torch.Tensor], own: int) -> None:
    expected = parts[own]
    for slot, part in enumerate(parts):
        if (part.shape[1:], part.dtype) != (expected.shape[1:], expected.dtype):
            raise TaskError(
                f"shoal.gather puts rows of one shape and type together, but slot {own} brought {_look(expected)} "
                f"and slot {slot} {_look(part)}; pad them to one shape."
            )


def _look(rows: torch.Tensor) -> str:
    return f"{str(rows.dtype).removeprefix('torch.')} of shape {tuple(rows.shape)}"


class _Rows(torch.autograd.Function):
    """All slots' rows; what they are used for in any slot goes back to the one that brought them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, parts: Sequence[torch.Tensor], start: int, asked: Asking
    ) -> torch.Tensor:
        ctx.own, ctx.asked = slice(start, start + len(x)), asked
        return torch.cat(list(parts))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise TaskError(
                "shoal.gather has no second derivative, but create_graph=True asks for one; leave that out."
            )
        answer = ctx.asked.ask(gradients[0], Question.GRADIENTS)
        return Gathered([part[ctx.own] for part in answer.parts], answer.own).total, None, None, None
