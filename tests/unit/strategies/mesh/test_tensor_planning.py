"""Which layers of an unknown model are cut how: guesses that are tried, and what is left when they are wrong."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.errors import SpecError
from shoal.layout.tensor_plan import TensorPlan, Way, Wishes
from shoal.model.replica import Replica
from shoal.strategies.mesh.tensor.planning import make_plan
from shoal.strategies.mesh.tensor.recording import record

WIDTH, LENGTH = 16, 6


def planned(module: Callable[[], nn.Module], count: int = 2, plan: str = "auto", *shape: int) -> TensorPlan:
    inputs = torch.randn(4, *(shape or (LENGTH, WIDTH)))
    task = shoal.Task(
        model=module,
        loss=lambda output, target: output.square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(inputs, inputs),
        batch_size=2,
        epochs=1,
    )
    replica = Replica(task, sample=lambda: (inputs[:2], inputs[:2]))
    return make_plan(replica.module, record(replica), count, Wishes.parse(plan))


def ways(plan: TensorPlan) -> dict[str, str]:
    """By layer: how it is cut, with a star where it is alone."""
    cuts = [cut for region in plan.regions for cut in region.cuts] + list(plan.singles)
    return {cut.layer: cut.way.value + "*" * cut.alone for cut in cuts}


class Attention(nn.Module):
    """Of several makes: query, key and value from one layer or three, in one order or another."""

    def __init__(self, make: str = "fused", heads: int = 4) -> None:
        super().__init__()
        self.make, self.num_heads, self.embed_dim = make, heads, WIDTH
        if make == "apart":
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        else:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        size = width // self.num_heads
        if self.make == "apart":
            q, k, v = self.query(x), self.key(x), self.value(x)
        elif self.make == "by head":
            q, k, v = self.qkv(x).view(batch, length, self.num_heads, 3, size).permute(3, 0, 1, 2, 4).flatten(-2)
        else:
            q, k, v = self.qkv(x).split(self.embed_dim, -1)
        q, k, v = (each.reshape(batch, length, self.num_heads, size).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Around(nn.Module):
    """A block inside of a model."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("make", ["fused", "by head", "apart"])
def test_attention_is_cut_by_heads(make: str, count: int) -> None:
    plan = planned(lambda: Around(Attention(make)), count)
    found = ways(plan)
    assert found.pop("block.out") == "row" and set(found.values()) == {"column"}
    (region,) = plan.regions
    assert {name for _, name in region.divided} >= {"num_heads"} and region.narrowed == WIDTH
    blocks = {cut.blocks for cut in region.cuts if cut.way is Way.COLUMN}
    assert blocks == {(WIDTH,) * 3 if make == "fused" else ()}


def test_heads_that_do_not_divide_leave_attention_gathered() -> None:
    assert ways(planned(lambda: Around(Attention(heads=1)))) == {
        "block.qkv": "column*",
        "block.out": "vocabulary*",
    }


class Gated(nn.Module):
    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, hidden),
            nn.Linear(WIDTH, hidden),
            nn.Linear(hidden, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_a_gated_perceptron() -> None:
    assert ways(planned(Gated)) == {"gate": "column", "up": "column", "down": "row"}


def test_what_looks_right_and_is_not_is_found_out() -> None:
    """A norm over the hidden features sees a part of them only."""
    net = lambda: nn.Sequential(nn.Linear(WIDTH, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, WIDTH))  # noqa: E731
    plan = planned(net)
    assert not plan.regions and ways(plan) == {"0": "column*", "3": "vocabulary*"}
    assert plan.whole == {"1": "LayerNorm is not cut"}


class SharedScale(nn.Module):
    """One scale for all heads: its gradient would be a part of it at each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(4))
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down((hidden.unflatten(-1, (-1, 4)) * self.scale).flatten(-2))


def test_gradients_of_what_stays_whole_are_tried_too() -> None:
    plan = planned(SharedScale)
    assert not plan.regions and ways(plan)["up"] == "column*"


def test_a_block_that_begins_with_zeros_is_tried_with_other_values() -> None:
    def net() -> nn.Module:
        made = nn.Sequential(nn.Linear(WIDTH, 24), nn.LayerNorm(24), nn.Linear(24, WIDTH))
        nn.init.zeros_(made[2].weight)  # whatever comes before, the output is zero
        nn.init.zeros_(made[2].bias)
        return made

    assert not planned(net).regions


def test_chains_are_cut_in_pairs() -> None:
    widths = (WIDTH, 24, 32, 24, 8, 7)
    plan = planned(lambda: nn.Sequential(*(nn.Linear(*sizes) for sizes in pairwise(widths))))
    assert ways(plan) == {"0": "column", "1": "row", "2": "column", "3": "row", "4": "row*"}
    assert len(plan.regions) == 2


class Residual(nn.Module):
    """As in a ResNet with bottlenecks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.shortcut = nn.Conv2d(8, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))
        return torch.relu(self.bn3(self.conv3(inner)) + self.shortcut(x))


def test_convolutions_by_channel() -> None:
    found = ways(planned(Residual, 2, "auto", 8, 5, 5))
    assert (found["conv1"], found["bn1"], found["conv2"]) == ("column", "channels", "row")
    assert (found["conv3"], found["shortcut"]) == ("column*", "column*")
    assert "bn2" not in found and "bn3" not in found


def test_what_divides_by_nobody_stays_whole_and_is_named() -> None:
    plan = planned(lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, 5)), 4)
    assert ways(plan) == {"0": "row*"}
    assert plan.whole == {"2": "its sizes do not divide by 4 workers"}


class Inverted(nn.Module):
    """As in a MobileNet: widened, each channel by itself (or in groups), and narrow again."""

    def __init__(self, groups: int = 24) -> None:
        super().__init__()
        self.widen, self.bn1 = nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24)
        self.apart, self.bn2 = nn.Conv2d(24, 48, 3, padding=1, groups=groups), nn.BatchNorm2d(48)
        self.narrow = nn.Conv2d(48, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.bn2(self.apart(torch.relu(self.bn1(self.widen(x))))))
        return x + self.narrow(inner)


@pytest.mark.parametrize(("groups", "count"), [(24, 2), (4, 4)])
def test_convolutions_by_group(groups: int, count: int) -> None:
    plan = planned(lambda: Inverted(groups), count, "auto", 8, 5, 5)
    assert len(plan.regions) == 1 and not plan.whole
    assert ways(plan) == {
        "widen": "column",
        "bn1": "channels",
        "apart": "groups",
        "bn2": "channels",
        "narrow": "row",
    }


def test_groups_alone_or_that_do_not_divide() -> None:
    net = lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=4), nn.ReLU(), nn.Conv2d(8, 2, 1))  # noqa: E731
    assert ways(planned(net, 2, "auto", 8, 5, 5)) == {"0": "groups*", "2": "column*"}
    plan = planned(lambda: Inverted(3), 2, "auto", 8, 5, 5)
    assert not plan.regions and plan.whole["apart"] == "its 3 groups do not divide by 2 workers"
    with pytest.raises(SpecError, match=r"apart=channels cannot be: its 3 groups do not divide by 2 workers"):
        planned(lambda: Inverted(3), 2, "apart=channels", 8, 5, 5)


def encoder(heads: int = 4, *, norm_first: bool = False, batch_first: bool = True) -> nn.Module:
    made = {"dropout": 0.0, "batch_first": batch_first, "norm_first": norm_first}
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, heads, 24, **made),
        2,
        enable_nested_tensor=False,
    )


@pytest.mark.parametrize(("norm_first", "batch_first", "count"), [(False, True, 2), (True, False, 4)])
def test_the_encoder_of_torch(norm_first: bool, batch_first: bool, count: int) -> None:
    plan = planned(lambda: encoder(norm_first=norm_first, batch_first=batch_first), count)
    layer = {"self_attn": "heads*", "linear1": "column", "linear2": "row"}
    assert ways(plan) == {f"layers.{number}.{name}": way for number in range(2) for name, way in layer.items()}
    assert set(plan.whole.values()) == {"LayerNorm is not cut"}
    assert "layers.*.self_attn (2): cut by heads" in plan.lines()


def test_the_decoder_of_torch() -> None:
    class Decoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
            return self.layer(x, x.flip(1)[:, :4], tgt_mask=mask, tgt_is_causal=True)

    found = ways(planned(Decoding))
    assert found.pop("layer.linear1") == "column" and found.pop("layer.linear2") == "row"
    assert found == {"layer.self_attn": "heads*", "layer.multihead_attn": "heads*"}


def test_attention_of_torch_that_stays_whole_is_named() -> None:
    plan = planned(lambda: encoder(1))
    reason = "its 1 heads do not divide by 2 workers"
    assert plan.whole["layers.0.self_attn"] == plan.whole["layers.0.self_attn.out_proj"] == reason
    by_hand = planned(encoder, 2, "layers.0.self_attn=heads;layers.1.self_attn=whole")
    assert ways(by_hand) == {"layers.0.self_attn": "heads*"}
    assert by_hand.whole["layers.1.self_attn"] == "the plan says so"
    with pytest.raises(SpecError, match=rf"layers\.1\.self_attn=heads cannot be: {reason}"):
        planned(lambda: encoder(1), 2, "layers.1.self_attn=heads")


def test_attention_of_torch_is_tried_before_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a part that forgets to add gradients up."""
    monkeypatch.setattr("shoal.strategies.mesh.tensor.attention.entered", lambda tensor, workers: tensor)
    plan = planned(encoder)
    assert plan.whole["layers.1.self_attn"] == "cut by heads, the gradient of its input would be another"
    assert ways(plan)["layers.1.linear2"] == "row"


class PastTheLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.linear(x, self.up.weight))


def test_layers_that_are_not_called_stay_whole() -> None:
    plan = planned(PastTheLayer)
    assert ways(plan) == {"down": "vocabulary*"}
    assert plan.whole["up"] == "not called in the pass on a sample"


def test_a_plan_by_hand_is_kept_to() -> None:
    plan = planned(lambda: Around(Gated()), 2, "block.up=row;block.down=column;block.gate=whole")
    assert ways(plan) == {"block.up": "row*", "block.down": "column*"}
    with pytest.raises(SpecError, match=r"block\.down=column cannot be: its sizes do not divide by 3 workers"):
        planned(lambda: Around(Gated()), 3, "block.down=column")
    with pytest.raises(SpecError, match="matches nothing"):
        planned(Gated, 2, "layers.*=column")
