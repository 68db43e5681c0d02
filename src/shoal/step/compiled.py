"""Passes that torch compiles, once for each shape of a batch.

One shape, one piece of code: torch would otherwise make code for all shapes when it meets a second one, and which
code a batch goes through, and so its last bits, would depend on which batches came before it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from shoal.errors import SpecError
from shoal.model.gathering import Asking, Gathered, Question, asked_by, now_asked
from shoal.model.replica import Replica
from shoal.model.vocabulary_loss import fuse_pieces
from shoal.step.compile_cache import one_compiles, use_cache
from shoal.step.compute import Backward, EagerCompute, ToldLoss, raw_loss, told_loss

MOST_SHAPES = 32
"""Of batches with yet other shapes the passes run as they are."""


class CompiledCompute(EagerCompute):
    """As `EagerCompute`, with the task's forward pass, loss and their backward pass compiled."""

    def __init__(self, replica: Replica, backend: str = "inductor") -> None:
        super().__init__(replica)
        use_cache()
        import torch._dynamo.config
        import torch._inductor.config

        torch._dynamo.config.recompile_limit = MOST_SHAPES
        # In this process: the pool that compiles beside it would have to be ended with whoever is killed.
        torch._inductor.config.compile_threads = 1
        if replica.device == "cpu":
            torch._inductor.config.fallback_random = True  # the numbers that are drawn are those of plain passes
        self._compiled = _compiled_loss(replica, backend)
        self._known: set[Hashable] = set()
        self._opened: ExitStack | None = None
        """What is to be left when the backward pass has been compiled, too."""

    def loss(self, batch: Any, step: int) -> ToldLoss:
        replica, batch = self._replica, self._laid_out(batch)
        key = _shape_of(batch), replica.module.training, replica.precision.numbers(step)
        if key not in self._known:
            self._known.add(key)
            self._leave()
            self._opened = ExitStack()
            self._opened.enter_context(replica.preparing())
            self._opened.enter_context(one_compiles())
            if now_asked() is not None:
                self._opened.enter_context(asked_by(Asking(_refuse_to_meet)))
        with replica.precision.autocast(step), self._explained():
            return told_loss(replica, self._compiled(batch))

    def backward(self, backward: Backward, loss: torch.Tensor, share: torch.Tensor | None) -> None:
        with self._explained():
            backward(loss, share)
        self._leave()

    def _leave(self) -> None:
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say in one sentence that it cannot be compiled; what the task's own code raises is raised as it is."""
        if self._opened is None:
            yield
            return
        from torch._dynamo.exc import TorchDynamoException

        try:
            yield
        except TorchDynamoException as error:
            self._leave()
            why = " ".join(str(error).split("\n\n")[0].split())
            raise SpecError(
                f"compile: torch could not compile the passes of {type(self._replica.module).__name__} ({why}); "
                "leave compile out, or use fast, which tries it before the run."
            ) from error
        except BaseException:
            self._leave()
            raise


def _compiled_loss(replica: Replica, backend: str) -> Callable[[Any], Any]:
    task, module = replica.task, replica.module
    if replica.form.loss_in_pieces:  # what is done with the scores is no part of it
        if replica.device != "cpu":
            fuse_pieces()
        compiled = torch.compile(module, dynamic=False, backend=backend)
        return lambda batch: raw_loss(task, compiled, batch)  # type: ignore[arg-type]

    def loss(batch: Any) -> Any:
        return raw_loss(task, module, batch)

    return torch.compile(loss, dynamic=False, backend=backend)


def _refuse_to_meet(values: torch.Tensor, question: Question) -> Gathered:
    raise SpecError(
        "Task: shoal.gather has workers meet inside a pass, but compile makes one piece of it; leave compile out."
    )


def _shape_of(batch: Any) -> Hashable:
    leaves, form = tree_flatten(batch)
    return str(form), tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.stride()) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in leaves
    )
