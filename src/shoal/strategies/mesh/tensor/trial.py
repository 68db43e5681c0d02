"""Tries in one process whether cut layers compute what the whole ones do: each worker is a thread.

So a cut can be judged before anybody meets anybody, every process comes to the same verdict, and a wrong guess
that would leave real workers waiting for each other ends here as an error.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal.comm.group import ThreadGroup, together
from shoal.layout.tensor_plan import Region
from shoal.strategies.mesh.splits import Split
from shoal.strategies.mesh.tensor.building import Parts
from shoal.strategies.mesh.tensor.observing import SEED, Inputs, Observed, close, observe
from shoal.strategies.mesh.tensor.shapes import channels_of
from shoal.strategies.mesh.tensor.surgery import Surgery


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of a block with cut layers, at the worker that has most."""

    kept_bytes: int
    """What is kept for the way back."""
    sent_bytes: float
    in_rows: frozenset[str]
    """Layers that worked on parts of the sequence."""


class CutTrial:
    """A block that is tried with its layers cut in different ways, on inputs that it got in a real pass."""

    def __init__(self, name: str, block: nn.Module, inputs: Inputs, count: int) -> None:
        self._name, self._count, self._inputs = name, count, inputs
        self._block = _stirred(block)
        self._expected = observe(self._block, inputs)

    @property
    def output_shape(self) -> torch.Size:
        """Of the first tensor that it gives."""
        return self._expected.outputs[0].shape if self._expected.outputs else torch.Size()

    def objection(self, regions: Sequence[Region]) -> str | None:
        """Why these cuts are wrong; None where they compute the same."""
        found = self.costs(regions)
        return found if isinstance(found, str) else None

    def costs(self, regions: Sequence[Region], width: int | None = None) -> Costs | str:
        """What these cuts cost, or why they are wrong. `width`: each worker gets a part of the sequence, that of
        the first input of this width."""
        try:
            found = together(self._count, lambda worker: self._cut_and_observe(regions, worker, width))
        except Exception as error:  # whatever the block's code says to parts of its layers
            return f"{type(error).__name__} with parts of its layers"
        for index, (observed, splits) in enumerate(found):
            if (different := self._difference(observed, splits, index)) is not None:
                return different
        return Costs(
            kept_bytes=max(observed.kept_bytes for observed, _ in found),
            sent_bytes=max(observed.sent_bytes for observed, _ in found),
            in_rows=frozenset.intersection(*(observed.in_rows for observed, _ in found)),
        )

    def _cut_and_observe(
        self, regions: Sequence[Region], worker: ThreadGroup, width: int | None
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
        return observe(around["block"], self._inputs, worker, width), splits

    def _difference(self, found: Observed, splits: dict[str, Split], index: int) -> str | None:
        expected = self._expected
        if not close(found.outputs, expected.outputs):
            return "its output would be another"
        if not close(found.input_grads, expected.input_grads):
            return "the gradient of its input would be another"
        wanted = [
            grad if grad is None or name not in splits else splits[name].cut(grad, index, self._count)
            for name, grad in expected.grads.items()
        ]
        if not close([found.grads.get(name) for name in expected.grads], wanted):
            return "gradients of its parameters would be others"
        return None


def _stirred(block: nn.Module) -> nn.Module:
    """A copy whose values are all different: zeros and ones, as layers begin with, would hide mistakes."""
    own = copy.deepcopy(block).to("cpu").eval()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        statistics = (b for norm in own.modules() if channels_of(norm) for b in norm.buffers(recurse=False))
        for tensor in (*own.parameters(), *statistics):
            if tensor.is_floating_point() and tensor.numel():
                noise = torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
                tensor.add_(noise.mul_(0.2 * tensor.abs().mean() + 0.04))
    for param in own.parameters():
        param.requires_grad_(param.is_floating_point())
    return own
