"""What each link of a model costs, measured on a sample, and the split that follows from it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.layout.stage_memory import LinkSize, StageDemand, split_within
from shoal.model.parking.parked import brought_in, unpark
from shoal.strategies.cut.packing import tensors_in
from shoal.strategies.cut.tracing import in_mode, state_used
from shoal.strategies.mesh.pipeline.chain import Chain, carried
from shoal.strategies.mesh.pipeline.links import LinkCost, ModelLinks

_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 50
_ENOUGH_S = 0.5
"""Once all rounds together took so long, no more are made than must be."""
BYTES_PER_S = 1e9
"""What sockets of one host carry: only so that of equally good cuts the one is taken over which less travels."""


def balanced_split(
    chain: ModelLinks, given: Mapping[str, Any], demand: StageDemand, *, trained: Collection[str]
) -> tuple[int, ...]:
    """How many links each stage has, by the time that each link takes on a sample, and the memory that it needs.

    `trained`: names of the parameters that the optimizer updates.
    """
    found = chain.costs(given)
    links = [
        LinkSize(
            trained={name: tensor.nbytes for name, tensor in link.state.items() if name in trained},
            fixed={name: tensor.nbytes for name, tensor in link.state.items() if name not in trained},
            activations=link.activations,
            entering=link.entering,
        )
        for link in found
    ]
    return split_within([link.seconds for link in found], [link.crossing_s for link in found], links, demand)


def graph_costs(chain: Chain, given: Mapping[str, Any]) -> list[LinkCost]:
    """What each link of a graph takes."""
    measured = _Measuring(chain, given)
    homes, count = chain.link_of(False), len(chain.links)
    seconds = [0.0] * count
    activations: list[dict[str, int]] = [{} for _ in range(count)]
    for node, home in homes.items():
        seconds[home] += measured.seconds(node)
        activations[home] |= measured.activations.get(node, {})
    entering = [carried(homes, link) for link in range(count)]
    state = _state_of_links(chain, homes)
    return [
        LinkCost(
            seconds=seconds[link],
            crossing_s=sum((measured.crossing_s(node) for node in entering[link]), start=0.0),
            entering=sum(measured.num_bytes.get(node, 0) for node in entering[link]),
            activations=activations[link],
            state=state[link],
        )
        for link in range(count)
    ]


def rounds() -> Iterator[None]:
    """As many as a measurement takes."""
    began = time.perf_counter()
    for done in range(_MOST_ROUNDS):
        yield
        if done >= _FEWEST_ROUNDS and time.perf_counter() - began > _ENOUGH_S:
            break


def _state_of_links(chain: Chain, homes: Mapping[fx.Node, int]) -> list[dict[str, torch.Tensor]]:
    """By link: the parameters and buffers that its calls use, by the one name that each has in the model."""
    state = {**dict(chain.module.named_parameters()), **dict(chain.module.named_buffers())}
    names = {id(tensor): name for name, tensor in state.items()}
    used: list[dict[str, torch.Tensor]] = [{} for _ in chain.links]
    for node, home in homes.items():
        own = [tensor for tensor in state_used(chain.module, node) if id(tensor) in names]
        used[home].update({names[id(tensor)]: tensor for tensor in own})
    known = {name for link in used for name in link}
    used[0].update({name: tensor for name, tensor in state.items() if name not in known})  # `adopt_unused`
    return used


class _Measuring(fx.Interpreter):
    """Runs the evaluation graph call by call, several times.

    Calls that are alike (equal layers, given tensors of equal shapes) take the same time: the shortest that any of
    them took, which is what differs least from run to run.
    """

    def __init__(self, chain: Chain, given: Mapping[str, Any]) -> None:
        graph = chain.graphs[False]
        super().__init__(chain.module, graph=graph)
        self.activations: dict[fx.Node, dict[str, int]] = {}
        """By call: the values that autograd keeps for it, and their bytes."""
        self.num_bytes: dict[fx.Node, int] = {}
        """By call: those of its value, where that can travel."""
        self._made: dict[int, fx.Node] = {}
        """By address: the call that made the value there."""
        self._kinds: dict[fx.Node, Hashable] = {}
        self._shortest: dict[Hashable, float] = defaultdict(lambda: float("inf"))
        with in_mode(chain.module, training=False), torch.no_grad():
            self._repeat([given[node.target] for node in graph.nodes if node.op == "placeholder"])

    def _repeat(self, inputs: list[Any]) -> None:
        for _ in rounds():
            self.run(*inputs)

    def seconds(self, node: fx.Node) -> float:
        """The shortest time that a call of this kind took."""
        return self._shortest[self._kinds[node]]

    def crossing_s(self, node: fx.Node) -> float:
        """The seconds that its value takes to travel; infinity where it cannot."""
        return self.num_bytes[node] / BYTES_PER_S if node in self.num_bytes else float("inf")

    def run_node(self, n: fx.Node) -> Any:
        layer = self.module.get_submodule(str(n.target)) if n.op == "call_module" else None
        with brought_in(layer or nn.Module()):
            if n not in self._kinds:
                self._look_at(n, layer)
            began = time.perf_counter()
            value = super().run_node(n)
            if isinstance(value, torch.Tensor) and value.is_cuda:
                torch.cuda.synchronize(value.device)
            kind = self._kinds[n]
            self._shortest[kind] = min(self._shortest[kind], time.perf_counter() - began)
        if n.op == "get_attr" and isinstance(value, torch.Tensor):
            value = unpark(value)
        if _travels_well(value):
            self.num_bytes[n] = sum(tensor.nbytes for tensor in tensors_in(value))
        self._made |= {_address(leaf): n for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
        return value

    def _look_at(self, n: fx.Node, layer: nn.Module | None) -> None:
        """Which calls are like it, and what autograd keeps for it."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        shapes = [
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)
            for leaf in tree_leaves((args, kwargs))
        ]
        self._kinds[n] = (n.op, str(n.target) if layer is None else str(layer), *shapes)
        if n.op not in ("call_module", "call_function", "call_method"):
            return
        kept: dict[int, int] = {}
        makers: dict[int, fx.Node] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            kept[_address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            made = _with_history(tensor)
            makers[_address(made)] = self._made.get(_address(tensor), n)
            return made

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            copies = tree_map_only(torch.Tensor, copy, (args, kwargs))
            value = getattr(self, n.op)(n.target, *copies)
        makers |= {_address(leaf): n for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
        own = {_address(param) for param in (layer.parameters() if layer is not None else ())}
        self.activations[n] = {
            makers[at].name if at in makers else f"{n.name} {number}": size
            for number, (at, size) in enumerate(kept.items())
            # Parameters count as such, and what the model is given as data.
            if at not in own and not (at in makers and makers[at].op in ("get_attr", "placeholder"))
        }


def _travels_well(value: Any) -> bool:
    """Whether a value is a tensor, a number, or a tuple of these; other ones might arrive as something else."""
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, (torch.Tensor, bool, int, float)) for part in parts)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _with_history(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as if another layer had made them, in memory that may be changed in place."""
    if not tensor.is_floating_point():
        return tensor.clone()
    return tensor.detach().requires_grad_().clone()
