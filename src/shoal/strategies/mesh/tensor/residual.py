"""Finds blocks between whose cut layers each worker can have a part of the sequence, and whether that pays."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.errors import SpecError
from shoal.layout.tensor_plan import LayerCut, Region, SequenceStream, TensorPlan, Way, Wishes
from shoal.strategies.mesh.tensor.recording import Recording
from shoal.strategies.mesh.tensor.sequence import stream_of
from shoal.strategies.mesh.tensor.shapes import is_embedding, is_token_norm, shape_of
from shoal.strategies.mesh.tensor.trial import Costs, CutTrial

MORE_SENT = 1 / 16
"""How much more a block may send: the gradients of its norms are summed, which is little beside real activations,
but the trial's are small."""
SEQUENCE = "sequence"


def with_streams(
    plan: TensorPlan,
    module: nn.Module,
    recording: Recording,
    wishes: Wishes | None,
    norms: str,
    *,
    saves_memory: bool,
) -> TensorPlan:
    """The plan with norms sequence-parallel where that is right and pays, or is wished; what it costs in time, it
    pays in memory."""
    finder = _Finder(plan, module, recording, wishes, norms, saves_memory=saves_memory)
    streams = finder.streams()
    known = {norm for stream in streams for norm in stream.norms}
    following = tuple(finder.following(streams, known))
    known |= set(following)
    finder.check_wishes(known)
    whole = {name: reason for name, reason in plan.whole.items() if name not in known}
    whole |= {name: f"{whole[name]}; {reason}" for name, reason in finder.reasons.items() if name in whole}
    rows, widths = finder.in_rows, {stream.width for stream in streams}

    def flagged(cuts: Iterable[LayerCut]) -> tuple[LayerCut, ...]:
        return tuple(replace(cut, in_rows=cut.layer in rows or finder.feeds(cut, widths)) for cut in cuts)

    return replace(
        plan,
        regions=tuple(replace(region, cuts=flagged(region.cuts)) for region in plan.regions),
        singles=flagged(plan.singles),
        streams=tuple(streams),
        following=following,
        whole=whole,
    )


class _Finder:
    def __init__(
        self,
        plan: TensorPlan,
        module: nn.Module,
        recording: Recording,
        wishes: Wishes | None,
        norms: str,
        *,
        saves_memory: bool,
    ) -> None:
        self._plan, self._recording, self._wishes, self._mode = plan, recording, wishes, norms
        self._saves_memory = saves_memory
        self._named = dict(module.named_modules())
        self._verdicts: dict[Hashable, tuple[int, frozenset[str]] | str] = {}
        """By kind of block, see `_tried`."""
        self.in_rows: set[str] = set()
        """Layers whose output is cut along the sequence."""
        self.reasons: dict[str, str] = {}
        """By norm: why it is not sequence-parallel."""

    def streams(self) -> list[SequenceStream]:
        """Blocks from the innermost outwards; every cut layer belongs to the first around it that has a norm."""
        found: list[SequenceStream] = []
        settled: set[str] = set()
        for name, block in reversed(list(self._named.items())):
            inside = {id(each) for each in block.modules()}
            norms = [norm for norm in self._norms() if id(self._named[norm]) in inside and norm not in settled]
            regions = self._regions_in(inside)
            rows = {cut.layer for region in regions for cut in region.cuts if self._can_leave_rows(cut)} - settled
            if not norms or not rows:
                continue
            settled.update(norms, rows)
            if (reason := self._left_out(norms)) is None:
                verdict = self._judged(name, block, regions, rows, norms)
                if not isinstance(verdict, str):
                    found.append(verdict)
                    self.in_rows |= rows
                    norms = [norm for norm in norms if norm not in verdict.norms]
                    reason = "not sequence-parallel: it needs all tokens"
                else:
                    reason = f"not sequence-parallel: {verdict}"
            self.reasons.update(dict.fromkeys(norms, reason))
        return list(reversed(found))

    def _norms(self) -> list[str]:
        called = {id(each) for each in self._recording.order}
        return [name for name, each in self._named.items() if is_token_norm(each) and id(each) in called]

    def _regions_in(self, inside: set[int]) -> list[Region]:
        """What of the plan is wholly in a block."""
        regions = [
            region
            for region in self._plan.regions
            if all(id(self._named[cut.layer]) in inside for cut in region.cuts)
        ]
        singles = [cut for cut in self._plan.singles if id(self._named[cut.layer]) in inside]
        return regions + [Region(block=cut.layer, cuts=(cut,)) for cut in singles]

    def _can_leave_rows(self, cut: LayerCut) -> bool:
        shape = shape_of(self._named[cut.layer])
        return cut.way is Way.HEADS or (cut.way is Way.ROW and shape is not None and not shape.is_convolution)

    def _left_out(self, norms: list[str]) -> str | None:
        if self._mode == "replicated":
            return "norms=replicated"
        if self._mode == SEQUENCE:
            return None
        if self._wishes is None:
            return None if self._saves_memory else "without a limit of memory that is faster"
        is_wished = any(self._wishes.of(norm) == SEQUENCE for norm in norms)
        return None if is_wished else "the plan does not name it"

    def _judged(
        self, name: str, block: nn.Module, regions: list[Region], rows: set[str], norms: list[str]
    ) -> SequenceStream | str:
        rows = rows | self.in_rows
        flagged = [
            replace(region, cuts=tuple(replace(cut, in_rows=cut.layer in rows) for cut in region.cuts))
            for region in regions
        ]
        # A block of the same kind does the same; in the end the model as a whole is looked at, too.
        shapes = tuple((each, param.shape) for each, param in block.named_parameters())
        kind = (type(block), shapes, repr(flagged).replace(f"'{name}.", "'"))
        if kind not in self._verdicts:
            self._verdicts[kind] = self._tried(name, block, regions, flagged)
        verdict = self._verdicts[kind]
        if isinstance(verdict, str):
            return verdict
        width, in_rows = verdict
        prefix = f"{name}." if name else ""
        worked = tuple(norm for norm in norms if norm.removeprefix(prefix) in in_rows)
        return SequenceStream(block=name, width=width, norms=worked) if worked else "its norms need all tokens"

    def _tried(
        self, name: str, block: nn.Module, regions: list[Region], flagged: list[Region]
    ) -> tuple[int, frozenset[str]] | str:
        """The stream's width and the layers that worked on parts of it; or why it cannot be, or does not pay."""
        inputs = self._recording.inputs.get(id(block))
        if inputs is None:
            return "what its block is given could not be recorded"
        try:
            trial = CutTrial(name, block, inputs, self._plan.count)
        except Exception:  # it does not even run whole, alone, and on the host
            return "its block could not be tried by itself"
        gives, leaves = trial.output_shape, tree_leaves(inputs)
        index = stream_of(leaves, gives[-1]) if gives else None
        if index is None or leaves[index].shape != gives:
            return "its block gives another shape than it is given"
        if gives[-2] < self._plan.count:
            return f"the sample's sequence of {gives[-2]} is shorter than the workers are many"
        before, after = trial.costs(regions), trial.costs(flagged, gives[-1])
        if isinstance(before, str) or isinstance(after, str):
            return f"on parts of the sequence, of its block {after if isinstance(after, str) else before}"
        return self._why_not_worth(before, after) or (gives[-1], after.in_rows)

    def _why_not_worth(self, before: Costs, after: Costs) -> str | None:
        if self._mode == SEQUENCE or self._wishes is not None:
            return None
        if after.kept_bytes >= before.kept_bytes:
            return "its block would keep no less for the way back"
        if after.sent_bytes > before.sent_bytes * (1 + MORE_SENT):
            return f"its block would send {after.sent_bytes / before.sent_bytes - 1:.0%} more"
        return None

    def following(self, streams: Iterable[SequenceStream], known: set[str]) -> list[str]:
        """Norms outside of blocks that get what these give."""
        blocks = {id(self._named[stream.block]) for stream in streams}
        return [
            name
            for name in self._norms()
            if name not in known and blocks & set(self._recording.sources.get(id(self._named[name]), ()))
        ]

    def feeds(self, cut: LayerCut, widths: set[int]) -> bool:
        """Whether this is an embedding that a stream may begin with."""
        layer = self._named[cut.layer]
        return cut.way is Way.VOCABULARY and is_embedding(layer) and layer.embedding_dim in widths

    def check_wishes(self, known: set[str]) -> None:
        """What the user has named must be sequence-parallel."""
        for name in self._named:
            if name and self._wishes is not None and self._wishes.of(name) == SEQUENCE and name not in known:
                reason = self.reasons.get(name, "it is no norm of a block with cut layers")
                raise SpecError(
                    f"plan: {name}={SEQUENCE} cannot be: {reason.removeprefix('not sequence-parallel: ')}; "
                    "leave it out."
                )
