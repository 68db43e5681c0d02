"""How the workers compute a batch together: each runs the layers that are its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch

from shoal.strategies.cut.tracing import state_used
from shoal.strategies.gradients import check_loss, split_batch
from shoal.strategies.layer.placement import assign, check_homes, spread
from shoal.strategies.layer.post import Post
from shoal.strategies.layer.program import BatchPass, Program, Root
from shoal.strategies.layer.steps import Traced, follow
from shoal.strategies.layer.trained_head import TrainedHead
from shoal.strategies.replica import Replica


class LayerLine(ABC):
    """One worker's part in every batch. What the model does in training and what it does otherwise may differ."""

    returns = True
    """Whether gradients go back to the workers that results came from."""
    head: TrainedHead | None = None
    """What this worker trains besides the model."""

    def __init__(self, replica: Replica, post: Post, placed: Collection[str] = ()) -> None:
        self._replica = replica
        self._post = post
        self._serial = 0
        module = replica.module
        traced = {mode: follow(module, placed, training=mode) for mode in (True, False)}
        self.homes: Mapping[str, int] = self._place(traced[True])
        """By submodule that is called: its worker."""
        self._programs = {
            mode: Program(module, one, self._assign(one), post, returns=self.returns)
            for mode, one in traced.items()
        }

    @abstractmethod
    def _place(self, traced: Traced) -> Mapping[str, int]:
        """The worker of each submodule."""

    def _assign(self, traced: Traced) -> Mapping[str, int]:
        """The worker of each step."""
        return assign(traced.nodes, self.homes)

    @property
    def program(self) -> Program:
        """For the mode that the model is in."""
        return self._programs[self._replica.module.training]

    def owners(self) -> dict[int, tuple[int, ...]]:
        """By id of a parameter or buffer: the workers that use it; the first one for what nobody uses."""
        found: dict[int, set[int]] = {}
        for program in self._programs.values():
            for name, step in program.traced.steps.items():
                for tensor in state_used(self._replica.module, step):
                    found.setdefault(id(tensor), set()).add(program.workers[name])
        return {key: tuple(sorted(workers)) for key, workers in found.items()}

    @abstractmethod
    def train(self, batch: Any, step: int, share: float) -> float:
        """Leave this worker's gradients of a batch, times its share, in `p.grad`; returns its loss, 0 where it has
        none. The task's own is that of the worker with the model's output."""

    def infer(self, inputs: Any) -> Any:
        """The model's output; None where another worker has it."""
        one = self._pass_forward(inputs)
        return one.result(self.program.traced.output) if self.program.has_output else None

    def _pass_forward(self, inputs: Any, step: int = 0) -> BatchPass:
        self._serial += 1
        one = BatchPass(self.program, self._serial, inputs)
        with self._replica.precision.autocast(step):
            one.forward()
        return one

    def _loss(self, output: Any, target: Any, step: int) -> torch.Tensor:
        """The task's loss of the model's output, or of what stands in for it."""
        replica = self._replica
        assert replica.task.loss is not None
        with replica.precision.autocast(step):
            loss = check_loss(replica.task.loss(output, target))
        return replica.precision.widened(loss)


class PlacedLine(LayerLine):
    """Submodules where the user wants them, or branches spread over the workers; one loss, at the end."""

    def __init__(self, replica: Replica, post: Post, homes: Mapping[str, int]) -> None:
        self._wanted = homes
        super().__init__(replica, post, placed=homes)

    def _place(self, traced: Traced) -> Mapping[str, int]:
        nodes = traced.nodes
        homes = self._wanted or spread(nodes, self._post.size)
        check_homes(nodes, homes, self._post.size)
        workers = assign(nodes, homes)
        return {node.module: workers[node.name] for node in nodes if node.module}

    def train(self, batch: Any, step: int, share: float) -> float:
        inputs, target = split_batch(batch)
        one = self._pass_forward(inputs, step)
        if not self.program.has_output:
            one.backward()
            return 0.0
        output = self.program.traced.output
        loss = self._loss(one.result(output), target, step)
        one.backward(Root(result=output, loss=loss, share=share))
        return loss.item()
