"""Parameters laid end to end, and where such a line may be cut.

Inside a parameter a cut falls only at a multiple of 64 bytes: vectorised kernels compute what fills no whole
vector by other instructions, so that only such cuts give the same bits as no cut at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from shoal.errors import SpecError
from shoal.spec.checks import require_count

ALIGN_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """One parameter as placement sees it."""

    name: str
    """As the module names it: `blocks.0.attention.weight`."""
    kind: str
    """Kind of the layer that owns it: `Linear`, `Conv2d`, `Embedding`."""
    numel: int
    itemsize: int

    def __post_init__(self) -> None:
        require_count(f"parameter {self.name}", "numel", self.numel, least=0)
        require_count(f"parameter {self.name}", "itemsize", self.itemsize)
        if ALIGN_BYTES % self.itemsize:
            raise SpecError(
                f"parameter {self.name}: itemsize must divide {ALIGN_BYTES} bytes, found {self.itemsize}."
            )

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, order=True)
class Span:
    """A run of one parameter's elements."""

    param: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """One parameter's part of a line."""

    param: int
    numel: int
    weight: int
    """What it counts for when the line is divided."""
    piece_numel: int
    """Elements from one permitted cut to the next; the last piece may be shorter."""
    piece_weight: int

    @classmethod
    def by_bytes(cls, param: int, parcel: Parcel, cut_bytes: int = ALIGN_BYTES) -> Stretch:
        """A parameter that weighs its bytes and may be cut."""
        return cls(
            param=param,
            numel=parcel.numel,
            weight=parcel.num_bytes,
            piece_numel=cut_bytes // parcel.itemsize,
            piece_weight=cut_bytes,
        )

    @classmethod
    def whole(cls, param: int, parcel: Parcel) -> Stretch:
        """A parameter that counts as one and is never cut."""
        return cls(param=param, numel=parcel.numel, weight=1, piece_numel=parcel.numel, piece_weight=1)

    @property
    def num_pieces(self) -> int:
        return -(-self.numel // self.piece_numel)


class ParameterLine:
    """Stretches end to end. Its permitted cuts are numbered: cut `c` has `c` pieces before it."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._stretches = tuple(stretches)
        self._first_pieces = [0, *accumulate(stretch.num_pieces for stretch in self._stretches)]
        self._starts = [0, *accumulate(stretch.weight for stretch in self._stretches)]

    @property
    def num_pieces(self) -> int:
        return self._first_pieces[-1]

    @property
    def weight(self) -> int:
        return self._starts[-1]

    def position(self, cut: int) -> int:
        """The weight that lies before a cut."""
        if cut == self.num_pieces:
            return self.weight
        number = bisect_right(self._first_pieces, cut) - 1
        return self._starts[number] + (cut - self._first_pieces[number]) * self._stretches[number].piece_weight

    def divide(self, targets: Sequence[Fraction], *, least: int = 0) -> list[int]:
        """The permitted cuts nearest to these positions, between the line's two ends.

        Every part keeps at least `least` pieces; the line must have that many.
        """
        cuts = [0]
        for number, target in enumerate(targets):
            most = self.num_pieces - least * (len(targets) - number)
            cuts.append(min(max(self._nearest(target), cuts[-1] + least), most))
        return [*cuts, self.num_pieces]

    def spans(self, cuts: Sequence[int]) -> list[list[Span]]:
        """What lies between each cut and the next."""
        return [self._between(first, last) for first, last in pairwise(cuts)]

    def _nearest(self, target: Fraction) -> int:
        if target <= 0:
            return 0
        if target >= self.weight:
            return self.num_pieces
        number = bisect_right(self._starts, target) - 1
        inside = (target - self._starts[number]) // self._stretches[number].piece_weight
        before = self._first_pieces[number] + int(inside)
        closer_to_next = self.position(before + 1) - target < target - self.position(before)
        return before + 1 if closer_to_next else before

    def _between(self, first: int, last: int) -> list[Span]:
        spans = []
        for stretch, base in zip(self._stretches, self._first_pieces, strict=False):
            start = max(0, first - base) * stretch.piece_numel
            stop = min((last - base) * stretch.piece_numel, stretch.numel)
            if start < stop:
                spans.append(Span(stretch.param, start, stop))
        return spans
