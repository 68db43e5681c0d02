"""How the layers of a model are cut by width, as plain data, and plans that users write by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase

from shoal.errors import SpecError


class Way(Enum):
    """By what a layer is cut."""

    COLUMN = "column"
    """Its outputs: each worker computes some of them from the whole input."""
    ROW = "row"
    """Its inputs: each worker has some of them, and the sum over workers is the output."""
    VOCABULARY = "vocabulary"
    """The entries of an embedding, or the scores of an output layer, which the loss takes as they are."""
    CHANNELS = "channels"
    """A norm whose channels are those of the cut layer before it."""
    GROUPS = "groups"
    """The groups of a convolution: each worker has some of them, with their inputs and outputs."""
    HEADS = "heads"
    """The heads of torch's own attention, which is one layer: its input and its output are whole."""


@dataclass(frozen=True, kw_only=True)
class LayerCut:
    """What is done with one layer."""

    layer: str
    """Its name in the model."""
    way: Way
    alone: bool = False
    """Whether it meets whole neighbours: its output is gathered, or its input cut, in the layer itself."""
    blocks: tuple[int, ...] = ()
    """Sizes of what its outputs consist of, where several things are computed in one (query, key and value)."""
    in_rows: bool = False
    """Whether each worker gets a part of the sequence of its output, in place of all of it."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """Layers of one block that are cut to fit each other, so that nothing is gathered between them."""

    block: str
    """The module that they are in, by name."""
    cuts: tuple[LayerCut, ...]
    divided: tuple[tuple[str, str], ...] = ()
    """Modules and attributes of theirs, such as a number of heads, of which each worker has its share."""
    narrowed: int = 0
    """The block sees inputs of this width as if they were as narrow as a worker's part; 0: as they are."""

    def apart(self) -> tuple[LayerCut, ...]:
        """The same layers each for itself, as it is right in any surroundings."""
        layers = (cut for cut in self.cuts if cut.way is not Way.CHANNELS)
        return tuple(replace(cut, alone=True, blocks=()) for cut in layers)


@dataclass(frozen=True, kw_only=True)
class SequenceStream:
    """A block between whose cut layers (in norms, sums and dropout) each worker has a part of the sequence."""

    block: str
    width: int
    """Features of the argument that is cut, which is the first that has as many."""
    norms: tuple[str, ...]
    """Those that were seen to work on a part."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How a model is cut over so many workers."""

    count: int
    regions: tuple[Region, ...] = ()
    singles: tuple[LayerCut, ...] = ()
    """Layers that are cut each for itself."""
    streams: tuple[SequenceStream, ...] = ()
    following: tuple[str, ...] = ()
    """Norms that get what a stream's block gives."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Layers that every worker has whole, and why."""

    def retreats(self) -> Iterator[TensorPlan]:
        """Plans that cut less and less, for a model that does not compute the same when it is cut as this says.

        Its code may use a layer's weight past the layer, which happens to embeddings most often."""
        if self.streams:
            yield self.without_streams("with it sequence-parallel, the model computes something else")
        self = self.without_streams("the model computes something else when it is cut")
        reason = "with it cut, the model computes something else"
        kept = tuple(cut for cut in self.singles if cut.way is not Way.VOCABULARY)
        for regions, singles in ((self.regions, kept), (self.regions, ()), ((), ())):
            left = {cut.layer for cut in singles} | {cut.layer for region in regions for cut in region.cuts}
            given_up = [name for name in self.cut_layers if name not in left]
            yield replace(
                self, regions=regions, singles=singles, whole={**self.whole, **dict.fromkeys(given_up, reason)}
            )

    def without_streams(self, reason: str) -> TensorPlan:
        """The same with every token in every worker."""
        return replace(
            self,
            regions=tuple(replace(region, cuts=_whole_rows(region.cuts)) for region in self.regions),
            singles=_whole_rows(self.singles),
            streams=(),
            following=(),
            whole={**self.whole, **dict.fromkeys(self.sequence_norms, reason)},
        )

    @property
    def sequence_norms(self) -> list[str]:
        """Norms of which each worker computes a part of the sequence."""
        return [norm for stream in self.streams for norm in stream.norms] + list(self.following)

    @property
    def cut_layers(self) -> list[str]:
        """All of which a worker has a part."""
        return [cut.layer for region in self.regions for cut in region.cuts] + [cut.layer for cut in self.singles]

    def lines(self) -> list[str]:
        """One line for each kind of decision; numbered layers are told together."""
        told: dict[str, dict[str, None]] = {}
        for region in self.regions:
            parts = [f"{_within(cut.layer, region.block)} by {cut.way.value}" for cut in region.cuts]
            divided = [_within(module, region.block, name) for module, name in region.divided]
            parts += [f"{', '.join(divided)} divided"] if divided else []
            told.setdefault(f"cut together: {', '.join(parts)}", {})[region.block or "the model"] = None
        for cut in self.singles:
            told.setdefault(_told(cut), {})[cut.layer] = None
        norms = self.sequence_norms
        for norm in norms:
            told.setdefault(f"sequence-parallel: {len(norms)} norm{'s' * (len(norms) > 1)}", {})[norm] = None
        for layer, reason in self.whole.items():
            told.setdefault(f"whole: {reason}", {})[layer] = None
        return [f"{_together(names)}: {what}" for what, names in told.items()]


def _whole_rows(cuts: Iterable[LayerCut]) -> tuple[LayerCut, ...]:
    return tuple(replace(cut, in_rows=False) for cut in cuts)


def _told(cut: LayerCut) -> str:
    where = {
        Way.COLUMN: ", output gathered",
        Way.ROW: ", input cut and output summed",
        Way.GROUPS: ", input cut and output gathered",
    }
    return f"cut by {cut.way.value}" + where.get(cut.way, "")


def _within(layer: str, block: str, attribute: str = "") -> str:
    name = f"{layer}.{attribute}" if attribute and layer else layer or attribute
    return name.removeprefix(f"{block}.")


def _together(names: Iterable[str]) -> str:
    """Names with `*` for numbers, and how many each stands for."""
    counts: dict[str, list[str]] = {}
    for name in names:
        counts.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    told = [f"{one} ({len(of)})" if len(of) > 1 else of[0] for one, of in counts.items()]
    return ", ".join(told)


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """A plan that the user wrote: name patterns, and what is done with the layers (or blocks) they match."""

    rules: tuple[tuple[str, str], ...] = ()
    """Pattern and kind; the first that matches a name counts."""

    @classmethod
    def parse(cls, text: str) -> Wishes | None:
        """None where the plan is made automatically."""
        if text == "auto":
            return None
        items = (item.partition("=") for item in text.split(";"))
        return cls(rules=tuple((pattern.strip(), kind.strip()) for pattern, _, kind in items))

    def of(self, name: str) -> str | None:
        """The kind that is wished for a name; None where nothing is."""
        return next((kind for pattern, kind in self.rules if fnmatchcase(name, pattern)), None)

    def check(self, names: Iterable[str]) -> None:
        """Every pattern must match something."""
        known = list(names)
        for pattern, kind in self.rules:
            if not any(fnmatchcase(name, pattern) for name in known):
                some = ", ".join(known[:12]) + ", ..." * (len(known) > 12)
                raise SpecError(f"plan: {pattern}={kind} matches nothing in the model; it has: {some}.")
