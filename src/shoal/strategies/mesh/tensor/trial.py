"""Tries in one process whether cut layers compute what the whole ones do: each worker is a thread.

So a cut can be judged before anybody meets anybody, every process comes to the same verdict, and a wrong guess
that would leave real workers waiting for each other ends here as an error.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shoal.layout.tensor_plan import Region
from shoal.strategies.mesh.splits import Split
from shoal.strategies.mesh.tensor.building import Parts
from shoal.strategies.mesh.tensor.shapes import channels_of
from shoal.strategies.mesh.tensor.surgery import Surgery

T = TypeVar("T")
PATIENCE_S = 60.0
OWN_TOLERANCE, COMMON_TOLERANCE = 1e-3, 1e-5
"""Relative to the largest value of a tensor itself, and of all that are compared with it: rounding in float32. A
wrong cut is off by about as much as the values are large."""
_SEED = 11

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a module's call."""


class _Table:
    """Where threads meet."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=PATIENCE_S)
        self.brought: list[torch.Tensor] = [torch.empty(0)] * count


class ThreadWorker:
    """One of several threads that act as the workers of an axis."""

    def __init__(self, index: int, table: _Table) -> None:
        self.index = index
        self._table = table

    @property
    def size(self) -> int:
        return len(self._table.brought)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._table.brought[self.index] = tensor.detach().clone()
        self._table.barrier.wait()
        found = list(self._table.brought)
        self._table.barrier.wait()
        if len({one.shape for one in found}) > 1:
            raise ValueError("workers met with different shapes")
        return found

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.all_gather(tensor)).sum(0))

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.all_gather(tensor)).amax(0))

    def leave(self) -> None:
        """Nobody shall wait for this one any more."""
        self._table.barrier.abort()


def together(count: int, act: Callable[[ThreadWorker], T]) -> list[T]:
    """What so many workers return who do the same at the same time; raises what one of them raises."""
    table = _Table(count)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def live(worker: ThreadWorker) -> None:
        try:
            results[worker.index] = act(worker)
        except BaseException as error:
            errors.append(error)
            worker.leave()

    threads = [threading.Thread(target=live, args=(ThreadWorker(index, table),)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [results[index] for index in range(count)]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What a block did with its inputs."""

    outputs: list[torch.Tensor]
    """With and without gradients being kept, for these may be different code."""
    input_grads: list[torch.Tensor | None]
    grads: dict[str, torch.Tensor | None]
    """Of its parameters."""


class Trial:
    """A block that is tried with its layers cut in different ways, on inputs that it got in a real pass."""

    def __init__(self, name: str, block: nn.Module, inputs: Inputs, count: int) -> None:
        self._name, self._count, self._inputs = name, count, inputs
        self._block = _stirred(block)
        self._expected = _observe(self._block, inputs)

    def objection(self, regions: Sequence[Region]) -> str | None:
        """Why these cuts are wrong; None where they compute the same."""
        try:
            found = together(self._count, lambda worker: self._cut_and_observe(regions, worker))
        except Exception as error:  # whatever the block's code says to parts of its layers
            return f"{type(error).__name__} with parts of its layers"
        for index, (observed, splits) in enumerate(found):
            if (different := self._difference(observed, splits, index)) is not None:
                return different
        return None

    def _cut_and_observe(
        self, regions: Sequence[Region], worker: ThreadWorker
    ) -> tuple[Observed, dict[str, Split]]:
        # Whole tensors are shared by the threads, which only read them.
        tensors = (*self._block.parameters(), *self._block.buffers())
        own = copy.deepcopy(self._block, {id(tensor): tensor for tensor in tensors})
        parts = Parts(worker)
        around = nn.ModuleDict({"block": own})  # so that the block itself can be replaced
        named = dict(own.named_modules(prefix=self._name, remove_duplicate=False))
        wholes = {id(p): name for name, p in own.named_parameters()}
        surgery = Surgery(around, named, parts)
        for region in regions:
            surgery.cut_region(region)
        splits = {wholes[key]: split for key, split in parts.splits().items() if key in wholes}
        return _observe(around["block"], self._inputs), splits

    def _difference(self, found: Observed, splits: dict[str, Split], index: int) -> str | None:
        expected = self._expected
        if not _close(found.outputs, expected.outputs):
            return "its output would be another"
        if not _close(found.input_grads, expected.input_grads):
            return "the gradient of its input would be another"
        wanted = [
            grad if grad is None or name not in splits else splits[name].cut(grad, index, self._count)
            for name, grad in expected.grads.items()
        ]
        if not _close([found.grads.get(name) for name in expected.grads], wanted):
            return "gradients of its parameters would be others"
        return None


def _stirred(block: nn.Module) -> nn.Module:
    """A copy whose values are all different: zeros and ones, as layers begin with, would hide mistakes."""
    own = copy.deepcopy(block).to("cpu").eval()
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        statistics = (b for norm in own.modules() if channels_of(norm) for b in norm.buffers(recurse=False))
        for tensor in (*own.parameters(), *statistics):
            if tensor.is_floating_point() and tensor.numel():
                noise = torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
                tensor.add_(noise.mul_(0.2 * tensor.abs().mean() + 0.04))
    for param in own.parameters():
        param.requires_grad_(param.is_floating_point())
    return own


def _observe(block: nn.Module, inputs: Inputs) -> Observed:
    args, kwargs = copy.deepcopy(inputs)
    with torch.no_grad():
        passing = _tensors(block(*args, **kwargs))
    args, kwargs = tree_map(_as_leaf, copy.deepcopy(inputs))
    outputs = _tensors(block(*args, **kwargs))
    leaves = [
        leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    params = dict(block.named_parameters())
    generator = torch.Generator().manual_seed(_SEED)
    score = torch.zeros(())
    for output in outputs:
        if output.requires_grad:
            score = score + (output * torch.randn(output.shape, generator=generator).to(output.dtype)).sum()
    grads = torch.autograd.grad(score, [*leaves, *params.values()], allow_unused=True)
    return Observed(
        outputs=[output.detach() for output in (*passing, *outputs)],
        input_grads=list(grads[: len(leaves)]),
        grads=dict(zip(params, grads[len(leaves) :], strict=True)),
    )


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _as_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isfinite().all()):
        return value.detach().requires_grad_()
    return value


def _close(found: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor | None]) -> bool:
    if len(found) != len(wanted):
        return False
    common = max((float(one.abs().max()) for one in wanted if one is not None and one.numel()), default=0.0)
    for ours, theirs in zip(found, wanted, strict=True):
        if ours is None or theirs is None:
            if ours is not theirs:
                return False
        elif ours.shape != theirs.shape:
            return False
        elif ours.numel():
            bound = OWN_TOLERANCE * float(theirs.abs().max()) + COMMON_TOLERANCE * common
            if not float((ours - theirs).abs().max()) <= bound:
                return False
    return True
