"""Makes the plan for a model: blocks whose layers can be cut to fit each other, then the rest layer by layer."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from torch import nn

from shoal.errors import SpecError
from shoal.layout.tensor_plan import LayerCut, Region, TensorPlan, Way, Wishes
from shoal.strategies.mesh.tensor.proposing import Called, regions_of
from shoal.strategies.mesh.tensor.recording import Recording
from shoal.strategies.mesh.tensor.shapes import (
    channels_of,
    fits,
    grouped_shape_of,
    is_attention,
    is_embedding,
    shape_of,
)
from shoal.strategies.mesh.tensor.trial import CutTrial

MOST_LAYERS = 8
"""Of a block that is looked at as one: larger ones are made of smaller ones."""
MOST_OTHERS = 4.0
"""Parameters that a block may have besides those of its layers in question, as a multiple of these; for a block is
copied to be tried."""


def make_plan(module: nn.Module, recording: Recording, count: int, wishes: Wishes | None) -> TensorPlan:
    """How to cut a model over so many workers: follows from the model, its recorded pass and the user's wishes."""
    planner = _Planner(module, recording, count, wishes)
    regions = tuple(planner.regions())
    singles = (*planner.attentions(), *planner.singles())
    return TensorPlan(count=count, regions=regions, singles=singles, whole=planner.whole())


_NONE = -1
"""No proposal was right."""


class _Planner:
    def __init__(self, module: nn.Module, recording: Recording, count: int, wishes: Wishes | None) -> None:
        self._module, self._recording, self._count, self._wishes = module, recording, count, wishes
        self._named = dict(module.named_modules())
        names = {id(each): name for name, each in self._named.items()}
        if wishes is not None:
            wishes.check([name for name in self._named if name])
        self._called = [
            Called(
                name=names[id(layer)],
                shape=shape_of(layer),
                channels=channels_of(layer),
                grouped=grouped_shape_of(layer),
            )
            for layer in recording.order
            if layer is not module and not list(layer.children())
        ]
        self._output = next((each.name for each in reversed(self._called) if each.shape is not None), None)
        self._ties = _ties(self._named)
        self._cut: set[str] = set()
        self._known: dict[Hashable, int] = {}
        """By kind of block: which proposal was right before, as it will be again; it is tried nevertheless."""
        self._reasons: dict[str, str] = {}

    def _wish(self, layer: str) -> str | None:
        """What the user wants done with a layer: `any` without a plan, None where a plan does not name it."""
        if self._wishes is None:
            return "any"
        own = self._wishes.of(layer)
        parts = layer.split(".")
        blocks = (".".join(parts[:length]) for length in range(1, len(parts)))
        return own or ("heads" if any(self._wishes.of(block) == "heads" for block in blocks) else None)

    def regions(self) -> Iterator[Region]:
        """Blocks from the innermost outwards; a layer is in one of them at most."""
        for name, block in reversed(list(self._named.items())):
            while found := self._try(name, block, self._layers_in(block)):
                self._cut.update(cut.layer for region in found for cut in region.cuts)
                yield from found

    def _layers_in(self, block: nn.Module) -> list[Called]:
        if id(block) not in self._recording.inputs:
            return []
        inside = {id(each) for each in block.modules()}
        together = ("any", "column", "row", "heads", "channels")
        return [
            each
            for each in self._called
            if id(self._named[each.name]) in inside
            and (each.shape is not None or each.channels is not None or each.grouped is not None)
            and each.name not in self._cut
            and each.name not in self._ties
            and (each.channels is not None or self._wish(each.name) in together)
        ]

    def _try(self, name: str, block: nn.Module, layers: Sequence[Called]) -> tuple[Region, ...]:
        if not 2 <= sum(layer.shape is not None for layer in layers) <= MOST_LAYERS:
            return ()
        inside = dict(block.named_modules(prefix=name))
        own = sum(p.numel() for layer in layers for p in self._named[layer.name].parameters())
        if sum(p.numel() for p in block.parameters()) > (1 + MOST_OTHERS) * own:
            return ()
        ways = {Way.COLUMN.value: Way.COLUMN, Way.ROW.value: Way.ROW}
        wanted = {each.name: ways[wish] for each in layers if (wish := self._wish(each.name)) in ways}
        proposals = list(regions_of(name, layers, inside, self._count, wanted))
        kind = _kind(name, block, layers)
        known = self._known.get(kind)
        if not proposals or known == _NONE:
            return ()
        try:
            trial = CutTrial(name, block, self._recording.inputs[id(block)], self._count)
        except Exception:  # it does not even run whole, alone, and on the host
            return ()
        for number in sorted(range(len(proposals)), key=lambda number: number != known):
            if trial.objection(proposals[number]) is None:
                self._known[kind] = number
                return proposals[number]
        self._known[kind] = _NONE
        return ()

    def attentions(self) -> Iterator[LayerCut]:
        """Torch's own attention, which computes with its parameters itself: by heads, wherever it is."""
        for name, module in self._named.items():
            if not name or not is_attention(module) or id(module) not in self._recording.inputs:
                continue
            layers = (name, f"{name}.out_proj")
            wish = self._wish(name)
            reason = self._left_out(wish) or self._why_not_by_heads(name, module)
            if reason is None:
                self._cut.update(layers)
                yield LayerCut(layer=name, way=Way.HEADS, alone=True)
            elif self._wishes is not None and wish == Way.HEADS.value:
                raise _refused(name, wish, reason)
            else:
                self._reasons.update(dict.fromkeys(layers, reason))

    def _why_not_by_heads(self, name: str, attention: nn.MultiheadAttention) -> str | None:
        if self._wish(name) not in ("any", Way.HEADS.value):
            return "attention is cut by heads alone"
        if not fits(attention.num_heads, self._count):
            return f"its {attention.num_heads} heads do not divide by {self._count} workers"
        if name in self._ties or f"{name}.out_proj" in self._ties:
            return "it shares a weight with another layer"
        region = Region(block=name, cuts=(LayerCut(layer=name, way=Way.HEADS),))
        try:
            trial = CutTrial(name, attention, self._recording.inputs[id(attention)], self._count)
        except Exception:  # as in a block
            return "it could not be tried by itself"
        objection = trial.objection((region,))
        return objection and f"cut by heads, {objection}"

    def singles(self) -> Iterator[LayerCut]:
        """Layers that are in no region: each as it can be cut whatever is around it."""
        for each in self._called:
            if each.name in self._cut or each.name in self._reasons:
                continue
            layer = self._named[each.name]
            if each.shape is None and each.grouped is None and not is_embedding(layer):
                continue
            group = self._ties.get(each.name, (each.name,))
            cuts = self._alike(group)
            for cut in cuts:
                self._cut.add(cut.layer)
            yield from cuts

    def _alike(self, group: Sequence[str]) -> list[LayerCut]:
        """Layers that share a weight, or one layer: cut in the first way that all allow."""
        wish = self._wish(group[0])
        if reason := self._left_out(wish):
            self._reasons.update(dict.fromkeys(group, reason))
            return []
        options = [self._options(name, is_tied=len(group) > 1) for name in group]
        for ways in zip(*options, strict=True):
            fitting = [way for way in ways if way is not None]
            if len(fitting) == len(group) and (
                wish not in ("column", "row", "vocabulary") or fitting[0].value == wish
            ):
                return [
                    LayerCut(layer=name, way=way, alone=True) for name, way in zip(group, fitting, strict=True)
                ]
        reason = self._why_not(group[0])
        if self._wishes is not None:
            raise _refused(group[0], wish, reason)
        self._reasons.update(dict.fromkeys(group, reason))
        return []

    @staticmethod
    def _left_out(wish: str | None) -> str | None:
        """Why the user's plan leaves a layer whole; None where it does not."""
        return {None: "the plan does not name it", "whole": "the plan says so"}.get(wish)

    def _why_not(self, name: str) -> str:
        grouped = grouped_shape_of(self._named[name])
        if grouped is None:
            return f"its sizes do not divide by {self._count} workers"
        if fits(grouped.groups, self._count):
            return "a convolution in groups is cut by these alone"
        return f"its {grouped.groups} groups do not divide by {self._count} workers"

    def _options(self, name: str, *, is_tied: bool) -> tuple[Way | None, Way | None, Way | None]:
        """Ways in the order of preference; for tied layers each place means the same dimension of the weight."""
        layer, count = self._named[name], self._count
        if is_embedding(layer):
            assert isinstance(layer, nn.Embedding)
            by_entry = Way.VOCABULARY if fits(layer.num_embeddings, count) else None
            return by_entry, None, Way.COLUMN if fits(layer.embedding_dim, count) else None
        grouped = grouped_shape_of(layer)
        if grouped is not None and not is_tied:
            return None, Way.GROUPS if fits(grouped.groups, count) else None, None
        shape = shape_of(layer)
        if shape is None or not self._recording.was_called(layer) or (is_tied and shape.out_dim != 0):
            return None, None, None
        by_output = Way.COLUMN if fits(shape.outputs, count) else None
        by_input = Way.ROW if fits(shape.inputs, count) else None
        may_score = not shape.is_convolution and (
            is_tied or name == self._output or self._wish(name) == Way.VOCABULARY.value
        )
        scores = Way.VOCABULARY if may_score and by_output else None
        return scores, by_output if not is_tied else None, by_input

    def whole(self) -> dict[str, str]:
        """Everything with parameters that no worker has only a part of, and why."""
        found = dict(self._reasons)
        for name, module in self._named.items():
            if name in self._cut or name in found or not any(True for _ in module.parameters(recurse=False)):
                continue
            found[name or "the model"] = self._why_whole(module)
        return found

    def _why_whole(self, module: nn.Module) -> str:
        if list(module.children()):
            return "parameters of its own, used as they are"
        if not self._recording.was_called(module):
            return "not called in the pass on a sample"
        if shape_of(module) is not None or grouped_shape_of(module) is not None or is_embedding(module):
            return "it is the whole model"
        return f"{type(module).__name__} is not cut"


def _refused(name: str, wish: str | None, reason: str) -> SpecError:
    return SpecError(f"plan: {name}={wish} cannot be: {reason}; leave it whole, or use other sizes.")


def _kind(name: str, block: nn.Module, layers: Sequence[Called]) -> Hashable:
    """The same for blocks of one class whose layers are of the same sizes."""
    sizes = tuple(
        (
            each.name.removeprefix(name),
            each.channels,
            each.grouped,
            each.shape and (each.shape.inputs, each.shape.outputs),
        )
        for each in layers
    )
    return type(block), sizes


def _ties(named: dict[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """Layers that share a parameter with others: by name, all of them."""
    users: dict[int, list[str]] = {}
    for name, module in named.items():
        for param in module.parameters(recurse=False):
            users.setdefault(id(param), []).append(name)
    return {name: tuple(group) for group in users.values() if len(group) > 1 for name in group}
