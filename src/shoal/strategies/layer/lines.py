"""How the workers compute a batch together: each runs the layers that are its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from shoal.comm.group import Group
from shoal.model.replica import Replica
from shoal.step.compute import ToldLoss
from shoal.step.objective import inputs_of, loss_from
from shoal.strategies.cut.executor import Microbatch
from shoal.strategies.layer.block_steps import find_steps, place_steps
from shoal.strategies.layer.placement import assign
from shoal.strategies.layer.program import Program
from shoal.strategies.layer.steps import Steps
from shoal.strategies.layer.trained_head import TrainedHead


class LayerLine(ABC):
    """One worker's part in every batch. What the model does in training and what it does otherwise may differ."""

    returns = True
    """Whether gradients go back to the workers that results came from."""
    head: TrainedHead | None = None
    """What this worker trains besides the model."""
    weight = 1.0
    """What its loss counts."""

    def __init__(self, replica: Replica, group: Group, traced: Mapping[bool, Steps]) -> None:
        """`traced`: what the model does in training, and otherwise."""
        self._replica = replica
        self._group = group
        module = replica.module
        self.homes: Mapping[str, int] = self._place(traced[True])
        """By submodule that is called: its worker."""
        self._programs = {
            mode: Program(module, one, self._assign(one), group, returns=self.returns, device=replica.device)
            for mode, one in traced.items()
        }

    @abstractmethod
    def _place(self, traced: Steps) -> Mapping[str, int]:
        """The worker of each submodule."""

    def _assign(self, traced: Steps) -> Mapping[str, int]:
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
            for node in program.traced.nodes:
                for tensor in program.traced.state_of(self._replica.module, node.name):
                    found.setdefault(id(tensor), set()).add(program.workers[node.name])
        return {key: tuple(sorted(workers)) for key, workers in found.items()}

    def train(self, batch: Any, step: int, share: float, key: int) -> ToldLoss | None:
        """Leave this worker's gradients of a batch, times its share, in `p.grad`; returns its loss, where it has
        one. The task's own is that of the worker with the model's output. `key`: see `inputs_of`."""
        losses: list[ToldLoss] = []

        def finish(result: Any) -> torch.Tensor:
            losses.append(loss_from(self._replica, self._output(result), batch, key))
            return losses[-1].loss

        program = self.program
        program.run(
            Microbatch(
                given=program.traced.given(inputs_of(self._replica.task, batch, key)),
                finish=finish,
                share=share * self.weight,
                forward_in=partial(self._replica.precision.autocast, step),
            )
        )
        return losses[0] if losses else None

    def _output(self, result: Any) -> Any:
        """What the loss is made of, from the result of the last step here."""
        return result

    def infer(self, inputs: Any) -> Any:
        """The model's output; None where another worker has it."""
        program = self.program
        with self._replica.precision.autocast():
            output = program.executor.infer(program.traced.given(inputs))
        return output if program.has_output else None


class PlacedLine(LayerLine):
    """Submodules where the user wants them, or branches spread over the workers; one loss, at the end."""

    def __init__(self, replica: Replica, group: Group, homes: Mapping[str, int]) -> None:
        self._wanted = homes
        super().__init__(replica, group, find_steps(replica, homes))

    def _place(self, traced: Steps) -> Mapping[str, int]:
        workers = place_steps(traced, self._wanted, self._group.size, self._replica)
        return {node.module: workers[node.name] for node in traced.nodes if node.module}
