"""Parts of the `layer` strategy: heads, groups that take turns, and the steps of a model."""

import pytest
import torch
from torch import nn

from shoal.errors import SpecError
from shoal.spec import Layer
from shoal.strategies.layer.heads import AuxiliaryHead
from shoal.strategies.layer.phased import layer_groups, phase_of
from shoal.strategies.layer.steps import follow


@pytest.mark.parametrize(
    ("features", "output", "hidden"),
    [
        ((2, 8), (2, 3), (8, 64)),
        ((2, 200), (2, 3), (200, 200)),
        ((2, 8, 6, 6), (2, 3), (8 * 4 * 4, 64)),
        ((2, 8, 3, 9), (2, 3), (8 * 3 * 4, 64)),
        ((2, 600, 8, 8), (2, 3), (600 * 2 * 2, 600)),  # 4 x 4 places would be too many
        ((2, 5000, 8, 8), (2, 3), (5000, 1024)),
        ((2, 8, 6, 6, 6), (2, 3), (8 * 4 * 4 * 4, 64)),
        ((2, 5, 8), (2, 3), (8, 64)),
        ((2, 5, 8), (2, 5, 3), (8, 64)),
        ((2, 8), (2,), (8, 64)),
    ],
)
def test_a_head_makes_what_looks_like_the_output(features, output, hidden):
    head = AuxiliaryHead(torch.zeros(features), torch.zeros(output))
    assert (head.hidden.in_features, head.hidden.out_features) == hidden
    assert head(torch.zeros(7, *features[1:])).shape == (7, *output[1:])


def test_a_head_that_nobody_can_make():
    with pytest.raises(SpecError, match=r"from shape \(2, 8\) to \(2, 3, 4\)"):
        AuxiliaryHead(torch.zeros(2, 8), torch.zeros(2, 3, 4))


def test_groups_take_turns():
    spec = Layer(phases=3, every=2)
    assert [phase_of(step, spec) for step in range(1, 9)] == [0, 0, 1, 1, 2, 2, 0, 0]


def test_groups_are_children_of_about_the_same_size():
    block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.ModuleDict({"block": block, "head": nn.Linear(4, 1)})
    trained = dict(model.named_parameters())
    assert [sorted({name.rpartition(".")[0] for name in group}) for group in layer_groups(model, trained, 2)] == [
        ["block.0", "block.1", "block.2"],
        ["head"],
    ]
    thirds = layer_groups(model, trained, 3)
    assert [sorted({name.rpartition(".")[0] for name in group}) for group in thirds] == [
        ["block.0"],
        ["block.1"],
        ["block.2", "head"],
    ]
    with pytest.raises(SpecError, match=r"phases=5 needs as many layers .* has 4"):
        layer_groups(model, trained, 5)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, x, by=None):
        return self.outer(x) + self.shift


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x


def test_tracing_opens_a_module_only_for_what_is_placed_inside():
    assert [node.module for node in follow(Nested()).nodes if node.module] == ["outer"]
    assert [node.module for node in follow(Nested(), ["outer.1"]).nodes if node.module] == ["outer.0", "outer.1"]
    assert [node.size for node in follow(Nested()).nodes] == [6, 2, 0, 0]


def test_inputs_by_place_and_by_name():
    traced = follow(Nested())
    x = torch.ones(1, 2)
    for inputs in (x, (x,), {"x": x}):
        assert [value is x or value for value in traced.given(inputs).values()] == [True, None]


def test_a_forward_that_asks_for_values_cannot_be_followed():
    with pytest.raises(SpecError, match="forward of Choosing cannot be followed"):
        follow(Choosing())
