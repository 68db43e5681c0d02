"""Blocks are found in the module tree of any model; what several share goes to the root."""

from __future__ import annotations

from torch import nn

from shoal.strategies.mesh.sharded.blocks import ShardedBlock, find_blocks


def blocks_of(module: nn.Module) -> list[ShardedBlock]:
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = find_blocks(module, trained)
    assert sorted(name for block in found for name in block.names) == sorted(trained), "each is in one block"
    assert found[-1].modules == ()
    return found


def test_items_of_a_sequential() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 2))
    first, second, root = blocks_of(net)
    assert (first.modules, second.modules) == ((net[0],), (net[2],))
    assert root.names == ("3.weight", "3.bias"), "too small for a block of its own"


def test_small_neighbours_are_one_block() -> None:
    net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(10)])
    assert [len(block.modules) for block in blocks_of(net)] == [4, 4, 0]


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64) for _ in range(3))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight


def test_layers_of_a_model_are_not_taken_apart() -> None:
    net = Language()
    *layers, root = blocks_of(net)
    assert [block.modules for block in layers] == [(layer,) for layer in net.layers]
    assert root.names == ("tokens.weight",)


def test_what_is_shared_or_frozen_is_in_no_block() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    net[1].weight = net[0].weight
    net[2].weight.requires_grad_(False)
    (root,) = blocks_of(net)
    assert root.names == ("0.weight", "0.bias", "1.bias", "2.bias"), "biases alone make no block"


def test_a_block_that_is_most_of_the_model_is_looked_into() -> None:
    inner = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    outer = nn.Module()
    outer.body = inner
    net = nn.Sequential(outer, nn.Linear(64, 20))
    assert [block.modules for block in blocks_of(net)] == [(inner[0],), (inner[1],), (net[1],), ()]


def test_a_model_without_containers_is_all_root() -> None:
    assert [block.modules for block in blocks_of(nn.Linear(64, 64))] == [()]
