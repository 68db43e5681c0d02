"""Messages between the stages of different workers: sent without waiting, and received ahead of their use."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.comm.group import Group, Transfer
from shoal.errors import TaskError
from shoal.layout.schedules import StageSchedule
from shoal.strategies.cut.packing import Form, MessageRoom, leaves, pack
from shoal.strategies.cut.wires import receive_told, send_told

_LENGTH, _HEADER, _VALUES, _GRADIENTS = range(4)
"""Kinds of messages between two workers about a stage's result."""


@dataclass(frozen=True)
class Crossing:
    """A stage's result on its way to another worker, or its gradients on their way back, of one micro-batch."""

    source: int
    """The stage."""
    reader: int
    """The other worker."""
    number: int
    """Of the micro-batch."""
    shape: Hashable = None
    """What decides the form of the message, which then is told once for each; None: it is told every time."""
    back: bool = False


class Traffic:
    """What this worker sends to others and receives from them."""

    def __init__(self, group: Group, schedule: StageSchedule) -> None:
        self.waited_s = 0.0
        """How long this worker has waited for messages."""
        self._group = group
        self._schedule = schedule
        self._forms: dict[tuple[int, int, Hashable], Form] = {}
        self._expected: dict[Crossing, tuple[MessageRoom, Transfer]] = {}
        self._sent: dict[Crossing, list[Transfer]] = {}

    def send(self, crossing: Crossing, values: Sequence[Any]) -> None:
        """Send a result to a reader, or gradients to the stage that made it; go on."""
        if crossing.shape is None:
            send_told(values, self._peer(crossing), self._group, self._tag(crossing, _VALUES))
        elif crossing.back:
            self._send(pack(self._form(crossing), values), crossing, _GRADIENTS)
        else:
            form = self._tell_form(crossing, Form.of(values))
            self._send(pack(form, leaves(values)), crossing, _VALUES)

    def expect(self, crossing: Crossing) -> None:
        """Make room for a message that will be needed, if its form is known."""
        if _key(crossing) not in self._forms or crossing in self._expected:
            return
        form = self._form(crossing)
        if form.items or not crossing.back:  # nobody sends the gradients of nothing
            parcel = MessageRoom(form)
            kind = _GRADIENTS if crossing.back else _VALUES
            self._expected[crossing] = parcel, self._receive(parcel.room, crossing, kind)

    def receive(self, crossing: Crossing, device: str) -> Any:
        """Wait for a message."""
        if crossing.shape is None:
            tag = self._tag(crossing, _VALUES)
            return receive_told(self._peer(crossing), self._group, tag, device=device)
        if _key(crossing) not in self._forms:
            self._learn_form(crossing)
        self.expect(crossing)
        parcel, transfer = self._expected.pop(crossing)
        self._wait(transfer)
        if crossing.back:
            self._let_go(replace(crossing, back=False))  # whose gradients these are has been taken
        return parcel.value(device)

    def settle(self) -> None:
        """Wait until all that was sent has been taken."""
        for crossing in list(self._sent):
            self._let_go(crossing)

    def _let_go(self, crossing: Crossing) -> None:
        for transfer in self._sent.pop(crossing, ()):
            transfer.wait()

    def _form(self, crossing: Crossing) -> Form:
        form = self._forms[_key(crossing)]
        return form.differentiable if crossing.back else form

    def _tell_form(self, crossing: Crossing, form: Form) -> Form:
        known = self._forms.setdefault(_key(crossing), form)
        if known is form:
            told = form.to_bytes()
            self._send(torch.tensor([len(told)]), crossing, _LENGTH)
            self._send(told, crossing, _HEADER)
        elif known != form:
            raise TaskError(
                f"Task: stage {crossing.source} of the pipeline has sent {known.items} and now, for inputs of "
                f"the same shape, {form.items}; use sharded or data for models whose shapes depend on values."
            )
        return known

    def _learn_form(self, crossing: Crossing) -> None:
        length = torch.zeros(1, dtype=torch.int64)
        self._wait(self._receive(length, crossing, _LENGTH))
        told = torch.empty(int(length), dtype=torch.uint8)
        self._wait(self._receive(told, crossing, _HEADER))
        self._forms[_key(crossing)] = Form.from_bytes(told)

    def _peer(self, crossing: Crossing) -> int:
        """The worker at the other end."""
        is_reader = crossing.reader == self._group.index
        return self._schedule.worker_of(crossing.source) if is_reader else crossing.reader

    def _tag(self, crossing: Crossing, kind: int) -> int:
        """Never 0, which is for all that is not said about stages."""
        return (crossing.number * self._schedule.num_stages + crossing.source + 1) * 4 + kind

    def _send(self, content: torch.Tensor, crossing: Crossing, kind: int) -> None:
        transfer = self._group.send(content, self._peer(crossing), self._tag(crossing, kind))
        self._sent.setdefault(crossing, []).append(transfer)

    def _receive(self, room: torch.Tensor, crossing: Crossing, kind: int) -> Transfer:
        return self._group.receive(room, self._peer(crossing), self._tag(crossing, kind))

    def _wait(self, transfer: Transfer) -> None:
        began = time.perf_counter()
        transfer.wait()
        self.waited_s += time.perf_counter() - began


def _key(crossing: Crossing) -> tuple[int, int, Hashable]:
    """By which the form of a result is known at both ends."""
    return crossing.source, crossing.reader, crossing.shape
