"""One worker's part of a computation, forward and backward.

The steps of a worker form segments: lines of steps with one result. Each segment is a piece of autograd's graph of
its own, so that gradients leave for other workers as soon as they are there, and not when all is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.strategies.cut.graph import StageCode, part_of
from shoal.strategies.cut.packing import replace_tensors, tensors_in
from shoal.strategies.layer.graph import GraphNode, chains
from shoal.strategies.layer.post import Post
from shoal.strategies.layer.steps import Traced


@dataclass(frozen=True, kw_only=True)
class ProgramSegment:
    """Steps of one worker in a line; only the result of the last is read by others."""

    worker: int
    steps: tuple[str, ...]
    inputs: tuple[str, ...]
    """Results of other segments that the first step reads."""
    readers: tuple[int, ...] = ()
    """Other workers that read its result."""

    @property
    def result(self) -> str:
        return self.steps[-1]


def cut_into_segments(nodes: Sequence[GraphNode], workers: Mapping[str, int]) -> list[ProgramSegment]:
    """The computation of all workers, in an order in which every segment comes after those it reads."""
    pieces: list[list[GraphNode]] = []
    for chain in chains(nodes):
        for index, node in enumerate(chain):
            if index == 0 or workers[node.name] != workers[chain[index - 1].name]:
                pieces.append([])
            pieces[-1].append(node)
    order = {node.name: index for index, node in enumerate(nodes)}
    pieces.sort(key=lambda piece: order[piece[0].name])
    readers: dict[str, set[int]] = {}
    for piece in pieces:
        for name in piece[0].inputs:
            readers.setdefault(name, set()).add(workers[piece[0].name])
    return [
        ProgramSegment(
            worker=workers[piece[0].name],
            steps=tuple(node.name for node in piece),
            inputs=tuple(dict.fromkeys(piece[0].inputs)),
            readers=tuple(sorted(readers.get(piece[-1].name, set()) - {workers[piece[0].name]})),
        )
        for piece in pieces
    ]


class Program:
    """What one worker does with every batch."""

    def __init__(
        self, module: nn.Module, traced: Traced, workers: Mapping[str, int], post: Post, *, returns: bool = True
    ) -> None:
        self.traced = traced
        self.workers = workers
        self.returns = returns
        """Whether gradients go back to the workers that results came from."""
        self.segments = [one for one in cut_into_segments(traced.nodes, workers) if one.worker == post.rank]
        self.post = post
        self.first_reader: dict[str, ProgramSegment] = {}
        """By result of another worker: the segment whose backward pass is the last to add to its gradient."""
        for segment in self.segments:
            for name in segment.inputs:
                if workers[name] != post.rank:
                    self.first_reader.setdefault(name, segment)
        self._module = module
        self._codes = {segment.result: self._code(segment) for segment in self.segments}

    def _code(self, segment: ProgramSegment) -> StageCode:
        traced = self.traced
        graph = part_of(
            self._module,
            traced.graph,
            [traced.steps[name] for name in segment.steps],
            entering=[traced.steps[name] for name in segment.inputs],
            leaving=None if segment.result == traced.output else [traced.steps[segment.result]],
        )
        return StageCode(self._module, graph)

    @property
    def has_output(self) -> bool:
        """Whether the model's output is made here."""
        return self.workers[self.traced.output] == self.post.rank

    def run(self, segment: ProgramSegment, entered: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        """The result of a segment."""
        carried = [entered[name] for name in segment.inputs]
        found = self._codes[segment.result](self._module, carried, given)
        return found if segment.result == self.traced.output else found[0]


@dataclass(frozen=True, kw_only=True)
class Root:
    """Where a backward pass begins."""

    result: str
    """The segment's result that the loss was made of."""
    loss: torch.Tensor
    share: float
    """What the loss counts."""


class BatchPass:
    """One batch on its way through one worker's segments, and back."""

    def __init__(self, program: Program, serial: int, inputs: Any) -> None:
        self._program = program
        self._post = program.post
        self._serial = serial
        """The same at all workers for the same batch."""
        self._given = program.traced.given(inputs)
        self._values: dict[str, Any] = {}
        self._entered: list[dict[str, Any]] = []
        self._gradients: dict[str, list[torch.Tensor | None]] = {}

    def forward(self) -> None:
        """Run all segments; results that others read leave at once."""
        program = self._program
        for segment in program.segments:
            entered = {name: replace_tensors(self._value(name), _begin_history) for name in segment.inputs}
            self._entered.append(entered)
            value = self._values[segment.result] = program.run(segment, entered, self._given)
            leaving = value if program.returns else replace_tensors(value, torch.Tensor.detach)
            for reader in segment.readers:
                self._post.send(reader, f"{self._serial} {segment.result}", leaving)

    def result(self, name: str) -> Any:
        """What a step that runs here, and ends a segment, has made."""
        return self._values[name]

    def _value(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._post.take(self._program.workers[name], f"{self._serial} {name}")
        return self._values[name]

    def backward(self, root: Root | None = None) -> None:
        """Run all segments backwards, from a loss where there is one here; gradients of what others sent leave as
        soon as they are complete."""
        segments = self._program.segments
        for segment, entered in zip(reversed(segments), reversed(self._entered), strict=True):
            if root is not None and segment.result == root.result:
                torch.autograd.backward(root.loss, torch.full_like(root.loss, root.share))
            else:
                self._propagate(segment)
            for name, value in entered.items():
                self._add(name, [tensor.grad for tensor in tensors_in(value)])
                if self._program.first_reader.get(name) is segment and self._program.returns:
                    self._give_back(name)

    def _propagate(self, segment: ProgramSegment) -> None:
        """Backward from the gradients that the readers of a segment's result found."""
        results = tensors_in(self._values[segment.result])
        if not any(tensor.requires_grad for tensor in results):
            return
        if self._program.returns:
            for reader in segment.readers:
                self._add(segment.result, self._post.take(reader, f"{self._serial} {segment.result} back"))
        found = self._gradients.pop(segment.result, [None] * len(results))
        pairs = [(t, grad) for t, grad in zip(results, found, strict=True) if t.requires_grad and grad is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [grad for _, grad in pairs])

    def _add(self, name: str, gradients: Sequence[torch.Tensor | None]) -> None:
        known = self._gradients.get(name, [None] * len(gradients))
        self._gradients[name] = [
            new if old is None else old if new is None else old + new
            for old, new in zip(known, gradients, strict=True)
        ]

    def _give_back(self, name: str) -> None:
        """Send the gradient of another worker's result to it, if it waits for one."""
        gradients = self._gradients.pop(name)
        if any(tensor.requires_grad for tensor in tensors_in(self._values[name])):
            self._post.send(self._program.workers[name], f"{self._serial} {name} back", gradients)


def _begin_history(tensor: torch.Tensor) -> torch.Tensor:
    """The same values for another segment, whose gradients stop here."""
    return tensor.detach().requires_grad_(tensor.requires_grad and torch.is_grad_enabled())
