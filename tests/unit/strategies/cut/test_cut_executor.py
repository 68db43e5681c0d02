"""Stages on several workers compute what the whole model does, wherever each of them is and whatever it reads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.group import Group, ThreadGroup, together
from shoal.layout.schedules import make_schedule
from shoal.strategies.cut.executor import Executor, Microbatch
from shoal.strategies.cut.stage_run import StageRun
from shoal.strategies.layer.placement import assign
from shoal.strategies.layer.program import Program
from shoal.strategies.layer.steps import Traced, follow
from shoal.strategies.mesh.pipeline.chain import Chain

INPUTS = torch.randn(5, 6, generator=torch.Generator().manual_seed(3)).double()


class Branches(nn.Module):
    """A stem that several branches read, a parameter that two of them use, a tuple of which one part has no
    gradient, a layer that has none, and a join."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.head = (nn.Linear(6, 6) for _ in range(4))
        self.memory = nn.GRU(6, 6, batch_first=True)
        self.scale = nn.Parameter(torch.full((6,), 0.5))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.double()

    def forward(self, x: Tensor, shift: float = 1.0) -> Tensor:
        h = torch.tanh(self.stem(x))
        left, right = self.left(h) * self.scale, torch.relu(self.right(h)) * self.scale
        states, _ = self.memory(h[:, None])
        left += right + self.frozen(x) + shift
        return self.head(left + states[:, 0])


def whole_gradients(model: nn.Module, share: float) -> dict[str, Tensor | None]:
    model = copy.deepcopy(model)
    model(INPUTS).square().mean().mul(share).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def summed(found: list[dict[str, Tensor | None]]) -> dict[str, Tensor | None]:
    total: dict[str, Tensor | None] = dict.fromkeys(found[0])
    for one in found:
        for name, grad in one.items():
            known = total[name]
            total[name] = grad if known is None else known if grad is None else known + grad
    return total


def assert_same(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
    for name, gradient in expected.items():
        own = found[name]
        assert (own is None) == (gradient is None), name
        if own is not None and gradient is not None:
            torch.testing.assert_close(own, gradient, atol=1e-12, rtol=0)


HOMES = [
    {"stem": 0, "left": 0, "right": 1, "memory": 2, "head": 1, "frozen": 2},
    {"stem": 2, "left": 1, "right": 0, "memory": 1, "head": 2, "frozen": 0},
    {"stem": 0, "left": 0, "right": 0, "memory": 0, "head": 0, "frozen": 0},
]


@pytest.mark.parametrize("homes", HOMES)
def test_branches_on_any_workers(homes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Branches()
    models = [copy.deepcopy(model) for _ in range(3)]
    traced = [follow(one) for one in models]  # not in threads: tracing changes functions of torch for a while

    def work(group: ThreadGroup) -> tuple[dict[str, Tensor | None], Any]:
        own = models[group.index]
        program = make_program(own, traced[group.index], homes, group)
        batch = Microbatch(
            given=program.traced.given(INPUTS), finish=lambda output: output.square().mean(), share=0.25
        )
        program.run(batch)
        output = program.executor.infer(program.traced.given((INPUTS,)))
        return {name: p.grad for name, p in own.named_parameters()}, output if program.has_output else None

    found = together(3, work)
    assert_same(summed([gradients for gradients, _ in found]), whole_gradients(model, 0.25))
    (output,) = [output for _, output in found if output is not None]
    torch.testing.assert_close(output, model(INPUTS), atol=1e-12, rtol=0)


def make_program(model: nn.Module, traced: Traced, homes: dict[str, int], group: Group) -> Program:
    return Program(model, traced, assign(traced.nodes, homes), group)


def test_where_nothing_returns_each_worker_has_a_loss_of_its_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    models = [copy.deepcopy(model) for _ in range(2)]
    traced = [follow(one, ["0", "1", "2"]) for one in models]

    def work(group: ThreadGroup) -> tuple[dict[str, Tensor | None], str]:
        own = models[group.index]
        workers = {name: int(name in ("_2", "output")) for name in traced[group.index].steps}
        program = Program(own, traced[group.index], workers, group, returns=False)

        def finish(result: Any) -> Tensor:
            output: Tensor = result if program.has_output else result[0]
            return output.square().mean()

        program.run(Microbatch(given={"input": INPUTS}, finish=finish))
        return {name: p.grad for name, p in own.named_parameters()}, program.end

    (first, first_end), (second, second_end) = together(2, work)
    assert (first_end, second_end) == ("_1", "output")
    features = model[:2](INPUTS)
    features.square().mean().backward()
    model[2](features.detach()).square().mean().backward()
    assert_same(summed([first, second]), {name: p.grad for name, p in model.named_parameters()})
    assert first["2.weight"] is None and second["0.weight"] is None


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("shape", [None, "known"])
def test_stages_in_a_line_under_every_schedule(name: str, shape: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh()))).double()
    schedule = make_schedule(name, workers=2, per_worker=2 if name == "interleaved" else 1)
    models = [copy.deepcopy(model) for _ in range(2)]
    counts = [8 // schedule.num_stages] * schedule.num_stages
    stages = [Chain(one, INPUTS).stages(counts) for one in models]

    def work(group: ThreadGroup) -> dict[str, Tensor | None]:
        own = {number: stages[group.index][number] for number in schedule.stages_of(group.index)}
        runs = {number: StageRun(stage, stage.parameters) for number, stage in own.items()}
        executor = Executor(runs, schedule, group)
        batch = Microbatch(
            given={"input": INPUTS}, finish=lambda output: output.square().mean(), share=0.25, shape=shape
        )
        for _ in range(2):  # the second time all forms are known
            executor.run(schedule.actions(4)[group.index], [batch] * 4)
        return {name: p.grad for name, p in models[group.index].named_parameters()}

    assert_same(summed(together(2, work)), whole_gradients(model, 2.0))
