"""One stage of a cut model: some of its layers, and the calls of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from shoal.errors import TaskError
from shoal.model.normalising import has_moving_statistics
from shoal.strategies.cut.graph import StageCode


class Stage(nn.Module):
    """Some of the model's layers, by their names in it, and the calls of them."""

    def __init__(self, whole: nn.Module, graphs: Mapping[bool, fx.Graph]) -> None:
        super().__init__()
        for graph in graphs.values():
            for node in graph.nodes:
                if node.op in ("call_module", "get_attr"):
                    _adopt(whole, self, node.target)
        self._code = {training: StageCode(self, graph) for training, graph in graphs.items()}

    def forward(self, carried: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """From what the stage before carries over, and what the model is given."""
        return self._code[self.training](self, carried, given)


def check_moving(whole: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Two stages would each move the statistics of a layer that both call."""
    for name, layer in whole.named_modules():
        if has_moving_statistics(layer):
            callers = [number for number, stage in enumerate(stages) if layer in set(stage.modules())]
            if len(callers) > 1:
                raise TaskError(
                    f"Task: stages {callers} of the pipeline both call {name}, whose running statistics move; "
                    "write a split that keeps its calls in one stage, or use data, sharded or ps."
                )


def adopt_unused(whole: nn.Module, stages: Sequence[Stage]) -> None:
    """What no call uses is state all the same: the first stage keeps it."""
    known = {id(tensor) for stage in stages for tensor in stage.state_dict(keep_vars=True).values()}
    for name, tensor in whole.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            _adopt(whole, stages[0], name)


def _adopt(whole: nn.Module, stage: nn.Module, name: str) -> None:
    """Give a stage a layer, parameter or buffer of the whole under the same name."""
    *path, last = name.split(".")
    for part in path:
        theirs, ours = getattr(whole, part), getattr(stage, part, None)
        if ours is theirs:
            return  # it has a layer around this one
        if ours is None:
            ours = nn.Module()
            stage.add_module(part, ours)
        whole, stage = theirs, ours
    value = getattr(whole, last)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        stage.register_buffer(last, value, persistent=last not in whole._non_persistent_buffers_set)
    else:
        setattr(stage, last, value)
