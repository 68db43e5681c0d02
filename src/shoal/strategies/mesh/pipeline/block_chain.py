"""A chain of links that are a model's blocks: for models whose forward torch.fx cannot follow."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shoal.errors import TaskError
from shoal.model.parking.parked import Parked
from shoal.strategies.cut.block_line import BlockLine, repeated_blocks
from shoal.strategies.cut.packing import tensors_in
from shoal.strategies.cut.tracing import call_given, in_mode
from shoal.strategies.mesh.pipeline.chain import Chain
from shoal.strategies.mesh.pipeline.costs import BYTES_PER_S, rounds
from shoal.strategies.mesh.pipeline.links import Anchor, LinkCost, ModelLinks
from shoal.strategies.mesh.pipeline.stage import check_moving


def find_links(module: nn.Module, inputs: Any, *, opens_layers: bool = True, device: str = "cpu") -> ModelLinks:
    """As torch.fx follows the model, or else between the blocks that it is seen to call."""
    try:
        chain = Chain(module, inputs, opens_layers=opens_layers)
    except TaskError:
        line = BlockLine.of(module, inputs) if opens_layers else None
        if line is None:
            raise
        return BlockChain(line, inputs, device)
    if opens_layers and _hides_blocks(chain) and (line := BlockLine.of(module, inputs)) is not None:
        blocks = BlockChain(line, inputs, device)
        try:
            blocks.stages([1] * len(blocks.links))
        except TaskError:
            return chain
        return blocks
    return chain


def _hides_blocks(chain: Chain) -> bool:
    """Whether torch.fx could not follow a module of the task's own that has blocks inside, and keeps it whole."""
    names = {str(node.target) for node in chain.graphs[False].nodes if node.op == "call_module"}
    kept = [chain.module.get_submodule(name) for name in names]
    return any(repeated_blocks(one) for one in kept if not type(one).__module__.startswith("torch.nn."))


class BlockChain:
    """Blocks, each with what is called between it and the one before, and what follows the last of them."""

    def __init__(self, line: BlockLine, inputs: Any, device: str = "cpu") -> None:
        self._line = line
        self._inputs = inputs
        self._device = device
        self.signature = line.signature
        self.besides: Mapping[str, Any] = line.besides
        self.links: list[Anchor] = [(name, 0) for name in line.link_names]

    def layers(self) -> dict[str, int]:
        return {name: number for number, (name, _) in enumerate(self.links)}

    def stages(self, counts: Sequence[int]) -> list[nn.Module]:
        """Each is tried, whether it makes of a sample what the whole model does."""
        stages = self._line.cut(counts)
        check_moving(self._line.module, stages)
        self._line.check(stages, counts, self._inputs, who="pipeline", device=self._device)
        return list(stages)

    def costs(self, given: Mapping[str, Any]) -> list[LinkCost]:
        line = self._line
        state = {**dict(line.module.named_parameters()), **dict(line.module.named_buffers())}
        names = {id(tensor): name for name, tensor in state.items()}
        seconds, kept = _seconds(line, given), _kept(line, given)
        return [
            LinkCost(
                seconds=seconds[link],
                crossing_s=entering / BYTES_PER_S,
                entering=entering,
                activations=activations,
                state={names[id(tensor)]: tensor for tensor in line.state_of(link) if id(tensor) in names},
            )
            for link, (entering, activations) in enumerate(kept)
        ]


def _seconds(line: BlockLine, given: Mapping[str, Any]) -> list[float]:
    """By link, the shortest time of several; blocks that are alike take the same."""
    blocks = [line.parts[name] for name in line.blocks]
    on_device = any(p.is_cuda for p in line.module.parameters())
    marks: list[float] = []

    def mark(*_: Any) -> None:
        if on_device:
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    shortest: list[float] = []
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block.register_forward_pre_hook(mark))
            stack.enter_context(block.register_forward_hook(mark))
        stack.enter_context(in_mode(line.module, training=False))
        stack.enter_context(torch.no_grad())
        for _ in rounds():
            marks.clear()
            mark()
            call_given(line.module, line.signature, given)
            mark()
            spans = [after - before for before, after in pairwise(marks)]
            shortest = spans if not shortest else [min(pair) for pair in zip(shortest, spans, strict=True)]
    between, inside = shortest[::2], shortest[1::2]  # before each block, and after the last; in each block
    kinds = [str(block) for block in blocks]
    alike = {kind: min(own for own, its in zip(inside, kinds, strict=True) if its == kind) for kind in kinds}
    return [*(before + alike[kind] for before, kind in zip(between, kinds, strict=False)), between[-1]]


def _kept(line: BlockLine, given: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, int]]]:
    """By link: the bytes that enter it, and what autograd keeps for it. Every block begins a history of its own,
    so that there is never more than that of one."""
    own = {p.untyped_storage().data_ptr() for p in line.module.parameters() if not isinstance(p, Parked)}
    entering, kept = [0], [dict[int, int]()]

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is torch.Tensor and (at := tensor.untyped_storage().data_ptr()) not in own:
            kept[-1][at] = tensor.untyped_storage().nbytes()
        return tensor

    def begin(block: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, _with_history, (args, kwargs))

    def end(block: nn.Module, args: Any, output: Any) -> None:
        entering.append(sum(tensor.nbytes for tensor in tensors_in(output)))
        kept.append({})

    with ExitStack() as stack:
        for name in line.blocks:
            stack.enter_context(line.parts[name].register_forward_pre_hook(begin, with_kwargs=True))
            stack.enter_context(line.parts[name].register_forward_hook(end))
        stack.enter_context(in_mode(line.module, training=False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor))
        call_given(line.module, line.signature, given)
    for link, (num_bytes, found) in enumerate(zip(entering, kept, strict=True)):
        yield num_bytes, {f"{link} {number}": size for number, size in enumerate(found.values())}


def _with_history(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as if a layer before had made them, which may be changed in place."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().requires_grad_().clone()
