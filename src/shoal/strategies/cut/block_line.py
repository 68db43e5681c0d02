"""A model as a line of its repeated blocks, seen by running it: for those whose forward torch.fx cannot follow.

What is called before a block and after the one before it belongs to that block's link; what follows the last block
is a link of its own. A cut may fall before any link but the first, and one value travels over it: what the block
before it has made. Whether that is all that later links need is tried on a sample before anybody trains.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from shoal.errors import TaskError
from shoal.strategies.cut.block_stage import BlockStage
from shoal.strategies.cut.graph import copied
from shoal.strategies.cut.packing import arrived, tensors_in
from shoal.strategies.cut.tracing import bind, call_given, in_mode

_CLOSE = 1e-5
"""So far results may be apart that the same code makes of the same values, in float32."""


@dataclass(frozen=True, kw_only=True)
class BlockLine:
    """Which parts of a model are called when."""

    module: nn.Module
    signature: inspect.Signature
    blocks: tuple[str, ...]
    """Names, in the order in which they are called."""
    parts: Mapping[str, nn.Module]
    """By name, all that has parameters: the blocks, and modules that have no block inside."""
    links: tuple[frozenset[str], ...]
    """By link: the parts that are called in it. What nobody calls belongs to the first."""

    @classmethod
    def of(cls, module: nn.Module, inputs: Any) -> BlockLine | None:
        """As a run on a sample shows it; None where a model has no blocks that are called one after the other."""
        signature = inspect.signature(module.forward)
        for blocks in repeated_blocks(module):
            parts = dict(_parts(module, {module.get_submodule(name) for name in blocks}))
            given = {**_besides(signature), **bind(signature, inputs)}
            called = _calls(module, parts, signature, given)
            if [name for name, is_done in called if is_done and name in blocks] == blocks:
                links = _links(called, blocks, parts)
                return cls(
                    module=module, signature=signature, blocks=tuple(blocks), parts=parts, links=tuple(links)
                )
        return None

    @property
    def besides(self) -> dict[str, Any]:
        """What the model is given, by name, where the batch does not say otherwise."""
        return _besides(self.signature)

    @property
    def link_names(self) -> list[str]:
        """One for each link: its block, and for the last what it calls last."""
        return [*self.blocks, ([*self.present(range(len(self.blocks), len(self.links)))] or ["output"])[-1]]

    def present(self, own: range) -> list[str]:
        """The parts that these links call, in the model's order."""
        return [name for name in self.parts if any(name in self.links[link] for link in own)]

    def stage(self, own: range) -> BlockStage:
        """What computes these links."""
        return BlockStage(self.module, parts=self.parts, present=self.present(own), blocks=self.blocks, own=own)

    def cut(self, counts: Sequence[int]) -> list[BlockStage]:
        """Stages of so many links each."""
        return [self.stage(range(*ends)) for ends in pairwise(accumulate(counts, initial=0))]

    def state_of(self, link: int) -> Iterator[torch.Tensor]:
        """The parameters and buffers that a link uses; those that belong to no part are used by all."""
        for name in self.present(range(link, link + 1)):
            yield from self.parts[name].parameters()
            yield from self.parts[name].buffers()
        inside = {id(tensor) for part in self.parts.values() for tensor in (*part.parameters(), *part.buffers())}
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if id(tensor) not in inside:
                yield tensor

    def check(
        self, stages: Sequence[BlockStage], counts: Sequence[int], inputs: Any, *, who: str, device: str = "cpu"
    ) -> None:
        """Refuse a model whose stages do not make of a sample what the whole makes of it."""
        if any(getattr(self.parts[name], "gradient_checkpointing", False) for name in self.blocks):
            raise self._refusal(who, "they compute themselves twice; leave that out and ask for recompute", "")
        try:
            with torch.no_grad():
                wrong = self._first_wrong(stages, counts, {**self.besides, **bind(self.signature, inputs)}, device)
        except Exception as error:  # the model's own code runs here, with parts of it missing
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise self._refusal(who, f"the parts cannot run alone ({why})") from error
        if wrong is not None:
            raise self._refusal(who, f"{wrong} depends on more than what the block before it makes")

    def _first_wrong(
        self, stages: Sequence[BlockStage], counts: Sequence[int], given: Mapping[str, Any], device: str
    ) -> str | None:
        """The end of the first stage whose result is another than in the whole model."""
        ends = [self.blocks[stop - 1] for stop in list(accumulate(counts))[:-1]]
        expected: list[Any] = []

        def note(block: nn.Module, args: Any, made: Any) -> None:
            expected.append(copied((made,)))  # which the next block may change in place

        with ExitStack() as stack:
            stack.enter_context(in_mode(self.module, training=False))
            for name in ends:
                stack.enter_context(self.parts[name].register_forward_hook(note))
            output = call_given(self.module, self.signature, given)
        carried: Any = ()
        for stage, wanted, end in zip(stages, [*expected, output], [*ends, "its output"], strict=True):
            with in_mode(stage, training=False):
                made = stage(carried, given)
            if not _alike(made, wanted):
                return end
            carried = arrived(made, device) if end in ends else ()
        return None

    def _refusal(self, who: str, why: str, remedy: str = "; use data, sharded or ps") -> TaskError:
        return TaskError(
            f"Task: {who} cannot follow the forward of {type(self.module).__name__}, and so cuts it between its "
            f"blocks ({self.blocks[0]} to {self.blocks[-1]}), but {why}{remedy}."
        )


def _besides(signature: inspect.Signature) -> dict[str, Any]:
    """A model that could generate text would keep what it needs for that, which is no tensor and nobody's."""
    return {"use_cache": False} if "use_cache" in signature.parameters else {}


def repeated_blocks(module: nn.Module) -> list[list[str]]:
    """Lists of modules of one kind, each of several layers, by name; those with the most parameters first."""
    found: list[tuple[int, list[str]]] = []
    for name, inner in module.named_modules():
        if isinstance(inner, nn.ModuleList | nn.Sequential):
            own = {f"{name}.{key}".lstrip("."): child for key, child in inner.named_children()}
            alike = len({type(child) for child in own.values()}) == 1
            if len(own) > 1 and alike and all(any(True for _ in child.children()) for child in own.values()):
                found.append((sum(p.numel() for p in inner.parameters()), list(own)))
    return [names for size, names in sorted(found, key=lambda each: -each[0]) if size]


def _parts(module: nn.Module, blocks: set[nn.Module], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if not any(True for _ in child.parameters()):
            continue
        is_opened = isinstance(child, nn.ModuleList | nn.ModuleDict) or not blocks.isdisjoint(child.modules())
        if child not in blocks and is_opened:
            yield from _parts(child, blocks, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _calls(
    module: nn.Module, parts: Mapping[str, nn.Module], signature: inspect.Signature, given: Mapping[str, Any]
) -> list[tuple[str, bool]]:
    """Which parts are called on a sample, in order: when something in them begins, and when they are done."""
    called: list[tuple[str, bool]] = []

    def noted(name: str, *, is_done: bool) -> Any:
        return lambda *_: called.append((name, is_done))

    with ExitStack() as stack:
        for name, part in parts.items():
            for inner in part.modules():
                stack.enter_context(inner.register_forward_pre_hook(noted(name, is_done=False)))
            stack.enter_context(part.register_forward_hook(noted(name, is_done=True)))
        stack.enter_context(in_mode(module, training=False))
        stack.enter_context(torch.no_grad())
        call_given(module, signature, given)
    return called


def _links(
    called: Sequence[tuple[str, bool]], blocks: Sequence[str], parts: Mapping[str, nn.Module]
) -> list[frozenset[str]]:
    links: list[set[str]] = [set() for _ in range(len(blocks) + 1)]
    link = 0
    for name, is_done in called:
        links[link].add(name)
        link += is_done and name in blocks
    links[0] |= set(parts).difference(*links)
    return [frozenset(names) for names in links]


def _alike(result: Any, wanted: Any) -> bool:
    own, other = tensors_in(result), tensors_in(wanted)
    return len(own) == len(other) and all(map(_close, own, other))


def _close(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if mine.shape != theirs.shape or not mine.is_floating_point():
        return torch.equal(mine, theirs)
    return torch.allclose(mine, theirs, rtol=_CLOSE, atol=_CLOSE, equal_nan=True)
