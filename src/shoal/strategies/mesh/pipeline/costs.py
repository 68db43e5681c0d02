"""What each link of a model costs, measured on a sample, and the split that follows from it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from shoal.layout.stage_split import split_chain
from shoal.strategies.mesh.pipeline.graph import Chain, carried
from shoal.strategies.mesh.pipeline.messages import can_travel, leaves

_ROUNDS = 3
_BYTES_PER_S = 1e9
"""What sockets of one host carry: only so that of equally good cuts the one is taken over which less travels."""


def balanced_split(chain: Chain, given: Mapping[str, Any], num_stages: int) -> tuple[int, ...]:
    """How many links each stage has, by the time that each link takes on a sample."""
    costs = [0.0] * len(chain.links)
    homes = chain.link_of(False)
    measured = _Measuring(chain, given)
    for node, seconds in measured.seconds.items():
        costs[homes[node]] += seconds
    crossings = [
        sum((measured.crossing.get(node, 0.0) for node in carried(homes, link)), start=0.0)
        for link in range(len(chain.links))
    ]
    return split_chain(costs, num_stages, crossings)


class _Measuring(fx.Interpreter):
    """Runs the evaluation graph call by call."""

    def __init__(self, chain: Chain, given: Mapping[str, Any]) -> None:
        graph = chain.graphs[False]
        super().__init__(chain.module, graph=graph)
        self.seconds: dict[fx.Node, float] = {}
        """By call: the shortest time it took."""
        self.crossing: dict[fx.Node, float] = {}
        """By call: the seconds that its value takes to travel; infinity where it cannot."""
        modes = {each: each.training for each in chain.module.modules()}
        chain.module.eval()
        try:
            with torch.no_grad():
                for _ in range(_ROUNDS):
                    self.run(*(given[node.target] for node in graph.nodes if node.op == "placeholder"))
        finally:
            for each, mode in modes.items():
                each.training = mode

    def run_node(self, n: fx.Node) -> Any:
        began = time.perf_counter()
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and value.is_cuda:
            torch.cuda.synchronize(value.device)
        self.seconds[n] = min(self.seconds.get(n, float("inf")), time.perf_counter() - began)
        if can_travel(value):
            size = sum(leaf.nbytes for leaf in leaves([value]) if isinstance(leaf, torch.Tensor))
            self.crossing[n] = size / _BYTES_PER_S
        else:
            self.crossing[n] = float("inf")
        return value
