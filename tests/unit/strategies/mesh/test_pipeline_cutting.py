"""Stages of a cut model compute what the whole does, wherever it is cut: values, gradients, state."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import OutOfMemory, SpecError, TaskError
from shoal.layout.stage_memory import StageDemand
from shoal.spec import Mesh
from shoal.strategies.cut.packing import Form, MessageRoom, leaves, pack
from shoal.strategies.cut.stage_run import StageRun
from shoal.strategies.cut.tracing import bind
from shoal.strategies.mesh.pipeline.chain import Chain, parse_split
from shoal.strategies.mesh.pipeline.costs import balanced_split


class Residual(nn.Module):
    """A skip connection, changes in place, a branch that is computed late."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second, self.side = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.relu(self.first(x)))
        out += self.side(x)
        return self.relu(out)


class Blocks(nn.Module):
    """A module list, sizes that follow from the input, a position made on the way, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.places = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.register_buffer("mask", torch.tril(torch.ones(9, 9)), persistent=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
        batch, length = tokens.shape
        x = self.tokens(tokens) + self.places(torch.arange(length))
        for block in self.blocks:
            x = self.mask[:length, :length] @ block(x)
        x = F.dropout(x, 0.5, self.training)
        if scale is not None:
            x = x * scale
        return self.head(x.view(batch * length, -1)).view(batch, length, -1)


class Pair(nn.Module):
    """Cannot be followed, as it asks for values; passes a tuple on."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), last

    def forward(self, both: Any) -> Any:
        x, count = both if isinstance(both, tuple) else (both, torch.zeros((), dtype=torch.int64))
        if float(x.detach().sum()) > 1e9:
            raise AssertionError
        x = torch.tanh(self.layer(x))
        return x * count if self.last else (x, count + 1)


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


MODELS: dict[str, tuple[Any, Any]] = {
    "sequence": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(5, 5), nn.Tanh())),
        torch.randn(3, 6),
    ),
    "residual": (lambda: nn.Sequential(Residual(), Residual()), torch.randn(3, 6)),
    "blocks": (Blocks, torch.randint(0, 11, (4, 7))),
    "blocks with a scale": (Blocks, {"tokens": torch.randint(0, 11, (4, 7)), "scale": torch.tensor(2.0)}),
    "pairs": (lambda: nn.Sequential(Pair(), Pair(), Pair(last=True)), torch.randn(2, 4)),
}


def over_a_wire(values: Any) -> Any:
    form = Form.of(values)
    assert Form.from_bytes(form.to_bytes()) == form
    parcel = MessageRoom(form)
    parcel.room.copy_(pack(form, leaves(values)))
    return parcel.value("cpu")


def forward(runs: list[StageRun], given: dict[str, Any]) -> Tensor:
    """Through all stages, each beginning with what came over a wire."""
    entered: list[Any] = []
    for run in runs[:-1]:
        entered = [over_a_wire(run.forward(0, entered, given))]
    output = runs[-1].forward(0, entered, given)
    assert isinstance(output, Tensor)
    return output


def backward(runs: list[StageRun], gradients: list[Any], *, split: bool) -> None:
    for run in reversed(runs):
        found = run.backward_input(0, gradients) if split else run.backward(0, gradients)
        gradients = [gradient for result in found for gradient in result]
    for run in runs if split else []:
        run.backward_weight(0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("training", "split"), [(True, False), (True, True), (False, False)])
def test_any_cut_computes_the_same(name: str, training: bool, split: bool) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    whole = make()
    chain = Chain(copy.deepcopy(whole), inputs)
    given = bind(chain.signature, inputs)
    whole.train(training)
    torch.manual_seed(1)
    expected = whole(**given)
    expected.sum().backward()
    for first in range(1, len(chain.links), 1 + len(chain.links) // 10):
        chain.module.zero_grad(set_to_none=True)
        stages = chain.stages([first, len(chain.links) - first])
        runs = [StageRun(stage.train(training), stage.parameters) for stage in stages]
        torch.manual_seed(1)
        found = forward(runs, given)
        assert torch.equal(found, expected)
        backward(runs, [1.0], split=split)
        gradients = {name: p.grad for name, p in chain.module.named_parameters()}
        for name, p in whole.named_parameters():
            assert (p.grad is None) == (gradients[name] is None)
            assert p.grad is None or torch.allclose(p.grad, gradients[name], atol=1e-6)
        held = [set(stage.state_dict()) for stage in stages]
        assert held[0] | held[1] == set(whole.state_dict())


def test_another_batch_size() -> None:
    chain = Chain(Blocks().eval(), torch.randint(0, 11, (4, 7)))
    stages = chain.stages([3, len(chain.links) - 3])
    runs = [StageRun(stage.eval(), stage.parameters) for stage in stages]
    tokens = torch.randint(0, 11, (1, 3))
    assert torch.equal(forward(runs, {"tokens": tokens}), chain.module(tokens))


def test_a_stage_keeps_nothing_of_the_others_alive() -> None:
    chain = Chain(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(2, 6))
    kept, other = chain.stages([1, 1])
    lost = weakref.ref(chain.module[1].weight)  # type: ignore[index]
    del chain, other
    gc.collect()
    assert lost() is None
    assert torch.is_tensor(kept([], {"input": torch.randn(2, 6)})[0])


def test_costs_decide_the_split() -> None:
    cheap = [nn.Linear(512, 8), *(nn.Linear(8, 8) for _ in range(4))]
    inputs = torch.randn(256, 512)
    chain = Chain(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), *cheap), inputs)
    demand = StageDemand(mesh=Mesh(pipeline=2), microbatches=4)
    assert balanced_split(chain, {"input": inputs}, demand, trained=()) == (1, 6)


def test_memory_decides_where_cost_would_not_fit() -> None:
    """The first layer takes nearly all of the time, and the last nearly all of the memory."""
    model = nn.Sequential(nn.Linear(256, 256), *(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 4096))
    inputs = torch.randn(2, 256)
    chain, given = Chain(model, inputs), {"input": inputs}
    trained = [name for name, _ in model.named_parameters()]
    layer, last = (sum(p.nbytes for p in part.parameters()) for part in (model[0], model[-1]))

    def split(limit: int) -> tuple[int, ...]:
        demand = StageDemand(mesh=Mesh(pipeline=2), microbatches=2, kept=2, limit=limit)
        return balanced_split(chain, given, demand, trained=trained)

    room = 4 * layer // 2  # for activations
    assert split(4 * max(7 * layer, last) + room) == (7, 1)
    with pytest.raises(OutOfMemory, match=r"however the model is cut into 2 stages for 2 workers, one needs at l"):
        split(4 * last)


def test_what_is_kept_for_the_backward_pass_is_counted_once() -> None:
    """A linear layer keeps what it is given, tanh what it makes, and the next layer is given just that."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs = torch.randn(16, 4)
    chain = Chain(model, inputs)
    # With gpipe all micro-batches are held; parameters are not the optimizer's here, and counted once.
    held, parameters = 100, sum(p.nbytes for p in model.parameters())
    needed = parameters + held * 2 * (16 * 8 * 4)
    for limit, fits in ((needed, True), (needed - 1, False)):
        demand = StageDemand(mesh=Mesh(pipeline=1, schedule="gpipe"), microbatches=held, limit=limit)
        with nullcontext() if fits else pytest.raises(OutOfMemory):
            assert balanced_split(chain, {"input": inputs}, demand, trained=()) == (len(chain.links),)


def test_the_user_splits_by_children() -> None:
    chain = Chain(Blocks(), torch.randint(0, 11, (4, 7)))
    assert list(chain.layers()) == ["tokens", "places", "blocks.0", "blocks.1", "blocks.2", "head"]
    counts = parse_split(chain, "3+3", 2)
    starts = [name for name, _ in chain.links]
    assert starts[counts[0]].startswith("blocks.1")
    with pytest.raises(
        SpecError, match=r"split=2\+2 gives 2 stages 4 layers, but there are 2 stages and 6 layers"
    ):
        parse_split(chain, "2+2", 2)


def test_what_cannot_be_followed_is_refused() -> None:
    with pytest.raises(TaskError, match=r"that of Undecided cannot be followed .* use data, sharded or ps"):
        Chain(Undecided(), torch.randn(2, 4))
