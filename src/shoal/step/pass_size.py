"""What a forward and backward pass makes besides parameters, seen by running one.

On tensors without values, where the task's code lets itself be run on them; else on real ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.model.precision import Precision
from shoal.model.recompute import recompute_blocks
from shoal.model.replica import call_model
from shoal.spec import Task
from shoal.spec.model_size import PassSize
from shoal.step.compute import check_loss, split_batch


def pass_without_values(
    task: Task, batch: Any, *, precision: str = "fp32", recompute: bool = False, numerics: str = "task"
) -> PassSize | None:
    """Of a model that is made for this, without values; None where the task's code asks for some."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            module = task.model()
            if numerics == "float64":
                module.double()
            if recompute:
                recompute_blocks(module)
            return measure_pass(task, module, tree_map_only(torch.Tensor, mode.from_tensor, batch), precision)
    except Exception:  # whatever is wrong with the task is told where it is made in earnest
        return None


def measure_pass(task: Task, module: nn.Module, batch: Any, precision: str = "fp32") -> PassSize:
    """Of this model, whose gradients are left empty, and whose buffers may move."""
    module.train()
    with _widest_result(module) as widest, _gradients_taken(module):
        activations = _most_made(task, module, batch, precision)
    with_gradients = _most_made(task, module, batch, precision)
    module.zero_grad(set_to_none=True)
    return PassSize(
        activations=activations,
        with_gradients=with_gradients,
        batch=sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)),
        widest=widest[0],
    )


def _most_made(task: Task, module: nn.Module, batch: Any, precision: str) -> int:
    known = [*module.parameters(), *module.buffers(), *tree_leaves(batch)]
    with StorageTally(tensor for tensor in known if isinstance(tensor, torch.Tensor)) as tally:
        with Precision(precision).autocast():
            loss = _loss(task, module, batch)
        if loss.requires_grad:
            loss.backward()
        del loss
    return tally.most


def _loss(task: Task, module: nn.Module, batch: Any) -> torch.Tensor:
    if task.objective is not None:
        return check_loss(task.objective(module, batch))
    inputs, target = split_batch(batch)
    assert task.loss is not None
    return check_loss(task.loss(call_model(module, inputs), target))


class StorageTally(TorchDispatchMode):
    """Counts the bytes that operations make and nobody has let go of yet; what was there before is left out."""

    def __init__(self, known: Iterator[torch.Tensor]) -> None:
        super().__init__()
        self.most = 0
        self._now = 0
        self._counted = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._counted:
            return
        self._counted.add(storage._cdata)
        self._now += storage.nbytes()
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._let_go, storage._cdata, storage.nbytes()).atexit = False

    def _let_go(self, address: int, num_bytes: int) -> None:
        self._counted.discard(address)
        self._now -= num_bytes


@contextmanager
def _gradients_taken(module: nn.Module) -> Iterator[None]:
    """Let no gradient stay, as where each goes elsewhere as soon as it is there."""

    def take(param: torch.Tensor) -> None:
        param.grad = None

    handles = [p.register_post_accumulate_grad_hook(take) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _widest_result(module: nn.Module) -> Iterator[list[int]]:
    """Notes the bytes of the largest result of any layer without layers of its own."""
    widest = [0]

    def note(layer: nn.Module, inputs: Any, output: Any) -> None:
        found = (leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        widest[0] = max(widest[0], *found, 0)

    leaves = [layer for layer in module.modules() if not any(True for _ in layer.children())]
    handles = [layer.register_forward_hook(note) for layer in leaves]
    try:
        yield widest
    finally:
        for handle in handles:
            handle.remove()
