"""One worker's part of a computation. The steps of a worker form segments: lines of steps with one result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.comm.group import Group
from shoal.layout.schedules import StageSchedule
from shoal.strategies.cut.executor import Executor, Microbatch
from shoal.strategies.cut.stage_run import StageRun
from shoal.strategies.layer.graph import GraphNode, chains
from shoal.strategies.layer.steps import Steps


@dataclass(frozen=True, kw_only=True)
class ProgramSegment:
    """Steps of one worker in a line; only the result of the last is read by others."""

    worker: int
    steps: tuple[str, ...]
    inputs: tuple[str, ...]
    """Results of other segments that the first step reads."""

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
    return [
        ProgramSegment(
            worker=workers[piece[0].name],
            steps=tuple(node.name for node in piece),
            inputs=tuple(dict.fromkeys(piece[0].inputs)),
        )
        for piece in pieces
    ]


class Program:
    """What one worker does with every batch: segments are the stages of a schedule in which all go forward, and
    then all go back."""

    def __init__(
        self,
        module: nn.Module,
        traced: Steps,
        workers: Mapping[str, int],
        group: Group,
        *,
        returns: bool = True,
        device: str = "cpu",
    ) -> None:
        """`returns`: there is one loss, at the model's output, whose gradients go back from worker to worker; else
        each worker has a loss of its own, at the last step that it has."""
        self.traced, self.workers = traced, workers
        self.has_output = workers[traced.output] == group.index
        """Whether the model's output is made here."""
        own = [node.name for node in traced.nodes if workers[node.name] == group.index]
        self.end = traced.output if returns or not own else own[-1]
        """The step of whose result the loss is made; another worker's where this one has none."""
        segments = cut_into_segments(traced.nodes, workers)
        numbers = {segment.result: number for number, segment in enumerate(segments)}
        homes = tuple(segment.worker for segment in segments)
        schedule = StageSchedule(name="gpipe", homes=homes, num_workers=group.size)
        self._actions = schedule.actions()[group.index]
        stages = {
            number: traced.stage(module, segments[number].steps, segments[number].inputs)
            for number in schedule.stages_of(group.index)
        }
        self.executor = Executor(
            {number: StageRun(stage, module.parameters) for number, stage in stages.items()},
            schedule,
            group,
            reads=[[numbers[name] for name in segment.inputs] for segment in segments],
            end=numbers[self.end],
            returns=returns,
            device=device,
        )

    def run(self, microbatch: Microbatch) -> None:
        """Take a batch forward and back."""
        self.executor.run(self._actions, [microbatch])
