"""Which blocks are computed twice, and that nobody can tell from the result."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.errors import SpecError
from shoal.model.recompute import compute_once, find_blocks, recompute_blocks, segments_of
from shoal.model.replica import Replica
from shoal.spec import Task


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        return self.norm(x + gain * self.inner(x))


class Listed(nn.Module):
    """Blocks in a list, called with a keyword; beside them a lone one, of which a sequence is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, gain=0.5)
        return self.head(x)


def flat() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8)
    )


def nested() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()), nn.Linear(8, 8))


def trained(module: nn.Module) -> dict[str, torch.Tensor]:
    """Two passes: gradients and buffers after them."""
    for seed in range(2):
        torch.manual_seed(seed)
        module(torch.randn(6, 8)).square().sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {**gradients, **dict(module.named_buffers())}


@pytest.mark.parametrize(("make", "found"), [(Listed, 4), (flat, 1), (nested, 4)])
def test_no_bit_is_another(make, found: int) -> None:
    torch.manual_seed(1)
    plain = make()
    saving = make()
    saving.load_state_dict(plain.state_dict())
    assert recompute_blocks(saving) == found
    calls = []
    saving.register_forward_hook(lambda *_: calls.append(1))
    first = next(each for each in saving.modules() if isinstance(each, nn.Linear))
    first.register_forward_hook(lambda *_: calls.append(2))
    expected, ours = trained(plain), trained(saving)
    assert expected.keys() == ours.keys()
    for name, value in expected.items():
        assert torch.equal(value, ours[name]), name
    assert calls.count(2) == 2 * calls.count(1) == 4  # it was computed again, once each time


def test_a_model_can_be_as_it_was() -> None:
    model = nested()
    recompute_blocks(model)
    compute_once(model)
    assert not [each for each in model.modules() if "forward" in each.__dict__]


def test_blocks_are_those_that_repeat() -> None:
    listed = Listed()
    assert find_blocks(listed) == list(listed.blocks)
    assert find_blocks(nn.Sequential(Block(), nn.Linear(8, 8))) == []
    assert [len(layers) for layers in segments_of(flat())] == [3, 3]


def test_a_model_without_blocks_is_told() -> None:
    task = Task(
        model=lambda: nn.Linear(4, 2),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)),
    )
    with pytest.raises(SpecError, match="no repeated blocks"):
        Replica(task, recompute=True)
