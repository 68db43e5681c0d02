"""A model as a chain of links, and the stages that it is cut into.

A link begins at a layer (or at a parameter that is used by itself) and ends before the next. Between two stages
travel all values that were made before the cut and are used after it. What the model is given does not travel:
every worker of the pipeline has it.

Layers of torch stay whole, and so do modules that have no others inside. Containers and the task's own modules are
looked into, unless torch.fx cannot follow what they do: then they stay whole, too. The outermost module must be
one that it can follow; others are cut between their blocks (`block_chain.py`).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import fx, nn

from shoal.errors import SpecError, TaskError
from shoal.strategies.cut.graph import part_of
from shoal.strategies.cut.tracing import StaysWhole, bind, trace
from shoal.strategies.mesh.pipeline.links import Anchor, LinkCost, ModelLinks
from shoal.strategies.mesh.pipeline.stage import Stage, adopt_unused, check_moving

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Chain:
    """What a model does, in training and in evaluation: two graphs with the same links."""

    def __init__(self, module: nn.Module, inputs: Any, *, opens_layers: bool = True) -> None:
        """`opens_layers`: whether to look into the model's children, and not only into containers of them."""
        self.module = module
        self.signature = inspect.signature(module.forward)
        self.besides: Mapping[str, Any] = {}
        given = bind(self.signature, inputs)
        whole = () if opens_layers else tuple(_children(module))
        self.graphs = {training: _follow(module, given, whole, training) for training in (True, False)}
        anchors = {training: list(_anchors(graph).values()) for training, graph in self.graphs.items()}
        common = set(anchors[True]) & set(anchors[False])
        self.links: list[Anchor] = [anchor for anchor in anchors[False] if anchor in common]
        if self.links != [anchor for anchor in anchors[True] if anchor in common]:
            raise TaskError(
                f"Task: pipeline finds the layers of {type(module).__name__} in another order in training than in "
                "evaluation, so it cannot cut both at one place; use data, sharded or ps."
            )

    def link_of(self, training: bool) -> dict[fx.Node, int]:
        """By call of a graph: the link that it belongs to."""
        numbers = {anchor: number for number, anchor in enumerate(self.links)}
        graph, link = self.graphs[training], 0
        anchors = _anchors(graph)
        found: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if node in anchors:
                link = max(link, numbers.get(anchors[node], 0))
            found[node] = link
        return found

    def layers(self) -> dict[str, int]:
        """The model's children, containers opened, with the link at which each begins; in order."""
        found: dict[str, int] = {}
        for number, (name, _) in enumerate(self.links):
            if layer := _layer_of(self.module, name):
                found.setdefault(layer, number)
        return found

    def stages(self, counts: Sequence[int]) -> list[Stage]:
        """Cut into stages with so many links each."""
        ends = list(accumulate(counts))
        stage_of = [next(stage for stage, end in enumerate(ends) if link < end) for link in range(len(self.links))]
        cut: list[dict[bool, fx.Graph]] = [{} for _ in counts]
        for training, graph in self.graphs.items():
            homes = {node: stage_of[link] for node, link in self.link_of(training).items()} if stage_of else {}
            for stage, part in enumerate(_cut(self.module, graph, homes, len(counts))):
                cut[stage][training] = part
        stages = [Stage(self.module, graphs) for graphs in cut]
        check_moving(self.module, stages)
        adopt_unused(self.module, stages)
        return stages

    def costs(self, given: Mapping[str, Any]) -> list[LinkCost]:
        from shoal.strategies.mesh.pipeline.costs import graph_costs

        return graph_costs(self, given)


def _follow(module: nn.Module, given: Collection[str], whole: Collection[nn.Module], training: bool) -> fx.Graph:
    """Arguments that are not `given` have their defaults; modules in `whole` are not looked into."""
    parameters = inspect.signature(module.forward).parameters
    absent = {name: each.default for name, each in parameters.items() if name not in given}
    try:
        if _hides_arguments(module.forward):
            raise TypeError("a decorator hides its arguments")
        opaque = _opaque(module, whole, training)
        return trace(module, _unless_in(opaque), training=training, absent=absent, records_buffers=True)
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TaskError(
            f"Task: pipeline cuts a model by following its forward pass, but that of {type(module).__name__} "
            f"cannot be followed ({why}); make it an nn.Sequential of its blocks, or use data, sharded or ps."
        ) from error


def _hides_arguments(forward: Callable[..., Any]) -> bool:
    """Where any number of arguments goes through a decorator, torch.fx takes those of the one for the other's."""
    if not hasattr(forward, "__wrapped__"):
        return False
    kinds = {each.kind for each in inspect.signature(forward).parameters.values()}
    return not kinds.isdisjoint((inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD))


def _opaque(module: nn.Module, whole: Collection[nn.Module], training: bool) -> set[nn.Module]:
    """Modules of the task's own inside of this one that cannot be followed; inner ones are tried first."""
    found = set(whole)
    for inner in reversed(list(module.modules())):
        if inner is module:
            continue
        # Somebody may have wrapped it, to compute it twice perhaps: leave it so.
        if "forward" in vars(inner) or _hides_arguments(inner.forward):
            found.add(inner)
        if inner in found or type(inner).__module__.startswith("torch.nn."):
            continue
        try:
            trace(inner, _unless_in(found), training=training, records_buffers=True)
        except Exception:  # whatever its code does when it is not given tensors
            found.add(inner)
    return found


def _unless_in(opaque: Collection[nn.Module]) -> StaysWhole:
    """Look into modules that have others inside, but for these and the layers of torch."""
    is_of_torch = fx.Tracer().is_leaf_module
    return lambda inner, name: (
        not any(True for _ in inner.children()) or inner in opaque or is_of_torch(inner, name)
    )


def parse_split(chain: ModelLinks, split: str, num_stages: int) -> tuple[int, ...]:
    """ModelLinks of each stage, from the children that the user gave each of them."""
    wanted = [int(part) for part in split.split("+")]
    layers = chain.layers()
    if len(wanted) != num_stages or sum(wanted) != len(layers):
        raise SpecError(
            f"pipeline: split={split} gives {len(wanted)} stages {sum(wanted)} layers, but there are {num_stages} "
            f"stages and {len(layers)} layers ({', '.join(layers)}); write one number for each stage."
        )
    begins = [*layers.values(), len(chain.links)]
    cuts = [0, *(begins[layer] for layer in accumulate(wanted))]
    return tuple(after - before for before, after in pairwise(cuts))


def _anchors(graph: fx.Graph) -> dict[fx.Node, Anchor]:
    used: Counter[str] = Counter()
    found: dict[fx.Node, Anchor] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            found[node] = (node.target, used[node.target])
            used[node.target] += 1
    return found


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _children(child)
        else:
            yield child


def _layer_of(module: nn.Module, name: str) -> str | None:
    """The child, or child of a container, that a layer belongs to; None for parameters of the model itself."""
    path: list[str] = []
    for part in name.split("."):
        child = getattr(module, part)
        if not isinstance(child, nn.Module):
            return None
        path.append(part)
        if not isinstance(child, _CONTAINERS):
            break
        module = child
    return ".".join(path)


def carried(homes: Mapping[fx.Node, int], stage: int) -> list[fx.Node]:
    """The values that travel into a stage: made in an earlier one, used in this or a later one."""
    return [
        node
        for node, home in homes.items()
        if home < stage
        and node.op not in ("placeholder", "get_attr", "output")
        and any(homes[user] >= stage for user in node.users)
    ]


def _cut(whole: nn.Module, graph: fx.Graph, homes: Mapping[fx.Node, int], count: int) -> Iterator[fx.Graph]:
    for stage in range(count):
        inside = [node for node, home in homes.items() if home == stage]
        leaving = carried(homes, stage + 1) if stage < count - 1 else None
        yield part_of(whole, graph, inside, entering=carried(homes, stage), leaving=leaving)
