"""Agreeing on one part of the parameters after the other, while training goes on.

A part is sent after its step of every round; what the others have sent is taken in so many steps later. That
number is always the same, so that no bit depends on how fast a link is; who comes there before the others' parts
have arrived waits for them. A worker keeps what it has learnt in between: it goes on from what all agreed on, by
the way that it has come since it sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.model_stream import TensorStream
from shoal.model.replica import Replica
from shoal.spec import Average
from shoal.step.work import Work
from shoal.strategies.average.agreeing import by_kind
from shoal.strategies.average.outer import OuterStep, difference_, kind_name
from shoal.strategies.average.parts import StreamedPart, cut_in_parts
from shoal.strategies.average.strategy import AveragedModel
from shoal.strategies.base import Commit, Setting
from shoal.strategies.groups.kept_apart import OF_ALL, KeptApart
from shoal.strategies.groups.vector_sums import CompressedSums, SumUnderWay, make_sent_sums
from shoal.strategies.groups.vectors import Vectors

_STREAMED = 11
"""The tag of parts on their way, so that whatever else is said meanwhile is told from them."""


@dataclass
class Flight:
    """A part on its way."""

    part: int
    due: int
    """The step after which it is taken in."""
    sent: Vectors
    """The values that this worker had."""
    sums: Vectors
    """Once it has landed: the sum of all differences, by what each counts, and behind these what all count."""
    under_way: SumUnderWay | None
    """None where it has landed."""

    def land(self) -> None:
        """Wait for what the others have sent."""
        if self.under_way is not None:
            self.under_way.end()
            self.under_way = None


class OuterSteps:
    """An outer step for each part, saved and taken up together."""

    optimizer = None

    def __init__(self, steps: list[OuterStep]) -> None:
        self.steps = steps

    def state(self) -> dict[str, torch.Tensor]:
        """What each keeps, by its part's number."""
        return {f"{n}/{key}": one for n, step in enumerate(self.steps) for key, one in step.state().items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `state` gave."""
        for number, step in enumerate(self.steps):
            prefix = f"{number}/"
            own = {key.removeprefix(prefix): one for key, one in state.items() if key.startswith(prefix)}
            step.load(own)


class StreamedAverage(AveragedModel):
    """One worker's part in it."""

    _outer: OuterSteps  # type: ignore[assignment]
    _sums: CompressedSums

    def __init__(self, spec: Average) -> None:
        super().__init__(spec)
        self._flights: list[Flight] = []
        """In the order in which they were sent."""

    def open(self, replica: Replica, setting: Setting) -> None:
        self._counted = torch.zeros(self._spec.parts, dtype=torch.float64)
        """By part: what this worker was trained on since it was sent last."""
        super().open(replica, setting)

    def _open_sums(self, setting: Setting) -> CompressedSums:
        return make_sent_sums(self._spec.compress, self._group, setting)

    def _make_outer(self) -> OuterSteps:  # type: ignore[override]
        cuts = cut_in_parts(self._values.params, self._spec.parts)
        last = len(cuts) - 1
        self._parts = [
            StreamedPart(rows, self._replica, self._values, is_last=number == last)
            for number, rows in enumerate(cuts)
        ]
        self._agreed_of = [part.of(self._agreed) for part in self._parts]
        """By part: what all have agreed on last, a part of `_agreed`."""
        pairs = zip(self._parts, self._agreed_of, strict=True)
        return OuterSteps([OuterStep(self._spec, part.params_of(agreed)) for part, agreed in pairs])

    def take(self, work: Work) -> Commit:
        self._step = work.step
        if work.step <= self._spec.after:
            assert self._together is not None
            return self._together.take(work)
        if self._together is not None:
            self._go_apart()
        own = self._take_alone(work)
        step = self._open_step(own, work)
        self._is_apart = True
        self._counted += own.weight
        self._take_in(work.step)
        if self._spec.is_agreement(work.step, self._size):
            self._block()
            self._rounds.settle()  # before anything large is on its way, behind which words would wait
            self._rounds.weights.zero_()
        for part in self._spec.parts_sent(work.step):
            self._send(part)
        self._take_in(work.step)
        self._group.pump()
        return step

    # Parts.

    @torch.no_grad()
    def _send(self, number: int) -> None:
        """Put on its way how far this worker has come in a part."""
        part, agreed = self._parts[number], self._agreed_of[number]
        sent = part.read()
        if not sent:
            return  # there are fewer rows than parts
        copied = {kind: vector.clone() for kind, vector in sent.items()}
        difference = difference_(copied, agreed, part.params_of, self._clip)
        counts = float(self._counted[number]) if self._spec.weight == "samples" else float(self._team.speaks)
        self._counted[number] = 0.0
        sums = {
            kind: torch.cat([vector.mul_(counts), vector.new_tensor([counts])])
            for kind, vector in difference.items()
        }
        under_way = self._sums.begin(sums, part.spans, _STREAMED)
        self._flights.append(Flight(number, self._step + self._spec.delay, sent, sums, under_way))

    def _take_in(self, step: int) -> None:
        """Agree on the parts that are due."""
        while self._flights and self._flights[0].due <= step:
            flight = self._flights.pop(0)
            if flight.under_way is not None:
                self._block()
            flight.land()
            self._agree_on(flight)

    @torch.no_grad()
    def _agree_on(self, flight: Flight) -> None:
        part, agreed = self._parts[flight.part], self._agreed_of[flight.part]
        mean = {kind: vector[:-1] / vector[-1] for kind, vector in flight.sums.items() if vector[-1] > 0}
        if not mean:
            return  # nobody was trained on anything
        for kind, vector in part.buffers_of(agreed).items():
            vector.add_(mean[kind][-len(vector) :])
        self._outer.steps[flight.part].take(part.params_of(mean))
        if not self._spec.delay:
            part.write(agreed)
            return
        since = part.read()
        for kind, vector in since.items():
            vector.sub_(flight.sent[kind]).add_(agreed[kind])
        part.write(since)

    def _land_all(self) -> None:
        """Have all that is on its way, though it is taken in when it is due."""
        for flight in self._flights:
            if flight.under_way is not None:
                self._block()
            flight.land()

    # What others read, and checkpoints.

    def _mean_model(self, own: Vectors) -> Vectors:
        self._land_all()
        return self._mean_of_own(own)

    def state_stream(self) -> TensorStream:
        self._land_all()
        return super().state_stream()

    def _kept_apart(self) -> dict[str, torch.Tensor]:
        found = super()._kept_apart()
        found[f"{self._team.number}/counted/parts"] = self._counted.clone()
        for number, flight in enumerate(self._flights):
            found |= {
                f"{self._team.number}/sent{number}/{kind_name(kind)}": one for kind, one in flight.sent.items()
            }
        return found

    def _kept_of_all(self) -> dict[str, torch.Tensor]:
        found = super()._kept_of_all()
        if self._flights:
            rows = [[flight.part, flight.due] for flight in self._flights]
            found[f"{OF_ALL}/flights/rows"] = torch.tensor(rows, dtype=torch.int64)
        for number, flight in enumerate(self._flights):
            found |= {f"{OF_ALL}/sums{number}/{kind_name(kind)}": one for kind, one in flight.sums.items()}
        return found

    def _go_on(self) -> None:
        super()._go_on()
        kept = KeptApart("replica", self._replica.start.aside)
        counted = kept.of(self._whose, "counted").get("parts")
        if self._saved_workers != self._team.count or counted is None or len(counted) != len(self._counted):
            return
        if self._team.speaks:
            self._counted.copy_(counted)
        rows = kept.of(OF_ALL, "flights").get("rows")
        for number, (part, due) in enumerate([] if rows is None else rows.tolist()):
            sent, sums = by_kind(kept.of(self._whose, f"sent{number}")), by_kind(kept.of(OF_ALL, f"sums{number}"))
            self._flights.append(Flight(part, due, sent, sums, None))

    def _wire(self) -> dict[str, Any]:
        is_local = not self._setting.world.is_spread and self._spec.via != "sockets"
        return {"kind": "memory"} if is_local else self._sums.facts()
