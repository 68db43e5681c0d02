"""What a block does with its inputs: outputs, gradients, and what it costs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from shoal.comm.group import ThreadGroup
from shoal.strategies.mesh.tensor.sequence import SequencePart, stream_of
from shoal.strategies.mesh.tensor.sequence_collectives import cut_rows, join_rows

OWN_TOLERANCE, COMMON_TOLERANCE = 1e-3, 1e-5
"""Relative to the largest value of a tensor itself, and of all that are compared with it: rounding in float32. A
wrong cut is off by about as much as the values are large."""
SEED = 11

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a module's call."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What a block did with its inputs."""

    outputs: list[torch.Tensor]
    """With and without gradients being kept, for these may be different code."""
    input_grads: list[torch.Tensor | None]
    grads: dict[str, torch.Tensor | None]
    """Of its parameters."""
    kept_bytes: int
    """What is kept for the way back, besides parameters."""
    sent_bytes: float
    """To the other workers, forward and back."""
    in_rows: frozenset[str]
    """Layers whose outputs were parts of a sequence."""


@dataclass(frozen=True, kw_only=True)
class InRows:
    """A block that is given its part of the sequence, and gives one: as between two others of its kind."""

    width: int
    worker: ThreadGroup
    outside: ThreadGroup
    """For what passes at the ends, which is not the block's own."""

    def given(self, inputs: Inputs) -> Inputs:
        """The arguments with the stream cut."""
        leaves, form = tree_flatten(inputs)
        index = stream_of(leaves, self.width)
        if index is not None:
            whole = leaves[index]
            rows = cut_rows(whole, self.outside)
            leaves[index] = SequencePart.wrap(rows, whole.shape[-2], self.worker)
        return tree_unflatten(leaves, form)

    def whole(self, value: Any) -> Any:
        """What it gave, put together."""
        if isinstance(value, SequencePart) and value.is_part:
            return join_rows(value.local, value.length, self.outside)
        return value


def observe(
    block: nn.Module, inputs: Inputs, worker: ThreadGroup | None = None, width: int | None = None
) -> Observed:
    """Run a block forward and back, as this worker if it is cut. `width`: see `InRows`."""
    stream = None
    if worker is not None and width is not None:
        stream = InRows(width=width, worker=worker, outside=worker.uncounted())

    def run(given: Inputs) -> list[torch.Tensor]:
        args, kwargs = given if stream is None else stream.given(given)
        output = block(*args, **kwargs)
        return _tensors(output if stream is None else tree_map(stream.whole, output))

    with torch.no_grad():
        passing = run(copy.deepcopy(inputs))
    args, kwargs = tree_map(_as_leaf, copy.deepcopy(inputs))
    sent_before = 0.0 if worker is None else worker.sent_bytes
    with _watching(block) as watched:
        outputs = run((args, kwargs))
    leaves = [
        leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    params = dict(block.named_parameters())
    generator = torch.Generator().manual_seed(SEED)
    score = torch.zeros(())
    for output in outputs:
        if output.requires_grad:
            score = score + (output * torch.randn(output.shape, generator=generator).to(output.dtype)).sum()
    grads = torch.autograd.grad(score, [*leaves, *params.values()], allow_unused=True)
    return Observed(
        outputs=[output.detach() for output in (*passing, *outputs)],
        input_grads=list(grads[: len(leaves)]),
        grads=dict(zip(params, grads[len(leaves) :], strict=True)),
        kept_bytes=sum(watched.kept.values()),
        sent_bytes=0.0 if worker is None else worker.sent_bytes - sent_before,
        in_rows=frozenset(watched.in_rows),
    )


@dataclass
class _WatchedBlock:
    kept: dict[int, int] = field(default_factory=dict)
    """Bytes by address."""
    in_rows: set[str] = field(default_factory=set)


@contextmanager
def _watching(block: nn.Module) -> Iterator[_WatchedBlock]:
    seen = _WatchedBlock()
    known = {param.untyped_storage().data_ptr() for param in block.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            seen.kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def note(name: str, output: Any) -> None:
        if isinstance(output, SequencePart) and output.is_part:
            seen.in_rows.add(name)

    handles = [
        layer.register_forward_hook(lambda _, args, output, name=name: note(name, output))
        for name, layer in block.named_modules(remove_duplicate=False)
        if not any(True for _ in layer.children())
    ]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def close(found: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor | None]) -> bool:
    """Whether tensors are the same but for rounding."""
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


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _as_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isfinite().all()):
        return value.detach().requires_grad_()
    return value
