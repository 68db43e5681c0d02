"""A model is built with most of its parameters in a file, and is the same to the bit."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.model.parking.building import LEAST_BYTES, Parking
from shoal.model.parking.parked import Parked, hollow_out, unpark, unpark_module

sys.path.insert(0, str(Path(__file__).parents[4] / "examples"))
from gpt import GPT

WIDTH = 160


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))


def conv():
    net = nn.Sequential(nn.Conv2d(16, 128, 3), nn.BatchNorm2d(128), nn.Conv2d(128, 32, 3))
    return net.to(memory_format=torch.channels_last)


def gpt():
    return GPT(vocabulary=256, context=64, width=WIDTH, heads=4, depth=2, dropout=0.1)


class Odd(nn.Module):
    """Every unusual way to make and to change a parameter."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(300, WIDTH, padding_idx=3)
        own = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.left.weight = own
        self.right.weight = own
        nn.init.orthogonal_(own)
        self.free = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.eye = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True), 2)
        self.rnn = nn.LSTM(WIDTH, WIDTH)
        self.half = nn.Linear(WIDTH, 2 * WIDTH).to(torch.bfloat16)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        nn.init.eye_(self.eye)
        nn.init.trunc_normal_(self.frozen.weight, std=0.02)
        self.frozen.weight.data = torch.rand(WIDTH, WIDTH)
        with torch.no_grad():
            upper, lower = self.right.weight.chunk(2)
            upper.mul_(2)
            lower[3:5].uniform_()
            self.tokens.weight /= self.tokens.weight.norm()
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module):
        if isinstance(module, nn.Linear) and module.weight.shape[0] == 2 * WIDTH:
            module.weight.data.normal_()


BUILDS = {"mlp": mlp, "conv": conv, "gpt": gpt, "odd": Odd}


def built(make, parking=None):
    torch.manual_seed(11)
    if parking is None:
        return make(), torch.rand(4)
    with parking.building():
        module = make()
    parking.park_rest(module)
    return module, torch.rand(4)


@pytest.mark.parametrize("make", BUILDS.values(), ids=BUILDS)
def test_the_same_to_the_bit(make, tmp_path):
    expected, expected_next = built(make)
    module, found_next = built(make, Parking(tmp_path))
    assert torch.equal(found_next, expected_next), "other random numbers were drawn"
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in expected.named_parameters()]
    for (name, found), wanted in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(unpark(found), wanted), name
        assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype), name
        assert found.requires_grad == wanted.requires_grad and isinstance(found, nn.Parameter), name
        assert isinstance(found, Parked) or wanted.nbytes < LEAST_BYTES or name.startswith("rnn"), name
    unpark_module(module)
    assert not any(isinstance(p, Parked) for p in module.parameters())
    for name, wanted in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], wanted), name


def test_what_was_one_parameter_stays_one(tmp_path):
    module, _ = built(gpt, Parking(tmp_path))
    assert module.head.weight is module.tokens.weight
    unpark_module(module)
    assert module.head.weight is module.tokens.weight
    odd, _ = built(Odd, Parking(tmp_path))
    assert odd.left.weight is odd.right.weight


def test_the_optimizer_sees_parameters(tmp_path):
    module, _ = built(gpt, Parking(tmp_path))
    groups = [[p for p in module.parameters() if p.dim() >= 2], [p for p in module.parameters() if p.dim() < 2]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], fused=True)
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == sum(
        p.numel() for p in built(gpt)[0].parameters()
    )


def test_hollow_parameters_take_no_memory_until_somebody_gives_them_values(tmp_path):
    module, _ = built(gpt, Parking(tmp_path))
    expected, _ = built(gpt)
    values = hollow_out(module)
    assert module.head.weight is module.tokens.weight
    for found, wanted in zip(module.parameters(), expected.parameters(), strict=True):
        assert type(found) is nn.Parameter and found.shape == wanted.shape
        assert found.untyped_storage().nbytes() < LEAST_BYTES
        found.data = values(found).clone()
        assert torch.equal(found, wanted)


def test_some_stay_parked(tmp_path):
    module, _ = built(mlp, Parking(tmp_path))
    unpark_module(module, but={"0.weight"})
    assert [isinstance(p, Parked) for p in (module[0].weight, module[2].weight)] == [True, False]


def test_a_copy_is_another_parameter(tmp_path):
    module, _ = built(mlp, Parking(tmp_path))
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert isinstance(twin[0].weight, Parked)
    assert not unpark(twin[0].weight).any()
    assert torch.equal(unpark(module[0].weight), built(mlp)[0][0].weight)


def test_a_saved_model_is_loaded_into_parked_parameters(tmp_path):
    module, _ = built(gpt, Parking(tmp_path))
    saved = {name: tensor + 1 for name, tensor in built(gpt)[0].state_dict().items()}
    module.load_state_dict(saved)
    for name, found in module.named_parameters():
        assert torch.equal(unpark(found), saved[name]), name


def test_nothing_but_the_last_layer_is_in_memory(tmp_path):
    """Of ten layers, never more than two are held at a time."""
    held = []

    class Watched(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            held.append(sum(not isinstance(layer.weight, Parked) for layer in layers))
            layers.append(self)

    layers = []
    built(lambda: nn.Sequential(*(Watched() for _ in range(10))), Parking(tmp_path))
    assert max(held) <= 1
    assert len(layers) == 10
