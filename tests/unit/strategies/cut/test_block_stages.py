"""A model whose forward cannot be followed is cut between its blocks, and computes what the whole does."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import hugging_face
from shoal.errors import SpecError, TaskError
from shoal.layout.stage_memory import StageDemand
from shoal.spec import Mesh
from shoal.strategies.cut.block_line import BlockLine
from shoal.strategies.cut.packing import arrived
from shoal.strategies.cut.stage_run import StageRun
from shoal.strategies.cut.tracing import bind
from shoal.strategies.mesh.pipeline.block_chain import BlockChain, find_links
from shoal.strategies.mesh.pipeline.chain import Chain, parse_split
from shoal.strategies.mesh.pipeline.costs import balanced_split

TOKENS = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(5))


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As libraries do: torch.fx takes the wrapper's arguments for those of what it wraps."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return wrapper


class MixingBlock(nn.Module):
    """Mixes neighbours as the mask says; changes in place what it is given; may return a tuple."""

    def __init__(self, *, pairs: bool) -> None:
        super().__init__()
        self.pairs = pairs
        self.norm, self.layer = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor, *, scale: Tensor) -> Any:
        x += 0.1
        x = x + torch.tanh(self.layer(mask @ self.norm(x))) * scale
        return (x, mask.sum()) if self.pairs else x


class Decorated(nn.Module):
    """Embeddings, a list of blocks with a mask that is made of the input's sizes, a tied head, an own loss, a
    parameter of the model itself, and a layer that nobody calls."""

    def __init__(self, *, pairs: bool = False, scaled: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 6), nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(MixingBlock(pairs=pairs) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(6)) if scaled else torch.ones(6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.unused = nn.Linear(2, 2)

    @decorated
    def forward(self, tokens: Tensor, use_cache: bool = True, **kwargs: Any) -> Tensor:
        assert self.tokens.weight.dtype.is_floating_point and not use_cache
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        mask = torch.tril(x.new_ones(length, length)) / length
        for block in self.blocks:
            x = block(x, mask, scale=self.scale)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(self.norm(x.flatten(0, 1)).unflatten(0, tokens.shape))


class Around(nn.Module):
    """Can be followed, but for what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Decorated()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens, use_cache=False) * 2


class Sharing(Decorated):
    """Every block is given what one and the same layer makes of the input, each time."""

    @decorated
    def forward(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        mask = torch.eye(tokens.shape[1])
        x = self.tokens(tokens) * 1.0
        for block in self.blocks:
            x = block(x, mask, scale=self.positions(tokens % 9))
        return self.head(self.norm(x.flatten(0, 1)))


class Conditioned(Decorated):
    """Every block is given what another layer has made of the input, once."""

    @decorated
    def forward(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        mask, scale = torch.eye(tokens.shape[1]), self.positions(tokens % 9)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x * 1.0, mask, scale=scale)
        return self.head(x)


class Dropping(Decorated):
    """Leaves out a block while it trains."""

    @decorated
    def forward(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        x, mask = self.tokens(tokens), torch.eye(tokens.shape[1])
        for number, block in enumerate(self.blocks):
            if not self.training or number != 1:
                x = block(x * 1.0, mask, scale=self.scale)
        return self.head(x)


def through(runs: list[StageRun], given: dict[str, Any]) -> Any:
    """Forward through all stages, each beginning with what came over a wire."""
    entered: list[Any] = []
    for run in runs[:-1]:
        entered = [arrived(run.forward(0, entered, given))]
    return runs[-1].forward(0, entered, given, loss_of)


def loss_of(output: Any) -> Tensor:
    loss = output.square().mean() if isinstance(output, Tensor) else output.loss
    assert isinstance(loss, Tensor)
    return loss


def back(runs: list[StageRun], *, split: bool) -> None:
    gradients: list[Any] = [1.0]
    for run in reversed(runs):
        found = run.backward_input(0, gradients) if split else run.backward(0, gradients)
        gradients = [gradient for result in found for gradient in result]
    for run in runs if split else []:
        run.backward_weight(0)


def assert_cut_as_whole(make: Callable[[], nn.Module], inputs: Any, *, split: bool) -> None:
    """Wherever it is cut into two."""
    torch.manual_seed(0)
    whole = make()
    chain = find_links(copy.deepcopy(whole), inputs)
    assert isinstance(chain, BlockChain)
    given = {**chain.besides, **bind(chain.signature, inputs)}
    expected = loss_of(whole(**given))
    expected.backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    for first in range(1, len(chain.links)):
        stages = chain.stages([first, len(chain.links) - first])
        runs = [StageRun(stage.train(), stage.parameters) for stage in stages]
        assert torch.equal(through(runs, given), expected)
        back(runs, split=split)
        parameters = {id(p): p for stage in stages for p in stage.parameters()}
        own = {name: p for stage in stages for name, p in stage.named_parameters(remove_duplicate=False)}
        for name, gradient in gradients.items():
            found = own[name].grad
            assert (found is None) == (gradient is None), name
            assert found is None or torch.allclose(found, gradient, atol=1e-6), name
        for p in parameters.values():
            p.grad = None
        assert set(stages[0].state_dict()) | set(stages[1].state_dict()) == set(whole.state_dict())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_any_cut_computes_the_same(pairs: bool, split: bool) -> None:
    """Torch splits no backward pass in which several blocks share a parameter."""
    model = functools.partial(Decorated, pairs=pairs, scaled=not split)
    assert_cut_as_whole(model, {"tokens": TOKENS, "use_cache": False}, split=split)


@pytest.mark.parametrize("model", [Around, Sharing])
def test_models_whose_parts_are_called_elsewhere(model: Callable[[], nn.Module]) -> None:
    """Inside of one that can be followed; between the blocks, by all stages."""
    assert_cut_as_whole(model, TOKENS, split=False)


@pytest.mark.parametrize("name", hugging_face.MODELS)
def test_models_of_hugging_face(name: str) -> None:
    pytest.importorskip("transformers")
    assert_cut_as_whole(hugging_face.MODELS[name], hugging_face.inputs(name, 3), split=name == "gpt2")


def test_another_batch_size_and_length() -> None:
    whole = Decorated().eval()
    chain = find_links(copy.deepcopy(whole), TOKENS)
    runs = [StageRun(stage.eval(), stage.parameters) for stage in chain.stages([2, 3])]
    given = {"tokens": TOKENS[:1, :3], **chain.besides}
    assert torch.equal(through(runs, given), loss_of(whole(**given)))


def test_a_stage_has_the_state_of_its_links_and_what_the_model_itself_has() -> None:
    first, second = (set(stage.state_dict()) for stage in find_links(Decorated(), TOKENS).stages([2, 3]))
    blocks = {name for name in first | second if name.startswith("blocks.")}
    assert first & blocks == {name for name in blocks if name.split(".")[1] in "01"}
    assert first - blocks == {"tokens.weight", "positions.weight", "scale", "unused.weight", "unused.bias"}
    assert second - blocks == {"scale", "head.weight", *(name for name in second if name.startswith("norm."))}


def test_nothing_of_the_others_is_kept() -> None:
    model = Decorated()
    kept, other = find_links(model, TOKENS).stages([2, 3])
    lost = weakref.ref(model.blocks[3].layer.weight)
    del model, other
    gc.collect()
    assert lost() is None
    assert torch.is_tensor(kept([], {"tokens": TOKENS, "use_cache": False})[0])


def test_what_is_hollow_is_never_in_training() -> None:
    first, last = find_links(Decorated(), TOKENS).stages([4, 1])
    for stage in (first, last):
        stage.train()
    assert [first.tokens.training, first.norm.training] == [True, False]
    assert [last.tokens.training, last.norm.training] == [False, True]


def test_cuts_by_hand_and_by_cost() -> None:
    chain = find_links(Decorated(), TOKENS)
    assert list(chain.layers()) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert parse_split(chain, "3+2", 2) == (3, 2)
    with pytest.raises(
        SpecError, match=r"split=3\+3 gives 2 stages 6 layers, but there are 2 stages and 5 layers"
    ):
        parse_split(chain, "3+3", 2)
    demand = StageDemand(mesh=Mesh(pipeline=2), microbatches=4)
    given = {**chain.besides, "tokens": TOKENS}
    counts = balanced_split(chain, given, demand, trained=["tokens.weight"])
    assert sum(counts) == 5 and min(counts) >= 1
    costs = chain.costs(given)
    assert [cost.entering for cost in costs] == [0, *[TOKENS.numel() * 6 * 4] * 4]
    assert all(cost.activations and cost.seconds > 0 for cost in costs)
    assert {"blocks.1.layer.weight", "scale"} <= set(costs[1].state)
    assert "blocks.1.layer.weight" not in costs[0].state


def test_what_can_be_followed_is() -> None:
    followed = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    assert isinstance(find_links(followed, torch.randn(2, 6)), Chain)


def test_blocks_that_read_more_than_the_one_before_are_refused() -> None:
    chain = find_links(Conditioned(), TOKENS)
    with pytest.raises(
        TaskError, match=r"forward of Conditioned.*\(blocks.0 to blocks.3\).* depends on more than"
    ):
        chain.stages([2, 3])


def test_a_block_that_is_left_out_at_the_cut_is_told() -> None:
    chain = find_links(Dropping(), TOKENS)
    first, _ = chain.stages([2, 3])
    with pytest.raises(TaskError, match="has left out one beside the cut"):
        first.train()([], {"tokens": TOKENS})


def test_a_model_without_blocks_has_no_line() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        @decorated
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            return self.layer(x)

    assert BlockLine.of(Alone(), torch.randn(2, 4)) is None
    with pytest.raises(TaskError, match=r"that of Alone cannot be followed \(a decorator hides its arguments\)"):
        find_links(Alone(), torch.randn(2, 4))
